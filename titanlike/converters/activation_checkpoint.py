"""Activation checkpointing: what the backward recomputes instead of keeping.

Applied by replacing a block's forward, not by wrapping the block, so that no parameter changes its name.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlike.config import Config
from titanlike.models.decoder import Decoder
from titanlike.parallel import context  # noqa: F401  (its operators are named below)


def _saved_operators() -> set:
    """Operators whose results selective checkpointing keeps: they cost most to recompute, or talk to other ranks."""
    aten = torch.ops.aten
    return {
        torch.ops.titanlike.document_attention.default,
        torch.ops.titanlike.context_attention.default,
        torch.ops.titanlike.exchange.default,
        aten.mm.default,
        aten.addmm.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }


def _selective_contexts():
    """Keeps the results of attention and of every other matrix product."""
    saved, products = _saved_operators(), {"forward": 0, "recompute": 0}

    def policy(ctx, operator, *args, **kwargs):
        if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            phase = "recompute" if ctx.is_recompute else "forward"
            products[phase] += 1
            keep = products[phase] % 2 == 1
        else:
            keep = operator in saved
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _checkpointed(block: nn.Module, config: Config, by_operator: bool) -> None:
    settings = config.activation_checkpoint
    options = {
        "use_reentrant": False,
        "preserve_rng_state": settings.preserve_rng_state,
        "determinism_check": settings.determinism_check,
        "early_stop": settings.early_stop,
        "debug": settings.debug,
    }
    if by_operator:
        options["context_fn"] = _selective_contexts
    forward = block.forward

    # A function of its own, not a partial: torch.compile starts at a frame that it can trace.
    def recomputed(*args, **kwargs):
        return checkpoint(forward, *args, **kwargs, **options)

    block.forward = recomputed


def apply_activation_checkpointing(model: Decoder, config: Config) -> None:
    """Makes the blocks recompute as `[activation_checkpoint]` says; in place."""
    settings = config.activation_checkpoint
    if settings.mode == "none":
        return
    option = str(settings.selective_ac_option)
    by_operator = settings.mode == "selective" and option == "op"
    every = int(option) if settings.mode == "selective" and not by_operator else 1
    for i, block in enumerate(model.layers.values()):
        if i % every == 0:
            _checkpointed(block, config, by_operator)
