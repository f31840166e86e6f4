"""Which layers each pipeline stage holds, and which rank holds which stages. Imports no torch.

A model is cut into stages in its own order: the embedding on the first, norm and head on the last. Ranks hold one stage
each, or several, so that fewer microbatches fill the pipeline:

    4 ranks, single     0 1 2 3
    4 ranks, loop       0 1 2 3 4 5 6 7      rank r holds r, r + 4, …
    4 ranks, V          0 1 2 3              rank r holds r and 7 - r
                        7 6 5 4
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titanlike.errors import ConfigError
from titanlike.models.spec import DecoderSpec, Part
from titanlike.parallel.schedules import TABLE, Schedule, Table, read_table, schedule_named

if TYPE_CHECKING:
    from titanlike.config import Config

DEGREE = "parallelism.pipeline_parallel_degree"
MODULES = "parallelism.module_fqns_per_model_part"
LAYERS = "parallelism.pipeline_parallel_layers_per_stage"
FIRST = "parallelism.pipeline_parallel_first_stage_less_layers"
LAST = "parallelism.pipeline_parallel_last_stage_less_layers"
SCHEDULE = "parallelism.pipeline_parallel_schedule"
MICROBATCH = "parallelism.pipeline_parallel_microbatch_size"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: its place in the model, the pipeline coordinate of the rank that holds it, and what it holds.

    `cost` is in layers, the embedding and the head weighed as the config says.
    """

    index: int
    rank: int
    part: Part
    cost: int

    def modules(self) -> list[str]:
        """What it holds, for people: "tok_embeddings", "layers.0 … layers.3"."""
        layers = self.part.layers
        names = ["tok_embeddings"] if self.part.first else []
        if layers:
            ends = dict.fromkeys((layers[0], layers[-1]))
            names.append((" … " if len(layers) > 2 else ", ").join(f"layers.{n}" for n in ends))
        return names + (["norm", "output"] if self.part.last else [])


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """All stages in the model's order, the schedule by torch's name, and how many microbatches it takes at once.

    `table` is the schedule of the user's own, if the config names one.
    """

    stages: tuple[Stage, ...]
    schedule: str
    microbatches: int
    table: Table | None = None

    def of_rank(self, rank: int) -> tuple[Stage, ...]:
        """The stages of the rank with this pipeline coordinate, in the model's order."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def lines(self) -> list[str]:
        """The split for people: one line a stage."""
        rows = [("stage", "rank", "layers' cost", "modules")]
        rows += [(str(s.index), str(s.rank), str(s.cost), ", ".join(s.modules())) for s in self.stages]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return ["  ".join([*(c.rjust(w) for c, w in zip(row, widths, strict=False)), row[3]]) for row in rows]


def plan_stages(config: Config, spec: DecoderSpec, degree: int | None = None) -> StagePlan:
    """The split that `[parallelism]` asks for over `degree` ranks (default: pipeline_parallel_degree as it is written).

    Raises ConfigError with every key that doesn't fit.
    """
    degree = degree or config.parallelism.pipeline_parallel_degree
    schedule = schedule_named(config.parallelism.pipeline_parallel_schedule)
    problems: list[str] = []
    microbatches, count, parts, table = 0, 0, [], None
    with _collecting(problems):
        microbatches = _microbatches(config)
    with _collecting(problems):
        if schedule.placement != "table":
            count = degree * _stages_a_rank(config, spec, degree)
        elif microbatches:
            table = read_table(config.parallelism.pipeline_parallel_schedule_csv, degree, microbatches)
            count = len(table.rank_of_stage)
    with _collecting(problems):
        if count:
            parts = _parts(config, spec, count)
    with _collecting(problems):
        if parts and microbatches:
            _check_microbatches(config, schedule, microbatches, degree, count)
    if problems:
        raise ConfigError(problems)
    stages = tuple(
        Stage(
            index=i,
            rank=table.rank_of_stage[i] if table else schedule.rank_of(i, degree),
            part=part,
            cost=_cost(config, part),
        )
        for i, part in enumerate(parts)
    )
    return StagePlan(stages=stages, schedule=schedule.name, microbatches=microbatches, table=table)


@contextlib.contextmanager
def _collecting(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        problems += error.problems


def _check_microbatches(config: Config, schedule: Schedule, microbatches: int, degree: int, count: int) -> None:
    if problem := schedule.microbatch_problem(microbatches, degree, count):
        raise ConfigError(
            f"{SCHEDULE} = {schedule.name!r}: {problem}, but training.local_batch_size = "
            f"{config.training.local_batch_size} in rows of {MICROBATCH} = "
            f"{config.parallelism.pipeline_parallel_microbatch_size} makes {microbatches}"
        )


def _microbatches(config: Config) -> int:
    local, micro = config.training.local_batch_size, config.parallelism.pipeline_parallel_microbatch_size
    if local % micro:
        raise ConfigError(
            f"{MICROBATCH} = {micro}: must divide training.local_batch_size = {local} (remainder {local % micro})"
        )
    return local // micro


def _stages_a_rank(config: Config, spec: DecoderSpec, degree: int) -> int:
    section = config.parallelism
    schedule = schedule_named(section.pipeline_parallel_schedule)
    if section.module_fqns_per_model_part and section.pipeline_parallel_layers_per_stage:
        raise ConfigError(f"{MODULES}: says itself how many stages there are; leave out {LAYERS}")
    if section.module_fqns_per_model_part:
        count = len(section.module_fqns_per_model_part)
        what = f"{MODULES}: has {count} stages, which"
    elif section.pipeline_parallel_layers_per_stage:
        count = -(-_effective_layers(config, spec) // section.pipeline_parallel_layers_per_stage)
        what = (
            f"{LAYERS} = {section.pipeline_parallel_layers_per_stage}: makes {count} stages of {spec.n_layers} layers "
            f"(embedding and head counted as {_effective_layers(config, spec) - spec.n_layers} more), which"
        )
    else:
        return schedule.stages_a_rank
    if count % degree:
        raise ConfigError(f"{what} must be a multiple of {DEGREE} = {degree}")
    if not schedule.takes(count // degree):
        raise ConfigError(
            f"{what} is {count // degree} a rank at {DEGREE} = {degree}; {SCHEDULE} = {schedule.name!r} takes "
            f"{schedule.takes_words}"
        )
    return count // degree


def _weights(config: Config) -> tuple[int, int]:
    section = config.parallelism
    return section.pipeline_parallel_first_stage_less_layers, section.pipeline_parallel_last_stage_less_layers


def _effective_layers(config: Config, spec: DecoderSpec) -> int:
    return spec.n_layers + sum(_weights(config))


def _cost(config: Config, part: Part) -> int:
    first, last = _weights(config)
    return len(part.layers) + first * part.first + last * part.last


def _parts(config: Config, spec: DecoderSpec, count: int) -> list[Part]:
    if not config.parallelism.module_fqns_per_model_part:
        return _balanced(config, spec, count)
    parts = _listed(config, spec)
    if len(parts) != count:  # a table has its own number; else the lists have made it
        raise ConfigError(f"{MODULES}: has {len(parts)} stages, but {TABLE} has {count}")
    return parts


def _balanced(config: Config, spec: DecoderSpec, count: int) -> list[Part]:
    """Stages of equal cost, the first ones a layer longer where it doesn't divide."""
    first, last = _weights(config)
    share, longer = divmod(_effective_layers(config, spec), count)
    section = config.parallelism
    if share == 0:
        raise ConfigError(
            f"{DEGREE} = {section.pipeline_parallel_degree}: {SCHEDULE} = {section.pipeline_parallel_schedule!r} makes "
            f"{count} stages of it, more than the model's {spec.n_layers} layers, embedding and head counted as "
            f"{first} ({FIRST}) and {last} ({LAST})"
        )
    costs = [share + (i < longer) for i in range(count)]
    for key, weight, cost in ((FIRST, first, costs[0]), (LAST, last, costs[-1])):
        if weight > cost:
            raise ConfigError(
                f"{key} = {weight}: is more than a stage's share of {cost} (the model's {spec.n_layers} layers, "
                f"embedding and head counted as {first + last} more, over {count} stages); lower it"
            )
    costs[0] -= first
    costs[-1] -= last
    ends = [sum(costs[: i + 1]) for i in range(count)]
    return [
        Part(layers=tuple(range(end - cost, end)), first=i == 0, last=i == count - 1)
        for i, (end, cost) in enumerate(zip(ends, costs, strict=True))
    ]


def _listed(config: Config, spec: DecoderSpec) -> list[Part]:
    """The lists of module_fqns_per_model_part, which must hold each module once and in the model's order."""
    lists = config.parallelism.module_fqns_per_model_part
    assert lists is not None
    order = ["tok_embeddings", *(f"layers.{n}" for n in range(spec.n_layers)), "norm", "output"]
    place = {name: i for i, name in enumerate(order)}
    problems, seen, before = [], set(), ""
    for name in (name for names in lists for name in names):
        if name not in place:
            problems.append(f"{name!r} is none of the model's modules (tok_embeddings, {_layers(spec)}, norm, output)")
            continue
        if name in seen:
            problems.append(f"{name!r} is there twice")
        elif before and place[name] < place[before]:
            problems.append(f"{name!r} comes after {before!r}; stages must be in the model's order")
        seen.add(name)
        before = name
    problems += [f"{name!r} is missing" for name in order if name not in seen]
    problems += [f"stage {i} is empty" for i, names in enumerate(lists) if not names]
    if not problems and "norm" not in lists[-1]:
        problems.append("'norm' must be on the last stage, before 'output'")
    if problems:
        raise ConfigError([f"{MODULES}: {problem}" for problem in problems])
    return [
        Part(
            layers=tuple(int(name.split(".")[1]) for name in names if name.startswith("layers.")),
            first=i == 0,
            last=i == len(lists) - 1,
        )
        for i, names in enumerate(lists)
    ]


def _layers(spec: DecoderSpec) -> str:
    return "layers.0" if spec.n_layers == 1 else f"layers.0 … layers.{spec.n_layers - 1}"
