"""Clipping by the norm of the whole gradient, over all shards."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scales all gradients so that their global norm is at most `max_norm` (0: leaves them).

    Returns the norm before clipping, a scalar on the device, the same on every rank. Raises nothing for norms that
    aren't finite: what to do with them is the caller's decision.
    """
    # A generator would be used up by the norm and leave nothing to scale.
    with_gradients = [p for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm([p.grad for p in with_gradients])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(with_gradients, max_norm, norm)
    return norm
