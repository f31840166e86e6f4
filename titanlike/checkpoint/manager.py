"""What the trainer holds: saves in the foreground or the background, in order, and loads what was saved.

    main thread    save(5) ── train ─ before_update ─ train ── … ── save(10)
                      │ stage: copy the tensors                      │ waits for 5, raises if it failed
    its own thread    └── write files ── manifest ── retention       └── write …

The background thread talks to the other ranks over a process group of its own, so that it can't cross the training's
collectives; its timeout is long, since a slow disk is not a lost rank.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

import titanlike
from titanlike.checkpoint import agree, folders, loading, retention, storage
from titanlike.checkpoint.hub import export_checkpoint
from titanlike.checkpoint.loading import Found
from titanlike.checkpoint.manifest import FileRecord, Manifest, counters_of
from titanlike.checkpoint.staging import Staging
from titanlike.config import Config

logger = logging.getLogger("titanlike")

# How long a rank waits for the slowest one's disk.
_TIMEOUT = timedelta(hours=2)
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Settings(Protocol):
    """What is read of the config's [checkpoint] section."""

    @property
    def async_mode(self) -> str: ...
    @property
    def keep_latest_k(self) -> int: ...
    @property
    def verify_checksums(self) -> bool: ...


class CheckpointManager:
    """Keeps a run's checkpoints in `folder`. Every rank makes one, and makes the same calls on it in the same order.

    `config_text` (the resolved config as TOML) and `topology` (degrees, for people) go into every checkpoint.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path | str,
        *,
        process_group: dist.ProcessGroup | None = None,
        config_text: str | None = None,
        topology: Mapping[str, Any] | None = None,
    ):
        self.folder = Path(folder)
        self._keep = settings.keep_latest_k
        self._checksums = settings.verify_checksums
        self._config_text = config_text
        self._topology = dict(topology or {})
        self._group: dist.ProcessGroup | None = None
        if dist.is_initialized():
            ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
            self._group = dist.new_group(ranks, backend="gloo", timeout=_TIMEOUT)
        self._staging: Staging | None = None
        if settings.async_mode != "disabled":
            self._staging = Staging(pinned=settings.async_mode == "async_with_pinned_mem")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._upload: Future[None] | None = None
        self._kept_step: int | None = None

    # ---- saving

    def save(
        self, step: int, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], *, final: bool = False
    ) -> bool:
        """Save `tensors` (flat, clean names; DTensors or plain ones equal on all ranks) and `state` (JSON) as step-N.

        Waits for the save before it, and raises CheckpointError if that one failed. In the background modes it returns
        once the tensors are staged; call `before_update` before they change. `final`, or async_mode "disabled", returns
        when the checkpoint is complete. Rank 0's `state` is what counts. The step that was saved or loaded last is not
        written twice: then False is returned. A complete checkpoint of this step from elsewhere is replaced, and stays
        until its successor is complete.
        """
        self.wait()
        if step == self._kept_step:
            return False
        assert dist.is_initialized(), "saving needs a process group, if only of one rank"
        leaked = [name for name in tensors if any(wrapper in name for wrapper in _WRAPPERS)]
        assert not leaked, f"wrapper names would be saved: {leaked[:3]}"
        start = time.perf_counter()
        texts = {loading.STATE: json.dumps(state, indent=1)}
        if self._config_text is not None:
            texts[loading.CONFIG] = self._config_text
        counters = counters_of(state)
        detached = {name: tensor.detach() for name, tensor in tensors.items()}
        background = self._staging is not None and not final
        staged = self._staging.stage(detached) if self._staging is not None and background else None
        self._upload = self._thread.submit(self._write, step, detached, staged, texts, counters)
        self._kept_step = step
        if background:
            logger.debug("save of step %d held training for %.3f s", step, time.perf_counter() - start)
        else:
            self.wait()
        return True

    def before_update(self) -> None:
        """Call before tensors that were given to `save` change (before the optimizer's step, each step)."""
        if self._staging is not None:
            self._staging.before_update()

    def wait(self) -> None:
        """Wait for the save in the background; CheckpointError (on every rank) if it failed.

        A lost rank shows as the process group's own error.
        """
        upload, self._upload = self._upload, None
        if upload is None:
            return
        try:
            upload.result()
        except BaseException:
            self._kept_step = None
            raise

    def close(self) -> None:
        """Wait for the save in the background (raising if it failed), and give threads and memory back."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            if self._staging is not None:
                self._staging.close()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def _write(
        self,
        step: int,
        tensors: dict[str, torch.Tensor],
        staged: dict[str, torch.Tensor] | None,
        texts: dict[str, str],
        counters: dict[str, Any],
    ) -> None:
        """Write one checkpoint, then make room by the retention rule. Runs in the manager's thread."""
        start = time.perf_counter()
        path = folders.step_folder(self.folder, step)
        first = agree.rank_of(self._group) == 0

        def describe(files: dict[str, FileRecord]) -> Manifest:
            made = {
                "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "titanlike": titanlike.__version__,
                "torch": str(torch.__version__),
                "world_size": agree.world_of(self._group),
                "tensors": len(tensors),
            }
            return Manifest(step, files, self._topology, counters, made)

        if staged is not None and self._staging is not None:
            self._staging.wait()
        writer = storage.Writer(path, step=step, texts=texts, describe=describe, staged=staged is not None)
        planner = storage.TensorSavePlanner(tensors, staged)
        try:
            dcp.save({}, storage_writer=writer, planner=planner, process_group=self._group)
        except CheckpointException as error:
            failure = storage.explain(error, f"saving {path}", self.folder)
            if first:
                folders.withdraw(path)
            raise failure from error
        if first:
            logger.info("saved %s in %.1f s", path, time.perf_counter() - start)
            folders.settle(path)
            retention.prune(self.folder, self._keep, step)

    # ---- loading

    def find(self, step: int = -1) -> Found | None:
        """The newest complete checkpoint (or `step`'s), verified; see `loading.find`. All ranks get the same."""
        self.wait()
        return loading.find(self.folder, step, self._group, checksums=self._checksums)

    def load(self, found: Found, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill `tensors` in place, at any layout; CheckpointError names what is missing or has another shape."""
        loading.load(found.path, tensors, self._group)
        if found.path.parent == self.folder:
            self._kept_step = found.step

    def shapes(self, path: Path | str) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors in the checkpoint or DCP folder `path`, by name."""
        return loading.shapes(Path(path), self._group)

    def load_foreign(self, path: Path | str, tensors: Mapping[str, torch.Tensor], exclude: Sequence[str] = ()) -> None:
        """Fill `tensors` from a DCP folder of another program; see `loading.load_foreign`."""
        loading.load_foreign(Path(path), tensors, exclude, self._group)

    def export(self, step: int, folder: Path, config: Config, dtype: torch.dtype) -> None:
        """Write the model of a step that was saved in the Hub's form; see `hub.export_checkpoint`."""
        self.wait()
        export_checkpoint(folders.step_folder(self.folder, step), folder, config, dtype=dtype, group=self._group)
