"""Rules on how the model is split: over tensor ranks, pipeline stages and context ranks. They import no torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlike.config.derive import degree_problem, degrees
from titanlike.config.problem import Problem, not_among
from titanlike.config.schema import Config
from titanlike.errors import ConfigError

if TYPE_CHECKING:
    from titanlike.models.spec import DecoderSpec

_KEY = re.compile(r"(parallelism|training|model|compile)\.[a-z_0-9.]+\w")


def split(config: Config, world: int | None) -> Iterator[Problem]:
    """Everything of this module, with the number of processes if it is known."""
    from titanlike.models.spec import decoder_spec

    yield from sequences(config)
    try:
        spec = decoder_spec(config)
    except ConfigError:  # said elsewhere, or a name that an imported module knows
        spec = None
    if spec:
        yield from heads(config, spec)
    yield from pipeline(config, spec, world)


def heads(config: Config, spec: DecoderSpec) -> Iterator[Problem]:
    """Query heads divide. Fewer key/value heads than ranks are replicated, so they need not."""
    tensor = config.parallelism.tensor_parallel_degree
    if tensor > 1 and spec.n_heads % tensor:
        key = "parallelism.tensor_parallel_degree"
        yield Problem((key, "model.flavor"), f"{key} = {tensor}: must divide the model's {spec.n_heads} query heads")


def sequences(config: Config) -> Iterator[Problem]:
    """Each context rank gets the same share of a sequence (two shares, where head and tail are paired)."""
    degree = config.parallelism.context_parallel_degree
    if degree <= 1:
        return
    shares = degree * (2 if config.parallelism.context_parallel_load_balancer == "headtail" else 1)
    if config.training.seq_len % shares:
        key = "training.seq_len"
        text = (
            f"{key} = {config.training.seq_len}: must be a multiple of {shares} "
            f"for parallelism.context_parallel_degree = {degree}"
        )
        yield Problem((key, "parallelism.context_parallel_degree"), text)


def pipeline(config: Config, spec: DecoderSpec | None, world: int | None) -> Iterator[Problem]:
    """The schedule is one of torch's, and takes what there is of stages and microbatches."""
    from titanlike.parallel.schedules import SCHEDULES, schedule_named
    from titanlike.parallel.stages import plan_stages

    key, name = "parallelism.pipeline_parallel_schedule", config.parallelism.pipeline_parallel_schedule
    if name.lower() not in {known.lower() for known in SCHEDULES}:
        yield not_among(key, name, list(SCHEDULES))
        return
    degree = _pipeline_degree(config, world)
    if degree is None or degree <= 1 or spec is None:
        return
    halves = schedule_named(name).splits_backward
    try:
        table = plan_stages(config, spec, degree).table
        halves = table.splits_backward if table else halves
    except ConfigError as error:
        yield from (Problem(_keys(text), text) for text in error.problems)
    if halves and config.compile.enable and "model" in config.compile.components:
        text = (
            f"{key} = {name!r}: takes the gradients of inputs and of weights apart, which compiled blocks can't; "
            'take "model" out of compile.components, or another schedule'
        )
        yield Problem((key, "compile.components"), text)


def _pipeline_degree(config: Config, world: int | None) -> int | None:
    written = config.parallelism.pipeline_parallel_degree
    if written != -1:
        return written
    return degrees(config, world).pipeline if world and not degree_problem(config, world) else None


def _keys(text: str) -> tuple[str, ...]:
    """The keys that a text speaks of, in its order, and the model that they are held against."""
    return (*dict.fromkeys(match[0] for match in _KEY.finditer(text)), "model.flavor")
