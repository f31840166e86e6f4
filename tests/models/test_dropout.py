"""Dropout by counter: its statistics, and the same masks in every layout and every recomputation."""

import itertools

import pytest
import torch

from tests.parity.layouts import BY_OPERATOR, COMPILED, FULL, RING, config
from titanlike.models.dropout import Dropout, layer_keys, token_keys

P = 0.1
EVERY_LAYER = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "1"}}


def masks(p=P, seed=0, step=1, layer=0, place=0):
    keys = layer_keys(token_keys(torch.arange(16), 64, seed, step), layer)
    return Dropout(p)(torch.ones(16, 64, 128), keys, place)


def test_a_share_is_dropped_and_the_rest_scaled():
    for p in (0.1, 0.5):
        out = masks(p)
        dropped = (out == 0).double()
        spread = (p * (1 - p) / out.numel()) ** 0.5
        assert abs(dropped.mean().item() - p) < 5 * spread
        assert torch.equal(out[out != 0], torch.full_like(out[out != 0], 1 / (1 - p)))
        for axes in ((0, 1), (0, 2), (1, 2)):  # no token, row or channel is treated otherwise
            shares = dropped.mean(axes)
            assert (shares - p).abs().max() < 6 * (p * (1 - p) * len(shares) / out.numel()) ** 0.5


def test_masks_differ_by_seed_step_layer_and_place():
    """Two of them agree as often as independent ones do."""
    found = [masks(0.5), masks(0.5, seed=1), masks(0.5, step=2), masks(0.5, layer=1), masks(0.5, place=1)]
    for one, other in itertools.combinations(found, 2):
        agree = ((one == 0) == (other == 0)).double().mean().item()
        assert abs(agree - 0.5) < 5 * (0.25 / one.numel()) ** 0.5


def test_nothing_is_dropped_in_evaluation():
    x = torch.randn(2, 3, 8)
    keys = token_keys(torch.arange(2), 3, 0, 1)
    assert torch.equal(Dropout(0.5).eval()(x, keys, 0), x)
    assert torch.equal(Dropout(0.5)(x, None, 0), x)


def settings(parallelism=None, **sections):
    made = config(
        model={"dropout": P},
        parallelism={"data_parallel_shard_degree": 1, **(parallelism or {})},
        **sections,
    )
    data = made["parallelism"]["data_parallel_shard_degree"]
    made["training"]["local_batch_size"] = 4 // data
    return made


def run(pool, world=1, steps=5, **given):
    ranks = pool.run("tests.parity.jobs:train", world=world, config=settings(**given), steps=steps, masks="uneven")
    together = {name: grad for rank in ranks for name, grad in rank["gradients"].items()}
    return {**ranks[0], "gradients": together}


@pytest.mark.parametrize(
    ("world", "parallelism"),
    [
        (2, {"data_parallel_shard_degree": 2}),
        (2, {"tensor_parallel_degree": 2}),
        (2, {"tensor_parallel_degree": 2, "enable_sequence_parallel": False}),
        (2, {"context_parallel_degree": 2, **RING}),
        (2, {"pipeline_parallel_degree": 2}),
        pytest.param(*(4, {"context_parallel_degree": 2, "tensor_parallel_degree": 2, **RING}), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_layout_drops_the_same(pool, world, parallelism):
    want, got = run(pool), run(pool, world, parallelism=parallelism)
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
    assert got["norms"] == pytest.approx(want["norms"], rel=1e-5)
    for name, grad in want["gradients"].items():
        assert (got["gradients"][name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_it_drops(pool):
    want = run(pool)
    given = settings()
    given["model"]["overrides"]["dropout"] = 0.0
    (without,) = pool.run("tests.parity.jobs:train", world=1, config=given, steps=5, masks="uneven")
    assert want["losses"][0] != pytest.approx(without["losses"][0], rel=1e-5)


@pytest.mark.parametrize("recomputed", [FULL, BY_OPERATOR, EVERY_LAYER], ids=["full", "by operator", "every layer"])
def test_recomputation_drops_the_same(pool, recomputed):
    """Bit-equal: losses of 5 steps, the first gradients, and the state of torch's own generator afterwards."""
    want, got = run(pool), run(pool, **recomputed)
    assert got["losses"] == want["losses"]
    assert all(torch.equal(got["gradients"][name], grad) for name, grad in want["gradients"].items())
    assert torch.equal(got["generator"], want["generator"])


def test_compiled_blocks_drop_the_same_in_one_graph(pool):
    want, got = run(pool, steps=2), run(pool, steps=2, **COMPILED)
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-6)
    assert got["graphs"] == 1
