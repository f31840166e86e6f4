"""Fault hooks: make a run fail on purpose, so that its survival can be tested.

    TITANLIKE_FAULT="kind:rank=R,step=S,phase=P[,seconds=N][,once=PATH]"     (several: separated by ';')

| kind       | what happens                                       | phases                                   |
|------------|----------------------------------------------------|------------------------------------------|
| raise      | an exception                                       | data, forward, backward, optimizer,      |
| kill       | SIGKILL to the process itself                      | save, validate, rollout                  |
| hang       | the process sleeps for ever                        |                                          |
| save-error | an input/output error, as of a broken disk         | save                                     |
| slow-save  | the save takes N seconds longer (default 30)       | save                                     |

A rank, step or phase that is not given means any. `once=PATH` makes the file when the fault fires and lets it fire
only if the file is not there: so a fault survives neither a restart nor a later start.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from titanlike.errors import ConfigError
from titanlike.launch import worker

VARIABLE = "TITANLIKE_FAULT"
KINDS = ("raise", "kill", "hang", "save-error", "slow-save")
PHASES = ("data", "forward", "backward", "optimizer", "save", "validate", "rollout")


class InjectedFault(RuntimeError):
    """What `raise` raises."""


@dataclass(frozen=True)
class Fault:
    """One entry of TITANLIKE_FAULT; None means any."""

    kind: str
    rank: int | None = None
    step: int | None = None
    phase: str | None = None
    seconds: float = 30.0
    once: Path | None = None

    def strikes(self, phase: str, step: int) -> bool:
        """Whether this is its moment; takes the `once` file."""
        here = self.phase in (None, phase) and self.step in (None, step) and self.rank in (None, worker.rank())
        return here and (self.once is None or _take(self.once))

    def fire(self, phase: str, step: int) -> None:
        place = f"on rank {worker.rank()} at step {step} in {phase}"
        if self.kind == "raise":
            raise InjectedFault(f"{VARIABLE}: raised {place}")
        if self.kind == "save-error":
            raise OSError(errno.EIO, f"{VARIABLE}: {os.strerror(errno.EIO)}, {place}")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "slow-save":
            time.sleep(self.seconds)
        while self.kind == "hang":
            time.sleep(3600)


_armed: tuple[Fault, ...] | None = None  # None: the variable was not read yet


def fault(phase: str, step: int) -> None:
    """The hook: does nothing unless TITANLIKE_FAULT names this phase, step and rank. ConfigError if it is malformed."""
    global _armed
    if _armed is None:
        _armed = read_faults()
    for one in _armed:
        if one.strikes(phase, step):
            one.fire(phase, step)


def read_faults(environ: Mapping[str, str] = os.environ) -> tuple[Fault, ...]:
    """The faults that TITANLIKE_FAULT asks for; raises ConfigError naming everything that is wrong in it."""
    problems: list[str] = []
    entries = [entry.strip() for entry in environ.get(VARIABLE, "").split(";") if entry.strip()]
    faults = [_parse(entry, problems) for entry in entries]
    if problems:
        raise ConfigError(problems)
    return tuple(faults)


def _parse(entry: str, problems: list[str]) -> Fault:
    kind, _, rest = entry.partition(":")
    options: dict[str, str | None] = dict.fromkeys(("rank", "step", "phase", "seconds", "once"))

    def wrong(what: str) -> None:
        problems.append(f"{VARIABLE}: {what} in {entry!r}")

    def number(key: str, convert: type) -> float | None:
        text = options[key]
        try:
            value = None if text is None else convert(text)
        except ValueError:
            value = -1
        if value is not None and value < 0:
            wrong(f"{key} must be a number of 0 or more, not {text!r},")
        return value

    for pair in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if key not in options or not equals or not value:
            wrong(f"{pair!r} is none of {', '.join(f'{key}=…' for key in options)}")
        else:
            options[key] = value
    if kind not in KINDS:
        wrong(f"unknown kind {kind!r} (one of {', '.join(KINDS)})")
    phase = options["phase"] or ("save" if "save" in kind else None)
    if phase not in (None, *PHASES):
        wrong(f"unknown phase {phase!r} (one of {', '.join(PHASES)})")
    if "save" in kind and phase != "save":
        wrong(f"{kind} strikes in phase save only, not {phase!r},")
    rank, step, seconds = number("rank", int), number("step", int), number("seconds", float)
    once = Path(options["once"]) if options["once"] else None
    return Fault(kind, rank, step, phase, 30.0 if seconds is None else seconds, once)  # type: ignore[arg-type]


def _take(marker: Path) -> bool:
    """Make the file; False if it was there."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
