"""Stopping politely: SIGTERM, SIGINT and SIGHUP ask for a stop, and the loop stops when it suits.

A handler may run between any two bytecodes, in the middle of a collective or of a save, so it does nothing but
remember. The trainer asks the flag once a step, agrees on it with the other ranks (a signal may reach only one of
them), saves and leaves. More signals change nothing, so they can't break that save, except one way out for a person
who doesn't want to wait: the third Ctrl-C (SIGINT) ends the process at once.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FORCING_INTERRUPTS = 3


def install(handler: Any) -> dict[signal.Signals, Any]:
    """Set the handler for every stop signal (main thread only); returns the handlers that were there.

    A SIGHUP that is ignored stays ignored: that is what nohup is for.
    """
    previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    if previous[signal.SIGHUP] == signal.SIG_IGN:
        del previous[signal.SIGHUP]
    for number in previous:
        signal.signal(number, handler)
    return previous


class StopFlag:
    """Raised by the first stop signal and never lowered. A context manager that puts the old handlers back."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None  # the first one
        self._interrupts = 0
        self._previous = install(self._handle)

    @property
    def raised(self) -> bool:
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        self._interrupts += number == signal.SIGINT
        if self._interrupts >= FORCING_INTERRUPTS:
            os._exit(1)

    def close(self) -> None:
        """Put back the handlers that were there before."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def __enter__(self) -> StopFlag:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
