"""Numbers that follow from the config and the number of processes: degrees of the mesh, batch, accumulation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titanlike.errors import ConfigError

if TYPE_CHECKING:
    from titanlike.config.schema import Config

# Outer to inner, by what people call them.
DEGREES = {
    "pipeline": "parallelism.pipeline_parallel_degree",
    "replicate": "parallelism.data_parallel_replicate_degree",
    "shard": "parallelism.data_parallel_shard_degree",
    "context": "parallelism.context_parallel_degree",
    "tensor": "parallelism.tensor_parallel_degree",
}


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """The mesh, outer to inner; the product is the number of processes."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int

    @property
    def data(self) -> int:
        """Ranks that see different data."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    def place(self, rank: int) -> Place:
        """Where a rank stands on each axis."""
        position = {}
        for name in reversed(DEGREES):
            rank, position[name] = divmod(rank, getattr(self, name))
        return Place(**position, data=position["replicate"] * self.shard + position["shard"])

    def __str__(self) -> str:
        """The axes that are in use, as people say it: "shard 4 × tensor 2"."""
        used = [f"{name} {getattr(self, name)}" for name in DEGREES if getattr(self, name) > 1]
        return " × ".join(used) or "one process"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Coordinates of one rank on the mesh. Ranks of the same `data` coordinate see the same rows."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int
    data: int


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """How the global batch is dealt to ranks and microbatches."""

    degrees: Degrees
    global_batch: int
    """Sequences of an optimizer step."""
    accumulation: int
    """Microbatches of an optimizer step, the same on every rank."""
    experts: int = 1
    """Ranks that experts are spread over."""
    experts_split: bool = False
    """Whether each of them is split over the tensor axis, too."""

    @property
    def dp_degree(self) -> int:
        """Ranks that see different rows."""
        return self.degrees.data


def written_degrees(config: Config) -> dict[str, int]:
    """Degrees by key as the config has them, -1 included."""
    return {key: getattr(config.parallelism, key.split(".")[1]) for key in DEGREES.values()}


def degree_problem(config: Config, world: int | None) -> str | None:
    """What keeps the degrees from fitting the world (None: from fitting any world), with every degree named."""
    written = written_degrees(config)
    for key, value in written.items():
        if value < 1 and value != -1:
            return f"{key} = {value}: must be at least 1 (or -1 for what is left of the processes)"
    open_keys = [key for key, value in written.items() if value == -1]
    if len(open_keys) > 1:
        return f"{' and '.join(open_keys)} are both -1: only one degree can be what is left of the processes"
    if world is None:
        return None
    product = math.prod(value for value in written.values() if value != -1)
    if world == product or (open_keys and world % product == 0):
        return None
    parts = " x ".join(f"{key.split('.')[1]} = {value}" for key, value in written.items() if value != -1)
    if open_keys:
        return f"parallelism: {parts} make {product}, which does not divide the {world} processes there are"
    return f"parallelism: {parts} make {product}, but there are {world} processes"


def degrees(config: Config, world: int) -> Degrees:
    """The mesh for that many processes. Raises ConfigError where the degrees don't make it."""
    if problem := degree_problem(config, world):
        raise ConfigError(problem)
    written = written_degrees(config)
    left = world // math.prod(value for value in written.values() if value != -1)
    return Degrees(**{name: left if written[key] == -1 else written[key] for name, key in DEGREES.items()})


def implied_world(config: Config) -> int | None:
    """The number of processes that the degrees make by themselves; None where one of them is -1."""
    values = written_degrees(config).values()
    return None if any(value < 1 for value in values) else math.prod(values)


def batch_problem(config: Config, dp_degree: int) -> str | None:
    """What keeps the global batch from being dealt in whole microbatches to that many data-parallel ranks."""
    local, total = config.training.local_batch_size, config.training.global_batch_size
    step = local * dp_degree
    if total == -1 or (total > 0 and total % step == 0):
        return None
    reason = "is smaller than" if 0 < total < step else "must be a multiple of"
    if total < 1:
        return f"training.global_batch_size = {total}: must be at least 1, or -1 for one microbatch on every rank"
    return (
        f"training.global_batch_size = {total}: {reason} {step} "
        f"(training.local_batch_size = {local} x data-parallel degree {dp_degree})"
    )


def batch_layout(config: Config, world: int, *, allow_filler: bool = False) -> BatchLayout:
    """How the batch is dealt to `world` processes.

    Raises ConfigError where degrees or batch don't fit. With `allow_filler` (after a restart on another number of
    processes) a batch that doesn't divide takes one more microbatch, which the loader fills up with empty rows.
    """
    mesh = degrees(config, world)
    step = config.training.local_batch_size * mesh.data
    total = step if config.training.global_batch_size == -1 else config.training.global_batch_size
    if not allow_filler and (problem := batch_problem(config, mesh.data)):
        raise ConfigError(problem)
    return BatchLayout(
        degrees=mesh,
        global_batch=total,
        accumulation=-(-total // step),
        experts=config.parallelism.expert_parallel_degree,
        experts_split=mesh.tensor > 1 and config.parallelism.expert_tensor_parallel_degree > 1,
    )
