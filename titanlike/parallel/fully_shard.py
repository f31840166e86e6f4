"""Fully sharded data parallelism (FSDP2) over replicate × shard.

Gradients are summed, never averaged: the loss of each rank is already divided by the weight of the whole global batch.
Plain replication is the same with one shard; so is a single process, unless it would have nothing to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from titanlike.config import Config
from titanlike.errors import ConfigError
from titanlike.models.decoder import Decoder
from titanlike.models.moe import StackedExperts
from titanlike.parallel.mesh import Mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def precision_policy(config: Config) -> MixedPrecisionPolicy:
    """Computation in `mixed_precision_param` over master weights in `training.dtype`; gradients reduced in float32."""
    compute = DTYPES[config.training.mixed_precision_param]
    stored = DTYPES[config.training.dtype]
    return MixedPrecisionPolicy(
        param_dtype=None if compute == stored else compute,
        reduce_dtype=DTYPES[config.training.mixed_precision_reduce],
        cast_forward_inputs=False,  # rotary tables stay float32
    )


def check_device(config: Config, device: torch.device) -> None:
    """Refuses what needs an accelerator where there is none, or another one; raises ConfigError."""
    needs = {
        "training.enable_cpu_offload": config.training.enable_cpu_offload,
        "training.activation_offload": config.training.activation_offload,
        "parallelism.enable_async_tensor_parallel": config.parallelism.enable_async_tensor_parallel,
    }
    if device.type == "cpu" and any(needs.values()):
        raise ConfigError(
            [f"{key} = true: needs an accelerator; this run is on the CPU" for key in needs if needs[key]]
        )
    if problem := _low_precision_problem(config, device):
        raise ConfigError(problem)


def _low_precision_problem(config: Config, device: torch.device) -> str | None:
    """What keeps the device from multiplying as `model.converters` says. CPUs multiply float8, but no MX formats."""
    names, section = config.model.converters, config.quantize.linear
    is_nvidia = device.type == "cuda" and not torch.version.hip
    capability = torch.cuda.get_device_capability(device) if is_nvidia else None
    if "quantize.linear.float8" in names and not section.float8.emulate and capability and capability < (8, 9):
        return (
            "model.converters: quantize.linear.float8 needs a GPU of compute capability 8.9 (Ada, Hopper or later); "
            f"this one has {capability[0]}.{capability[1]}. quantize.linear.float8.emulate = true computes it slowly"
        )
    on_hardware = section.mx.recipe_name != "mxfp8_emulated"
    if "quantize.linear.mx" in names and on_hardware and (capability is None or capability < (10, 0)):
        return (
            f"quantize.linear.mx.recipe_name = {section.mx.recipe_name!r}: needs a GPU of compute capability 10.0 "
            '(Blackwell); "mxfp8_emulated" computes it slowly on any device'
        )
    return None


def reshards(config: Config) -> bool:
    """Whether blocks give their gathered weights back between forward and backward.

    By default not under pipelining: each microbatch would gather them again.
    """
    policy = config.parallelism.fsdp_reshard_after_forward
    return policy == "always" or (policy == "default" and config.parallelism.pipeline_parallel_degree == 1)


def has_shards(config: Config, world: int) -> bool:
    """Whether weights are spread over ranks, or change their type or place between the update and their use.

    A single process in one type needs none of it, and copying between weights and its one shard of each took an eighth
    of a step. It reduces nothing, so the type of that doesn't count.
    """
    training = config.training
    one_type = training.dtype == training.mixed_precision_param
    return world > 1 or not one_type or training.enable_cpu_offload or bool(config.model.converters)


def shard_model(model: Decoder, ranks: Mesh, config: Config) -> None:
    """Shards each block, the embedding, and norm + head as groups of their own; in place, on the meta device too.

    Experts that are spread over ranks are a group as well, on what their own mesh leaves.
    """
    mesh = ranks.shards
    always = config.parallelism.fsdp_reshard_after_forward == "always"
    # With one shard giving back only frees a copy that has to be made again: for those who ask for it.
    reshard = reshards(config) and (always or mesh["shard"].size() > 1)
    options = {"mesh": mesh, "mp_policy": precision_policy(config)}
    if config.training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    tied, part = model.spec.tied_head, model.part
    # A tied weight is used by the embedding and by the head: it stays in the root's group, gathered from start to end.
    if part.first and not tied:
        fully_shard(model.tok_embeddings, **options, reshard_after_forward=reshard)
    for block in model.layers.values():
        if block.moe is not None and ranks.experts is not None:
            _shard_experts(block.moe.experts, ranks.experts[(*ranks.replicas, "expert_shard")], options, reshard)
        fully_shard(block, **options, reshard_after_forward=reshard)
    if part.last and not tied:
        # The backward starts here at once, so giving the weights back first would only gather them again. A schedule
        # that splits the backward also needs them in place.
        fully_shard([model.norm, model.output], **options, reshard_after_forward=reshard and always and part.first)
    fully_shard(model, **options, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            if ranks.degrees.world > 1:  # one rank would divide by one, a pass over all gradients
                module.set_gradient_divide_factor(1.0)
    _prefetch_neighbours(list(model.layers.values()))


def _shard_experts(experts: StackedExperts, mesh: DeviceMesh, options: dict, reshard: bool) -> None:
    """Along their width rather than by expert, of which a rank may have fewer than there are shards."""
    shards = mesh["expert_shard"].size()

    def along(parameter: nn.Parameter) -> Shard:
        return Shard(1 if parameter.shape[1] % shards == 0 else 0)

    here = {**options, "mesh": mesh, "reshard_after_forward": reshard and shards > 1}
    fully_shard(experts, **here, shard_placement_fn=along)


def summing_groups(modules: Iterable[nn.Module]) -> list[Any]:
    """FSDP's parameter groups; none in a torch that has them elsewhere."""
    states = [module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule)]
    found = (getattr(s, "_fsdp_param_groups", None) or [getattr(s, "_fsdp_param_group", None)] for s in states)
    return [group for groups in found for group in groups if group is not None]


def let_go_of_sums(groups: list[Any]) -> None:
    """Drops the gradients summed over replicas that FSDP keeps, whoever has used them, until the backward ends.

    It keeps them lest the next group's gradients go where these are still being summed. Here those wait for that.
    """
    for group in groups:
        if getattr(group, "_all_reduce_state", None) is None:
            continue
        if (used := getattr(group, "_post_reduce_event", None)) is not None:
            group.comm_ctx.reduce_scatter_stream.wait_event(used)
        group._all_reduce_state = None


def _prefetch_neighbours(blocks: list) -> None:
    """Has each block's weights gathered while its neighbour computes.

    FSDP does so by itself only as fast as the host issues work, which a slow host does too late.
    """
    for block, following in itertools.pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
