"""A head by full logits, and what the pool's ranks are asked about a vocabulary that is split over them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from titanlike.data.batch import IGNORE
from titanlike.models.linear_cross_entropy import linear_log_probs_and_entropy
from titanlike.models.logits_chunk import PLAIN, Chunk, LogitRule, VocabularyShard
from titanlike.parallel import collectives

N, D, V = 37, 24, 130  # tokens, width, vocabulary


def inputs(ignored: float = 0.3, dtype=torch.float32):
    """Hidden states [N, D], a weight [V, D] and labels [N], a share of them ignored."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g).mul_(0.3).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (N,), generator=g)
    labels[torch.rand(N, generator=g) < ignored] = IGNORE
    return hidden, weight, labels


def full(hidden, weight, labels, upstream, of_entropy=None, rule=PLAIN.rule, dtype=torch.float64):
    """By full logits in dtype: log-probabilities, entropies, and both gradients under the upstream ones."""
    h, w = (t.detach().to(dtype).requires_grad_() for t in (hidden, weight))
    logits = F.linear(h, w) * rule.scale
    if rule.cap is not None:
        logits = rule.cap * torch.tanh(logits / rule.cap)
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    entropy = torch.distributions.Categorical(logits=logits).entropy().masked_fill(labels == IGNORE, 0.0)
    total = -(losses * upstream.to(dtype)).sum()
    if of_entropy is not None:
        total = total + (entropy * of_entropy.to(dtype)).sum()
    total.backward()
    return -losses.detach(), entropy.detach(), h.grad, w.grad


def over_ranks(rank: int, world: int, *, cases: list[tuple[LogitRule, str | None]]) -> list[Any]:
    """For each rule and backend: values, the hidden states' gradient through this rank's rows, that of its rows."""
    group = dist.group.WORLD.group_name
    results = []
    for rule, backend in cases:
        hidden, weight, labels = inputs()
        rows = weight.detach().chunk(world)[rank].requires_grad_()
        shard = VocabularyShard(rank * -(-V // world), lambda x: collectives.stack(x, world, group))
        out, entropy = linear_log_probs_and_entropy(
            hidden, rows, labels, chunk_size=8, chunk=Chunk(rule, shard, backend)
        )
        ((out * torch.linspace(-1, 2, N)).sum() + (entropy * torch.linspace(2, -3, N)).sum()).backward()
        results.append((out.detach(), entropy.detach(), hidden.grad, rows.grad))
    return results
