"""Clipping by the norm of the whole gradient, over all shards of all axes."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

_CHUNK = 1 << 20  # elements


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, *, copies: Collection[nn.Parameter] = ()
) -> torch.Tensor:
    """Scales all gradients so that their global norm is at most `max_norm` (0: leaves them).

    `copies` are scaled but not counted: another rank counts the same gradient. Returns the norm before clipping, a
    scalar on the device, the same on every rank. Raises nothing for norms that aren't finite: what to do with them is
    the caller's decision.
    """
    # A generator would be used up by the norm and leave nothing to scale.
    with_gradients = [p for p in parameters if p.grad is not None]
    known = {id(copy) for copy in copies}
    norm = _global_norm([p.grad for p in with_gradients if id(p) not in known])
    if max_norm > 0:
        _scale([_local(p.grad) for p in with_gradients], clipping_factor(norm, max_norm))
    return norm


def clipping_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What a gradient of this norm is multiplied by."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def counted_square(grad: torch.Tensor) -> torch.Tensor:
    """Of one gradient: the squared norm of the elements that this rank counts, a float64 scalar on the device."""
    shard = _local(grad)
    if not (_counts_here(grad) and shard.numel()):
        return torch.zeros((), dtype=torch.float64, device=shard.device)
    return _norms([shard])[0].double().square()


def _norms(shards: list[torch.Tensor]) -> list[torch.Tensor]:
    """A CPU adds squares up one after the other, so that in float32 a head's norm is off by 2e-5: row by row, then in
    float64, it is exact to float32 and no slower.
    """
    if all(shard.device.type == "cpu" for shard in shards):
        return [torch.linalg.vector_norm(_row_norms(shard), dtype=torch.float64) for shard in shards]
    return list(torch._foreach_norm(shards))


def _row_norms(shard: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(shard.dtype, torch.float32)
    if wide == shard.dtype or shard.ndim < 2:
        return torch.linalg.vector_norm(shard, dim=-1, dtype=wide)
    # A CPU makes a wide copy first: of some rows, not of a whole embedding.
    parts = shard.split(max(1, _CHUNK // shard[0].numel()))
    return torch.cat([torch.linalg.vector_norm(part, dim=-1, dtype=wide) for part in parts])


def _scale(shards: list[torch.Tensor], factor: torch.Tensor) -> None:
    """On what this rank holds: given a list of DTensors, torch first plans for seconds how each of them may lie."""
    for device in {shard.device for shard in shards}:
        torch._foreach_mul_([shard for shard in shards if shard.device == device], factor.to(device))


def _global_norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Every element once, wherever it lies: one sum over the world, which no mesh of a single tensor spans."""
    device = gradients[0].device if gradients else torch.device("cpu")
    shards = [local for grad in gradients if _counts_here(grad) and (local := _local(grad)).numel()]
    norms = _norms(shards)
    # In double: the squares of a large model's norms span more than float32 keeps.
    total = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.sqrt().float()


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _counts_here(grad: torch.Tensor) -> bool:
    """Whether this rank is the one of all that hold the same elements which counts them."""
    if not isinstance(grad, DTensor):
        assert not dist.is_initialized() or dist.get_world_size() == 1, "a gradient without a place on the mesh"
        return True
    coordinate = grad.device_mesh.get_coordinate()
    assert coordinate is not None
    copied = (isinstance(placement, Replicate) for placement in grad.placements)
    return not any(copy and position for copy, position in zip(copied, coordinate, strict=True))
