"""Initial values, and how values arrive in a sharded model.

A value depends on (seed, parameter name, global index) and on nothing else, so every layout starts from the same model
and a rank pays for its own shard only. Random bits are looked up by index (`counter_random`), whatever the shard.
Normal numbers come from a table of quantiles by linear interpolation: products and sums only, hence the same bits for
an element wherever it falls in a shard (a library's vectorised erfinv or log may round its last elements otherwise).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titanlike.counter_random import BITS, key_of, random_bits

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
    """The local shard of all that is kept (parameters, and buffers that are saved), with where it lies in the whole."""
    return (shard_of(name, tensor) for name, tensor in [*model.named_parameters(), *saved_buffers(model)])


def saved_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that are saved with the parameters, by name."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def shard_of(name: str, parameter: torch.Tensor) -> Shard:
    """What this rank holds of a parameter, and where that lies in the whole."""
    if not isinstance(parameter, DTensor):
        return Shard(name, parameter.shape, (0,) * parameter.ndim, parameter.data)
    mesh, placements = parameter.device_mesh, parameter.placements
    _, start = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    return Shard(name, parameter.shape, tuple(start), parameter.to_local())


Source = Callable[[Shard], torch.Tensor]


@torch.no_grad()
def materialise(
    model: nn.Module, device: torch.device | str, source: Source | None, *, parameters_on: str | None = None
) -> None:
    """Gives a model built on the meta device its memory, buffers and, shard by shard, the values that `source` returns.

    Without a source the values are left for a checkpoint to fill in. `parameters_on` is where parameters rest if that
    isn't the device.
    """
    model.to_empty(device=parameters_on or device)
    for module in model.modules():
        if reset := getattr(module, "reset_buffers", None):
            reset(device)
    if source is not None:
        for shard in shards(model):
            if shard.local.numel():
                shard.local.copy_(source(shard))


class HasInitialValues(Protocol):
    """A model that names the standard deviation of each parameter's initial values."""

    def initial_stds(self) -> Iterator[tuple[str, float | None]]: ...


def initial_values(model: HasInitialValues, seed: int) -> Source:
    """The source that draws a new model's values, with the standard deviations that the model names."""
    stds = dict(model.initial_stds())

    def draw(shard: Shard) -> torch.Tensor:
        std = stds.get(shard.name, 0.0)  # buffers start at zero
        if std is None:
            return torch.ones_like(shard.local)
        if std == 0.0:
            return torch.zeros_like(shard.local)
        return normal(shard, std, seed)

    return draw


def normal(shard: Shard, std: float, seed: int) -> torch.Tensor:
    """Normal values of that standard deviation, cut at three of them, for a shard; float32, shaped as the shard."""
    device, shape = shard.local.device, shard.local.shape
    out = torch.empty(shape, dtype=torch.float32, device=device)
    row = max(1, out[0].numel()) if out.ndim else 1
    lead = out.view(-1) if out.ndim == 0 else out
    step = max(1, _CHUNK // row)
    key = key_of(seed, shard.name)
    for a in range(0, len(lead), step):
        part = lead[a : a + step]
        index = global_index(shard, a, part.shape if out.ndim else torch.Size(()), device)
        part.copy_(_quantile(random_bits(index, key)).mul_(std).view(part.shape))
    return out


def global_index(shard: Shard, first: int, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """Row-major index in the whole parameter of each element of rows first … of the shard, int64 of that shape."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for d in reversed(range(len(shape))):
        start = shard.start[d] + (first if d == 0 else 0)
        along = torch.arange(start, start + shape[d], dtype=torch.int64, device=device) * stride
        index = index + along.view(-1, *[1] * (len(shape) - 1 - d))
        stride *= shard.shape[d]
    return index.expand(shape).contiguous()


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
    """Random bits to a normal number cut at ±3, float32."""
    table = _quantile_table(bits.device)
    cell = bits >> (BITS - _TABLE_BITS)
    share = (bits & ((1 << (BITS - _TABLE_BITS)) - 1)).to(torch.float32) * 2.0 ** (_TABLE_BITS - BITS)
    low = table[cell]
    return low + (table[cell + 1] - low) * share
