"""Whole runs with linear layers in float8."""

import pytest

from tests.jobs.jobs import curve, lines

pytest.importorskip("torchao")
RUN = "tests.jobs.jobs:run"
SCALES = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}


def go(pool, config, world=1, **options):
    return pool.run(RUN, world=world, group=False, config=config, **options)


def float8(config, **options):
    """The same run with float8."""
    model = {**config["model"], "converters": ["quantize.linear.float8"]}
    return {**config, "model": model, "quantize": {"linear": {"float8": options}}}


def test_a_resumed_run_is_bit_equal(pool, tiny, tmp_path):
    """At two ranks, with weights gathered in float8 by scales that a checkpoint doesn't hold."""
    sections = {"training": {"steps": 6, "global_batch_size": 4}}
    assert go(pool, float8(tiny(tmp_path / "whole", **sections), **SCALES), world=2) == ["done"] * 2
    made = float8(tiny(tmp_path / "run", **sections), **SCALES)
    assert go(pool, made, world=2, stop_at=3) == ["stopped"] * 2
    assert go(pool, made, world=2) == ["done"] * 2
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_checkpoints_know_nothing_of_float8(pool, tiny, tmp_path):
    """A run in bf16 goes on in float8 at two ranks, and back in bf16: the same files, a curve without a step."""
    sections = {"training": {"steps": 6, "global_batch_size": 4, "mixed_precision_param": "bfloat16"}}
    high = tiny(tmp_path / "run", **sections)
    assert go(pool, tiny(tmp_path / "whole", **sections)) == ["done"]
    assert go(pool, high, stop_at=2) == ["stopped"]
    assert go(pool, float8(high, **SCALES), world=2, stop_at=4) == ["stopped"] * 2
    assert go(pool, high) == ["done"]
    ours, want = curve(tmp_path / "run"), curve(tmp_path / "whole")
    assert ours[2] == want[2] and ours[3] != want[3]
    for step in want:
        assert ours[step][0] == pytest.approx(want[step][0], rel=5e-3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_curve_of_a_hundred_steps(pool, tiny, tmp_path):
    """Each loss within 2% of bf16's, at one process, over data ranks and over tensor ranks."""
    sizes = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 128}
    layouts = {
        "one": (1, {}, {}),
        "data": (2, {}, SCALES),
        "tensor": (2, {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1}, {}),
    }
    training = {"steps": 100, "mixed_precision_param": "bfloat16", "local_batch_size": 4}

    def made(name, parallelism):
        return tiny(tmp_path / name, training=training, parallelism=parallelism, model={"overrides": sizes})

    go(pool, made("bf16", {}))
    want = curve(tmp_path / "bf16")
    assert want[100][0] < 0.5 * want[1][0], "nothing was learnt"
    for name, (world, parallelism, options) in layouts.items():
        go(pool, float8(made(name, parallelism), **options), world=world)
        ours = curve(tmp_path / name)
        worst = max(abs(ours[step][0] / loss - 1) for step, (loss, _) in want.items())
        print(f"{name}: at most {worst:.2%} off, at the end {lines(tmp_path / name / 'metrics.jsonl')[-1]['loss']}")
        assert worst < 0.02
