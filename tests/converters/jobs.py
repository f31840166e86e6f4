"""What the pool's ranks are asked to do about converters."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity.jobs import gathered, rows, take
from titanlike.config import Config
from titanlike.config.derive import batch_layout
from titanlike.converters.activation_offload import ActivationOffload, offload_blocks
from titanlike.data.batch import Batch, document_offsets
from titanlike.models.initial import initial_values
from titanlike.objectives.next_token import NextToken
from titanlike.observe.memory import SavedForBackward
from titanlike.observe.recompilation import Recompilations
from titanlike.parallel.build import build_model
from titanlike.parallel.mesh import build_mesh

TINY = {
    "model": {"overrides": {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 64, "vocab_size": 61}}
}


def _config(**sections: Any) -> Config:
    training = {"seq_len": 24, "local_batch_size": 2, "mixed_precision_param": "float32"}
    return Config.model_validate({**TINY, **sections, "training": {**training, **sections.get("training", {})}})


def _model(config: Config, world: int):
    model = build_model(config, build_mesh(batch_layout(config, world), "cpu"))
    model.materialise("cpu", initial_values(model, 0))
    return model


def _batch(length: int, cuts: list[int]) -> Batch:
    """Two rows of `length` tokens whose documents begin at 0 and at `cuts`."""
    tokens = torch.arange(2 * length).view(2, length) % 61
    documents = torch.zeros(2, length, dtype=torch.int32)
    positions = torch.arange(length).repeat(2, 1)
    for cut in cuts:
        documents[:, cut:] += 1
        positions[:, cut:] = torch.arange(length - cut)
    return Batch(
        tokens=tokens,
        labels=tokens,
        positions=positions,
        documents=documents,
        sequences=torch.arange(2),
        offsets=document_offsets(documents),
    )


def graphs(rank: int, world: int, *, documents: list[list[int]]) -> list[dict[str, Any]]:
    """Trains at 24 tokens and evaluates at 32 on rows with these documents: graphs so far and what was said."""
    compiled = {"enable": True, "components": ["model"], "backend": "aot_eager"}
    model, watch = _model(_config(compile=compiled, validation={"seq_len": 32}), world), Recompilations()
    watch.report()
    before, found = counters["stats"]["unique_graphs"], []
    for cuts in documents:
        model.train()
        model.forward_backward(_batch(24, cuts), NextToken(), 1.0)
        model.eval()
        model.loss_sum(_batch(32, cuts), NextToken())
        found.append({"graphs": counters["stats"]["unique_graphs"] - before, "said": watch.report()})
    return found


class Counted(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self):
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.__name__.split(".")[0]
        self.calls[name] = self.calls.get(name, 0) + 1
        return operator(*args, **(kwargs or {}))


def kept(rank: int, world: int, *, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each config: bytes kept for the backward, operators that ran in the backward, loss and gradients."""
    found = []
    for sections in runs:
        torch._dynamo.reset()
        graphs, config = counters["stats"]["unique_graphs"], _config(**sections)
        model = _model(config, world)
        whole = take(rows(1, config, "uneven"), 0, 2 * world)
        batch = take(whole, 2 * rank if config.parallelism.tensor_parallel_degree == 1 else 0, 2)
        saved, ran = SavedForBackward(model.parameters), Counted()
        with saved.counting():
            loss = model._loss(batch, NextToken())
        with ran:
            loss.backward()
        assert saved.now == 0, "after the backward nothing is kept"
        gradients = gathered(model, lambda p: p.grad)
        found.append(
            {
                "bytes": saved.peak,
                "ran": ran.calls,
                "loss": loss.item(),
                "gradients": gradients,
                "graphs": counters["stats"]["unique_graphs"] - graphs,
            }
        )
    return found


class LateCopies:
    """Copies that arrive when they are waited for, not before, as on streams; NaN until then."""

    def __init__(self):
        self.away: list[tuple[int, ...]] = []
        self.fetched = self.waited = 0

    def out(self, tensor):
        self.away.append(tuple(tensor.shape))
        host = torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else torch.zeros_like(tensor)
        return host, lambda: host.copy_(tensor)

    def back(self, host, left):
        left()
        self.fetched += 1
        tensor = torch.full_like(host, float("nan")) if host.is_floating_point() else torch.zeros_like(host)

        def wait():
            self.waited += 1
            tensor.copy_(host)

        return tensor, wait


def offloaded(rank: int, world: int, *, runs: list[dict[str, Any]], smallest: int) -> list[dict[str, Any]]:
    """For each config: loss and gradients with what the blocks save sent away, and what was."""
    from titanlike.converters import activation_offload

    activation_offload.SMALLEST, found = smallest, []
    for sections in runs:
        config = _config(**sections)
        model, copies = _model(config, world), LateCopies()
        (part,) = model.parts
        offload = ActivationOffload(
            copies, lambda t: isinstance(t, torch.nn.Parameter) or isinstance(t._base, torch.nn.Parameter)
        )
        offload_blocks(part, offload)
        model.forward_backward(take(rows(1, config, "uneven"), 0, 2), NextToken(), 1.0)
        gradients = gathered(model, lambda p: p.grad)
        found.append({"gradients": gradients, "away": copies.away, "fetched": copies.fetched, "waited": copies.waited})
    return found
