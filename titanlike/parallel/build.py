"""From a config to this rank's part of the model, in the one fixed order that everything composes in.

    meta device → low precision → pipeline split → experts → tensor/sequence → context → activation checkpointing →
    offloading → compile per block → fully sharded

Nothing has memory yet when this is done: `DistributedModel.materialise` gives each rank its own shard and no more.
"""

from __future__ import annotations

import logging

import torch

from titanlike.config import Config
from titanlike.converters.activation_checkpoint import apply_activation_checkpointing
from titanlike.converters.activation_offload import apply_activation_offload
from titanlike.converters.compile import apply_compile
from titanlike.converters.low_precision import LowPrecision, low_precision
from titanlike.models.decoder import Decoder
from titanlike.models.moe import Router
from titanlike.models.spec import Part, decoder_spec
from titanlike.parallel.context import apply_context
from titanlike.parallel.expert import apply_experts
from titanlike.parallel.fully_shard import DTYPES, has_shards, shard_model
from titanlike.parallel.mesh import Mesh
from titanlike.parallel.model import DistributedModel
from titanlike.parallel.stages import plan_stages
from titanlike.parallel.tensor import apply_tensor

logger = logging.getLogger("titanlike")


def build_model(config: Config, mesh: Mesh) -> DistributedModel:
    """This rank's part of the model, on the meta device."""
    precision = low_precision(config, mesh.degrees.tensor)
    for line in precision.lines() if precision else ():
        logger.info("%s", line)
    if mesh.pipeline is None:
        return DistributedModel([_build_part(config, mesh, None, precision)], mesh, config)
    plan = plan_stages(config, decoder_spec(config), mesh.degrees.pipeline)
    logger.info("pipeline schedule %s over %d stages:", plan.schedule, len(plan.stages))
    for line in plan.lines():
        logger.info("%s", line)
    parts = [_build_part(config, mesh, stage.part, precision) for stage in plan.of_rank(mesh.place.pipeline)]
    return DistributedModel(parts, mesh, config, plan)


def _build_part(config: Config, mesh: Mesh, part: Part | None, precision: LowPrecision | None) -> Decoder:
    with torch.device("meta"):
        model = Decoder(
            decoder_spec(config),
            kernel=config.model.attention,
            seq_len=max(config.training.seq_len, config.validation.seq_len or 0),
            loss=config.loss.implementation,
            chunk_size=config.loss.chunk_size,
            part=part,
        )
    model.to(DTYPES[config.training.dtype])
    for module in model.modules():
        if isinstance(module, Router):
            module.in_turn = config.debug.moe_force_load_balance
    if precision:
        precision.apply(model)
    apply_experts(model, mesh)
    if mesh.tensor is not None:
        apply_tensor(
            model,
            mesh.tensor,
            sequence=config.parallelism.enable_sequence_parallel,
            overlap=config.parallelism.enable_async_tensor_parallel,
            # The yardstick holds full logits.
            whole_head=config.parallelism.disable_loss_parallel or config.loss.implementation == "logits",
            split_routing=mesh.keeps_tokens_split,
        )
    if mesh.context is not None:
        apply_context(model, mesh.context, config.parallelism)
    apply_activation_checkpointing(model, config)
    apply_activation_offload(model, config)
    apply_compile(model, config)
    if precision:
        precision.method.check_shards(model, mesh.shards["shard"].size())
    if has_shards(config, mesh.degrees.world):
        shard_model(model, mesh, config)
    if config.model.print_after_conversion:
        logger.info("%s", model)
    return model
