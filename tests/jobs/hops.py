"""Weights and optimizer state on their way from one layout to another, in the pool's processes."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.jobs.inspections import built, whole
from titanlike.checkpoint.manager import CheckpointManager
from titanlike.config import Config, dump_toml


def trained(rank: int, world: int, *, config: dict[str, Any]) -> dict[str, Any]:
    """Train to the end; what this rank then holds, see `held`."""
    trainer = _trainer(config)
    trainer.run()
    return held(trainer)


def handed_on(rank: int, world: int, *, config: dict[str, Any], to: str) -> dict[str, Any]:
    """What this rank holds of what there is; saved as it is for the run in folder `to`, then trained to the end."""
    trainer = _trainer(config)
    found = held(trainer)
    settings = trainer.config.checkpoint
    copies = CheckpointManager(settings, Path(to) / settings.folder, config_text=dump_toml(trainer.config))
    state = {"counters": asdict(trainer.counters), "data": trainer.data.loader.state()}
    copies.save(trainer.counters.step, trainer._tensors(), state)
    trainer.run()  # in a background mode, while the copy is written
    copies.close()
    return found


def started(rank: int, world: int, *, config: dict[str, Any]) -> dict[str, Any]:
    """What this rank holds before its first step, and the lines that it logs until then under `log`."""
    lines: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("titanlike")
    handler.emit = lambda record: lines.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        return {**held(built(config)), "log": lines}
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def held(trainer) -> dict[str, Any]:
    """This rank's tensors in full, with the other ranks of the same stages.

    `tensors`: all that a checkpoint holds of them, by name. `embeddings`: every one that these stages compute with.
    `empty`: names of tensors of which this rank's own shard has no element.
    """
    tensors = trainer._tensors()
    embeddings = [
        whole(parameter)
        for part in trainer.model.parts
        for name, parameter in part.named_parameters()
        if name == "tok_embeddings.weight"
    ]
    return {
        "tensors": {name: whole(tensor) for name, tensor in tensors.items()},
        "embeddings": embeddings,
        "empty": [n for n, t in tensors.items() if hasattr(t, "to_local") and not t.to_local().numel()],
    }


def together(ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The ranks' tensors as one model's. What several ranks hold, and copies of the embedding, must be equal."""
    found: dict[str, torch.Tensor] = {}
    for rank in ranks:
        named = [*rank["tensors"].items(), *(("tok_embeddings.weight", one) for one in rank["embeddings"])]
        for name, tensor in named:
            assert tensor.isfinite().all(), name
            assert torch.equal(found.setdefault(name, tensor), tensor), name
    return found


def _trainer(config: dict[str, Any]):
    from titanlike.trainer import Trainer

    # What no checkpoint has filled is NaN: debug.deterministic has torch fill new memory.
    assert config["debug"]["deterministic"] and torch.utils.deterministic.fill_uninitialized_memory
    return Trainer(Config.model_validate(config))
