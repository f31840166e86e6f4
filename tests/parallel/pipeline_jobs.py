"""What the pool's ranks are asked to do for test_pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity import jobs
from titanlike.config import Config
from titanlike.config.derive import batch_layout
from titanlike.data.batch import IGNORE, Batch, document_offsets
from titanlike.models.decoder import Decoder
from titanlike.models.initial import initial_values, materialise
from titanlike.models.spec import decoder_spec
from titanlike.objectives.next_token import NextToken
from titanlike.parallel.build import build_model
from titanlike.parallel.mesh import build_mesh


def train(rank: int, world: int, *, runs: dict[str, tuple[dict, str]], steps: int) -> dict[str, Any]:
    """Each run of (config, masks) on this rank."""
    return {name: jobs.train(rank, world, config=c, steps=steps, masks=masks) for name, (c, masks) in runs.items()}


def held_out(vocabulary: int) -> list[Batch]:
    """Batches of other sizes than training's: shorter rows, a number that microbatches of 2 don't divide, filler."""
    batches = []
    for rows, length in ((3, 16), (5, 24), (1, 8)):
        g = torch.Generator().manual_seed(rows)
        tokens = torch.randint(0, vocabulary, (rows, length), generator=g)
        documents = torch.zeros(rows, length, dtype=torch.int32)
        positions = torch.arange(length).repeat(rows, 1)
        documents[0, 5:], positions[0, 5:] = 1, torch.arange(length - 5)
        labels = tokens.roll(-1, 1)
        labels[:, -1] = IGNORE
        if rows > 1:
            tokens[-1], labels[-1], documents[-1] = 0, IGNORE, -1  # a row that only fills up
        batches.append(
            Batch(
                tokens=tokens,
                labels=labels,
                positions=positions,
                documents=documents,
                sequences=torch.arange(rows),
                offsets=document_offsets(documents),
            )
        )
    return batches


def plain_sums(config: dict[str, Any]) -> list[float]:
    """Loss sums of the held-out batches by one plain process on new weights."""
    settings = Config.model_validate(config)
    with torch.device("meta"):
        model = Decoder(decoder_spec(settings), seq_len=settings.training.seq_len, kernel="math", loss="logits")
    materialise(model, "cpu", initial_values(model, 0))
    with torch.no_grad():
        return [
            -model(b.tokens, b.positions, b.offsets, labels=b.labels, reduction="sum").item()
            for b in held_out(model.spec.vocab_size)
        ]


def built(config: dict[str, Any], world: int):
    """Model and mesh of a config, with new weights."""
    settings = Config.model_validate(config)
    mesh = build_mesh(batch_layout(settings, world), "cpu")
    model = build_model(settings, mesh)
    model.materialise("cpu", initial_values(model, 0))
    model.after_update()
    return settings, mesh, model


def _gradients(model, batch: Batch) -> dict[str, torch.Tensor]:
    model.forward_backward(batch, NextToken(), 10.0)
    model.finish_gradients()
    gradients = jobs.gathered(model, lambda p: p.grad)
    for parameter in model.parameters():
        parameter.grad = None
    return gradients


def evaluate(rank: int, world: int, *, configs: dict[str, dict]) -> dict[str, dict[str, list]]:
    """Loss sums of the held-out batches by layout, and what a step gives after them and before."""
    results = {}
    for name, config in configs.items():
        settings, mesh, model = built(config, world)
        batch = jobs.take(jobs.rows(1, settings, "uneven"), 0, settings.training.local_batch_size)

        first = _gradients(model, batch)
        model.eval()
        sums = [model.loss_sum(batch, NextToken()) for batch in held_out(model.spec.vocab_size)]
        model.train()
        kinds = sorted({type(p.data).__name__ for p in model.parameters()})
        second = _gradients(model, batch)
        assert all(torch.equal(first[n], second[n]) for n in first), "an evaluation in between changes a step"
        sums = torch.stack(sums) / mesh.degrees.data
        dist.all_reduce(sums)
        results[name] = {"sums": sums.tolist(), "kinds": kinds}
    return results


def without_a_gradient(rank: int, world: int, *, config: dict[str, Any]) -> list[int]:
    """A gradient that a schedule leaves out is an error. Also: how often each part ran in two calls."""
    settings, _, model = built(config, world)
    calls = [0 for _ in model.parts]
    for i, part in enumerate(model.parts):

        def count(*_, i=i):
            calls[i] += 1

        part.register_forward_hook(count)
    batch = jobs.take(jobs.rows(1, settings, "even"), 0, settings.training.local_batch_size)
    for _ in range(2):
        model.forward_backward(batch, NextToken(), 10.0)
    model.finish_gradients()
    next(iter(model.parameters())).grad = None
    with pytest.raises(AssertionError, match="left these without a gradient"):
        model.finish_gradients()
    return calls
