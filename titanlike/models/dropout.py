"""Dropout whose masks are a function of (seed, step, layer, token, channel).

Nothing is drawn in order: every layout, every split of the batch and every recomputation drops the same elements, and
no generator's state is saved. A token has a key, made of what it is in the whole run; layers make their own of it.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from titanlike.counter_random import BITS, key_of, random_bits

_CHANNEL_BITS = 20


def token_keys(sequences: torch.Tensor, length: int, seed: int, step: int) -> torch.Tensor:
    """Keys int64 [B, length] of whole rows in one step; sequences int64 [B] are the rows' numbers in the run."""
    columns = torch.arange(length, device=sequences.device)
    return random_bits(sequences[:, None] * length + columns, key_of(seed, "dropout", step))


def layer_keys(keys: torch.Tensor, layer: int) -> torch.Tensor:
    """The same tokens' keys in one layer. (Outside of the block, which is compiled once for all layers.)"""
    return random_bits(keys, key_of("layer", layer))


class Dropout(nn.Module):
    """Zeroes a share `p` of the elements and scales the others by 1 / (1 - p), while training."""

    tensor_styles: ClassVar = {"": "tokens"}

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor, keys: torch.Tensor | None, place: int) -> torch.Tensor:
        """x [B, L, dim], keys [B, L] of its tokens (None: nothing is dropped); `place` tells calls in a layer apart."""
        if keys is None or not self.training:
            return x
        channels = torch.arange(x.shape[-1], device=x.device) + place * x.shape[-1]
        bits = random_bits((keys[..., None] << _CHANNEL_BITS) + channels, 0)
        return torch.where(bits < int(self.p * 2**BITS), 0.0, x * (1.0 / (1.0 - self.p))).to(x.dtype)
