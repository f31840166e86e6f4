"""Muon against torch.optim.Muon on one process, and how matrices are dealt out."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from tests.optim import updates
from tests.optim.small import Small
from tests.parity.jobs import rows
from tests.parity.layouts import config as parity_config
from titanlike.config import Config
from titanlike.data.batch import IGNORE
from titanlike.models.decoder import Decoder
from titanlike.models.initial import initial_values, materialise
from titanlike.models.spec import decoder_spec
from titanlike.optim.muon import is_matrix, orthogonalised
from titanlike.optim.optimizers import build_optimizer
from titanlike.optim.schedule import Schedule
from titanlike.optim.whole import deal

STEPS = 3
MASKS = "uneven"


def plain(model, settings: Config, give_gradients) -> dict[str, torch.Tensor]:
    """torch's own two optimizers, parameter by parameter as ours has them."""
    chosen = settings.optimizer
    decayed = {
        name: 0.0 if "norm" in name or "emb" in name or "bias" in name else 0.1 for name in model.all_parameter_names()
    }
    optimizers = []
    for name, p in model.named_parameters():
        if is_matrix(name, p):
            options = {"momentum": chosen.momentum or 0.95, "adjust_lr_fn": chosen.muon_scale}
            optimizers.append(torch.optim.Muon([p], weight_decay=decayed[name], **options))
        else:
            optimizers.append(torch.optim.AdamW([p], betas=(0.9, 0.95), weight_decay=decayed[name], fused=True))
    for step in range(1, STEPS + 1):
        give_gradients(step)
        for one in optimizers:
            one.param_groups[0]["lr"] = chosen.lr * Schedule.of(settings).factor(step)
            one.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("momentum", [None, 0.5])
@pytest.mark.parametrize("scale", ["match_rms_adamw", "original"])
def test_one_process_equals_torch(make_config, scale, momentum):
    settings = make_config(optimizer={"name": "Muon", "lr": 0.02, "muon_scale": scale, "momentum": momentum})
    model, theirs = Small(), Small()
    optimizer = build_optimizer(model, settings)
    for step in range(1, STEPS + 1):
        model.give_gradients(step)
        Schedule.of(settings).apply(optimizer, step)
        optimizer.begin(step)
        optimizer.step()
    want = plain(theirs, settings, theirs.give_gradients)
    assert not [key for key, value in model.values().items() if not torch.equal(value, want[key])]
    assert {key.rsplit(".", 1)[1] for key in optimizer.tensors() if "layers.1" in key} == {"momentum_buffer"}
    assert {key.rsplit(".", 1)[1] for key in optimizer.tensors() if "output" in key} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }


def test_a_group_by_pattern_may_hold_both_kinds(make_config):
    groups = [{"pattern": r"layers\.0", "lr": 0.5, "weight_decay": 0.0}]
    settings = make_config(optimizer={"name": "Muon", "lr": 0.02, "param_groups": groups})
    model, start = Small(), Small().values()
    optimizer = build_optimizer(model, settings)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
    Schedule.of(settings).apply(optimizer, settings.training.steps // 2)
    model.give_gradients(1)
    optimizer.begin(1)
    optimizer.step()
    moved = {name: (value - start[name]).abs().mean().item() for name, value in model.values().items()}
    assert rates.keys() == moved.keys()
    assert moved["layers.0.weight"] > 10 * moved["layers.1.weight"] > 0
    assert moved["layers.0.bias"] > 10 * moved["output.weight"] > 0


@pytest.mark.parametrize("shape", [(8, 40), (40, 8)])
def test_directions_are_nearly_orthogonal(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalised(matrix.bfloat16()).float())
    assert values.min() > 0.6 and values.max() < 1.25


def test_work_is_dealt_by_its_cost():
    costs = [8.0, 1, 1, 1, 1, 4, 4]
    owner = deal(costs, 3)
    load = [sum(c for c, o in zip(costs, owner, strict=True) if o == rank) for rank in range(3)]
    assert load == [8, 6, 6]
    assert deal([], 4) == [] and deal([1.0], 1) == [0]


LAYOUTS = {
    "shard 2": (2, {}),
    "tensor 2": (2, {"tensor_parallel_degree": 2}),
    "pipeline 2": (2, {"pipeline_parallel_degree": 2}),
    "shard 2 × tensor 2": (4, {"tensor_parallel_degree": 2}),
    "replicate 2 × shard 2": (4, {"data_parallel_replicate_degree": 2}),
    "pipeline 2 × shard 2": (4, {"pipeline_parallel_degree": 2}),
}
SETTINGS = {"name": "Muon", "lr": 1e-3}


@functools.cache
def yardstick() -> dict[str, torch.Tensor]:
    settings = Config.model_validate(parity_config(optimizer=SETTINGS))
    with torch.device("meta"):
        model = Decoder(decoder_spec(settings), seq_len=24)
    materialise(model, "cpu", initial_values(model, 0))

    def give_gradients(step: int) -> None:
        for name, p in model.named_parameters():
            p.grad = updates.gradient(name, step, p)

    return plain(model, settings, give_gradients)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_torch(pool, layout):
    """To the bit, given the same gradients: no order of additions is in it that a layout could change."""
    world, parallelism = LAYOUTS[layout]
    config = parity_config(optimizer=SETTINGS, parallelism=parallelism)
    found: dict[str, torch.Tensor] = {}
    owned = []
    for result in pool.run("tests.optim.updates:muon_updated", world=world, config=config, last=STEPS):
        owned.append(result["owned"])
        for name, value in result["trained"].items():
            assert torch.equal(found.setdefault(name, value), value), f"{name} differs between ranks"
    want = yardstick()
    assert not [name for name, value in want.items() if not torch.equal(found[name], value)]
    matrices = sum(is_matrix(name, value) for name, value in want.items())
    assert sum(owned) == matrices * STEPS and min(owned) > 0, "each matrix is orthogonalised once"


@pytest.mark.parametrize("layout", ["shard 2 × tensor 2", "pipeline 2"])
def test_training_equals_torch(pool, layout):
    """With gradients that layouts add up in their own order.

    A direction comes of five iterations in bfloat16, which turn the last bit of a gradient into some 256ths of it:
    matrices end within 4% of how far they moved. (That the update of equal gradients is bit-equal is tested above.)
    """
    world, parallelism = LAYOUTS[layout]
    config = parity_config(optimizer=SETTINGS, parallelism=parallelism, training={"max_norm": 0.0})
    found: dict[str, torch.Tensor] = {}
    for result in pool.run("tests.parity.jobs:train", world=world, config=config, steps=STEPS, masks=MASKS):
        found |= result["weights"]
    settings = Config.model_validate(config)
    with torch.device("meta"):
        model = Decoder(decoder_spec(settings), seq_len=24, kernel="math", loss="logits")
    materialise(model, "cpu", initial_values(model, 0))
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def give_gradients(step: int) -> None:
        model.zero_grad()
        batch = rows(step, settings, MASKS)
        logits = model.logits(model(batch.tokens, batch.positions, batch.offsets))
        F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE).backward()

    for name, value in plain(model, settings, give_gradients).items():
        # AdamW's own bound: see tests/parity/test_layouts.py
        bound = 4e-2 * (value - start[name]).norm() if is_matrix(name, value) else 1e-4 * value.norm()
        assert (found[name] - value).norm() <= bound, name
