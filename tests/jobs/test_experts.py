"""Runs of a mixture of experts: stopped and started again, and even routing by debug.moe_force_load_balance."""

from __future__ import annotations

import pytest
import torch

from tests.jobs.hops import together
from tests.jobs.jobs import consumed, curve, lines
from tests.jobs.layouts import layout, world_of

RUN = "tests.jobs.jobs:run"
OVERRIDES = {
    "dim": 32,
    "n_layers": 3,
    "n_heads": 4,
    "ffn_dim": 48,
    "experts": {"n_experts": 8, "top_k": 2, "ffn_dim": 16, "n_shared": 1, "bias_rate": 0.01, "balance_loss": 0.01},
}
MODEL = {"name": "deepseek_v3", "flavor": "debugmodel", "overrides": OVERRIDES}
LAYOUTS = {
    "one process": layout(),
    "shard 2": layout(shard=2, ep=2),
    "tensor 2": layout(tp=2, ep=2),
    "pipeline 2 and shard 2": layout(pp=2, shard=2, ep=2),
}


@pytest.fixture
def mixture(tiny):
    """mixture(folder, section={key: value}) → the config of a short run."""

    def make(folder, **sections):
        return {**tiny(folder, training={"steps": 6}, **sections), "model": MODEL}

    return make


@pytest.mark.parametrize(
    "where", [pytest.param(name, marks=[] if name == "shard 2" else pytest.mark.slow) for name in LAYOUTS]
)
def test_stopped_and_started_again_is_bit_equal(pool, mixture, tmp_path, where):
    """Weights, moments and the biases, which choose other experts as they move."""
    parallelism = LAYOUTS[where]
    world = world_of(parallelism)

    def go(job, folder, **options):
        config = mixture(tmp_path / folder, parallelism=parallelism)
        return pool.run(job, world=world, group=False, config=config, **options)

    whole = together(go("tests.jobs.hops:trained", "whole"))
    assert set(go(RUN, "parts", stop_at=3)) == {"stopped"}
    again = together(go("tests.jobs.hops:trained", "parts"))
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert consumed(tmp_path / "parts") == consumed(tmp_path / "whole")
    assert again.keys() == whole.keys()
    assert not [name for name in whole if not torch.equal(again[name], whole[name])]
    biases = {name: tensor for name, tensor in whole.items() if name.endswith("expert_bias")}
    assert biases.keys() == {"layers.1.moe.expert_bias", "layers.2.moe.expert_bias"}
    assert all(bias.abs().max() > 0 for bias in biases.values())


def test_a_run_whose_experts_are_chosen_in_turn(pool, mixture, tmp_path):
    for folder, debug in (("turn", {"moe_force_load_balance": True}), ("free", {})):
        config = mixture(tmp_path / folder, debug=debug, parallelism=layout(shard=2, ep=2))
        pool.run(RUN, world=2, group=False, config=config)
    even, free = (lines(tmp_path / folder / "metrics.jsonl") for folder in ("turn", "free"))
    assert all(row["expert_load_max"] == row["expert_load_min"] == 1.0 for row in even)
    assert all(row["expert_load_max"] > 1.1 for row in free)
