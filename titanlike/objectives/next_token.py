"""Next-token prediction: the mean negative log-likelihood of the trained tokens."""

from __future__ import annotations

from typing import Literal

import torch

from titanlike.data.batch import Batch
from titanlike.objectives.base import objectives


@objectives.register("pretrain")
class NextToken:
    reduction: Literal["none", "sum"] = "sum"

    def weight(self, batch: Batch) -> float:
        return batch.trained_count()

    def loss(self, log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return -log_probs
