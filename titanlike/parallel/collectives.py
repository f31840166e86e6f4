"""Collectives over a named group, in the functional form that torch.compile keeps inside a graph.

Each is waited for where it is called: what leaves here is a plain tensor. (A pending one that enters a compiled block
loses its gradient without a word.)
"""

from __future__ import annotations

import torch

_ops = torch.ops._c10d_functional


def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """The sum over the group."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))


def stack(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Every rank's x, [size, *x.shape]."""
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group)).view(size, *x.shape)


def gather(x: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:
    """Every rank's x side by side along `dim`."""
    parts = stack(x, size, group)
    # Ranks come first in the buffer; where x has no dimension of size above 1 before `dim`, they lie side by side.
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: torch.Tensor, dim: int, size: int, group: str) -> torch.Tensor:
    """This rank's slice along `dim` (which `size` divides) of the sum over the group."""
    parts = x.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(parts.flatten(0, 1), "sum", size, group))
