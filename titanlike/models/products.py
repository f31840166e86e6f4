"""Products in bfloat16 on CPUs that have no instructions for it.

There a matrix product in bfloat16 takes five to fifty times that in float32, its gradients most of all. The same
numbers are multiplied in float32 instead and the result is rounded once, which is what the instructions do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from titanlike.models import kernels


def is_slow(tensor: torch.Tensor) -> bool:
    """Whether products of such tensors are better done in float32."""
    return tensor.dtype is torch.bfloat16 and tensor.device.type == "cpu" and not kernels.CPU_MULTIPLIES_BF16


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, in float32 where products are better done so."""
    return tensor.float() if is_slow(tensor) else tensor


class _WideLinear(torch.autograd.Function):
    """Keeps its inputs as narrow as they came."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_x = of_weight = of_bias = None
        grad = grad.float()
        rows = grad.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            of_x = (grad @ weight.float()).to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = (rows.t() @ x.flatten(0, -2).float()).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0).to(weight.dtype)
        return of_x, of_weight, of_bias


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] times weight [out, in], plus bias [out]: [..., out], all of one dtype."""
    if is_slow(x):
        return _WideLinear.apply(x, weight, bias)
    return F.linear(x, weight, bias)
