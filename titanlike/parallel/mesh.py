"""The mesh: how the world's ranks are laid out, and the groups that talk to each other.

Axes from outer to inner: pipeline, replicate, shard, context, tensor. Neighbours in the innermost axis talk most. Two
factorisations of the one world are made of them:

    parameters   pipeline × replicate × (shard · context) × tensor    where weights live, gradients are summed
    sequences    (pipeline · replicate · shard) × context × tensor    where a row's tokens live

Context ranks hold different tokens and the same weights, so to parameters they are more shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlike.config.derive import BatchLayout, Degrees, Place


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the world.

    `shards` is the (replicate, shard) mesh that parameters are spread over; gradients are summed over all of it.
    `tensor`, `context` and `pipeline` are None where their degree is 1.
    """

    layout: BatchLayout
    place: Place
    shards: DeviceMesh
    tensor: DeviceMesh | None = None
    context: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None

    @property
    def degrees(self) -> Degrees:
        return self.layout.degrees

    @property
    def speaks_for_rows(self) -> bool:
        """Whether this rank is the one that counts its rows: one of all ranks that see the same rows."""
        return self.place.pipeline == self.place.context == self.place.tensor == 0

    @property
    def speaks_for_loss(self) -> bool:
        """Whether this rank's loss sum counts: tensor ranks all know the same one."""
        return self.place.tensor == 0

    def groups(self) -> list[dist.ProcessGroup]:
        """Every process group that training's collectives run on."""
        of_tensor = self.tensor.get_all_groups() if self.tensor else []
        others = [group for group in (self.context, self.pipeline) if group is not None]
        return [dist.group.WORLD, *self.shards.get_all_groups(), *of_tensor, *others]


def build_mesh(layout: BatchLayout, device_type: str) -> Mesh:
    """The mesh of these degrees over the running world."""
    d = layout.degrees
    names = ("pipeline", "replicate", "shard", "tensor")
    parameters = init_device_mesh(
        device_type, (d.pipeline, d.replicate, d.shard * d.context, d.tensor), mesh_dim_names=names
    )
    context = None
    if d.context > 1:
        shape = (d.world // (d.context * d.tensor), d.context, d.tensor)
        sequences = init_device_mesh(device_type, shape, mesh_dim_names=("rows", "context", "tensor"))
        context = sequences.get_group("context")
    return Mesh(
        layout,
        d.place(dist.get_rank()),
        parameters["replicate", "shard"],
        tensor=parameters["tensor"] if d.tensor > 1 else None,
        context=context,
        pipeline=parameters.get_group("pipeline") if d.pipeline > 1 else None,
    )
