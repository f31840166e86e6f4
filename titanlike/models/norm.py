"""Root-mean-square norm."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv 1910.07467); statistics in float32.

    With an `offset` it multiplies by that plus its weight, in float32 too.
    """

    tensor_styles: ClassVar = {"": "replicated"}

    def __init__(self, dim: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., dim]; a `weight` in hand takes the place of the module's own."""
        weight = self.weight if weight is None else weight
        if self.offset:
            return (F.rms_norm(x.float(), x.shape[-1:], None, self.eps) * (weight.float() + self.offset)).to(x.dtype)
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)


class InnerNorm(RMSNorm):
    """A norm inside attention, whose owner says how it lies on the tensor axis."""

    tensor_styles: ClassVar = {}
