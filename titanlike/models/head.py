"""The head: hidden states and labels in, log-probabilities out.

A module of its own, so that full sharding gathers its weight as for any layer and a pipeline's last stage needs no
second path. Every objective stands on what it returns.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from titanlike.data.batch import IGNORE
from titanlike.models.linear_cross_entropy import linear_log_probs, linear_log_probs_and_entropy
from titanlike.models.logits_chunk import Chunk, LogitRule, VocabularyShard
from titanlike.models.products import linear
from titanlike.models.spec import DecoderSpec

LogProbs = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Head(nn.Module):
    """Projects onto the vocabulary. `implementation` "logits" holds full logits: the yardstick for "linear"."""

    tensor_styles: ClassVar = {"": "vocabulary"}

    def __init__(self, spec: DecoderSpec, *, implementation: Literal["linear", "logits"], chunk_size: int = 0):
        super().__init__()
        self.implementation = implementation
        self.chunk_size = chunk_size
        self.rule = LogitRule(spec.logit_scale, spec.logit_softcap)
        self.compile_backend: str | None = None
        # A tied head gets the embedding's weight with each call: one parameter under one name, nothing to keep in step.
        self.weight = None if spec.tied_head else nn.Parameter(torch.empty(spec.vocab_size, spec.dim))

    def forward(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        tied: torch.Tensor | None = None,
        reduction: Literal["none", "sum"] = "none",
        with_entropy: bool = False,
    ) -> LogProbs:
        """Log-probabilities of labels [B, S] given hidden [B, S, dim]: float32 [B, S], 0 where ignored; or the sum.

        `with_entropy` (without reduction): those and the entropy at each token, [B, S] in nats, 0 where ignored.
        """
        return self.log_probs(hidden, self.weight if tied is None else tied, labels, reduction, with_entropy)

    def log_probs(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        reduction: Literal["none", "sum"],
        with_entropy: bool = False,
        shard: VocabularyShard | None = None,
    ) -> LogProbs:
        """What forward returns, with the weight in hand; with `shard` the weight is some rows of the vocabulary."""
        assert reduction == "none" or not with_entropy
        if self.implementation == "linear":
            options = {"chunk_size": self.chunk_size, "chunk": Chunk(self.rule, shard, self.compile_backend)}
            if with_entropy:
                return linear_log_probs_and_entropy(hidden, weight, labels, **options)
            return linear_log_probs(hidden, weight, labels, reduction, **options)
        assert shard is None, "full logits need the whole vocabulary"
        logits = self.rule(linear(hidden, weight).float())
        losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="none")
        if with_entropy:
            logs = logits.log_softmax(-1)
            return -losses.view_as(labels), (-(logs.exp() * logs).sum(-1)).masked_fill(labels == IGNORE, 0.0)
        return -losses.sum() if reduction == "sum" else -losses.view_as(labels)

    def compile_loss(self, backend: str) -> None:
        """Compiles what is computed for a chunk of tokens."""
        self.compile_backend = backend

    def logits(self, hidden: torch.Tensor, tied: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B, S, vocab] of hidden [B, S, dim]."""
        return self.rule(linear(hidden, self.weight if tied is None else tied))
