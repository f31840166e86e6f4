"""From a sharded tensor to this rank's elements and back."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, the same memory; without gradient."""
    tensor = tensor.detach()
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    # A weight that is gathered in float8 is wrapped (converters/float8.py).
    return getattr(held, "_tensor", held)


def like(parameter: torch.Tensor, shard: torch.Tensor, per: int = 1, *, whole_rows: bool = False) -> torch.Tensor:
    """A tensor of this rank's elements as one that is sharded as the parameter is, in the same memory.

    `per`: each element stands for that many of the parameter, side by side in a row. `whole_rows`: the rank has all of
    its rows, where of the parameter it has some columns.
    """
    if not isinstance(parameter, DTensor):
        return shard
    shape = parameter.shape if per == 1 else torch.Size((*parameter.shape[:-1], parameter.shape[-1] // per))
    placements = list(parameter.placements)
    if whole_rows:
        last = parameter.ndim - 1
        placements = [Replicate() if isinstance(one, Shard) and one.dim == last else one for one in placements]
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), shard.dtype)
    # Not DTensor.from_local: it would copy what is offloaded to the mesh's device.
    spec = DTensorSpec(parameter.device_mesh, tuple(placements), tensor_meta=meta)
    return DTensor(shard, spec, requires_grad=False)
