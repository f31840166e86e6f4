"""What waits for the backward: how much of it, what is computed again, and that the gradients stay the same."""

import pytest
import torch

from titanlike.config import load_config
from titanlike.config.sections.memory import ActivationCheckpoint
from titanlike.converters.activation_checkpoint import apply_activation_checkpointing
from titanlike.errors import ConfigError
from titanlike.models.decoder import Decoder
from titanlike.models.spec import decoder_spec

COMPILED = {"enable": True, "components": ["model"], "backend": "aot_eager"}
BY_OPERATOR = {"mode": "selective", "selective_ac_option": "op"}
FORCED = "per_op_sac_force_recompute_mm_shapes_by_fqns"


def budget(share):
    return {"compile": COMPILED, "activation_checkpoint": {"mode": "memory_budget", "memory_budget": share}}


def equal(got, want, bound=1e-5):
    assert got["loss"] == pytest.approx(want["loss"], rel=bound)
    for name, value in want["gradients"].items():
        assert (got["gradients"][name] - value).norm() <= bound * value.norm(), name


def test_a_budget_keeps_less_and_recomputes_attention_last(pool):
    # Long enough that attention costs more than the products for each byte that it keeps.
    runs = [{**run, "training": {"seq_len": 128}} for run in ({}, budget(1.0), budget(0.5), budget(0.0))]
    (results,) = pool.run("tests.converters.jobs:kept", world=1, runs=runs)
    eager, everything, half, nothing = results
    for result in results:
        equal(result, eager)
    assert nothing["bytes"] < half["bytes"] < everything["bytes"] <= eager["bytes"]
    # Two blocks: to the compiler our operator would be free, and the first thing to be computed again.
    assert half["ran"].get("document_attention", 0) == 0 and half["ran"]["mm"] > everything["ran"]["mm"]
    assert nothing["ran"]["document_attention"] == 2


def test_a_budget_over_tensor_ranks(pool):
    runs = [
        {"parallelism": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1}, **extra}
        for extra in ({}, budget(0.3))
    ]
    for plain, kept in pool.run("tests.converters.jobs:kept", world=2, runs=runs):
        equal(kept, plain)
        assert kept["bytes"] < plain["bytes"]


def test_bytes_by_mode_and_forced_shapes(pool):
    forced = {**BY_OPERATOR, FORCED: ["feed_forward.w2"]}
    runs = [{}, *({"activation_checkpoint": section} for section in ({"mode": "full"}, BY_OPERATOR, forced))]
    runs.append({"activation_checkpoint": forced, "compile": COMPILED})
    (results,) = pool.run("tests.converters.jobs:kept", world=1, runs=runs)
    none, full, selective, without, compiled = results
    for result in results:
        equal(result, none)
    # Two blocks multiply by wq, wk, wv, wo, w1, w3, w2; by operator they keep every other product, the last one too.
    assert full["ran"]["mm"] == none["ran"]["mm"] + 14
    assert selective["ran"]["mm"] == none["ran"]["mm"] + 6
    assert without["ran"]["mm"] == none["ran"]["mm"] + 8, "the product with w2 too"
    assert compiled["graphs"] == 1, "the blocks share a graph"
    assert full["bytes"] < compiled["bytes"] < none["bytes"]


def test_forced_shapes_name_layers(make_config):
    def apply(*parts):
        config = make_config(activation_checkpoint={**BY_OPERATOR, FORCED: list(parts)})
        with torch.device("meta"):
            apply_activation_checkpointing(Decoder(decoder_spec(config)), config)

    apply(*ActivationCheckpoint().per_op_sac_force_recompute_mm_shapes_by_fqns)
    with pytest.raises(ConfigError, match=rf"{FORCED}.*'feedforward'"):
        apply("feed_forward.w1", "feedforward")


def test_the_picture_needs_its_mode():
    with pytest.raises(ConfigError, match=r"visualize_memory_budget_pareto.*memory_budget"):
        load_config(["debug_model", "--activation_checkpoint.visualize_memory_budget_pareto"])


def test_offloaded_activations_come_back_in_time(pool):
    """Copies that aren't waited for are NaN. Each piece of memory travels once; the head's stays."""
    runs = [{}, {"activation_checkpoint": {"mode": "full"}}, {"compile": COMPILED}]
    (want,) = pool.run("tests.converters.jobs:kept", world=1, runs=[{}])
    (found,) = pool.run("tests.converters.jobs:offloaded", world=1, runs=runs, smallest=100)
    for result in found:
        for name, value in want[0]["gradients"].items():
            assert (result["gradients"][name] - value).norm() <= 1e-5 * value.norm(), name
        assert result["fetched"] == len(result["away"]) <= result["waited"]
    plain, full, _ = found
    # What enters the two blocks, and what the last norm keeps.
    assert full["away"] == [(2, 24, 32)] * 4
    assert len(plain["away"]) > len(full["away"])
    assert all(61 not in shape for shape in plain["away"]), "what the head saves stays"


def test_offloading_needs_an_accelerator():
    from titanlike.parallel.fully_shard import check_device

    for key in ("activation_offload", "enable_cpu_offload"):
        config = load_config(["debug_model", f"--training.{key}"])
        with pytest.raises(ConfigError, match=rf"training\.{key} = true: needs an accelerator"):
            check_device(config, torch.device("cpu"))
