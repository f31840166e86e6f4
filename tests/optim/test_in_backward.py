"""The update inside the backward against the ordinary one, at several layouts; fp32."""

import math

import pytest
import torch

from tests.parity.layouts import config, tied

STEPS = 10
WIDE = {"dim": 256, "n_heads": 4, "n_kv_heads": 4, "head_dim": 64, "ffn_dim": 512}
LAYERS, LAYER = 12, 4 * 256 * 256 + 3 * 256 * 512  # elements
LAYOUTS = {
    "one process": {"data_parallel_shard_degree": 1},
    "shard 2": {"data_parallel_shard_degree": 2},
    "tensor 2": {"data_parallel_shard_degree": 1, "tensor_parallel_degree": 2},
    "context 2": {"data_parallel_shard_degree": 1, "context_parallel_degree": 2},
    "shard 2 x tensor 2": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
}

QUICK = ("one process", "shard 2", "tensor 2")


def settings(layout, *, in_backward, head=tied, max_norm=0.0, **optimizer):
    parallelism = LAYOUTS[layout]
    data = parallelism["data_parallel_shard_degree"]
    return head(
        config(
            parallelism=parallelism,
            training={"max_norm": max_norm, "local_batch_size": 8 // data},
            lr_scheduler={"warmup_steps": 4},
            optimizer={"in_backward": in_backward, **optimizer},
        )
    )


def run(pool, layout, **given):
    parallelism = LAYOUTS[layout]
    world = parallelism["data_parallel_shard_degree"] * parallelism.get("tensor_parallel_degree", 1)
    world *= parallelism.get("context_parallel_degree", 1)
    results = pool.run(
        "tests.parity.jobs:train", world=world, config=settings(layout, **given), steps=STEPS, masks="uneven"
    )
    return results[0]


def assert_equal(got, want, bound=1e-6):
    assert got["losses"] == pytest.approx(want["losses"], rel=bound)
    assert got["norms"] == pytest.approx(want["norms"], rel=bound)
    for name, value in want["weights"].items():
        assert (got["weights"][name] - value).norm() <= bound * value.norm(), name


@pytest.mark.parametrize(
    "layout", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
@pytest.mark.parametrize("head", [tied, pytest.param(lambda s: s, marks=pytest.mark.slow)], ids=["tied", "untied"])
def test_equals_the_ordinary_update(pool, layout, head):
    """With a warm-up schedule and without clipping; the norm is reported all the same."""
    want = run(pool, layout, in_backward=False, head=head)
    assert_equal(run(pool, layout, in_backward=True, head=head), want)


@pytest.mark.parametrize("layout", ["shard 2", pytest.param("tensor 2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("clip", ["parameter", "previous"])
def test_clipping_is_the_same_at_every_layout(pool, layout, clip):
    given = {"in_backward": True, "max_norm": 0.05, "in_backward_clip": clip}
    want = run(pool, "one process", **given)
    assert_equal(run(pool, layout, **given), want, 1e-5)
    free = run(pool, "one process", in_backward=True)
    assert want["losses"][-1] != pytest.approx(free["losses"][-1], rel=1e-5), "it does clip"


def test_each_parameter_by_its_own_norm(pool):
    """SGD at a rate of 1 without decay: the first step moves each weight by its clipped gradient."""
    rate = {"name": "SGD", "lr": 1.0, "weight_decay": 0.0}
    free = settings("one process", in_backward=False, **rate)
    clipped = settings("one process", in_backward=True, max_norm=0.01, in_backward_clip="parameter", **rate)
    for one in (free, clipped):
        one["lr_scheduler"] = {"warmup_steps": 0}
    (want,), (got,) = (pool.run("tests.parity.jobs:train", world=1, config=c, steps=1) for c in (free, clipped))
    for name, grad in want["gradients"].items():
        moved = got["initial"][name] - got["weights"][name]
        factor = min(1.0, 0.01 / (grad.norm().item() + 1e-6))
        torch.testing.assert_close(moved, grad * factor, rtol=1e-3, atol=1e-6)


def test_previous_clips_by_the_step_before(pool):
    """The second step moves as far as the first step's norm lets it."""
    rate = {"name": "SGD", "lr": 1e-3, "weight_decay": 0.0}
    runs = {}
    for clip in ("previous", None):
        one = settings("one process", in_backward=True, max_norm=0.05 if clip else 0.0, in_backward_clip=clip, **rate)
        one["lr_scheduler"] = {"warmup_steps": 0}
        runs[clip] = [pool.run("tests.parity.jobs:train", world=1, config=one, steps=n)[0] for n in (1, 2)]
    clipped, free = runs["previous"], runs[None]
    for name, value in free[0]["weights"].items():
        assert torch.equal(clipped[0]["weights"][name], value), "nothing is known before the first step"
        whole, part = free[1]["weights"][name] - value, clipped[1]["weights"][name] - value
        torch.testing.assert_close(part, whole * 0.05 / clipped[0]["norms"][0], rtol=2e-2, atol=1e-7)


@pytest.mark.parametrize(
    ("parallelism", "training"),
    [
        pytest.param({"data_parallel_shard_degree": 1}, {}, marks=pytest.mark.slow),
        ({"data_parallel_shard_degree": 1}, {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}),
        pytest.param({"data_parallel_shard_degree": 1}, {"mixed_precision_param": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"data_parallel_shard_degree": 2}, {"mixed_precision_param": "bfloat16"}, marks=pytest.mark.slow),
        ({"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 2}, {}),
    ],
    ids=["fp32", "bf16", "mixed", "shard 2", "replicate 2"],
)
def test_gradients_live_for_one_layer(pool, parallelism, training):
    """Of all that a step allocates: what it takes more without is the gradients of all layers, but for a few."""
    world = math.prod(parallelism.values())
    whole = LAYERS * LAYER * (2 if training.get("dtype") else 4) // parallelism["data_parallel_shard_degree"]
    peaks = {}
    for in_backward in (False, True):
        given = config(
            model={**WIDE, "n_layers": LAYERS},
            training={"max_norm": 0.0, "seq_len": 8, "local_batch_size": 1, **training},
            parallelism={**parallelism, "fsdp_reshard_after_forward": "always"},
            optimizer={"in_backward": in_backward, "name": "SGD"},
        )
        peaks[in_backward] = pool.run("tests.optim.jobs:peak_of_a_step", world=world, config=given)[0]
    assert peaks[False] - peaks[True] >= 0.6 * whole, (peaks, whole)
