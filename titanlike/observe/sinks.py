"""Where metrics go besides the console: metrics.jsonl, TensorBoard, Weights & Biases.

A sink has two methods, `log(step, values)` and `close()`. The file is the record and must not fail quietly; the
others are views of it, and `Spared` keeps their failures away from the training. TensorBoard and W&B are imported
when they are switched on, not before.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from titanlike.errors import ConfigError
from titanlike.observe.jsonl import JsonLines, scalar

logger = logging.getLogger("titanlike")


class Sink(Protocol):
    """Takes the values of a logged step. Steps rise within one process."""

    def log(self, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


# What metrics.jsonl says of every step, in this order, null where it isn't known.
STEP_KEYS = (
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "trained_tokens",
    "tokens_per_second",
    "mfu",
    "step_seconds",
    "data_seconds",
    "memory_gib",
    "epoch",
)


class JsonLinesSink:
    """metrics.jsonl: one object a logged step."""

    def __init__(self, path: Path):
        self._lines = JsonLines(path)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._lines.write({**dict.fromkeys(STEP_KEYS), **values, "step": step})

    def close(self) -> None:
        self._lines.close()


class TensorBoardSink:
    """Event files in `folder`, a scalar a key. Steps above `resume_step` that earlier files hold are purged."""

    def __init__(self, folder: Path, *, resume_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for key, value in _numbers(values).items():
            self._writer.add_scalar(key, value, step)
        # What a killed process hasn't written is missing from the curve for ever: the resumed one starts after it.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run that goes on over restarts: its id is kept in `id_file`.

    Project, entity, name, mode and all else come from the WANDB_* variables. The x axis is the global step. W&B takes
    no step twice, so the steps up to `logged_step`, which an earlier process has sent, are left out.
    """

    FINISH_SECONDS = 60.0

    def __init__(self, folder: Path, id_file: Path, *, config: Mapping[str, Any], resume_step: int, logged_step: int):
        import wandb

        run_id = os.environ.get("WANDB_RUN_ID") or (_read(id_file) if resume_step else None) or secrets.token_hex(4)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "titanlike"),
            dir=str(folder),
            id=run_id,
            resume="allow",
            config=dict(config),
        )
        id_file.write_text(run_id + "\n")
        # Online, the server knows what has arrived; offline, our own record must do.
        self._first_step = logged_step + 1 if self._run.offline else self._run.step

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if step >= self._first_step:
            self._run.log(_numbers(values), step=step)

    def close(self) -> None:
        """Sends what is left. Gives up waiting after FINISH_SECONDS: without a network W&B would wait for ever."""
        sender = threading.Thread(target=self._finish, daemon=True)
        sender.start()
        sender.join(self.FINISH_SECONDS)
        if sender.is_alive():
            logger.warning("W&B: still sending after %.0f s; `wandb sync` sends the rest later", self.FINISH_SECONDS)

    def _finish(self) -> None:
        try:
            self._run.finish()
        except Exception as error:
            logger.warning("W&B: closing the run failed: %s", _brief(error))


S = TypeVar("S", bound=Sink)


class Spared(Generic[S]):
    """A sink whose failure, when it is made or later, costs one warning and the sink itself, never the training."""

    def __init__(self, name: str, make: Callable[[], S]):
        self._name = name
        self.sink: S | None = None
        self._try(lambda: setattr(self, "sink", make()))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.call(lambda sink: sink.log(step, values))

    def close(self) -> None:
        self.call(lambda sink: sink.close())
        self.sink = None

    def call(self, action: Callable[[S], None]) -> None:
        """Does `action` with the sink, if it is still there."""
        sink = self.sink
        if sink is not None:
            self._try(lambda: action(sink))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.sink = None
            logger.warning("%s failed and is switched off for this run: %s", self._name, _brief(error))


def check_installed(settings: Any) -> None:
    """Raises ConfigError when `[metrics]` asks for a package that isn't there.

    For every rank, since one that stopped alone would leave the others waiting for it. Imports nothing.
    """
    problems = []
    if settings.enable_wandb and not _installed("wandb"):
        problems.append("metrics.enable_wandb = true: wandb isn't installed; pip install 'titanlike[wandb]'")
    if settings.enable_tensorboard and not _installed("tensorboard"):
        problems.append("metrics.enable_tensorboard = true: tensorboard isn't installed; pip install tensorboard")
    if problems:
        raise ConfigError(problems)


def _installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # W&B writes into folders called wandb, and one in the current folder passes for a package: it has no origin.
    return spec is not None and spec.origin is not None


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The entries that a curve can show. A NaN is one too: it is news."""
    plain = {key: scalar(value) for key, value in values.items()}
    return {key: value for key, value in plain.items() if isinstance(value, (int, float))}


def _read(path: Path) -> str | None:
    return path.read_text().strip() or None if path.exists() else None


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
