"""What the pool's ranks are asked about updates."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.allocations import peak_bytes
from tests.parity.jobs import rows, take
from titanlike.config import Config
from titanlike.config.derive import batch_layout
from titanlike.models.initial import initial_values
from titanlike.objectives.next_token import NextToken
from titanlike.optim.optimizers import build_optimizer
from titanlike.optim.update import build_update
from titanlike.parallel.build import build_model
from titanlike.parallel.mesh import build_mesh
from titanlike.trainer import loss_and_gradients


def peak_of_a_step(rank: int, world: int, *, config: dict[str, Any]) -> int:
    """Most bytes that this rank has allocated at once in a second step, beyond those of before it."""
    settings = Config.model_validate(config)
    mesh = build_mesh(batch_layout(settings, world), "cpu")
    model = build_model(settings, mesh)
    model.materialise("cpu", initial_values(model, 0))
    update = build_update(settings, model, build_optimizer(model, settings), lambda: None)
    local = settings.training.local_batch_size
    mine = take(rows(1, settings, "uneven"), mesh.place.data * local, local)

    def step() -> None:
        update.before_backward(1)
        loss_and_gradients(model, NextToken(), [mine], 1.0, torch.device("cpu"))
        update.after_backward()

    step()  # makes the optimizer's state
    return peak_bytes(step)
