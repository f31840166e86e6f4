"""Stopping politely: SIGTERM, SIGINT and SIGHUP ask for a stop, and the loop stops when it suits.

A handler may run between any two bytecodes, in the middle of a collective or of a save, so it does nothing but
remember. The trainer asks the flag once a step, agrees on it with the other ranks (a signal may reach only one of
them), saves and leaves. More signals change nothing, so they can't break that save, except one way out for a person
who doesn't want to wait: the third Ctrl-C (SIGINT) ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def interruptible(over: Callable[[], bool]) -> Iterator[None]:
    """Stop signals raise KeyboardInterrupt inside until `over()` is true; then, and afterwards, they do nothing.

    A rank that reports a failure, or that leaves, is often told to stop as well: an exception of its own would then
    hide what it has to say, or turn a clean end into a failure.
    """
    left = False
    interrupts = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts >= FORCING_INTERRUPTS:
            os._exit(1)
        if not left and not over():
            raise KeyboardInterrupt

    install(handle)
    try:
        yield
    finally:
        left = True


def end_with_the_job(
    failed: Callable[[], bool], begun: Callable[[], bool], stopped: Callable[[], None], patience: float = 5.0
) -> None:
    """End this process some seconds after a signal if another rank has failed, or if training has not begun.

    A rank that waits in C code for a rank that is gone, inside a collective or while the ranks meet, never runs its
    handlers, and would sit there until its launcher's patience ends. The interpreter's C code does run: it writes to
    this descriptor, which a thread reads. `stopped` is called before a start that has not begun is ended.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        while os.read(reading, 1):
            time.sleep(patience)  # it may be about to report something itself
            if failed():
                os._exit(1)
            if not begun():
                stopped()
                os._exit(0)

    threading.Thread(target=watch, name="end-with-the-job", daemon=True).start()


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
