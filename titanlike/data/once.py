"""Making a thing once, however many processes and machines ask for it at the same moment.

The first that makes the lock file builds; the others wait for what it builds, on any file system that they share. No
process group is involved, so nothing times out however long it takes.

    <target>          the thing, renamed into place when it is whole: its being there is what "done" means
    <target>.lock     who builds it, and a count that it raises every few seconds
    <target>.failed   how the last builder failed: those who waited for that builder raise the same error

The lock saves work; it does not carry correctness. Each builder works in a place of its own and renames, so if a
builder was only asleep and two of them run, the second to finish finds the work done. A builder whose count stands
still (by the waiter's own clock: machines' clocks differ), or whose process is gone on the same machine, is taken over.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlike.data.store import write_json
from titanlike.errors import ConfigError, DataError, TitanlikeError

logger = logging.getLogger("titanlike")

BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
_LOG_SECONDS = 30.0


class Claim:
    """The right to build, held by a lock file that is kept fresh by a thread."""

    def __init__(self, target: Path, check: Callable[[], None]):
        self.token = uuid.uuid4().hex[:12]
        self.progress = "just begun"  # what waiters log
        self._lock = beside(target, ".lock")
        self._failed = beside(target, ".failed")
        self._check = check
        self._told_to_stop = False
        self._beats = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_fresh, name="build-lock", daemon=True)

    def take(self) -> bool:
        """Try to become the builder. Never waits."""
        try:
            handle = os.open(self._lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(self._facts(), file)
        self._thread.start()
        return True

    def check(self) -> None:
        """To be called often while building: raises what the caller's `check` raises."""
        try:
            self._check()
        except BaseException:
            self._told_to_stop = True
            raise

    def release(self, error: BaseException | None = None) -> None:
        """Give the lock back; the others learn of an error first. Being told to stop is no failure of the building."""
        self._stop.set()
        self._thread.join()
        if isinstance(error, Exception) and not self._told_to_stop:
            message = str(error) if isinstance(error, TitanlikeError) else f"{type(error).__name__}: {error}"
            code = getattr(error, "exit_code", None) if isinstance(error, TitanlikeError) else None
            with contextlib.suppress(OSError):  # the disk may be what failed
                write_json(self._failed, {**self._facts(), "message": message, "exit_code": code})
        if _read(self._lock).get("token") == self.token:
            self._lock.unlink(missing_ok=True)

    def _facts(self) -> dict[str, Any]:
        facts = {"token": self.token, "machine": _machine(), "pid": os.getpid()}
        return {**facts, "beat": self._beats, "progress": self.progress}

    def _keep_fresh(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            self._beats += 1
            with contextlib.suppress(OSError):  # a full disk or a hiccup of the network: the next beat may do
                if _read(self._lock).get("token") == self.token:
                    write_json(self._lock, self._facts())


@dataclass
class _Watch:
    """What a waiter has seen of the lock."""

    lock: Path
    seen: dict[str, Any]
    since: float
    logged: float

    def look(self) -> dict[str, Any]:
        facts = _read(self.lock)
        if facts != self.seen:
            self.seen, self.since = facts, time.monotonic()
        if time.monotonic() - self.logged > _LOG_SECONDS:
            self.logged = time.monotonic()
            logger.info("waiting for %s: %s", _who(facts), facts.get("progress", "no word yet"))
        return facts

    def dead(self) -> bool:
        if time.monotonic() - self.since > STALE_SECONDS:
            return True
        return self.seen.get("machine") == _machine() and not _alive(self.seen["pid"])


def build_once(
    target: Path,
    done: Callable[[], bool],
    build: Callable[[Claim], None],
    *,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Return once `done()`; either by calling `build` here, or by waiting for another process that does.

    Raises what `build` raises. Processes that waited raise a DataError or ConfigError of the same text, or RuntimeError
    if it was none of the user's mistakes. `check` is called while waiting (`build` calls `claim.check`), and may raise.
    """
    watch = _Watch(beside(target, ".lock"), {}, time.monotonic(), time.monotonic())
    pause = 0.05
    while not done():
        _raise_failure(target, watch.seen.get("token"))
        if not watch.lock.exists():
            claim = Claim(target, check)
            if claim.take():
                _build(claim, target, watch.seen.get("token"), done, build)
                continue
        watch.look()
        if watch.lock.exists() and watch.dead():
            logger.warning("%s stopped without a word; going on in its place", _who(watch.seen))
            _remove_lock(watch.lock, watch.seen.get("token"))
            continue
        check()
        time.sleep(pause)
        pause = min(pause * 1.5, 1.0)


def _build(
    claim: Claim, target: Path, before: str | None, done: Callable[[], bool], build: Callable[[Claim], None]
) -> None:
    """Build with a claim just taken, unless the builder `before` us finished or failed while we took it."""
    try:
        _raise_failure(target, before)
    except Exception:
        claim.release()
        raise
    try:
        if not done():
            build(claim)
    except BaseException as error:
        claim.release(error)
        raise
    beside(target, ".failed").unlink(missing_ok=True)
    claim.release()


def _raise_failure(target: Path, token: str | None) -> None:
    """Raise what the builder that we waited for raised, if it failed."""
    failed = _read(beside(target, ".failed"))
    if token is None or failed.get("token") != token:
        return
    kinds = {ConfigError.exit_code: ConfigError, DataError.exit_code: DataError}
    kind = kinds.get(failed["exit_code"])
    if kind:
        raise kind(failed["message"])
    raise RuntimeError(f"{_who(failed)} failed to build {target}: {failed['message']}")


def _remove_lock(lock: Path, token: str | None) -> None:
    """Take a dead builder's lock away. Of several waiters one succeeds, for a rename has one winner."""
    aside = lock.with_name(f"{lock.name}.{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(FileNotFoundError):
        if _read(lock).get("token") == token:
            os.rename(lock, aside)
            aside.unlink()


def beside(target: Path, ending: str) -> Path:
    return target.with_name(target.name + ending)


def _read(path: Path) -> dict[str, Any]:
    """The JSON of a small file; {} while it isn't there or is being made."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def _machine() -> str:
    """A name for where process ids mean the same: the host and its process namespace (containers have their own)."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}:{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _who(facts: dict[str, Any]) -> str:
    return f"process {facts['pid']} on {facts['machine'].split(':')[0]}" if "pid" in facts else "another process"
