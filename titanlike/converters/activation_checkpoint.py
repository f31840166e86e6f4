"""Activation checkpointing: what the backward recomputes instead of keeping.

Applied by replacing a block's forward, not by wrapping the block, so that no parameter changes its name. With
"memory_budget" nothing is replaced: the compiler is told what share of a block's activations it may keep.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from pathlib import Path

import torch
import torch._functorch.config
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlike.config import Config
from titanlike.config.sections.memory import ActivationCheckpoint
from titanlike.errors import ConfigError
from titanlike.models.decoder import Decoder
from titanlike.parallel import context  # noqa: F401  (its operators are named below)


def _saved_operators() -> set:
    """Operators whose results selective checkpointing keeps: they cost most to recompute, or talk to other ranks."""
    aten = torch.ops.aten
    return {
        torch.ops.titanlike.document_attention.default,
        torch.ops.titanlike.context_attention.default,
        torch.ops.titanlike.exchange.default,
        # Products in low precision are these too: of tensors that hold float8 numbers and their scales.
        aten.mm.default,
        aten.addmm.default,
        # The largest value of a tensor that is cast to float8: one number, for a pass over all of it.
        aten.max.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }


def _selective_contexts(always_recomputed: frozenset[tuple[int, ...]]):
    """Keeps the results of attention and of every other matrix product; none of those by a matrix [in, out] of
    `always_recomputed`, which aren't counted either.
    """
    saved, products = _saved_operators(), {"forward": 0, "recompute": 0}

    def policy(ctx, operator, *args, **kwargs):
        if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            if tuple(args[-1].shape) in always_recomputed:
                return CheckpointPolicy.PREFER_RECOMPUTE
            phase = "recompute" if ctx.is_recompute else "forward"
            products[phase] += 1
            keep = products[phase] % 2 == 1
        else:
            keep = operator in saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@cache
def _contexts(always_recomputed: frozenset[tuple[int, ...]]):
    """One object for all blocks: torch.compile guards on its identity, and another one would mean another graph."""
    return partial(_selective_contexts, always_recomputed)


def _recomputed_shapes(model: Decoder, settings: ActivationCheckpoint) -> frozenset[tuple[int, ...]]:
    """[in, out] of the linear layers that the config names, of a tensor rank's own share."""
    key = "per_op_sac_force_recompute_mm_shapes_by_fqns"
    parts = settings.per_op_sac_force_recompute_mm_shapes_by_fqns
    # The default speaks of experts, which a dense model hasn't; a pipeline stage may lack what another has.
    if parts != ActivationCheckpoint().per_op_sac_force_recompute_mm_shapes_by_fqns:
        names = model.all_parameter_names()
        if missing := [part for part in parts if not any(part in name for name in names)]:
            raise ConfigError([f"activation_checkpoint.{key}: {part!r} is in the name of no layer" for part in missing])
    shapes = set()
    for name, module in model.layers.named_modules():
        if isinstance(module, nn.Linear) and any(part in name for part in parts):
            weight = module.weight.to_local() if isinstance(module.weight, DTensor) else module.weight
            shapes.add((weight.shape[1], weight.shape[0]))
    return frozenset(shapes)


def _let_pass_marks_of_profiles() -> None:
    """A shard that is gathered inside a block marks that for profiles, and not as often when it is recomputed."""
    profiler = torch.ops.profiler
    torch.utils.checkpoint.SAC_IGNORED_OPS |= {
        profiler._record_function_enter_new.default,
        profiler._record_function_exit._RecordFunction,
    }


def _checkpointed(
    block: nn.Module, settings: ActivationCheckpoint, by_operator: bool, shapes: frozenset[tuple[int, ...]]
) -> None:
    options = {
        "use_reentrant": False,
        "preserve_rng_state": settings.preserve_rng_state,
        "determinism_check": settings.determinism_check,
        "early_stop": settings.early_stop,
        "debug": settings.debug,
    }
    if by_operator:
        options["context_fn"] = _contexts(shapes)
    forward = block.forward
    if by_operator and "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
        options["respect_saved_tensors_hooks"] = False  # torch 2.14 asks for a choice; this is the only one before it

    # A function of its own, not a partial: torch.compile starts at a frame that it can trace.
    def recomputed(*args, **kwargs):
        return checkpoint(forward, *args, **kwargs, **options)

    block.forward = recomputed


def _budget(config: Config) -> None:
    """What share of a graph's activations the compiler keeps: a setting of the process, read when it compiles."""
    settings, functorch = config.activation_checkpoint, torch._functorch.config
    by_budget = settings.mode == "memory_budget"
    functorch.activation_memory_budget = settings.memory_budget if by_budget else 1.0
    if hasattr(functorch, "is_non_builtin_to_include"):
        # Else attention, an operator of ours, would count as free to recompute.
        functorch.is_non_builtin_to_include = by_budget
    if hasattr(functorch, "unsafe_treat_script_objects_as_zero_size"):
        # The only ones in a block are the meshes of its tensor-parallel weights.
        functorch.unsafe_treat_script_objects_as_zero_size = by_budget
    functorch.visualize_memory_budget_pareto = by_budget and settings.visualize_memory_budget_pareto
    if functorch.visualize_memory_budget_pareto:
        functorch.memory_budget_pareto_dir = str(Path(config.job.dump_folder) / "memory_budget")


def autograd_sees_activations(config: Config) -> bool:
    """Whether what blocks keep for the backward lies with autograd: by operator torch keeps it elsewhere, if eager."""
    settings = config.activation_checkpoint
    compiled = config.compile.enable and "model" in config.compile.components
    return compiled or settings.mode != "selective" or str(settings.selective_ac_option) != "op"


def apply_activation_checkpointing(model: Decoder, config: Config) -> None:
    """Makes the blocks recompute as `[activation_checkpoint]` says; in place.

    Raises ConfigError where it names layers that aren't there.
    """
    settings = config.activation_checkpoint
    _budget(config)
    if settings.mode not in ("full", "selective"):
        return
    option = str(settings.selective_ac_option)
    by_operator = settings.mode == "selective" and option == "op"
    every = int(option) if settings.mode == "selective" and not by_operator else 1
    shapes = _recomputed_shapes(model, settings) if by_operator else frozenset()
    if by_operator:
        _let_pass_marks_of_profiles()
    for i, block in enumerate(model.layers.values()):
        if i % every == 0:
            _checkpointed(block, settings, by_operator, shapes)
