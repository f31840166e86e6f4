"""The mesh: how the world's ranks are laid out, and the groups that talk to each other.

Axes from outer to inner: pipeline, replicate, shard, context, tensor. Neighbours in the innermost axis talk most. Two
factorisations of the one world are made of them, and a third where experts are spread:

    parameters   pipeline × replicate × (shard · context) × tensor    where weights live, gradients are summed
    sequences    (pipeline · replicate · shard) × context × tensor    where a row's tokens live
    experts      pipeline × replicate × expert_shard × expert [× tensor]    the same for experts

Context ranks hold different tokens and the same weights, so to parameters they are more shards. The experts' axis takes
its ranks from the innermost of shard, context and tensor; from shard and context alone where each expert is split over
the tensor axis as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titanlike.config.derive import BatchLayout, Degrees, Place


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the world.

    `shards` is the (replicate, shard) mesh that parameters are spread over, without replicate where that is 1: FSDP
    would sum over a group of one, and keep what it summed. Gradients are summed over all of it.
    `experts` is the mesh that experts are spread over. `tensor`, `context`, `pipeline` and `experts` are None where
    their degree is 1. `stage` holds all ranks of the same pipeline coordinate.
    """

    layout: BatchLayout
    place: Place
    shards: DeviceMesh
    tensor: DeviceMesh | None = None
    context: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    experts: DeviceMesh | None = None
    stage: dist.ProcessGroup | None = None

    @property
    def degrees(self) -> Degrees:
        return self.layout.degrees

    @property
    def replicas(self) -> tuple[str, ...]:
        """The axis over which weights are copied, if there is one."""
        return replicas(self.degrees)

    @property
    def experts_split(self) -> bool:
        """Whether experts that are spread over ranks are each split over the tensor axis, too."""
        return self.experts is not None and "tensor" in (self.experts.mesh_dim_names or ())

    @property
    def keeps_tokens_split(self) -> bool:
        """Whether a mixture of experts routes the tokens that a tensor rank holds between layers."""
        return self.experts is not None and not self.experts_split

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
        of_experts = self.experts.get_all_groups() if self.experts else []
        others = [group for group in (self.context, self.pipeline, self.stage) if group is not None]
        return [dist.group.WORLD, *self.shards.get_all_groups(), *of_tensor, *of_experts, *others]


def replicas(degrees: Degrees) -> tuple[str, ...]:
    return ("replicate",) if degrees.replicate > 1 else ()


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
    stage = dist.group.WORLD
    if d.pipeline > 1:
        stages = init_device_mesh(device_type, (d.pipeline, d.world // d.pipeline), mesh_dim_names=("pipeline", "rest"))
        stage = stages.get_group("rest")
    return Mesh(
        layout,
        d.place(dist.get_rank()),
        parameters[(*replicas(d), "shard")],
        tensor=parameters["tensor"] if d.tensor > 1 else None,
        context=context,
        pipeline=parameters.get_group("pipeline") if d.pipeline > 1 else None,
        experts=_experts(layout, device_type) if layout.experts > 1 else None,
        stage=stage,
    )


def _experts(layout: BatchLayout, device_type: str) -> DeviceMesh:
    """([replicate,] expert_shard, expert) or, with experts split, (…, tensor)."""
    d = layout.degrees
    tensor = d.tensor if layout.experts_split else 1
    shards = d.shard * d.context * d.tensor // (layout.experts * tensor)
    shape, names = (
        (d.pipeline, d.replicate, shards, layout.experts),
        ("pipeline", "replicate", "expert_shard", "expert"),
    )
    if layout.experts_split:
        shape, names = (*shape, tensor), (*names, "tensor")
    return init_device_mesh(device_type, shape, mesh_dim_names=names)[(*replicas(d), *names[2:])]
