"""The mesh: how the world's ranks are laid out, and the groups that sums go over.

Axes from outer to inner: pipeline, replicate, shard, context, tensor. Neighbours in the innermost axis talk most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlike.config import Config
from titanlike.config.derive import BatchLayout, batch_layout


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the world.

    `shards` is the (replicate, shard) mesh that parameters are spread over; gradients are summed over all of it.
    """

    layout: BatchLayout
    shards: DeviceMesh

    @property
    def data_rank(self) -> int:
        """Which slice of each global batch this rank reads, from 0."""
        replicate, shard = self.shards.get_coordinate()
        return replicate * self.layout.dp_shard + shard

    @property
    def data_degree(self) -> int:
        """How many slices a global batch is cut into."""
        return self.layout.dp_degree


def build_mesh(config: Config, device_type: str) -> Mesh:
    """The mesh of `[parallelism]` over the running world. Raises ConfigError where the degrees don't fit it."""
    # A run that goes on at another world keeps its batch and may have to fill it up; the loader refuses that at a
    # fresh start.
    layout = batch_layout(config, dist.get_world_size(), allow_filler=True)
    shape = (layout.dp_replicate, layout.dp_shard)
    return Mesh(layout, init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard")))
