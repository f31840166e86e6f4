"""What the pool's ranks are asked to do, and the same by one plain process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titanlike import device as devices
from titanlike.config import Config
from titanlike.config.derive import batch_layout
from titanlike.data.batch import IGNORE, Batch, document_offsets
from titanlike.models.decoder import Decoder
from titanlike.models.initial import initial_values, materialise
from titanlike.models.moe import MoE
from titanlike.models.spec import decoder_spec
from titanlike.objectives.next_token import NextToken
from titanlike.optim.optimizers import build_optimizer
from titanlike.optim.schedule import Schedule
from titanlike.optim.update import build_update
from titanlike.parallel.build import build_model
from titanlike.parallel.expert import move_bias
from titanlike.parallel.mesh import build_mesh
from titanlike.trainer import add_up, loss_and_gradients, mean_loss

ROWS = 8


def rows(step: int, config: Config, masks: str) -> Batch:
    """One global batch of made-up rows. `masks`: "even", or "uneven" with unequal, and some missing, trained tokens."""
    g = torch.Generator().manual_seed(1000 + step)
    length, vocab = config.training.seq_len, decoder_spec(config).vocab_size
    tokens = torch.randint(0, vocab, (ROWS, length), generator=g)
    labels = torch.randint(0, vocab, (ROWS, length), generator=g)
    documents = torch.zeros(ROWS, length, dtype=torch.int32)
    positions = torch.arange(length).repeat(ROWS, 1)
    if masks == "uneven":
        share = torch.linspace(0.05, 0.95, ROWS)[:, None]
        labels[torch.rand(ROWS, length, generator=g) > share] = IGNORE
        labels[2:4] = IGNORE  # a whole microbatch without a trained token
        cut = 7
        documents[1::2, cut:] = 1
        positions[1::2, cut:] -= cut
    return Batch(
        tokens=tokens,
        labels=labels,
        positions=positions,
        documents=documents,
        sequences=torch.arange(ROWS) + ROWS * step,
        offsets=document_offsets(documents),
    )


def take(batch: Batch, first: int, count: int) -> Batch:
    part = slice(first, first + count)
    documents = batch.documents[part]
    return Batch(
        tokens=batch.tokens[part],
        labels=batch.labels[part],
        positions=batch.positions[part],
        documents=documents,
        sequences=batch.sequences[part],
        offsets=document_offsets(documents),
    )


def is_sharded(rank: int, world: int, *, config: dict[str, Any]) -> bool:
    """Whether full sharding gathers the model's weights."""
    settings = Config.model_validate(config)
    model = build_model(settings, build_mesh(batch_layout(settings, world), "cpu"))
    return any(isinstance(module, FSDPModule) for _, module in model.named_modules())


def train(rank: int, world: int, *, config: dict[str, Any], steps: int, masks: str = "even") -> dict[str, Any]:
    """`steps` steps of the product on this rank; losses, norms, first gradients and last weights, gathered."""
    settings = Config.model_validate(config)
    return train_on(settings, world, steps, lambda step: rows(step, settings, masks))


def train_each(rank: int, world: int, *, runs: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """`train` for each of `runs` (config, masks): one start of the ranks serves them all."""
    results = []
    for run in runs:
        if results:  # one process compiles a function anew a few times only, and then leaves it uncompiled
            torch.compiler.reset()
        results.append(train(rank, world, steps=steps, **run))
    return results


def train_on(settings: Config, world: int, steps: int, batch_of: Callable[[int], Batch]) -> dict[str, Any]:
    """The same on any global batches."""
    graphs = counters["stats"]["unique_graphs"]
    mesh = build_mesh(batch_layout(settings, world), "cpu")
    model = build_model(settings, mesh)
    model.materialise("cpu", initial_values(model, 0))
    model.after_update()
    initial = gathered(model, lambda p: p)
    optimizer, schedule = build_optimizer(model, settings), Schedule.of(settings)
    update = build_update(settings, model, optimizer, lambda: None)
    local = settings.training.local_batch_size
    losses, norms, gradients, trained = [], [], {}, 0
    for step in range(1, steps + 1):
        whole = batch_of(step)
        share = len(whole.tokens) // mesh.layout.dp_degree
        mine = [take(whole, mesh.place.data * share + i, local) for i in range(0, share, local)]
        devices.seed_everything(0, step)
        totals = add_up(NextToken(), mine, mesh)
        trained = totals.trained_tokens
        schedule.apply(optimizer, step)
        update.before_backward(step)
        loss = loss_and_gradients(model, NextToken(), mine, max(totals.weight, 1.0), torch.device("cpu"))
        if step == 1 and not settings.optimizer.in_backward:
            gradients = gathered(model, lambda p: p.grad)
        norms.append(update.after_backward().item())
        model.after_update()
        losses.append(mean_loss(loss, totals.weight, mesh))
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "weights": gathered(model, lambda p: p),
        "initial": initial,
        "trained_tokens": trained,
        "generator": torch.get_rng_state(),
        "graphs": counters["stats"]["unique_graphs"] - graphs,
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
    }


def gathered(model, what) -> dict[str, torch.Tensor]:
    result = {}
    for name, parameter in model.named_parameters():
        value = what(parameter).detach()
        result[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return result


def plain(
    config: dict[str, Any], steps: int, masks: str = "even", change: Callable[[Decoder], object] | None = None
) -> dict[str, Any]:
    """One process, one big batch, full logits, torch's own loss, clipping, optimizer: what every layout must equal.

    `change` is done to the model on the meta device.
    """
    settings = Config.model_validate(config)
    spec = decoder_spec(settings)
    with torch.device("meta"):
        model = Decoder(spec, seq_len=settings.training.seq_len, kernel="math", loss="logits")
    if change:
        change(model)
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    for mixture in mixtures:
        mixture.balance.share = 1 / ROWS
    materialise(model, "cpu", initial_values(model, 0))
    initial = gathered(model, lambda p: p)
    optimizer = build_optimizer(model, settings)
    losses, norms, gradients = [], [], {}
    for step in range(1, steps + 1):
        batch = rows(step, settings, masks)
        logits = model.logits(model(batch.tokens, batch.positions, batch.offsets))
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE)
        loss.backward()
        if step == 1:
            gradients = gathered(model, lambda p: p.grad)
        max_norm = settings.training.max_norm or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * Schedule.of(settings).factor(step)
        optimizer.step()
        optimizer.zero_grad()
        for mixture in mixtures:
            move_bias(mixture, mixture.balance.counts)
            mixture.balance.reset()
        losses.append(loss.item())
    weights = gathered(model, lambda p: p)
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "weights": weights,
        "initial": initial,
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
    }


def after_evaluation(rank: int, world: int, *, config: dict[str, Any]) -> dict[str, tuple[bool, str, bool]]:
    """Of each parameter after a held-out batch: is it a shard, its dtype, are its bits those of before."""
    settings = Config.model_validate(config)
    mesh = build_mesh(batch_layout(settings, world), "cpu")
    model = build_model(settings, mesh)
    model.materialise("cpu", initial_values(model, 0))
    before = gathered(model, lambda p: p)
    model.loss_sum(take(rows(1, settings, "uneven"), 0, settings.training.local_batch_size), NextToken())
    kinds = {name: (isinstance(p, DTensor), str(p.dtype)) for name, p in model.named_parameters()}
    after = gathered(model, lambda p: p)
    return {name: (*kind, torch.equal(before[name], after[name])) for name, kind in kinds.items()}
