"""Every data-parallel layout against one plain process: fp32, bounds 1e-5."""

import functools

import pytest
import torch

from tests.parity import jobs
from tests.parity.layouts import STEPS, config, tied


@functools.cache
def _yardstick(masks: str, is_tied: bool, optimizer: str):
    settings = config(optimizer={"name": optimizer})
    return jobs.plain(tied(settings) if is_tied else settings, STEPS, masks)


def close(got, want, bound, what):
    for name, value in want.items():
        assert (got[name] - value).norm() <= bound * max(value.norm(), 1e-12), f"{what} of {name}"


LAYOUTS = {
    "one process": (1, {}),
    "one process, accumulation 1": (1, {"training": {"local_batch_size": 8}}),
    "shard 4": (4, {"parallelism": {"data_parallel_shard_degree": 4}}),
    "replicate 2 × shard 2": (
        4,
        {"parallelism": {"data_parallel_replicate_degree": 2}, "training": {"local_batch_size": 1}},
    ),
    "shard 2, never resharded": (2, {"parallelism": {"fsdp_reshard_after_forward": "never"}}),
    "shard 2, full logits": (2, {"loss": {"implementation": "logits"}}),
    "shard 2, full checkpointing": (2, {"activation_checkpoint": {"mode": "full"}}),
    "shard 2, every 2nd checkpointed": (2, {"activation_checkpoint": {"mode": "selective"}}),
    "shard 2, checkpointing by operator": (
        2,
        {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}},
    ),
    "shard 2, compiled, checkpointing by operator": (
        2,
        {
            "compile": {"enable": True, "backend": "aot_eager"},
            "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"},
        },
    ),
}


# The list of all layouts has these axes, too, for a tied head and SGD.
SLOW = ("shard 4", "replicate 2 × shard 2", "shard 2, compiled, checkpointing by operator")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LAYOUTS]
)
def test_equals_one_plain_process(pool, layout):
    world, sections = LAYOUTS[layout]
    results = pool.run("tests.parity.jobs:train", world=world, config=config(**sections), steps=STEPS, masks="uneven")
    want = _yardstick("uneven", False, "AdamW")
    for result in results:
        assert result["losses"] == pytest.approx(want["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(want["norms"], rel=1e-5)
    close(results[0]["gradients"], want["gradients"], 1e-5, "gradient")
    # Summation order alone moves AdamW's weights this far at lr 1e-3.
    close(results[0]["weights"], want["weights"], 1e-4, "weight")


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_tied_head(pool, world):
    results = pool.run(
        "tests.parity.jobs:train",
        world=world,
        config=tied(config(optimizer={"name": "SGD"}, training={"local_batch_size": 1})),
        steps=STEPS,
        masks="uneven",
    )
    want = _yardstick("uneven", True, "SGD")
    assert results[0]["losses"] == pytest.approx(want["losses"], rel=1e-5)
    close(results[0]["gradients"], want["gradients"], 1e-5, "gradient")
    close(results[0]["weights"], want["weights"], 1e-5, "weight")
    assert "output.weight" not in results[0]["weights"], "one parameter under one name"


def test_every_layout_starts_from_the_bit_equal_model(pool):
    """Also replicas stay bit-equal to each other, buffers are the same on every rank, and the seed matters."""
    starts = {}
    for layout in ("one process", "shard 4", "replicate 2 × shard 2"):
        world, sections = LAYOUTS[layout]
        results = pool.run("tests.parity.jobs:train", world=world, config=config(**sections), steps=3)
        starts[layout] = results[0]
        for other in results[1:]:
            for part in ("initial", "weights", "buffers"):
                assert all(torch.equal(results[0][part][n], other[part][n]) for n in results[0][part]), part
    first = starts.pop("one process")
    for result in starts.values():
        assert all(torch.equal(first["initial"][n], result["initial"][n]) for n in first["initial"])
        assert all(torch.equal(first["buffers"][n], result["buffers"][n]) for n in first["buffers"])


def test_bf16_over_fp32_masters(pool):
    """bf16 compute: gradients stay float32, and are those of fp32 to bf16's rounding."""
    settings = config(training={"mixed_precision_param": "bfloat16"}, optimizer={"name": "SGD"})
    want = _yardstick("uneven", False, "SGD")
    for world in (1, 2):
        result = pool.run("tests.parity.jobs:train", world=world, config=settings, steps=STEPS, masks="uneven")[0]
        assert {t.dtype for t in (*result["gradients"].values(), *result["weights"].values())} == {torch.float32}
        assert result["losses"] == pytest.approx(want["losses"], rel=2e-3)
        close(result["gradients"], want["gradients"], 4e-2, "gradient")


def test_clipping_is_once_a_step_by_the_global_norm(pool):
    settings = config(training={"max_norm": 0.1}, optimizer={"name": "SGD", "lr": 1.0})
    want = jobs.plain(settings, STEPS)
    for world in (1, 4):
        layout = {**settings, "training": {**settings["training"], "local_batch_size": 1}}
        result = pool.run("tests.parity.jobs:train", world=world, config=layout, steps=STEPS)[0]
        assert result["norms"] == pytest.approx(want["norms"], rel=1e-5)
        close(result["weights"], want["weights"], 1e-5, "weight")


@pytest.mark.parametrize("world", [1, 2, 4])
def test_first_loss_is_ln_vocabulary(pool, world):
    result = pool.run("tests.parity.jobs:train", world=world, config=config(), steps=1)[0]
    assert result["losses"][0] == pytest.approx(torch.tensor(323.0).log().item(), rel=0.05)
    assert result["trained_tokens"] == jobs.ROWS * 24


@pytest.mark.parametrize(
    ("world", "sections", "expected"),
    [
        (1, {}, False),
        (1, {"training": {"mixed_precision_param": "bfloat16"}}, True),
        (1, {"training": {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}}, False),
        (2, {}, True),
    ],
)
def test_a_lone_process_in_one_type_has_nothing_to_gather(pool, world, sections, expected):
    answers = pool.run("tests.parity.jobs:is_sharded", world=world, config=config(**sections))
    assert answers == [expected] * world
