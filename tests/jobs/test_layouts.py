"""Whole runs at every layout report the same: loss, norm, counts, validation, data; on the console, too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet
import pytest

import titanlike
from tests.jobs.conftest import TINY
from tests.jobs.jobs import consumed, curve, lines
from tests.jobs.layouts import layout, world_of

BOOKS = Path(titanlike.__file__).parent / "assets" / "books.parquet"
STEPS, SEQ_LEN = 4, 128
RUN, SHOWN = "tests.jobs.jobs:run", "tests.jobs.layouts:shown"
PP_TP = layout(pp=2, tp=2)
LAYOUTS = {
    "shard 2": layout(shard=2),
    "tp 2": layout(tp=2),
    "pp 2": layout(pp=2),
    "cp 2": layout(cp=2),
    "pp 2 x tp 2": PP_TP,
    "tp 2 x cp 2": layout(tp=2, cp=2),
    "a pipeline in V": layout("ZBVZeroBubble", pp=2),
}
SLOW = {
    "pp 2 x cp 2 x tp 2": layout(pp=2, cp=2, tp=2),
    "pp 2 x shard 2 x cp 2 x tp 2": layout(pp=2, shard=2, cp=2, tp=2),
    "replicate 2 x cp 2 x tp 2": layout(replicate=2, cp=2, tp=2),
    "interleaved": layout("Interleaved1F1B", pp=2, shard=2, tp=2),
    "both ways": layout("DualPipeV", pp=2, cp=2),
    "tp 4": layout(tp=4),
    "cp 4": layout(cp=4),
}


@pytest.fixture(scope="module")
def settings(tiny, tmp_path_factory):
    """settings(folder, parallelism, section={key: value}) → a config on paragraphs of books, some of them held out.

    Rows hold several paragraphs, and long ones are split over rows; validation has rows of its own length. Without a
    data axis, microbatches accumulate.
    """
    books = pyarrow.parquet.read_table(BOOKS, columns=["text"])["text"].to_pylist()[:15]
    paragraphs = [part for book in books for part in book.split("\n\n") if part.strip()]
    path = tmp_path_factory.mktemp("text") / "paragraphs.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs))

    def settings(folder, parallelism, **sections):
        given = {
            "data": {"path": [str(path)], "validation_fraction": 0.02},
            "validation": {"enable": True, "freq": 2, "local_batch_size": 3, "seq_len": 56},
            "training": {"seq_len": SEQ_LEN, "local_batch_size": 4, "steps": STEPS, "max_norm": 0.1},
            "lr_scheduler": {"total_steps": 12},
            "metrics": {"log_freq": 1, "enable_tensorboard": True, "disable_color_printing": True},
        }
        for name, values in sections.items():
            given[name] = {**given.get(name, {}), **values}
        return tiny(folder, parallelism=parallelism, **given)

    return settings


@pytest.fixture(scope="module")
def run_at(pool, settings, tmp_path_factory):
    """run_at(parallelism) → a finished run's folder, and what its first rank printed. Each is run once."""
    done = {}

    def run_at(parallelism, **sections):
        key = str((parallelism, sections))
        if key not in done:
            folder = tmp_path_factory.mktemp("run")
            config = settings(folder, parallelism, **sections)
            ranks = pool.run(SHOWN, world=world_of(parallelism), group=False, timeout=500, config=config)
            assert not any(ranks[1:]), "one rank speaks for all"
            done[key] = folder, ranks[0]
        return done[key]

    return run_at


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_layout_reports_the_same(run_at, name):
    folder, console = run_at((LAYOUTS | SLOW)[name])
    whole, _ = run_at({})
    print(console)
    assert_same_rows(folder, whole)
    assert lines(folder / "metrics.jsonl")[-1]["tokens"] == STEPS * 8 * SEQ_LEN, "each token of each row once"
    assert consumed(folder) == consumed(whole)
    assert_shown(console, folder)


def assert_same_rows(folder, whole):
    rows, want = (lines(one / "metrics.jsonl") for one in (folder, whole))
    assert [row["step"] for row in rows] == [row["step"] for row in want]
    for ours, theirs in zip(rows, want, strict=True):
        for key in ("tokens", "trained_tokens", "learning_rate", "epoch"):
            assert ours[key] == theirs[key], (key, ours["step"])
        for key in ("loss", "grad_norm", "validation_loss"):
            assert (key in ours) == (key in theirs)
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-5), (key, ours["step"])


def assert_shown(console, folder):
    """Console and TensorBoard have the loss of metrics.jsonl at each step, and no stand-in for one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = lines(folder / "metrics.jsonl")
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    (tag,) = (tag for tag in board.Tags()["scalars"] if tag.split("/")[-1] == "loss")
    points = {point.step: point.value for point in board.Scalars(tag)}
    assert points == pytest.approx({row["step"]: row["loss"] for row in rows}, rel=1e-6)
    printed = re.findall(r"step (\d+)/\d+  loss (\S+)", console)
    assert printed == [(str(row["step"]), f"{row['loss']:.4f}") for row in rows]
    assert not re.search(r"nan|(?<![\w.])-\d", console), console


# Lengths that tensor ranks can't share evenly, documents that end in the middle of a context rank's share, layers that
# don't divide by stages, microbatches of three rows.
UNEVEN = {
    "pp 2 x tp 2": (
        layout(pp=2, tp=2) | {"pipeline_parallel_microbatch_size": 3},
        {"layers": 5, "seq_len": 33, "local": 6, "batch": 12},
    ),
    "pp 4": (layout(pp=4), {"layers": 3, "seq_len": 31, "local": 4, "batch": 8}),
    "interleaved, cp 2": (
        layout("Interleaved1F1B", pp=2, cp=2),
        {"layers": 7, "seq_len": 12, "local": 4, "batch": 8},
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", UNEVEN)
def test_what_does_not_divide_counts_in_full(run_at, name):
    parallelism, sizes = UNEVEN[name]
    sections = {
        "model": {"overrides": {**TINY["model"]["overrides"], "n_layers": sizes["layers"]}},
        "validation": {"enable": False},
        "training": {
            "seq_len": sizes["seq_len"],
            "local_batch_size": sizes["local"],
            "global_batch_size": sizes["batch"],
            "steps": 2,
        },
    }
    (folder, console), (whole, _) = (run_at(one, **sections) for one in (parallelism, {}))
    assert_same_rows(folder, whole)
    assert lines(folder / "metrics.jsonl")[-1]["tokens"] == 2 * sizes["batch"] * sizes["seq_len"]
    assert_shown(console, folder)


@pytest.mark.timeout(600)
def test_stopped_and_gone_on_with_at_other_layouts(run_at, pool, settings, tmp_path):
    stops = [(PP_TP, 1), (layout(shard=2, cp=2), 3), ({}, None)]
    for parallelism, stop in stops:
        world = world_of(parallelism)
        config = settings(tmp_path, parallelism)
        outcomes = pool.run(RUN, world=world, group=False, config=config, stop_at=stop, stop_rank=world - 1)
        assert outcomes == ["stopped" if stop else "done"] * world
    whole, _ = run_at({})
    assert_same_rows(tmp_path, whole)
    assert consumed(tmp_path) == consumed(whole)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("async_mode", ["disabled", pytest.param("async", marks=pytest.mark.slow)])
def test_stopped_and_gone_on_with_at_the_same_layout_is_bit_equal(run_at, pool, settings, tmp_path, async_mode):
    saves = {"async_mode": async_mode, "interval": 1}
    for stop in (2, None):
        config = settings(tmp_path, PP_TP, checkpoint=saves)
        pool.run(RUN, world=4, group=False, config=config, stop_at=stop, stop_rank=2)
    whole, _ = run_at(PP_TP)
    assert curve(tmp_path) == curve(whole)
    assert consumed(tmp_path) == consumed(whole)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "parallelism",
    [
        layout(pp=2),
        pytest.param(PP_TP, marks=pytest.mark.slow),
        pytest.param(layout("InterleavedZeroBubble", pp=2, cp=2), marks=pytest.mark.slow),
    ],
    ids=["pp 2", "pp 2 x tp 2", "pp 2 x cp 2"],
)
def test_the_last_step_of_data_that_ends(pool, tiny, tmp_path, parallelism):
    """A step that rows are missing of, whole microbatches too: nothing is trained on what fills it up."""
    for folder, axes in (("run", parallelism), ("whole", {})):
        config = tiny(
            tmp_path / folder,
            parallelism=axes,
            data={"epochs": 1},
            training={"steps": 1000, "global_batch_size": 64, "local_batch_size": 4},
        )
        world = world_of(axes)
        assert pool.run(RUN, world=world, group=False, config=config) == ["data_ended"] * world
    assert_same_rows(tmp_path / "run", tmp_path / "whole")
    assert consumed(tmp_path / "run") == list(range(175))
