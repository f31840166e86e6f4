"""Models other than Llama 3 in layouts against one plain process; the bounds are those of `against_plain`."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from tests.parity.against_plain import of_variant, run, yardstick
from tests.parity.families import MIXTURES, QUICK, SLOW, UPDATED_EARLY, Case
from tests.parity.layouts import HARD, PLAIN, STEPS, Variant


def biases(result: dict) -> dict[str, torch.Tensor]:
    return {name: value for name, value in result["buffers"].items() if name.endswith("expert_bias")}


def check(pool, case: Case, folder, *variants: Variant) -> None:
    config = case.config(folder)
    ranks = run(pool, case.layout.world, config, variants)
    for i, variant in enumerate(variants):
        want = biases(yardstick(of_variant(config, variant), variant))
        seen = set()
        for result in (results[i] for results in ranks):
            seen |= biases(result).keys()
            assert all(torch.equal(value, want[name]) for name, value in biases(result).items())
        assert seen == want.keys() and bool(want) == (case.model == "deepseek")
        assert all(value.abs().max() > 0 for value in want.values())


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_equals_one_plain_process(pool, tmp_path, case):
    check(pool, case, tmp_path, HARD)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_larger_layouts_equal_one_plain_process(pool, tmp_path, case):
    # A bias that begins at zero is a few of AdamW's steps and no more: where a gradient is near zero, its order of
    # adding up decides on the sign of a step.
    plain = PLAIN if case.model in MIXTURES else dataclasses.replace(PLAIN, optimizer="SGD", weights=1e-5)
    check(pool, case, tmp_path, HARD, plain)


@pytest.mark.parametrize("case", UPDATED_EARLY, ids=str)
def test_updated_in_backward_is_the_same(pool, tmp_path, case):
    """Without clipping, that an update waits for; the gradients are gone when one could look."""
    settings = of_variant(case.config(tmp_path), PLAIN)
    late = {**settings, "optimizer": {**settings["optimizer"], "in_backward": False}}
    runs = [{"config": one, "masks": "uneven"} for one in (settings, late)]
    for early, other in pool.run("tests.parity.jobs:train_each", world=2, runs=runs, steps=STEPS):
        assert early["losses"] == other["losses"]
        assert all(torch.equal(value, other["weights"][name]) for name, value in early["weights"].items())


@pytest.mark.parametrize(
    ("model", "loss"), [("qwen3", "balance_loss"), ("qwen3", "z_loss"), ("deepseek", "balance_loss")]
)
def test_the_sides_losses_count(tmp_path, model, loss):
    """The yardstick has them in its gradients, else the layouts' would not be seen."""
    config = Case(model, QUICK[0].layout).config(tmp_path)
    without = copy.deepcopy(config)
    without["model"]["overrides"]["experts"][loss] = 0.0
    some, none = (yardstick(of_variant(one, HARD), HARD)["gradients"] for one in (config, without))
    name = "layers.1.moe.router.gate.weight"
    assert (some[name] - none[name]).norm() > 1e-3 * some[name].norm()
