"""From a config to this rank's part of the model, in the one fixed order that everything composes in.

    meta device → activation checkpointing → compile per block → fully sharded

Nothing has memory yet when this is done: `models.initial.materialise` gives each rank its own shard and no more.
"""

from __future__ import annotations

import logging

import torch

from titanlike.config import Config
from titanlike.converters.activation_checkpoint import apply_activation_checkpointing
from titanlike.converters.compile import apply_compile
from titanlike.models.decoder import Decoder
from titanlike.models.spec import decoder_spec
from titanlike.parallel.fully_shard import DTYPES, shard_model
from titanlike.parallel.mesh import Mesh

logger = logging.getLogger("titanlike")


def build_model(config: Config, mesh: Mesh) -> Decoder:
    """The sharded model on the meta device."""
    with torch.device("meta"):
        model = Decoder(
            decoder_spec(config),
            kernel=config.model.attention,
            seq_len=max(config.training.seq_len, config.validation.seq_len or 0),
            loss=config.loss.implementation,
            chunk_size=config.loss.chunk_size,
        )
    model.to(DTYPES[config.training.dtype])
    apply_activation_checkpointing(model, config)
    apply_compile(model, config)
    shard_model(model, mesh.shards, config)
    if config.model.print_after_conversion:
        logger.info("%s", model)
    return model
