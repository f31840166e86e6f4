"""What a run is for: how a batch weighs and how log-probabilities become a loss.

An objective knows nothing of ranks, microbatches or division: it gives sums. The trainer adds up the weights of the
whole global batch before the first backward and divides once.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from titanlike.config.registry import Registry
from titanlike.data.batch import Batch


class Objective(Protocol):
    """One training method.

    `reduction` says what it needs of the head: "sum" if every trained token counts alike (cheaper: the head takes its
    gradients in the forward), else "none" for each token's log-probability [B, S].
    """

    reduction: Literal["none", "sum"]

    def weight(self, batch: Batch) -> float:
        """What a batch on the host counts in the mean (trained tokens, pairs, …)."""
        ...

    def loss(self, log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The loss summed over the batch, a float32 scalar; zero with zero gradients where nothing is trained on."""
        ...


objectives: Registry[type[Objective]] = Registry("recipe", {"pretrain": "titanlike.objectives.next_token"})
