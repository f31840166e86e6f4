"""Linear layers in microscaled 8-bit floating point, MXFP8 (Rouhani et al. 2023, arXiv 2310.10537), by torchao.

32 values in a row share a scale that is a power of two.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch

from titanlike.config import Config
from titanlike.errors import ConfigError
from titanlike.models.linear import Linear

try:
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats.config import (
        MXFP8Dim0CastKernelChoice,
        MXFP8Dim1CastKernelChoice,
        ScaleCalculationMode,
    )
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
except ImportError as error:
    raise ConfigError(
        f"model.converters: quantize.linear.mx needs torchao 0.18: pip install 'titanlike[lowbit]' ({error})"
    ) from error

BLOCK = 32


class MXProduct:
    """In front of a linear layer's class: multiplies in MXFP8."""

    arguments: ClassVar[tuple[Any, ...]]

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = mx_mm.apply(x, weight, *self.arguments)
        return out if bias is None else out + bias.to(out.dtype)


@cache
def _mixed(kind: type, arguments: tuple[Any, ...]) -> type:
    return type(f"MX{kind.__name__}", (MXProduct, kind), {"arguments": arguments})


class MX:
    """The method of `[quantize.linear.mx]`."""

    key = "quantize.linear.mx"
    multiple = BLOCK

    def __init__(self, config: Config):
        section = config.quantize.linear.mx
        self.words = f"{section.recipe_name}"
        emulated = section.recipe_name == "mxfp8_emulated"
        rounding = ScaleCalculationMode.RCEIL if section.recipe_name.endswith("rceil") else ScaleCalculationMode.FLOOR
        # Emulation computes in plain torch, casts included.
        columns = "torch" if emulated else section.mxfp8_dim1_cast_kernel_choice
        rows = "torch" if emulated else "triton"
        self._arguments = (
            *[torch.float8_e4m3fn] * 3,
            BLOCK,
            KernelPreference.EMULATED if emulated else KernelPreference.AUTO,
            MXFP8Dim0CastKernelChoice(rows),
            MXFP8Dim1CastKernelChoice(columns),
            rounding,
            False,
        )

    def is_small(self, features: tuple[int, int]) -> bool:
        return False

    def check_shards(self, part: torch.nn.Module, shards: int) -> None:
        """Weights are gathered as ever."""

    def convert(self, linear: Linear) -> None:
        linear.__class__ = _mixed(type(linear), self._arguments)
