"""status.json: how the last start of a run ended, for the launcher and for scripts.

    {"state": "running" | "done" | "data_ended" | "stopped" | "failed", "exit_code": 0 … 75 or null while running,
     "step": last step begun, "rank": whose it is, "message": one line or more, "time": Unix seconds}

torchrun turns every worker's exit code into 1, so the exit code travels in this file. All ranks may write it: it is
replaced atomically, and the *first* failure stays, since the later ones only tell that the first one's rank is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from titanlike.launch import worker

FILE = "status.json"
DONE, FAULT, STOPPED = 0, 1, 75  # exit codes; the user's mistakes carry theirs (titanlike.errors)


class Progress:
    """The step that this process works on, kept by the trainer for whoever has to report an error."""

    step = 0


progress = Progress()


@dataclass(frozen=True)
class Status:
    """The content of status.json."""

    state: str
    exit_code: int | None = None
    step: int = 0
    rank: int = 0
    message: str = ""
    time: float = field(default_factory=time.time)


def read(folder: str | Path) -> Status | None:
    """What the file says, or None where there is none that can be read."""
    try:
        return Status(**json.loads((Path(folder) / FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def has_failed(folder: str | Path) -> bool:
    """Whether some rank has recorded a failure."""
    status = read(folder)
    return status is not None and status.state == "failed"


def write(
    folder: str | Path, state: str, exit_code: int | None = None, message: str = "", rank: int | None = None
) -> bool:
    """Record a state of this process; False if a failure stands there, which only a new "running" replaces.

    `rank`: whose failure it is, where a rank tells of another's.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if state != "running" and has_failed(folder):
            return False
        status = Status(state, exit_code, progress.step, worker.rank() if rank is None else rank, message)
        draft = folder / f".{FILE}.{os.getpid()}"
        draft.write_text(json.dumps(asdict(status)) + "\n")
        draft.replace(folder / FILE)
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with open(folder / f".{FILE}.lock", "w") as lock:
        with suppress(OSError):  # no locks on this disk: two that fail at one moment may both call themselves first
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
