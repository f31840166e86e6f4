"""What the pool's ranks are asked about updates."""

from __future__ import annotations

from typing import Any

import torch

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


def peak_of_gradients(rank: int, world: int, *, config: dict[str, Any]) -> int:
    """Most bytes of this rank's sharded gradients at once in a step."""
    settings = Config.model_validate(config)
    mesh = build_mesh(batch_layout(settings, world), "cpu")
    model = build_model(settings, mesh)
    model.materialise("cpu", initial_values(model, 0))
    most = 0

    def count(_) -> None:
        nonlocal most
        held = sum(p.grad.to_local().nbytes for p in model.parameters() if p.grad is not None)
        most = max(most, held)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    update = build_update(settings, model, build_optimizer(model, settings), lambda: None)
    update.before_backward(1)
    local = settings.training.local_batch_size
    mine = take(rows(1, settings, "uneven"), mesh.place.data * local, local)
    loss_and_gradients(model, NextToken(), [mine], 1.0, torch.device("cpu"))
    update.after_backward()
    return most
