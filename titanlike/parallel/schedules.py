"""What the schedules of torch.distributed.pipelining ask of stages and microbatches. Imports no torch.

tests/parallel/test_stages.py holds every demand here against torch's own.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from titanlike.errors import ConfigError

TABLE = "parallelism.pipeline_parallel_schedule_csv"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One schedule: how its stages lie on the ranks, and how many microbatches it takes.

    `whole_rounds`: microbatches are taken in rounds of about as many as there are ranks, all of one size.
    `splits_backward`: gradients of a stage's input and of its weights are taken at different times.
    """

    name: str
    placement: Literal["single", "loop", "v", "table"]
    fills_stages: bool = False
    whole_rounds: bool = False
    splits_backward: bool = False

    @property
    def stages_a_rank(self) -> int:
        """Stages of a rank where the config asks for no other number."""
        return 1 if self.placement == "single" else 2

    def takes(self, stages_a_rank: int) -> bool:
        return {"single": stages_a_rank == 1, "v": stages_a_rank == 2}.get(self.placement, stages_a_rank >= 2)

    @property
    def takes_words(self) -> str:
        return {"single": "1", "v": "2"}.get(self.placement, "2 or more")

    def rank_of(self, stage: int, degree: int) -> int:
        """The pipeline coordinate of the rank that holds a stage."""
        return 2 * degree - 1 - stage if self.placement == "v" and stage >= degree else stage % degree

    def microbatch_problem(self, microbatches: int, degree: int, stages: int) -> str | None:
        """What the schedule lacks in microbatches, if anything."""
        if self.fills_stages and microbatches < stages:
            return f"needs at least as many microbatches as the {stages} stages"
        rounds = max(1, microbatches // degree)
        if self.whole_rounds and microbatches % rounds:
            return f"takes microbatches in {rounds} rounds of equal size over {degree} ranks"
        return None


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="GPipe", placement="single"),
        Schedule(name="1F1B", placement="single", fills_stages=True),
        Schedule(name="Interleaved1F1B", placement="loop", whole_rounds=True),
        Schedule(name="LoopedBFS", placement="loop"),
        Schedule(name="InterleavedZeroBubble", placement="loop", whole_rounds=True, splits_backward=True),
        Schedule(name="ZBVZeroBubble", placement="v", splits_backward=True),
        Schedule(name="DualPipeV", placement="v", fills_stages=True, splits_backward=True),
        # A schedule of the user's own; torch runs both names in the same way.
        Schedule(name="PipelineScheduleSingle", placement="table"),
        Schedule(name="PipelineScheduleMulti", placement="table"),
    )
}


def schedule_named(name: str) -> Schedule:
    """The schedule of that name, in any case. Raises KeyError if there is none."""
    return {known.lower(): schedule for known, schedule in SCHEDULES.items()}[name.lower()]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A schedule from a file: which rank holds each stage, and whether any backward is in two halves."""

    path: str
    rank_of_stage: tuple[int, ...]
    splits_backward: bool

    @property
    def has_neighbours(self) -> bool:
        """Whether a rank holds two stages that follow each other."""
        return any(a == b for a, b in itertools.pairwise(self.rank_of_stage))


_ACTION = re.compile(r"(\d+)(F|B|I|W)(\d+)")


def read_table(path: str | None, degree: int, microbatches: int) -> Table:
    """A file as torch writes its schedules: a line a rank, with what it does in order, as "0F0,0F1,,0B0,0B1".

    That is stage, action (F forward, B backward, or I and W for its halves: input, weights) and microbatch; empty where
    a rank waits. Raises ConfigError, naming file and line, for what doesn't make a schedule for these numbers.
    """
    if not path:
        raise ConfigError(f"{TABLE} = {path!r}: names no file, which this parallelism.pipeline_parallel_schedule needs")
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"{TABLE} = {path!r}: can't be read: {error.strerror}") from None
    problems: list[str] = []
    if len(lines) != degree:
        problems.append(f"has {len(lines)} lines, one a rank, but parallelism.pipeline_parallel_degree = {degree}")
    ranks: dict[int, set[int]] = {}
    done: dict[int, list[tuple[str, int]]] = {}
    for rank, line in enumerate(lines):
        for cell in filter(None, (cell.strip() for cell in line.split(","))):
            if not (match := _ACTION.fullmatch(cell)):
                problems.append(f"line {rank + 1}: {cell!r} is no action such as 0F0, 0B0, 0I0 or 0W0")
                continue
            stage = int(match[1])
            ranks.setdefault(stage, set()).add(rank)
            done.setdefault(stage, []).append((match[2], int(match[3])))
    problems += _problems(ranks, done, microbatches)
    if problems:
        raise ConfigError([f"{TABLE} = {path!r}: {problem}" for problem in problems])
    return Table(
        path=path,
        rank_of_stage=tuple(next(iter(ranks[stage])) for stage in sorted(ranks)),
        splits_backward=any(action == "I" for actions in done.values() for action, _ in actions),
    )


def _problems(ranks: dict[int, set[int]], done: dict[int, list[tuple[str, int]]], microbatches: int) -> list[str]:
    problems = []
    if sorted(ranks) != list(range(len(ranks))):
        problems.append(f"has stages {', '.join(map(str, sorted(ranks)))}; they must be 0, 1, … without a gap")
    wanted = set(range(microbatches))
    for stage in sorted(ranks):
        if len(ranks[stage]) > 1:
            problems.append(f"stage {stage} is on lines {' and '.join(str(r + 1) for r in sorted(ranks[stage]))}")
        forwards, backwards, inputs, weights = (
            [n for action, n in done[stage] if action == kind] for kind in ("F", "B", "I", "W")
        )
        if sorted(forwards) != sorted(wanted) or sorted(backwards + weights) != sorted(wanted):
            problems.append(
                f"stage {stage} must take each of the {microbatches} microbatches (training.local_batch_size over "
                "parallelism.pipeline_parallel_microbatch_size) forward and backward once"
            )
        elif sorted(inputs) != sorted(weights):
            problems.append(f"stage {stage} must have a W for each I")
    return problems
