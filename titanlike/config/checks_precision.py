"""Rules on low precision: what goes together, and how many tokens its products take. They import no torch."""

from __future__ import annotations

from collections.abc import Iterator

from titanlike.config.checks_parallel import CONTEXT, TENSOR, known_degree
from titanlike.config.problem import Problem, not_among
from titanlike.config.schema import Config

CONVERTERS = ("quantize.linear.float8", "quantize.linear.mx", "quantize.grouped_mm.float8", "quantize.grouped_mm.mx")
MX_RECIPES = ("mxfp8_cublas", "mxfp8_cublas_rceil", "mxfp8_emulated")
FLOAT8, MX = "quantize.linear.float8", "quantize.linear.mx"
SMALL = "auto_filter_small_kn"


def precision(config: Config, world: int | None) -> Iterator[Problem]:
    """Everything of this module, with the number of processes if it is known."""
    yield from converters(config)
    yield from float8(config)
    if MX in config.model.converters and config.quantize.linear.mx.recipe_name not in MX_RECIPES:
        yield not_among(f"{MX}.recipe_name", config.quantize.linear.mx.recipe_name, MX_RECIPES)
    yield from tokens(config, world)


def converters(config: Config) -> Iterator[Problem]:
    """Converters are known, and one takes the linear layers."""
    for name in config.model.converters:
        if name not in CONVERTERS and not config.job.imports:
            yield not_among("model.converters", name, CONVERTERS)
    for kind in ("quantize.linear.", "quantize.grouped_mm."):
        if len(names := [name for name in config.model.converters if name.startswith(kind)]) > 1:
            text = f"model.converters: {' and '.join(names)} are for the same layers; leave one of them"
            yield Problem(("model.converters",), text)


def float8(config: Config) -> Iterator[Problem]:
    """What goes with one recipe only, and what only goes with something else."""
    section = config.quantize.linear.float8
    gather, scales = "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"
    if section.recipe_name not in (None, "tensorwise"):
        for option in (gather, scales):
            if getattr(section, option):
                key = f"{FLOAT8}.{option}"
                yield Problem((key,), f"{key} = true: goes with {FLOAT8}.recipe_name = 'tensorwise' only")
    if FLOAT8 not in config.model.converters:
        return
    if section.precompute_float8_dynamic_scale_for_fsdp:
        key = f"{FLOAT8}.{scales}"
        if not section.enable_fsdp_float8_all_gather:
            other = f"{FLOAT8}.{gather}"
            yield Problem((key, other), f"{key} = true: needs {other} = true, whose scales these are")
        if config.training.enable_cpu_offload:
            other = "training.enable_cpu_offload"
            text = f"{key} = true: does not go with {other} = true, on whose way to the device scales are lost"
            yield Problem((key, other), text)
    if SMALL in section.filter_fqns and section.recipe_name == "rowwise_with_gw_hp":
        key = f"{FLOAT8}.filter_fqns"
        text = f'{key}: "{SMALL}" knows the recipes tensorwise and rowwise; name the layers to leave out instead'
        yield Problem((key, f"{FLOAT8}.recipe_name"), text)


def tokens(config: Config, world: int | None) -> Iterator[Problem]:
    """A weight's gradient is a product over the tokens of a microbatch; the formats take multiples of some number."""
    multiple, converter = _multiple(config)
    pipeline, context, tensor = (known_degree(config, world, axis) for axis in ("pipeline", "context", "tensor"))
    length = config.training.seq_len
    if multiple == 1 or pipeline is None or context is None or tensor is None or length % context:
        return
    section = config.parallelism
    rows = ("training.local_batch_size", config.training.local_batch_size)
    if pipeline > 1:
        rows = ("parallelism.pipeline_parallel_microbatch_size", section.pipeline_parallel_microbatch_size)
    named, words = [rows[0], "training.seq_len"], f"{rows[0]} = {rows[1]} x training.seq_len = {length}"
    length //= context
    if context > 1:
        named, words = [*named, CONTEXT], f"{words} / {CONTEXT} = {context}"
    if rows[1] * length % multiple == 0 and tensor > 1 and section.enable_sequence_parallel:
        # Layers that don't mix tokens see also the padding that makes a sequence divide by the ranks.
        length += -length % tensor
        named, words = [*named, TENSOR], f"{words} (padded for {TENSOR} = {tensor})"
    if rows[1] * length % multiple:
        text = f"{words} makes {rows[1] * length} tokens: {converter} needs a multiple of {multiple}"
        yield Problem((*named, "model.converters"), text)


def _multiple(config: Config) -> tuple[int, str]:
    """What the tokens of a microbatch must be a multiple of, and for which converter."""
    section = config.quantize.linear.float8
    if MX in config.model.converters:
        return 32, MX
    # With the gradients of weights in high precision, and in emulation, any number does.
    if FLOAT8 in config.model.converters and not section.emulate and section.recipe_name != "rowwise_with_gw_hp":
        return 16, FLOAT8
    return 1, ""
