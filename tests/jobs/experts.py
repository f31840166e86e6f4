"""A run of a mixture of experts, in the pool's processes, and what its biases then are."""

from __future__ import annotations

from typing import Any
from unittest import mock

from tests.jobs.jobs import StopAt
from titanlike.config import Config


def run(rank: int, world: int, *, config: dict[str, Any], stop_at: int | None = None) -> dict[str, Any]:
    """Trains to the end or to a stop that the first rank hears of: the outcome, and this rank's biases by name."""
    from titanlike import trainer

    with mock.patch.object(trainer, "StopFlag", lambda: StopAt(stop_at, rank, 0)):
        job = trainer.Trainer(Config.model_validate(config))
        outcome = job.run()
    named = (pair for part in job.model.parts for pair in part.named_buffers())
    return {"outcome": outcome, "biases": {n: bias.clone() for n, bias in named if n.endswith("expert_bias")}}
