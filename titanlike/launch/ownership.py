"""One run a folder: the run's first process holds a lock on job.dump_folder for as long as it lives.

The system drops the lock with the process, however that ends, so there is nothing to clean up after a kill.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import IO

from titanlike.errors import ConfigError

FILE = ".running"
_BY_LAUNCHER = "TITANLIKE_FOLDER_IS_HELD"
_held: list[IO[str]] = []  # open as long as the run goes on: closing gives the lock up


def hold(folder: Path, patience: float = 15.0) -> None:
    """Takes the folder (making it), or raises ConfigError naming who has it. A launcher that has it has it for all.

    Waits `patience` seconds first: the process of a job that is being started again may still be ending.
    """
    if os.environ.get(_BY_LAUNCHER) == str(folder):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / FILE, "a+", encoding="utf-8")  # noqa: SIM115 (kept open)
    except OSError as error:
        raise ConfigError(f"job.dump_folder = {str(folder)!r}: can't be written to ({error.strerror})") from error
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                with lock:
                    lock.seek(0)
                    holder = lock.read().strip()
                raise ConfigError(
                    f"job.dump_folder = {str(folder)!r}: another run is writing there ({holder}); "
                    f"stop it, or give this one a folder of its own"
                ) from None
            time.sleep(0.1)
        except OSError:  # a disk without locks: then nobody is kept out
            break
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    lock.flush()
    _held.append(lock)


def hold_for_workers(folder: Path) -> None:
    """Takes the folder for a whole job on this node: through restarts, and before any worker exists."""
    hold(folder)
    os.environ[_BY_LAUNCHER] = str(folder)


def release() -> None:
    """Gives the folder up."""
    while _held:
        _held.pop().close()
