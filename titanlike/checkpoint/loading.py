"""Finding the checkpoint to go on from, and reading tensors out of one.

Every function is a collective of `group`: rank 0 looks at the folder, the ranks verify the files between them, and all
come to the same answer or raise the same error.
"""

from __future__ import annotations

import fnmatch
import json
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from titanlike.checkpoint import agree, folders, manifest, storage
from titanlike.checkpoint.agree import Group
from titanlike.checkpoint.folders import StepFolder
from titanlike.checkpoint.manifest import FileRecord
from titanlike.errors import CheckpointError

logger = logging.getLogger("titanlike")

STATE = "state.json"
CONFIG = "config.toml"


@dataclass(frozen=True)
class Found:
    """A complete, verified checkpoint: its step, its folder, and what its state.json holds."""

    step: int
    path: Path
    state: dict[str, Any]


def find(folder: Path, step: int, group: Group, *, checksums: bool = True) -> Found | None:
    """The newest complete checkpoint of `folder`, or that of `step` if it is not -1; None if there is none.

    Complete: manifest, names, sizes and `checksums` all fit; each rank reads its share of the files to know. A torn or
    damaged one is skipped with a warning that says why. CheckpointError if `step` is asked for and is not complete, or
    if nothing is complete although something was: going on from nothing would throw the run away unseen.
    """
    listed = agree.from_first(lambda: [_brief(one) for one in folders.scan(folder)], group)
    candidates = [one for one in listed if step in (-1, one["step"])]
    if step != -1 and not candidates:
        there = ", ".join(str(one["step"]) for one in listed) or "none"
        raise CheckpointError(f"{folder}: there is no checkpoint of step {step} (checkpoint.load_step); steps: {there}")
    skipped: list[dict[str, Any]] = []
    for one in candidates:
        path = Path(one["path"])
        problems = one["problems"]
        if checksums and not problems:
            problems = _damage(path, one["files"], group)
        if not problems:
            _say_what_was_passed_over(one, skipped, listed if step != -1 else [], group)
            return Found(one["step"], path, agree.from_first(lambda path=path: read_state(path), group))
        skipped.append({**one, "problems": problems})
    return _nothing_usable(folder, step, skipped, group)


def _brief(one: StepFolder) -> dict[str, Any]:
    """A step folder as the ranks tell each other of it."""
    files = [list(asdict(record).values()) for record in one.manifest.files.values()] if one.manifest else []
    return {
        "step": one.step,
        "path": str(one.path),
        "problems": list(one.problems),
        "torn": one.torn,
        "files": files,
    }


def _damage(path: Path, files: Sequence[Sequence[Any]], group: Group) -> list[str]:
    """Verify a checkpoint's content between the ranks.

    Rank r takes every world-th file in DCP's order of writers: at an unchanged world that is the file it is about to
    load, so that the disk is read once.
    """
    records = sorted((FileRecord(*file) for file in files), key=lambda record: manifest.natural_order(record.name))
    mine = records[agree.rank_of(group) :: agree.world_of(group)]
    return agree.union(manifest.problems(path, mine, checksums=True), group)


def _say_what_was_passed_over(
    taken: dict[str, Any], skipped: Iterable[dict[str, Any]], listed: Iterable[dict[str, Any]], group: Group
) -> None:
    if agree.rank_of(group) != 0:
        return
    for one in skipped:
        logger.warning("%s is not complete, skipped: %s", one["path"], "; ".join(one["problems"]))
    newer = [Path(one["path"]).name for one in listed if one["step"] > taken["step"]]
    if newer:
        logger.warning(
            "going back to %s; a later start without checkpoint.load_step would take the newest of %s: move them away",
            taken["path"],
            ", ".join(newer),
        )


def _nothing_usable(folder: Path, step: int, skipped: list[dict[str, Any]], group: Group) -> None:
    """No candidate is complete: an error, unless all that is there are first saves that never finished."""
    if not skipped:
        return
    reasons = "\n".join(f"  {one['path']}: {'; '.join(one['problems'])}" for one in skipped)
    if step != -1:
        raise CheckpointError(f"the checkpoint of step {step} (checkpoint.load_step) is not complete:\n{reasons}")
    if not all(one["torn"] for one in skipped):
        raise CheckpointError(
            f"{folder}: no checkpoint is complete, and at least one was and is damaged now. Repair it or, to start "
            f"the run anew, move the folder away:\n{reasons}"
        )
    if agree.rank_of(group) == 0:
        logger.warning("%s: no save ever finished here, starting without:\n%s", folder, reasons)


def read_state(path: Path) -> dict[str, Any]:
    """What state.json of the checkpoint in `path` holds. JSON and nothing else."""
    file = path / STATE
    try:
        state = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: can't be read as JSON: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{file}: must hold an object, holds {type(state).__name__}")
    return state


def shapes(path: Path, group: Group) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that the checkpoint in `path` has, by name."""
    metadata = agree.together(lambda: storage.read_metadata(path), group)
    found = {name: storage.saved_shape(metadata, name) for name in metadata.state_dict_metadata}
    return {name: shape for name, shape in found.items() if shape is not None}


def load(path: Path, tensors: Mapping[str, torch.Tensor], group: Group) -> None:
    """Fill `tensors` in place, whatever their layout, from the checkpoint in `path`.

    Names, shapes and completeness are checked for all of them before the first is touched. Other dtypes are converted,
    with a warning. What else the checkpoint holds is left alone.
    """
    metadata = agree.together(lambda: storage.read_metadata(path), group)
    _check(path, metadata, {name: name for name in tensors}, tensors, group)
    _fill(path, metadata, dict(tensors), group)


def load_foreign(path: Path, tensors: Mapping[str, torch.Tensor], exclude: Sequence[str], group: Group) -> None:
    """Fill `tensors` from a DCP folder of another program (no manifest), such as TorchTitan's; or from one of ours.

    A tensor is looked for under its own name, then under "model." and its name. Names that match a pattern of `exclude`
    (`output.*`) keep their values. Entries that aren't tensors are never opened.
    """
    _verify_if_ours(path, group)
    metadata = agree.together(lambda: storage.read_metadata(path), group)
    wanted = {name: one for name, one in tensors.items() if not any(fnmatch.fnmatchcase(name, p) for p in exclude)}
    saved = metadata.state_dict_metadata
    source = {name: name if name in saved or f"model.{name}" not in saved else f"model.{name}" for name in wanted}
    _check(path, metadata, source, wanted, group)
    used = agree.union(list(source.values()), group)  # ranks hold different layers
    if agree.rank_of(group) == 0:
        unused = sorted(set(saved) - set(used))
        logger.info("%s: read %d tensors; left alone %s", path, len(used), _some(unused) or "nothing")
    _fill(path, metadata, {source[name]: one for name, one in wanted.items()}, group)


def _verify_if_ours(path: Path, group: Group) -> None:
    """A checkpoint with a manifest must fit it; a folder that is no checkpoint is answered with a hint."""

    def look() -> dict[str, Any] | None:
        if (path / manifest.NAME).exists():
            return _brief(folders.inspect(path))
        if not (path / storage.METADATA).exists():
            inside = next((one.path for one in folders.scan(path) if one.complete), None)
            hint = f"; did you mean {inside}?" if inside else ""
            raise CheckpointError(f"{path}: no DCP checkpoint: it has no {storage.METADATA} file{hint}")
        return None

    ours = agree.from_first(look, group)
    if ours is None:
        return
    problems = ours["problems"] or _damage(path, ours["files"], group)
    if problems:
        raise CheckpointError("; ".join(problems))


def _check(
    path: Path,
    metadata: Metadata,
    source: Mapping[str, str],
    tensors: Mapping[str, torch.Tensor],
    group: Group,
) -> None:
    """Whether every rank's tensors can all be filled; `source` is a tensor's name in the checkpoint."""
    mine = agree.together(lambda: _check_own(path, metadata, source, tensors), group)
    converted = agree.union(mine, group)
    if converted and agree.rank_of(group) == 0:
        logger.warning("%s: converted while reading: %s", path, _some(converted))


def _check_own(
    path: Path, metadata: Metadata, source: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> list[str]:
    """Raises CheckpointError unless these can be filled; returns what will be converted, in words."""
    shapes = {name: storage.saved_shape(metadata, source[name]) for name in tensors}
    missing = [name for name, shape in shapes.items() if shape is None]
    if missing:
        raise CheckpointError(f"{path}: has no tensor named {_some(missing)}")
    unfit = [
        f"{name}: saved {shape}, here {tuple(tensors[name].shape)}"
        for name, shape in shapes.items()
        if shape != tuple(tensors[name].shape)
    ]
    if unfit:
        raise CheckpointError(f"{path}: other shapes than the model's: {_some(unfit, '; ')}")
    partial = [name for name in tensors if not storage.is_covered(metadata, source[name])]
    if partial:
        raise CheckpointError(f"{path}: holds only parts of {_some(partial)}")
    return [
        f"{name} ({dtype} to {tensors[name].dtype})"
        for name in tensors
        if (dtype := storage.saved_dtype(metadata, source[name])) != tensors[name].dtype
    ]


def _fill(path: Path, metadata: Metadata, tensors: dict[str, torch.Tensor], group: Group) -> None:
    assert not any(tensor.is_meta for tensor in tensors.values()), "materialise tensors before they are loaded"
    alone = group is None
    detached = {name: tensor.detach() for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(
                detached,
                storage_reader=storage.Reader(path, metadata),
                planner=storage.TensorLoadPlanner(),
                process_group=group,
                no_dist=alone,
            )
        except CheckpointException as error:
            raise storage.explain(error, f"reading {path}", path) from error


def _some(names: Sequence[str], separator: str = ", ") -> str:
    """The first few of many names, and how many more there are."""
    rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return separator.join(names[:8]) + rest
