"""Rules on how the model is split: over tensor ranks, pipeline stages and context ranks. They import no torch."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from titanlike.config.derive import DEGREES, degree_problem, degrees
from titanlike.config.problem import Problem, not_among
from titanlike.config.schema import Config
from titanlike.errors import ConfigError

if TYPE_CHECKING:
    from titanlike.models.spec import DecoderSpec

TENSOR, CONTEXT = DEGREES["tensor"], DEGREES["context"]
EXPERT, EXPERT_TENSOR = "parallelism.expert_parallel_degree", "parallelism.expert_tensor_parallel_degree"
METHOD = "parallelism.context_parallel_rotate_method"
BALANCER = "parallelism.context_parallel_load_balancer"
ASYNC = "parallelism.enable_async_tensor_parallel"
# Before, torch can't begin a backward at an operator of one's own, and may count a weight's gradient twice.
HALVES_SINCE = (2, 13)
# Before, torch has a rank send to itself where it holds two stages that follow each other.
PARTS = "parallelism.module_fqns_per_model_part"
NEIGHBOURS_SINCE = (2, 12)
_KEY = re.compile(r"(parallelism|training|model|compile)\.[a-z_0-9.]+\w")


def split(config: Config, world: int | None) -> Iterator[Problem]:
    """Everything of this module, with the number of processes if it is known."""
    from titanlike.models.spec import decoder_spec

    yield from sequences(config, world)
    yield from overlap(config, world)
    try:
        spec = decoder_spec(config)
    except ConfigError:  # said elsewhere, or a name that an imported module knows
        spec = None
    if spec:
        yield from heads(config, spec, world)
        yield from attention(config, spec, world)
    yield from experts(config, spec, world)
    yield from pipeline(config, spec, world)


def heads(config: Config, spec: DecoderSpec, world: int | None) -> Iterator[Problem]:
    """Each rank gets whole heads, and rows of the vocabulary."""
    tensor, context = known_degree(config, world, "tensor") or 1, known_degree(config, world, "context") or 1
    if tensor > 1:
        for text in _tensor_problems(tensor, spec):
            yield Problem((TENSOR, "model.flavor"), f"{TENSOR} = {tensor}: {text}")
    own = spec.n_heads // tensor
    if config.parallelism.context_parallel_rotate_method == "ulysses" and own % context:
        text = (
            f"{METHOD} = 'ulysses': {CONTEXT} = {context} must divide the {own} query heads of each tensor rank; "
            '"alltoall" and "allgather" take any number of heads'
        )
        yield Problem((METHOD, CONTEXT, "model.flavor"), text)


def _tensor_problems(tensor: int, spec: DecoderSpec) -> Iterator[str]:
    if spec.experts and spec.experts.ffn_dim < tensor:
        yield f"is more than the {spec.experts.ffn_dim} hidden elements of an expert"
    if spec.n_heads % tensor:
        yield f"must divide the model's {spec.n_heads} query heads"
    # Fewer key/value heads than ranks are replicated.
    elif spec.n_kv_heads % tensor and tensor % spec.n_kv_heads:
        yield f"must divide the model's {spec.n_kv_heads} key/value heads, or be a multiple of them"
    if (tensor - 1) * -(-spec.vocab_size // tensor) >= spec.vocab_size:
        yield f"leaves ranks without any of the vocabulary's {spec.vocab_size} rows"


def attention(config: Config, spec: DecoderSpec, world: int | None) -> Iterator[Problem]:
    """Over ranks, windows and soft caps are for the method that gives each rank whole rows."""
    context, method = known_degree(config, world, "context") or 1, config.parallelism.context_parallel_rotate_method
    if context == 1 or method == "ulysses":
        return
    lengths = [config.training.seq_len, config.validation.seq_len or 0]
    for what in (
        f"a window of {spec.window} tokens"
        if spec.window and spec.windowed_layers and max(lengths) > spec.window
        else "",
        f"a soft cap of {spec.attention_softcap} on scores" if spec.attention_softcap else "",
    ):
        if what:
            text = f'{METHOD} = {method!r}: the model\'s attention has {what}, which only "ulysses" spreads over ranks'
            yield Problem((METHOD, CONTEXT, "model.flavor"), text)


def experts(config: Config, spec: DecoderSpec | None, world: int | None) -> Iterator[Problem]:
    """Whole experts to each rank of a group that is made of the axes inside the pipeline and the replicas."""
    section = config.parallelism
    degree, split = section.expert_parallel_degree, section.expert_tensor_parallel_degree
    tensor = known_degree(config, world, "tensor") or 1
    if split not in (1, section.tensor_parallel_degree):
        text = f"{EXPERT_TENSOR} = {split}: must be 1 or {TENSOR} = {section.tensor_parallel_degree}"
        yield Problem((EXPERT_TENSOR,), text)
        return
    in_turn = "debug.moe_force_load_balance"
    if config.debug.moe_force_load_balance and spec and spec.experts is None:
        yield Problem((in_turn, "model.flavor"), f"{in_turn} = true: the model has no experts")
    if degree == 1 or spec is None:
        return
    if spec.experts is None:
        yield Problem((EXPERT, "model.flavor"), f"{EXPERT} = {degree}: the model has no experts")
        return
    if spec.experts.n_experts % degree:
        text = f"{EXPERT} = {degree}: must divide the model's {spec.experts.n_experts} experts"
        yield Problem((EXPERT, "model.flavor"), text)
    if tensor > 1 and split == 1:
        if degree % tensor:
            text = (
                f"{EXPERT} = {degree}: must be a multiple of {TENSOR} = {tensor}, whose ranks it is taken from first; "
                f"{EXPERT_TENSOR} = {tensor} splits each expert over them instead"
            )
            yield Problem((EXPERT, TENSOR, EXPERT_TENSOR), text)
        if not section.enable_sequence_parallel:
            key = "parallelism.enable_sequence_parallel"
            text = f"{EXPERT} = {degree}: over tensor ranks it needs {key} = true, or {EXPERT_TENSOR} = {tensor}"
            yield Problem((EXPERT, key, EXPERT_TENSOR), text)
    if world and not degree_problem(config, world):
        made = degrees(config, world)
        there = made.shard * made.context * (made.tensor if split == 1 else 1)
        if there % degree:
            axes = "shard, context and tensor" if split == 1 else "shard and context"
            text = f"{EXPERT} = {degree}: must divide the {there} ranks of the {axes} axes, which it is taken from"
            yield Problem((EXPERT, *DEGREES.values()), text)


def sequences(config: Config, world: int | None) -> Iterator[Problem]:
    """Each context rank gets the same share of a sequence (two shares, where head and tail are paired)."""
    degree = known_degree(config, world, "context") or 1
    if degree <= 1:
        return
    if config.parallelism.context_parallel_load_balancer == "ptrr":
        text = (
            f"{BALANCER} = 'ptrr': deals out the blocks of a FlexAttention mask, which this attention does without; "
            '"headtail" balances causal attention'
        )
        yield Problem((BALANCER,), text)
    shares = degree * (2 if config.parallelism.context_parallel_load_balancer == "headtail" else 1)
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable and config.validation.seq_len:
        lengths["validation.seq_len"] = config.validation.seq_len
    for key, length in lengths.items():
        if length % shares:
            yield Problem((key, CONTEXT), f"{key} = {length}: must be a multiple of {shares} for {CONTEXT} = {degree}")


def overlap(config: Config, world: int | None) -> Iterator[Problem]:
    """Asynchronous tensor parallelism is a rewriting of compiled blocks that gather and scatter tokens."""
    section = config.parallelism
    if not section.enable_async_tensor_parallel or known_degree(config, world, "tensor") == 1:
        return
    if not (config.compile.enable and "model" in config.compile.components):
        text = f'{ASYNC} = true: needs compile.enable = true with "model" in compile.components'
        yield Problem((ASYNC, "compile.enable"), text)
    if not section.enable_sequence_parallel:
        key = "parallelism.enable_sequence_parallel"
        yield Problem((ASYNC, key), f"{ASYNC} = true: needs {key} = true")


def pipeline(config: Config, spec: DecoderSpec | None, world: int | None) -> Iterator[Problem]:
    """The schedule is one of torch's, and takes what there is of stages and microbatches."""
    from titanlike.parallel.schedules import SCHEDULES, TABLE, schedule_named
    from titanlike.parallel.stages import plan_stages

    key, name = "parallelism.pipeline_parallel_schedule", config.parallelism.pipeline_parallel_schedule
    if name.lower() not in {known.lower() for known in SCHEDULES}:
        yield not_among(key, name, list(SCHEDULES))
        return
    path = config.parallelism.pipeline_parallel_schedule_csv
    tables = [known for known in SCHEDULES if schedule_named(known).placement == "table"]
    if path and schedule_named(name).placement != "table":
        yield Problem(
            (TABLE, key), f"{TABLE} = {path!r}: is read with {key} = {' or '.join(tables)} only, not {name!r}"
        )
    degree = known_degree(config, world, "pipeline")
    parts = config.parallelism.module_fqns_per_model_part
    if degree == 1 and parts:
        text = f"{PARTS} = {parts}: splits a pipeline, and parallelism.pipeline_parallel_degree = 1 makes none"
        yield Problem((PARTS,), text)
    if degree is None or degree <= 1 or spec is None:
        return
    halves = schedule_named(name).splits_backward
    try:
        table = plan_stages(config, spec, degree).table
        halves = table.splits_backward if table else halves
        if table and table.has_neighbours and (installed := torch_version()) and installed < NEIGHBOURS_SINCE:
            what = f"{TABLE} = {table.path!r}: puts a stage on the rank of the one before"
            yield Problem((TABLE,), _too_old(what, installed, NEIGHBOURS_SINCE))
    except ConfigError as error:
        yield from (Problem(_keys(text), text) for text in error.problems)
    if halves:
        yield from _halves(config, key)


def _halves(config: Config, key: str) -> Iterator[Problem]:
    """What doesn't go with schedules that take the gradients of a stage's inputs and weights at different times."""
    clash = f"{key} = {config.parallelism.pipeline_parallel_schedule!r}: takes gradients of inputs and of weights apart"
    if (installed := torch_version()) and installed < HALVES_SINCE:
        yield Problem((key,), _too_old(clash, installed, HALVES_SINCE))
    if config.compile.enable and "model" in config.compile.components:
        text = f'{clash}, which compiled blocks can\'t; take "model" out of compile.components, or another schedule'
        yield Problem((key, "compile.components"), text)
    # Weights that were given back are others when the backward asks for them: torch leaves them without a gradient.
    resharding = "parallelism.fsdp_reshard_after_forward"
    if config.parallelism.fsdp_reshard_after_forward == "always":
        text = f'{clash}, for which weights stay gathered; {resharding} = "always" goes with other schedules'
        yield Problem((key, resharding), text)
    recomputing = config.activation_checkpoint
    if recomputing.mode == "selective" and recomputing.selective_ac_option == "op":
        option = "activation_checkpoint.selective_ac_option"
        text = (
            f'{clash}, for which torch recomputes a block twice; {option} = "op" lets it once. Take a number of blocks '
            'there, or activation_checkpoint.mode = "full"'
        )
        yield Problem((key, option), text)


def _too_old(what: str, installed: tuple[int, int], needed: tuple[int, int]) -> str:
    have, need = (".".join(map(str, version)) for version in (installed, needed))
    return f"{what}, which needs torch {need}; {have} is installed"


def torch_version() -> tuple[int, int] | None:
    """Of the torch that is installed, if any; read off the package, since importing it takes seconds."""
    try:
        numbers = re.findall(r"\d+", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(numbers[0]), int(numbers[1])


def known_degree(config: Config, world: int | None, axis: str) -> int | None:
    """The degree of an axis; None where it is what is left of processes whose number isn't known or doesn't fit."""
    written = getattr(config.parallelism, DEGREES[axis].split(".")[1])
    if written != -1:
        return written
    return getattr(degrees(config, world), axis) if world and not degree_problem(config, world) else None


def _keys(text: str) -> tuple[str, ...]:
    """The keys that a text speaks of, in its order, and the model that they are held against."""
    return (*dict.fromkeys(match[0] for match in _KEY.finditer(text)), "model.flavor")
