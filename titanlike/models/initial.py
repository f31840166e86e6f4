"""Initial values, and how values arrive in a sharded model.

A value depends on (seed, parameter name, global index) and on nothing else, so every layout starts from the same model
and a rank pays for its own shard only. The generator is counter-based: SplitMix64 (Steele, Lea and Flood 2014) of the
element's index, in 64-bit integers that wrap alike on every device, addressable element by element whatever the shard.
Normal numbers come from a table of quantiles by linear interpolation: products and sums only, hence the same bits for
an element wherever it falls in a shard (a library's vectorised erfinv or log may round its last elements otherwise).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_TABLE_BITS = 16
_CUT = 3.0  # standard deviations; as Llama's own code truncates
_CHUNK = 1 << 20  # elements; keeps the integer passes in cache and their memory small


@dataclass(frozen=True)
class Shard:
    """The box of a parameter that this rank holds: global shape, and start of each dimension; `local` is written to."""

    name: str
    shape: torch.Size
    start: tuple[int, ...]
    local: torch.Tensor


def shards(model: nn.Module) -> Iterator[Shard]:
    """Every parameter's local shard, with where it lies in the whole."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            _, start = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
            yield Shard(name, parameter.shape, tuple(start), parameter.to_local())
        else:
            yield Shard(name, parameter.shape, (0,) * parameter.ndim, parameter.data)


Source = Callable[[Shard], torch.Tensor]


@torch.no_grad()
def materialise(model: nn.Module, device: torch.device | str, source: Source | None) -> None:
    """Gives a model built on the meta device its memory, buffers and, shard by shard, the values that `source` returns.

    Without a source the values are left for a checkpoint to fill in.
    """
    model.to_empty(device=device)
    for module in model.modules():
        if reset := getattr(module, "reset_buffers", None):
            reset(device)
    if source is not None:
        for shard in shards(model):
            if shard.local.numel():
                shard.local.copy_(source(shard))


def initial_values(model: nn.Module, seed: int) -> Source:
    """The source that draws a new model's values, with the standard deviations that the model names."""
    stds = dict(model.initial_stds())

    def draw(shard: Shard) -> torch.Tensor:
        std = stds[shard.name]
        if std is None:
            return torch.ones_like(shard.local)
        return normal(shard, std, seed)

    return draw


def normal(shard: Shard, std: float, seed: int) -> torch.Tensor:
    """Normal values of that standard deviation, cut at three of them, for a shard; float32, shaped as the shard."""
    device, shape = shard.local.device, shard.local.shape
    out = torch.empty(shape, dtype=torch.float32, device=device)
    row = max(1, out[0].numel()) if out.ndim else 1
    lead = out.view(-1) if out.ndim == 0 else out
    step = max(1, _CHUNK // row)
    for a in range(0, len(lead), step):
        part = lead[a : a + step]
        index = _global_index(shard, a, part.shape if out.ndim else torch.Size(()), device)
        part.copy_(_quantile(_uniform_bits(index, _key(seed, shard.name))).mul_(std).view(part.shape))
    return out


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _global_index(shard: Shard, first: int, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Row-major index in the whole parameter of each element of rows first … of the shard, int64 of that shape."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for d in reversed(range(len(shape))):
        start = shard.start[d] + (first if d == 0 else 0)
        along = torch.arange(start, start + shape[d], dtype=torch.int64, device=device) * stride
        index = index + along.view(-1, *[1] * (len(shape) - 1 - d))
        stride *= shard.shape[d]
    return index.expand(shape).contiguous()


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


def _uniform_bits(index: torch.Tensor, key: int) -> torch.Tensor:
    """40 random bits for each index, int64."""
    # Mixed twice: streams of one generator are shifts of each other, and the second key parts them.
    once = _mix((index + 1) * _signed(_GAMMA) + _signed(key))
    return _shift_right(_mix(once ^ _signed(key * _GAMMA)), 24)


_tables: dict[torch.device, torch.Tensor] = {}


def _quantile_table(device: torch.device) -> torch.Tensor:
    """Quantiles of the cut normal distribution, float32 [2^16 + 1]."""
    if device not in _tables:
        normal_, n = NormalDist(), 1 << _TABLE_BITS
        low = normal_.cdf(-_CUT)
        lower = [normal_.inv_cdf(low + (1 - 2 * low) * i / n) for i in range(n // 2)]
        # Mirrored, so that the distribution is symmetric to the bit.
        values = torch.tensor([*lower, 0.0, *[-x for x in reversed(lower)]], dtype=torch.float64)
        _tables[device] = values.to(torch.float32).to(device)
    return _tables[device]


def _quantile(bits: torch.Tensor) -> torch.Tensor:
    """40 random bits to a normal number cut at ±3, float32."""
    table = _quantile_table(bits.device)
    cell = bits >> (40 - _TABLE_BITS)
    share = (bits & ((1 << (40 - _TABLE_BITS)) - 1)).to(torch.float32) * 2.0 ** (_TABLE_BITS - 40)
    low = table[cell]
    return low + (table[cell + 1] - low) * share
