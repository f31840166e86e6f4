"""A model small enough to follow by hand, and its optimizer."""

from __future__ import annotations

import torch
from torch import nn


class Small(nn.Module):
    """Matrices of blocks that are square, wide and tall, a bias, and a head."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 8, bias=False), nn.Linear(8, 40, bias=False)])
        self.output = nn.Linear(40, 16, bias=False)
        g = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=g).to(dtype)

    def all_parameter_names(self) -> set[str]:
        return {name for name, _ in self.named_parameters()}

    def give_gradients(self, step: int) -> None:
        g = torch.Generator().manual_seed(step)
        for parameter in self.parameters():
            parameter.grad = (0.1 * torch.randn(parameter.shape, generator=g)).to(parameter.dtype)

    def values(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
