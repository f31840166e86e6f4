"""Linear layers in 8-bit floating point (Micikevicius et al. 2022, arXiv 2209.05433), by torchao.

Inputs, weights and gradients are scaled, rounded to 8 bits and multiplied; products have the type that the model
computes in. Under tensor parallelism a rank scales its own part of a weight.

With the float8 all-gather, a weight is wrapped in torchao's tensor that full sharding gathers in 8 bits; its scale is
that of the whole weight (of the tensor rank's part), the largest value of all shards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from functools import cache
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanlike.config import Config
from titanlike.errors import ConfigError
from titanlike.models.linear import Linear

try:
    from torchao.float8 import Float8LinearConfig, _auto_filter_for_recipe, convert_to_float8_training
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.float8_utils import amax_to_scale
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
except ImportError as error:
    raise ConfigError(
        f"model.converters: quantize.linear.float8 needs torchao: pip install 'titanlike[lowbit]' ({error})"
    ) from error


class Float8Product:
    """In front of a linear layer's class: multiplies in float8."""

    settings: ClassVar[Float8LinearConfig]
    products: ClassVar[LinearMMConfig]

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = matmul_with_hp_or_float8_args.apply(x, weight.t(), self.products, self.settings)
        return out if bias is None else out + bias.to(out.dtype)


@cache
def _mixed(kind: type, settings: Float8LinearConfig, products: LinearMMConfig) -> type:
    return type(f"Float8{kind.__name__}", (Float8Product, kind), {"settings": settings, "products": products})


class Float8:
    """The method of `[quantize.linear.float8]`."""

    key = "quantize.linear.float8"
    multiple = 16

    def __init__(self, config: Config):
        section = config.quantize.linear.float8
        self._recipe = section.recipe_name or "tensorwise"
        self.words = f"float8 ({self._recipe}{', emulated' if section.emulate else ''})"
        self.settings = dataclasses.replace(
            Float8LinearConfig.from_recipe_name(self._recipe),
            enable_fsdp_float8_all_gather=section.enable_fsdp_float8_all_gather,
            emulate=section.emulate,
        )
        # Torchao's own way in: it knows which of its products go with the settings, and on this way it mends what
        # Triton makes of a compiled cast.
        example = convert_to_float8_training(
            nn.Sequential(nn.Linear(16, 16, bias=False, device="meta")), config=self.settings
        )
        self._products = example[0].linear_mm_config

    def is_small(self, features: tuple[int, int]) -> bool:
        gains = _auto_filter_for_recipe(self._recipe, filter_fqns=[])
        return not gains(nn.Linear(*features, bias=False, device="meta"), "")

    def convert(self, linear: Linear) -> None:
        linear.__class__ = _mixed(type(linear), self.settings, self._products)
        if self.settings.enable_fsdp_float8_all_gather:
            wrapped = WeightWithDynamicFloat8CastTensor(
                linear.weight.detach(), self._products, self.settings.cast_config_weight.target_dtype
            )
            linear.weight = nn.Parameter(wrapped, requires_grad=linear.weight.requires_grad)

    def check_shards(self, part: nn.Module, shards: int) -> None:
        uneven = []
        for name, parameter in part.named_parameters():
            held = _wrapped(parameter)
            if held is not None and held.shape[0] % shards:
                uneven.append(f"{name} ({held.shape[0]} rows)")
        if uneven:
            raise ConfigError(
                f"quantize.linear.float8.enable_fsdp_float8_all_gather = true: {shards} shards can't hold equal parts, "
                f"as torchao wants them, of {', '.join(uneven)}; leave these out by "
                "quantize.linear.float8.filter_fqns, or gather in the compute type"
            )


def _wrapped(parameter: torch.Tensor) -> WeightWithDynamicFloat8CastTensor | None:
    """What this rank holds of a weight that is gathered in float8; None for other parameters."""
    held = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return held if isinstance(held, WeightWithDynamicFloat8CastTensor) else None


@torch.no_grad()
def precompute_scales(parameters: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Takes the scales of all weights that are gathered in float8 in one exchange over their shards' group.

    They hold until the weights change. Torchao's own takes its own modules, and one scale over tensor ranks too.
    """
    shards = [held for held in map(_wrapped, parameters) if held is not None]
    if not shards:
        return
    largest = torch.stack(torch._foreach_norm([held._tensor for held in shards], ord=math.inf))
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    for held, scale in zip(shards, amax_to_scale(largest, shards[0]._dtype), strict=True):
        held._precomputed_scale = scale
