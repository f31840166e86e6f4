"""Traces of time and memory, from `[profiling]`.

    with profiling(config.profiling, folder, rank=rank, device_type="cuda", resume_step=step) as profiler:
        for …:
            train one step
            profiler.step()

Steps are the run's, not the process's: with `profile_freq = 10` steps 10, 20, … are recorded, after a resume too. A
trace is `<folder>/<save_traces_folder>/step-N/rank-R.json.gz`, for chrome://tracing or ui.perfetto.dev; a snapshot is
`<folder>/<save_memory_snapshot_folder>/step-N/rank-R.pickle`, for pytorch.org/memory_viz, which wants a pickle (it is
only ever written here).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction

from titanlike.errors import ConfigError

logger = logging.getLogger("titanlike")


class Profiler:
    """What runs after each step; does nothing when nothing is switched on."""

    def __init__(self) -> None:
        self.after_step: list[Callable[[], None]] = []

    def step(self) -> None:
        """Call once at the end of every training step."""
        for action in self.after_step:
            action()


@contextmanager
def profiling(
    settings: Any, folder: Path, *, rank: int, device_type: str = "cpu", resume_step: int = 0
) -> Iterator[Profiler]:
    """Records what `settings` asks for while the block runs; `resume_step` steps have been trained before it."""
    profiler = Profiler()
    with ExitStack() as stack:
        if settings.enable_profiling:
            trace = stack.enter_context(_trace(settings, folder, rank, device_type, resume_step))
            profiler.after_step.append(trace.step)
        if settings.enable_memory_snapshot:
            if device_type == "cuda":
                snapshots = stack.enter_context(_MemorySnapshots(settings, folder, rank, resume_step))
                profiler.after_step.append(snapshots.step)
            else:
                logger.warning(
                    "profiling.enable_memory_snapshot: torch records the memory of CUDA and ROCm devices only; "
                    "this run is on %s and writes no snapshots",
                    device_type,
                )
        yield profiler


def cycle(freq: int, warmup: int, active: int, resume_step: int) -> Callable[[int], ProfilerAction]:
    """The profiler's action for its n-th step (from 0): each cycle of `freq` steps ends with `active` recorded ones."""
    if warmup + active > freq:
        raise ConfigError(
            f"profiling.profile_freq = {freq}: must be at least profiler_warmup + profiler_active = {warmup + active}"
        )

    def action(index: int) -> ProfilerAction:
        left = freq - 1 - (resume_step + index) % freq  # steps of the cycle after this one
        if left == 0:
            return ProfilerAction.RECORD_AND_SAVE
        if left < active:
            return ProfilerAction.RECORD
        return ProfilerAction.WARMUP if left < active + warmup else ProfilerAction.NONE

    return action


@contextmanager
def _trace(
    settings: Any, folder: Path, rank: int, device_type: str, resume_step: int
) -> Iterator[torch.profiler.profile]:
    def save(profile: torch.profiler.profile) -> None:
        step = resume_step + profile.step_num
        path = folder / settings.save_traces_folder / f"step-{step}" / f"rank-{rank}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))
        logger.info("profiler: wrote %s", path)

    schedule = cycle(settings.profile_freq, settings.profiler_warmup, settings.profiler_active, resume_step)
    if device_type == "cpu":
        # The recorder says when it starts and stops, in a line of its own each. Hiding that hides its errors as well,
        # which are about accelerators.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # Each cycle is exported by itself, so it is right that the next one clears its events.
    warnings.filterwarnings("ignore", message=".*Profiler clears events", category=UserWarning)
    with torch.profiler.profile(schedule=schedule, on_trace_ready=save, record_shapes=True) as profile:
        yield profile


class _MemorySnapshots:
    """The allocator's history, written every `profile_freq` steps and when the device runs out of memory."""

    MAX_ENTRIES = 100_000

    def __init__(self, settings: Any, folder: Path, rank: int, resume_step: int):
        self._folder = folder / settings.save_memory_snapshot_folder
        self._freq = settings.profile_freq
        self._rank = rank
        self._step = resume_step

    def __enter__(self) -> _MemorySnapshots:
        torch.cuda.memory._record_memory_history(max_entries=self.MAX_ENTRIES)
        return self

    def step(self) -> None:
        self._step += 1
        if self._step % self._freq == 0:
            self._dump(f"step-{self._step}")

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # The error itself goes on to the caller: a snapshot explains it and must not hide it.
        if kind is not None and issubclass(kind, torch.OutOfMemoryError):
            self._dump(f"step-{self._step + 1}-out-of-memory")
        torch.cuda.memory._record_memory_history(enabled=None)

    def _dump(self, name: str) -> None:
        path = self._folder / name / f"rank-{self._rank}.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        logger.info("memory snapshot: wrote %s", path)
