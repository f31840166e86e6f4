"""The linear layer of the decoder: a weight, and how inputs are multiplied with it.

The two are apart, since others want one of them alone: tensor parallelism multiplies with a part of the weight, low
precision multiplies in another way. Both change a module's class: torch.compile's graph of one block serves all.
"""

from __future__ import annotations

import torch
from torch import nn

from titanlike.models.products import linear


class Linear(nn.Linear):
    """nn.Linear, whose product is a method; `exact`: never in low precision."""

    exact = False

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., in] times weight [out, in], plus bias [out]: [..., out]. The weight may be a part of the module's."""
        return linear(x, weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.weight, self.bias)
