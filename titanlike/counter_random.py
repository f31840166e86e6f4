"""Random bits that are a function of (key, index): nothing is drawn in order, so no state, no layout and no batching
shows in them.

SplitMix64 (Steele, Lea and Flood 2014) of the index, in 64-bit integers that wrap alike on every device.
"""

from __future__ import annotations

import hashlib

import torch

BITS = 40  # of each index
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def key_of(*parts: object) -> int:
    """A 64-bit key from a seed and whatever else tells streams apart."""
    digest = hashlib.blake2b(":".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def random_bits(index: torch.Tensor, key: int) -> torch.Tensor:
    """40 random bits for each index (int64, any shape), as int64."""
    # Mixed twice: streams of one generator are shifts of each other, and the second key parts them.
    once = _mix((index + 1) * _signed(_GAMMA) + _signed(key))
    return _shift_right(_mix(once ^ _signed(key * _GAMMA)), 64 - BITS)


def uniform(index: torch.Tensor, key: int) -> torch.Tensor:
    """A number in [0, 1) for each index, float64."""
    return random_bits(index, key).double() * 2.0**-BITS


def _signed(value: int) -> int:
    """A 64-bit pattern as the signed integer that torch takes."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser: a bijection of 64-bit patterns that scatters neighbours."""
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_2)
    return z ^ _shift_right(z, 31)
