"""What the pool's ranks are asked to do for test_accumulation: steps over rows with given numbers of trained tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.parity.jobs import train_on
from titanlike.config import Config
from titanlike.config.derive import batch_layout
from titanlike.data.batch import IGNORE, Batch, document_offsets
from titanlike.models.spec import decoder_spec
from titanlike.objectives.next_token import NextToken
from titanlike.parallel.mesh import build_mesh
from titanlike.parallel.model import DistributedModel
from titanlike.trainer import add_up, loss_and_gradients, mean_loss


def batch_of(step: int, config: Config, targets: list[int], rows: list[int]) -> Batch:
    """A global batch whose row i has targets[i] trained tokens; `rows` picks its text."""
    length, vocab = config.training.seq_len, decoder_spec(config).vocab_size
    texts = []
    for row in rows:
        g = torch.Generator().manual_seed(100 * step + row)
        texts.append(torch.randint(0, vocab, (2, length), generator=g))
    tokens, labels = (torch.stack([text[i] for text in texts]) for i in (0, 1))
    for row, count in enumerate(targets):
        labels[row, count:] = IGNORE
    documents = torch.zeros(len(rows), length, dtype=torch.int32)
    return Batch(
        tokens=tokens,
        labels=labels,
        positions=torch.arange(length).repeat(len(rows), 1),
        documents=documents,
        sequences=torch.tensor(rows),
        offsets=document_offsets(documents),
    )


def train(
    rank: int, world: int, *, config: dict[str, Any], steps: int, targets: list[int], rows: list[int] | None = None
) -> dict[str, Any]:
    """`steps` steps of the product on this rank. Losses, norms, the first gradients, the last weights; gathered."""
    settings = Config.model_validate(config)
    rows = list(range(len(targets))) if rows is None else rows
    result = train_on(settings, world, steps, lambda step: batch_of(step, settings, targets, rows))
    assert result["trained_tokens"] == sum(targets)
    return result


class GivenLosses(torch.nn.Module):
    """Stands in for the decoder: its "log-probabilities" are the labels themselves, times a weight of 1."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.spec = decoder_spec(config)
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, tokens, positions, offsets, *, labels, reduction, dropout_keys):
        assert reduction == "sum"
        return -self.weight * tokens[labels != IGNORE].sum() / 3


def mean_of_sums(rank: int, world: int) -> dict[str, float]:
    """Microbatches with 1 and 9 trained tokens, whose losses add up to 2 and 3; on one rank or on two."""
    losses = [[6] + [0] * 9, [1] * 9 + [0]]  # in thirds
    counts = [1, 9]
    batches = []
    for values, count in zip(losses, counts, strict=True):
        labels = torch.tensor([[0] * count + [IGNORE] * (10 - count)])
        documents = torch.zeros(1, 10, dtype=torch.int32)
        batches.append(
            Batch(
                tokens=torch.tensor([values]),
                labels=labels,
                positions=torch.arange(10)[None],
                documents=documents,
                sequences=torch.zeros(1, dtype=torch.int64),
                offsets=None,
            )
        )
    mine = batches[rank::world]
    settings = Config()
    mesh = build_mesh(batch_layout(settings, world), "cpu")
    part = GivenLosses(settings)
    model = DistributedModel([part], mesh, settings)
    totals = add_up(NextToken(), mine, mesh)
    loss = loss_and_gradients(model, NextToken(), mine, totals.weight, torch.device("cpu"))
    gradient = part.weight.grad
    dist.all_reduce(gradient)  # as full sharding does
    return {"loss": mean_loss(loss, totals.weight, mesh), "gradient": gradient.item()}
