"""Float8 against torchao's own layers, and over the axes.

At one process, products and gradients are torchao's to the bit. Models emulate unless the test is of the products: on
a CPU a float8 product builds its kernel anew at each call. Layouts are held against one process with the same
microbatches: over data they are the same products (1e-5 is the order of sums); tensor ranks scale their own part of a
weight and of activations, which moves roundings, so they are held against it to 8 bits' accuracy only.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity import jobs
from tests.parity.layouts import config as tiny
from titanlike.config import Config
from titanlike.errors import ConfigError
from titanlike.models.decoder import Decoder
from titanlike.models.linear import Linear
from titanlike.models.spec import decoder_spec

pytest.importorskip("torchao")

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
STEPS = 3
GATHER = {"enable_fsdp_float8_all_gather": True}
SCALES = {**GATHER, "precompute_float8_dynamic_scale_for_fsdp": True}
COMPILED = {"compile": {"enable": True, "backend": "aot_eager", "components": ["model"]}}
BY_OPERATOR = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}
TENSOR = {"parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1}}


def settings(float8: dict[str, Any] | None = None, **sections: dict[str, Any]) -> dict[str, Any]:
    """A tiny model's config with float8 as asked, emulated unless said otherwise."""
    made = tiny(**{**sections, "training": {"seq_len": 32, **sections.get("training", {})}})
    made["model"] = {**made["model"], "converters": ["quantize.linear.float8"]}
    return {**made, "quantize": {"linear": {"float8": {"emulate": True, **(float8 or {})}}}}


def theirs(recipe: str, emulate: bool, linear: nn.Module) -> nn.Module:
    """What torchao makes of a module's linear layers."""
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    chosen = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    return convert_to_float8_training(linear, config=chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("emulate", [False, True], ids=["products", "emulated"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_is_torchaos_to_the_bit(recipe, emulate, dtype):
    from titanlike.converters.float8 import Float8

    torch.manual_seed(0)
    ours = Linear(64, 96, dtype=dtype)
    want = theirs(recipe, emulate, nn.Sequential(copy.deepcopy(ours)))[0]
    high = copy.deepcopy(ours)
    Float8(Config.model_validate(settings({"recipe_name": recipe, "emulate": emulate}))).convert(ours)
    assert [name for name, _ in ours.named_parameters()] == ["weight", "bias"] and isinstance(ours, Linear)
    x = torch.randn(4, 16, 64, dtype=dtype)
    upstream = torch.randn(4, 16, 96, dtype=dtype)
    results = []
    for layer in (ours, want, high):
        inputs = x.clone().requires_grad_()
        out = layer(inputs)
        out.backward(upstream)
        results.append((out.detach(), inputs.grad, layer.weight.grad, layer.bias.grad))
    for got, expected, exact in zip(*results, strict=True):
        assert got.dtype == dtype and torch.equal(got, expected)
        assert (got - exact).norm() < 0.06 * exact.norm()
    assert not torch.equal(results[0][0], results[2][0]), "nothing was rounded to 8 bits"


def torchaos_model(recipe: str, emulate: bool) -> dict[str, Any]:
    """A plain decoder with torchao's layers, one big batch, full logits."""
    return jobs.plain(settings(), STEPS, change=lambda model: theirs(recipe, emulate, model))


@functools.cache
def high_precision() -> dict[str, Any]:
    return jobs.plain(settings(), STEPS)


def error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The largest relative error of any tensor."""
    assert got.keys() == want.keys()
    return max(((got[name] - value).norm() / value.norm()).item() for name, value in want.items())


def train(pool, world: int, *configs: dict[str, Any]) -> list[dict[str, Any]]:
    """Each config's results on rank 0; all ranks must agree."""
    runs = [{"config": one} for one in configs]
    ranks = pool.run("tests.parity.jobs:train_each", world=world, runs=runs, steps=STEPS, timeout=600)
    for others in ranks[1:]:
        for first, other in zip(ranks[0], others, strict=True):
            assert first["losses"] == other["losses"] and error(other["weights"], first["weights"]) == 0
    return ranks[0]


@pytest.fixture(scope="module")
def alone(pool) -> dict[str, dict[str, Any]]:
    """One process, microbatches of two rows."""
    return dict(zip(RECIPES, train(pool, 1, *(settings({"recipe_name": r}) for r in RECIPES)), strict=True))


@pytest.mark.parametrize("emulate", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["emulated", "products"])
def test_a_model_is_torchaos(pool, emulate):
    """The same big batch, attention in plain maths, full logits: bit-equal losses and gradients."""
    same = {"model": {"attention": "math"}, "loss": {"implementation": "logits"}, "training": {"local_batch_size": 8}}
    made = []
    for recipe in RECIPES:
        one = settings({"recipe_name": recipe, "emulate": emulate}, loss=same["loss"], training=same["training"])
        made.append({**one, "model": {**one["model"], **same["model"]}})
    for recipe, got in zip(RECIPES, train(pool, 1, *made), strict=True):
        want = torchaos_model(recipe, emulate)
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-6)
        assert error(got["gradients"], want["gradients"]) < 1e-6, recipe


@pytest.mark.parametrize("recipe", RECIPES)
def test_float8_is_near_high_precision(alone, recipe):
    want = high_precision()
    assert alone[recipe]["losses"] == pytest.approx(want["losses"], rel=1e-3)
    off = error(alone[recipe]["gradients"], want["gradients"])
    assert 1e-3 < off < 0.15, "a loose bound: 3 bits of mantissa"
    assert {value.dtype for value in alone[recipe]["weights"].values()} == {torch.float32}
    assert alone[recipe]["weights"].keys() == want["weights"].keys()


def test_over_data_ranks(pool, alone):
    """Also with weights gathered in float8, and with scales taken at once after the update: nothing changes."""
    ways = [{"recipe_name": recipe} for recipe in RECIPES] + [GATHER, SCALES]
    for way, got in zip(ways, train(pool, 2, *(settings(way) for way in ways)), strict=True):
        want = alone[way.get("recipe_name", "tensorwise")]
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-5), way
        assert error(got["gradients"], want["gradients"]) < 1e-5, way


def test_over_tensor_ranks(pool, alone):
    ways = [{"recipe_name": recipe} for recipe in RECIPES] + [GATHER, SCALES]
    results = train(pool, 2, *(settings(way, **TENSOR) for way in ways))
    for way, got in zip(ways, results, strict=True):
        want = alone[way.get("recipe_name", "tensorwise")]
        assert got["losses"] == pytest.approx(want["losses"], rel=1e-3), way
        assert error(got["gradients"], want["gradients"]) < 0.15, way
    plain, gathered, at_once = results[0], *results[-2:]
    assert plain["losses"] == gathered["losses"] == at_once["losses"]
    assert error(gathered["weights"], plain["weights"]) == error(at_once["weights"], plain["weights"]) == 0


def test_one_graph_serves_all_blocks(pool, alone):
    ways = [settings(**COMPILED), settings(SCALES, **COMPILED, **BY_OPERATOR)]
    results = train(pool, 2, *ways, settings(**COMPILED, **TENSOR))
    assert [result["graphs"] for result in results] == [1, 1, 1]
    for result in results[:2]:
        assert result["losses"] == pytest.approx(alone["tensorwise"]["losses"], rel=1e-5)
    assert results[2]["losses"] == pytest.approx(alone["tensorwise"]["losses"], rel=1e-3)


@pytest.mark.slow
def test_over_data_and_tensor_ranks(pool, alone):
    """Four ranks, two key/value heads: also with one of them shared by ranks."""
    both = {"parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2}}
    shared = {"parallelism": {"tensor_parallel_degree": 4, "data_parallel_shard_degree": 1}}
    for layout in (both, shared):
        plain, gathered, at_once = train(pool, 4, *(settings(way, **layout) for way in ({}, GATHER, SCALES)))
        for got in (plain, gathered, at_once):
            assert got["losses"] == pytest.approx(alone["tensorwise"]["losses"], rel=1e-3)
        assert gathered["losses"] == at_once["losses"]
        assert error(gathered["weights"], at_once["weights"]) == 0
        if layout is both:  # a weight that ranks share has one scale when it is gathered, else one for each head
            assert error(gathered["weights"], plain["weights"]) == 0


def test_selective_checkpointing_keeps_float8_products(pool):
    """By operator, every other product is recomputed: fewer than all, more than none; gradients stay bit-equal."""
    modes = [{"mode": "none"}, {"mode": "selective", "selective_ac_option": "op"}, {"mode": "full"}]
    configs = [settings({"emulate": False}, activation_checkpoint=mode) for mode in modes]
    (results,) = pool.run("tests.converters.precision_jobs:products", world=1, configs=configs)
    (none, want), (by_operator, some), (full, all_) = results
    layers, blocks = 7, 3
    assert none == 3 * layers * blocks
    assert full - none == layers * blocks
    assert by_operator - none == 3 * blocks
    assert error(some, want) == error(all_, want) == 0


def test_weights_are_seen_and_kept_out_of_their_wrapping(pool):
    """Optimizer and checkpoints get plain tensors; an update goes into the wrapped memory."""
    (seen,) = pool.run(
        "tests.converters.precision_jobs:wrapping", world=1, config=settings({**SCALES, "filter_fqns": ["wq"]})
    )
    first, second = seen["logged"][:2]
    assert first.startswith("float8 (tensorwise, emulated): 18 linear layers: layers.0-2.attention.wk, ")
    assert "by quantize.linear.float8.filter_fqns: layers.0-2.attention.wq" in second
    assert seen["wrapped"] == 18 and seen["plain"] and seen["shared"]
    assert seen["scales"] == pytest.approx(seen["wanted"], rel=1e-6)


def test_shards_of_unequal_parts_are_refused(pool):
    made = settings(GATHER, model={"dim": 80, "ffn_dim": 144}, training={"global_batch_size": 6})
    for found in pool.run("tests.converters.precision_jobs:refusal", world=3, config=made):
        assert "enable_fsdp_float8_all_gather" in found and "layers.0.attention.wk.weight (32 rows)" in found
        assert "w1" not in found, "144 rows are three equal parts"


def test_small_layers_by_torchaos_measurements():
    from titanlike.converters.float8 import Float8

    tensorwise, rowwise = (Float8(Config.model_validate(settings({"recipe_name": r}))) for r in RECIPES[:2])
    assert tensorwise.is_small((4096, 1024)) and not tensorwise.is_small((4096, 4096))
    assert rowwise.is_small((4096, 2048)) and not rowwise.is_small((4096, 14336))


def test_the_head_is_named_like_torchtitans_and_is_no_linear_layer():
    with torch.device("meta"):
        model = Decoder(decoder_spec(Config.model_validate(settings())))
    assert not isinstance(model.output, nn.Linear) and not isinstance(model.tok_embeddings, nn.Linear)


def test_without_torchao_the_extra_is_named(monkeypatch):
    import sys

    from titanlike.converters.low_precision import low_precision

    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("float8", "mx"):
        monkeypatch.delitem(sys.modules, f"titanlike.converters.{name}", raising=False)
        made = settings()
        made["model"]["converters"] = [f"quantize.linear.{name}"]
        with pytest.raises(ConfigError, match=r"titanlike\[lowbit\]"):
            low_precision(Config.model_validate(made), 1)
