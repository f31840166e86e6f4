"""How fast the training goes, over the window since the last log line.

    start ── step ── step ── read ── step ── paused("validation") ── step ── read ── …
             └───── window ─────┘   └─────────── window ──────────────────────┘

A window knows its steps and tokens by subtraction from the counts at its start, so a window of one step, one of ten
and the first one after a resume are all divided by what they really hold. Time in `paused` belongs to no step and is
reported beside them; time in `waiting_for_data` is a part of the step.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Throughput:
    """A stopwatch that the loop carries. Speeds are of the whole job, all ranks together.

    `flops_per_token` and `peak_flops` (of one device) are None where unknown; then `mfu` is None too. `synchronize`
    waits for the device, so that queued work of a step isn't charged to the pause that follows it.
    """

    def __init__(
        self,
        *,
        world_size: int = 1,
        flops_per_token: int | None = None,
        peak_flops: float | None = None,
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.peak_flops = peak_flops
        self._flops_per_token = flops_per_token
        self._world_size = world_size
        self._synchronize = synchronize
        self._clock = clock
        # Mean step times of the last windows. Windows and not single steps: a device runs behind its host, which sees
        # many steps that take no time and one that takes all of it; a window ends with a number read off the device.
        self._recent: deque[float] = deque(maxlen=50)
        self._first_window: float | None = None
        self.start(step=0, tokens=0)

    def start(self, step: int, tokens: int) -> None:
        """Opens the first window. `step` and `tokens` are the run's counts so far, not 0 after a resume."""
        self._step, self._tokens = step, tokens
        self._data_seconds = 0.0
        self._paused: dict[str, float] = {}
        self._began = self._clock()

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """The loop waits for its batch."""
        began = self._clock()
        try:
            yield
        finally:
            self._data_seconds += self._clock() - began

    @contextmanager
    def paused(self, kind: str) -> Iterator[None]:
        """The loop does something other than train: "validation", "checkpoint"; reported as `<kind>_seconds`."""
        self._wait()
        began = self._clock()
        try:
            yield
        finally:
            self._wait()
            self._paused[kind] = self._paused.get(kind, 0.0) + self._clock() - began

    def _wait(self) -> None:
        if self._synchronize is not None:
            self._synchronize()

    def read(self, step: int, tokens: int) -> dict[str, float | None]:
        """Closes the window after `step` and opens the next. `tokens`: the run's count so far, over all ranks.

        Returns `tokens_per_second`, `mfu` (0 to 1), and the mean `step_seconds` and `data_seconds` of one step, all
        None when the window holds no step; and the seconds of each kind of pause that the window saw, as a sum.
        """
        steps, trained = step - self._step, tokens - self._tokens
        seconds = self._clock() - self._began - sum(self._paused.values())
        pauses = {f"{kind}_seconds": spent for kind, spent in self._paused.items()}
        data_seconds = self._data_seconds
        self.start(step, tokens)
        if steps <= 0 or seconds <= 0:
            return {"tokens_per_second": None, "mfu": None, "step_seconds": None, "data_seconds": None, **pauses}
        self._remember(seconds / steps)
        speed = trained / seconds
        return {
            "tokens_per_second": speed,
            "mfu": self._mfu(speed),
            "step_seconds": seconds / steps,
            "data_seconds": data_seconds / steps,
            **pauses,
        }

    def _mfu(self, tokens_per_second: float) -> float | None:
        if self._flops_per_token is None or self.peak_flops is None:
            return None
        return self._flops_per_token * tokens_per_second / (self.peak_flops * self._world_size)

    def _remember(self, step_seconds: float) -> None:
        # The first window of a process compiles and warms up: it speaks for the others only until there are others.
        if self._first_window is None:
            self._first_window = step_seconds
        else:
            self._recent.append(step_seconds)

    def seconds_left(self, step: int, last_step: int) -> float | None:
        """Until `last_step` ends, by the median step time; None before the first window has closed."""
        if self._first_window is None:
            return None
        median = statistics.median(self._recent) if self._recent else self._first_window
        return max(0, last_step - step) * median
