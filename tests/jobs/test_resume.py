"""A run that was stopped and started again is the run that was not."""

import pytest

from tests.jobs.jobs import consumed, curve, lines

RUN = "tests.jobs.jobs:run"


def go(pool, config, world=1, **options):
    return pool.run(RUN, world=world, group=False, config=config, **options)


@pytest.fixture(scope="module")
def uninterrupted(pool, request, tmp_path_factory):
    return {}


@pytest.fixture
def whole(pool, tiny, uninterrupted, tmp_path_factory):
    """The uninterrupted run's folder, at one process."""
    if "folder" not in uninterrupted:
        folder = tmp_path_factory.mktemp("whole")
        assert go(pool, tiny(folder)) == ["done"]
        uninterrupted["folder"] = folder
    return uninterrupted["folder"]


def test_same_layout_is_bit_equal(pool, tiny, whole, tmp_path):
    for stop in (3, 4, 9):
        assert go(pool, tiny(tmp_path), stop_at=stop) == ["stopped"]
    assert go(pool, tiny(tmp_path)) == ["done"]
    assert curve(tmp_path) == curve(whole)
    assert consumed(tmp_path) == consumed(whole)
    kinds = [event["kind"] for event in lines(tmp_path / "events.jsonl")]
    assert kinds.count("start") == 1 and kinds.count("restart") == 3 and kinds.count("stop") == 4
    counters = [
        (row["tokens"], row["trained_tokens"], row["learning_rate"], row["epoch"])
        for row in lines(tmp_path / "metrics.jsonl")
    ]
    assert counters == [
        (row["tokens"], row["trained_tokens"], row["learning_rate"], row["epoch"])
        for row in lines(whole / "metrics.jsonl")
    ]


@pytest.mark.parametrize("async_mode", ["async", "async_with_pinned_mem"])
def test_background_saves_each_step_are_bit_equal_too(pool, tiny, whole, tmp_path, async_mode):
    config = tiny(tmp_path, checkpoint={"async_mode": async_mode, "interval": 1, "keep_latest_k": 3})
    for stop in (2, 7):
        assert go(pool, config, stop_at=stop) == ["stopped"]
    assert go(pool, config) == ["done"]
    assert curve(tmp_path) == curve(whole)
    kept = sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == ["step-10", "step-11", "step-12"]


def test_other_layouts_and_workers_read_the_same_list(pool, tiny, whole, tmp_path):
    """1 → 4 → 2 → 3 processes, with other numbers of loader workers; 3 doesn't divide the batch."""
    stops = [(1, 3, 2), (4, 6, 0), (2, 9, 1), (3, None, 0)]
    for world, stop, workers in stops:
        config = tiny(tmp_path, training={"dataloader": {"num_workers": workers}})
        go(pool, config, world=world, stop_at=stop, stop_rank=world - 1)
    assert consumed(tmp_path) == consumed(whole)
    ours, want = curve(tmp_path), curve(whole)
    for step, (loss, norm) in want.items():
        assert ours[step] == pytest.approx((loss, norm), rel=1e-5)
    assert lines(tmp_path / "metrics.jsonl")[-1]["tokens"] == lines(whole / "metrics.jsonl")[-1]["tokens"]


def test_a_doubled_batch_goes_on_in_the_same_list(pool, tiny, whole, tmp_path):
    go(pool, tiny(tmp_path), stop_at=4)
    go(pool, tiny(tmp_path, training={"global_batch_size": 16, "steps": 8}), world=2)
    assert consumed(tmp_path) == consumed(whole)


def test_three_ways_to_lay_out_one_run(pool, tiny, whole, tmp_path):
    """Whole runs over the real loader: shard 2, replicate 2 × shard 2, and accumulation at one process."""
    layouts = {
        "shard": (2, {"data_parallel_shard_degree": 2}),
        "both": (4, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2}),
    }
    want = curve(whole)
    for name, (world, parallelism) in layouts.items():
        go(pool, tiny(tmp_path / name, parallelism=parallelism), world=world)
        got = curve(tmp_path / name)
        for step in want:
            assert got[step] == pytest.approx(want[step], rel=1e-5), (name, step)
        rows = [lines(folder / "metrics.jsonl")[-1] for folder in (tmp_path / name, whole)]
        assert rows[0]["trained_tokens"] == rows[1]["trained_tokens"]
        assert rows[0]["tokens"] == rows[1]["tokens"] == 12 * 8 * 32


def test_data_that_ends(pool, tiny, tmp_path):
    """One pass in steps of 8: every sequence once, the last step smaller; saved, and nothing left to resume."""
    config = tiny(tmp_path, data={"epochs": 1, "log_consumed": True}, training={"steps": 1000})
    assert go(pool, config, world=2) == ["data_ended"] * 2
    numbers = consumed(tmp_path)
    assert numbers == list(range(len(numbers)))
    last = lines(tmp_path / "metrics.jsonl")[-1]["step"]
    assert (tmp_path / "checkpoints" / f"step-{last}" / "manifest.json").exists()
    assert go(pool, config) == ["data_ended"]
    assert consumed(tmp_path) == numbers


def test_a_longer_run_goes_on_from_the_last_save(pool, tiny, tmp_path):
    """The last save is a checkpoint like any other, also when weights are exported beside it."""
    short = tiny(tmp_path, training={"steps": 5}, checkpoint={"last_save_model_only": True, "export_dtype": "bfloat16"})
    assert go(pool, short) == ["done"]
    assert (tmp_path / "exports" / "step-5" / "manifest.json").exists()
    assert go(pool, tiny(tmp_path, training={"steps": 8})) == ["done"]
    assert list(curve(tmp_path)) == list(range(1, 9))


def test_initial_load_path_only_when_there_is_nothing_to_resume(pool, tiny, whole, tmp_path):
    start = {"initial_load_path": str(whole / "checkpoints" / "step-12")}
    go(pool, tiny(tmp_path, checkpoint=start, training={"steps": 2}))
    first = curve(tmp_path)[1][0]
    assert first < curve(whole)[1][0], "starts from what the other run learnt"
    assert lines(tmp_path / "metrics.jsonl")[0]["step"] == 1, "at a step of its own"
    events = lines(tmp_path / "events.jsonl")
    go(pool, tiny(tmp_path, checkpoint=start, training={"steps": 3}))
    assert lines(tmp_path / "events.jsonl")[len(events)]["kind"] == "restart"


def test_a_load_step_that_is_not_there(pool, tiny, whole, tmp_path):
    with pytest.raises(AssertionError, match="CheckpointError"):
        go(pool, tiny(whole, checkpoint={"load_step": 7}))


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_in_keys(pool, tiny, whole):
    for sections, words in [
        ({"model": {"overrides": {"dim": 64, "n_heads": 4}}}, "dim was 32, is 64.*model.overrides"),
        ({"optimizer": {"name": "SGD"}}, r"optimizer.name = 'AdamW'.*'SGD'.*exclude_from_loading"),
    ]:
        with pytest.raises(AssertionError, match=f"(?s)CheckpointError.*{words}"):
            go(pool, tiny(whole, **sections, training={"steps": 14}))


def test_numbers_that_are_not_finite_are_said_once(pool, tiny, tmp_path):
    go(pool, tiny(tmp_path, optimizer={"lr": 1e30}, training={"steps": 5}))
    events = [event for event in lines(tmp_path / "events.jsonl") if event["kind"] == "nonfinite"]
    assert len(events) == 1 and "loss" in events[0]["values"]
