"""The mesh: how the world's ranks are laid out, and the groups that sums go over.

Axes from outer to inner: pipeline, replicate, shard, context, tensor. Neighbours in the innermost axis talk most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlike.config.derive import BatchLayout


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the world.

    `shards` is the (replicate, shard) mesh that parameters are spread over; gradients are summed over all of it.
    """

    layout: BatchLayout
    shards: DeviceMesh

    def groups(self) -> list[dist.ProcessGroup]:
        """Every process group that training's collectives run on."""
        return [dist.group.WORLD, *self.shards.get_all_groups()]


def build_mesh(layout: BatchLayout, device_type: str) -> Mesh:
    """The mesh of these degrees over the running world."""
    shape = (layout.dp_replicate, layout.dp_shard)
    return Mesh(layout, init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard")))
