"""Every pipeline schedule against one plain process: fp32, bounds 1e-5 for losses, norms and each gradient."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.parallel import pipeline_jobs
from tests.parity import jobs
from tests.parity.layouts import config, tied
from tests.parity.test_data_parallel import close
from titanlike.config.checks_parallel import HALVES_SINCE, NEIGHBOURS_SINCE, torch_version

STEPS = 2
JOBS = "tests.parallel.pipeline_jobs"
SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"]
if torch_version() >= HALVES_SINCE:
    SCHEDULES += ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
V = "ZBVZeroBubble" if "ZBVZeroBubble" in SCHEDULES else "LoopedBFS"


def settings(
    degree: int = 1, schedule: str = "1F1B", local: int = 8, *, layers: int = 6, is_tied: bool = False, **sections
):
    """A config; with 6 layers 4 ranks of two stages each have some with an embedding or a head alone."""
    parallelism = {"pipeline_parallel_degree": degree, "pipeline_parallel_schedule": schedule}
    sections["parallelism"] = parallelism | sections.get("parallelism", {})
    sections["training"] = {"local_batch_size": local} | sections.get("training", {})
    sections["optimizer"] = {"name": "SGD"} | sections.get("optimizer", {})
    made = config(model={"n_layers": layers}, **sections)
    return tied(made) if is_tied else made


@functools.cache
def _yardstick(masks: str, is_tied: bool):
    return jobs.plain(settings(is_tied=is_tied), STEPS, masks)


def check(results: list[dict], want: dict, bound: float = 1e-5):
    """Losses and norms on every rank; each parameter on the ranks that hold it."""
    names = set()
    for result in results:
        assert result["losses"] == pytest.approx(want["losses"], rel=bound)
        assert result["norms"] == pytest.approx(want["norms"], rel=bound)
        for part in ("gradients", "weights"):
            close(result[part], {n: want[part][n] for n in result[part]}, bound, part)
        names |= set(result["weights"])
    assert names == set(want["weights"])
    copies = [r["weights"]["tok_embeddings.weight"] for r in results if "tok_embeddings.weight" in r["weights"]]
    assert all(torch.equal(copies[0], other) for other in copies), "copies drift apart"


def run(pool, world: int, runs: dict[str, tuple[dict, str, bool]]):
    results = pool.run(
        f"{JOBS}:train", world=world, runs={n: (c, masks) for n, (c, masks, _) in runs.items()}, steps=STEPS
    )
    for name, (_, masks, is_tied) in runs.items():
        check([result[name] for result in results], _yardstick(masks, is_tied))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("degree", [2, 4])
def test_schedules(pool, degree, schedule):
    """Unequal masks with a microbatch that has nothing to learn, packed documents; two local batches a step."""
    half = 8 if (degree, schedule) == (4, "DualPipeV") else 4
    runs = {"tied head": (settings(degree, schedule, half, is_tied=True), "uneven", True)}
    if degree == 2:
        recomputed = {"activation_checkpoint": {"mode": "full"}}
        runs["own head, recomputed"] = (settings(degree, schedule, half, **recomputed), "uneven", False)
    run(pool, degree, runs)


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("degree", [2, 4])
def test_schedules_with_one_local_batch(pool, degree, schedule, is_tied):
    runs = {masks: (settings(degree, schedule, 8, is_tied=is_tied), masks, is_tied) for masks in ("even", "uneven")}
    run(pool, degree, runs)


SHARDED = {"data_parallel_shard_degree": 2}
COPIED = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}


def test_with_data_parallel(pool):
    runs = {
        "shard 2": (settings(2, V, 4, parallelism=SHARDED), "uneven", False),
        "shard 2, tied": (settings(2, V, 4, is_tied=True, parallelism=SHARDED), "uneven", True),
        "replicate 2, tied": (settings(2, "1F1B", 4, is_tied=True, parallelism=COPIED), "uneven", True),
    }
    run(pool, 4, runs)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_with_data_parallel(pool, schedule):
    runs = {
        f"{parallelism}, {is_tied}": (
            settings(2, schedule, 4, is_tied=is_tied, parallelism=parallelism),
            "uneven",
            is_tied,
        )
        for parallelism in (SHARDED, COPIED)
        for is_tied in (False, True)
    }
    run(pool, 4, runs)


def test_accumulation_does_not_show(pool):
    """1, 2 and 4 local batches a step, microbatches of one row and of two."""
    runs = {
        f"{local} rows in microbatches of {micro}": (
            settings(2, "GPipe", local, parallelism={"pipeline_parallel_microbatch_size": micro}),
            "uneven",
            False,
        )
        for local, micro in ((8, 1), (4, 1), (2, 1), (4, 2), (8, 8))
    }
    run(pool, 2, runs)


def test_splits_of_ones_own(pool):
    """Stages without a layer, and options of sharding, checkpointing and the head."""
    lists = [["tok_embeddings"], ["layers.0"], [f"layers.{n}" for n in range(1, 6)], ["norm", "output"]]
    looped = {"module_fqns_per_model_part": lists}
    compiled = {"enable": True, "backend": "aot_eager", "components": ["loss"]}
    runs = {
        "embedding and head alone": (settings(2, "LoopedBFS", parallelism=looped), "uneven", False),
        "the same, tied, V": (settings(2, V, is_tied=True, parallelism=looped), "even", True),
        "full logits": (settings(2, loss={"implementation": "logits"}), "uneven", False),
        "by operator": (settings(2, activation_checkpoint={"mode": "selective"}), "uneven", False),
        "compiled loss": (settings(2, compile=compiled), "uneven", False),
    }
    run(pool, 2, runs)
    always = {"data_parallel_shard_degree": 2, "fsdp_reshard_after_forward": "always"}
    run(pool, 4, {"resharded": (settings(2, "Interleaved1F1B", 4, parallelism=always), "uneven", False)})


@pytest.mark.parametrize(("layers", "degree", "schedule"), [(5, 2, "1F1B"), (3, 4, "1F1B"), (7, 2, "Interleaved1F1B")])
def test_layers_that_stages_do_not_divide(pool, layers, degree, schedule):
    made = settings(degree, schedule, layers=layers)
    results = pool.run(f"{JOBS}:train", world=degree, runs={"uneven split": (made, "uneven")}, steps=STEPS)
    check([r["uneven split"] for r in results], jobs.plain(settings(layers=layers), STEPS, "uneven"))


def test_a_schedule_from_a_file(pool, tmp_path):
    one_f_one_b, v = tmp_path / "1f1b.csv", tmp_path / "v.csv"
    one_f_one_b.write_text("0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n")
    v.write_text("0F0,0F1,,3F0,3B0,3F1,3B1,,0B0,,0B1\n,1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n")
    names = {"PipelineScheduleSingle": one_f_one_b}
    if torch_version() >= NEIGHBOURS_SINCE:
        names["PipelineScheduleMulti"] = v
    runs = {
        name: (
            settings(2, name, 2, is_tied=True, parallelism={"pipeline_parallel_schedule_csv": str(path)}),
            "uneven",
            True,
        )
        for name, path in names.items()
    }
    run(pool, 2, runs)


def test_clipping_is_by_the_norm_of_all_stages(pool):
    sections = {"training": {"max_norm": 0.1}, "optimizer": {"lr": 1.0}}
    made = {is_tied: settings(2, is_tied=is_tied, **sections) for is_tied in (False, True)}
    runs = {str(t): (c, "even") for t, c in made.items()}
    results = pool.run(f"{JOBS}:train", world=2, runs=runs, steps=STEPS)
    for is_tied, c in made.items():
        want = jobs.plain(c, STEPS)
        assert min(want["norms"]) > 0.2
        for result in (r[str(is_tied)] for r in results):
            assert result["norms"] == pytest.approx(want["norms"], rel=1e-5)
            close(result["weights"], {n: want["weights"][n] for n in result["weights"]}, 1e-5, "weight")


def test_bf16_between_stages(pool):
    bf16 = {"training": {"mixed_precision_param": "bfloat16"}}
    results = pool.run(f"{JOBS}:train", world=2, runs={"bf16": (settings(2, **bf16), "uneven")}, steps=STEPS)
    want = _yardstick("uneven", False)
    for result in (r["bf16"] for r in results):
        assert {t.dtype for t in (*result["gradients"].values(), *result["weights"].values())} == {torch.float32}
        assert result["losses"] == pytest.approx(want["losses"], rel=2e-3)
        close(result["gradients"], {n: want["gradients"][n] for n in result["gradients"]}, 4e-2, "gradient")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_evaluation(pool, world):
    """Other lengths and numbers of rows than training's; it leaves no weight gathered and the next step as it was."""
    shard = {"data_parallel_shard_degree": world // 2, "pipeline_parallel_microbatch_size": 4 // world}
    names = SCHEDULES if world == 2 else ("1F1B", "Interleaved1F1B", V)
    made = {name: settings(2, name, 16 // world, is_tied=name == V, parallelism=shard) for name in names}
    if world == 4:
        made |= {f"{name} over 4": settings(4, name) for name in ("LoopedBFS", V)}
    results = pool.run(f"{JOBS}:evaluate", world=world, configs=made)
    for name, c in made.items():
        want = pipeline_jobs.plain_sums(c)
        for result in results:
            assert result[name]["sums"] == pytest.approx(want, rel=1e-6), name
            assert result[name]["kinds"] == ["DTensor"], name


def test_a_gradient_that_is_missing_and_passes_that_are_not(pool):
    """A schedule that leaves a gradient out is an error; nothing runs only to learn its shape."""
    calls = pool.run(f"{JOBS}:without_a_gradient", world=2, config=settings(2, V))
    assert calls == [[16, 16], [16, 16]]
