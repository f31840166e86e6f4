"""What the pool's ranks are asked to do for the tests of converters."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from tests.parity.jobs import gathered, rows, take
from titanlike.config import Config
from titanlike.config.derive import batch_layout
from titanlike.errors import ConfigError
from titanlike.models.initial import initial_values
from titanlike.objectives.next_token import NextToken
from titanlike.optim.optimizers import build_optimizer
from titanlike.parallel.build import build_model
from titanlike.parallel.mesh import build_mesh
from titanlike.parallel.model import DistributedModel
from titanlike.trainer import loss_and_gradients


def _model(config: dict[str, Any], world: int) -> tuple[Config, DistributedModel]:
    settings = Config.model_validate(config)
    model = build_model(settings, build_mesh(batch_layout(settings, world), "cpu"))
    model.materialise("cpu", initial_values(model, 0))
    model.after_update()
    return settings, model


def _backward(settings: Config, model: DistributedModel) -> None:
    batch = take(rows(1, settings, "even"), 0, settings.training.local_batch_size)
    loss_and_gradients(model, NextToken(), [batch], 64.0, torch.device("cpu"))


def products(rank: int, world: int, *, configs: list[dict[str, Any]]) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """How often float8 numbers are multiplied in one forward and backward, and the gradients; for each config."""
    results = []
    for config in configs:
        settings, model = _model(config, world)
        with mock.patch.object(torch, "_scaled_mm", wraps=torch._scaled_mm) as multiply:
            _backward(settings, model)
        results.append((multiply.call_count, gathered(model, lambda p: p.grad)))
    return results


def wrapping(rank: int, world: int, *, config: dict[str, Any]) -> dict[str, Any]:
    """What becomes of weights that are gathered in float8."""
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("titanlike")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    settings, model = _model(config, world)
    logger.removeHandler(handler)
    optimizer = build_optimizer(model, settings)
    _backward(settings, model)
    optimizer.step()
    model.after_update()
    held = {name: p._local_tensor for name, p in model.named_parameters() if isinstance(p, DTensor)}
    wrapped = {name: t for name, t in held.items() if isinstance(t, WeightWithDynamicFloat8CastTensor)}
    tensors = {name: t.to_local() for name, t in model.tensors().items()}
    known = [shard for _, _, shard in optimizer.parameters()]
    return {
        "logged": [record.getMessage() for record in records],
        "wrapped": len(wrapped),
        "plain": {type(t) for t in tensors.values()} == {torch.Tensor}
        and {type(t.data) for t in known} == {torch.Tensor},
        "shared": all(t._tensor.data_ptr() == tensors[name].data_ptr() for name, t in wrapped.items()),
        "scales": [t._precomputed_scale.item() for t in wrapped.values()],
        "wanted": [448 / t._tensor.abs().max().item() for t in wrapped.values()],
    }


def refusal(rank: int, world: int, *, config: dict[str, Any]) -> str:
    """What is said instead of a model."""
    try:
        _model(config, world)
    except ConfigError as error:
        return "\n".join(error.problems)
    return ""
