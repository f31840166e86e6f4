"""What is logged: the rates that were used, each step once, the same whatever was stopped or lost."""

import pytest

from tests.jobs.jobs import curve, lines

RUN = "tests.jobs.jobs:run"
SCHEDULES = {
    "linear": {"warmup_steps": 4},
    "cosine": {"warmup_steps": 4, "decay_type": "cosine", "min_lr_factor": 0.1},
    "warm-up, stable, decay": {"warmup_steps": 4, "decay_ratio": 0.3, "decay_type": "sqrt"},
}


def go(pool, config, world=1, **options):
    return pool.run(RUN, world=world, group=False, config=config, **options)


def column(folder, name):
    return [row[name] for row in lines(folder / "metrics.jsonl")]


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_do_not_jump_at_a_resume(pool, tiny, tmp_path, name):
    """Stopped in the warm-up, on the plateau and in the decay, with two groups of different rates."""
    sections = {
        "training": {"steps": 10, "global_batch_size": 2},
        "lr_scheduler": SCHEDULES[name],
        "optimizer": {"param_groups": [{"pattern": "attention", "lr_factor": 0.5}]},
    }
    for stop in (1, 4, 6, 9):
        assert go(pool, tiny(tmp_path / "run", **sections), stop_at=stop) == ["stopped"]
    for folder in ("run", "whole"):
        assert go(pool, tiny(tmp_path / folder, **sections)) == ["done"]
    assert column(tmp_path / "run", "learning_rate") == column(tmp_path / "whole", "learning_rate")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


def test_the_logged_rate_is_the_one_that_was_used(pool, tiny, tmp_path):
    sections = {
        "training": {"steps": 10, "global_batch_size": 2},
        "lr_scheduler": {"warmup_steps": 4, "decay_ratio": 0.4},
        "optimizer": {"lr": 0.5},
    }
    config = tiny(tmp_path, **sections)
    (used,) = pool.run("tests.jobs.inspections:rates_used", world=1, group=False, config=config)
    assert used == column(tmp_path, "learning_rate")
    assert [rate / 0.5 for rate in used] == [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25]


def test_the_schedule_ends_with_the_data(pool, tiny, tmp_path):
    """Two passes take fewer steps than training.steps: the last of them is the schedule's last, and is logged."""
    sections = {
        "training": {"steps": 1000, "global_batch_size": 64, "local_batch_size": 16},
        "data": {"epochs": 2},
        "lr_scheduler": {"warmup_steps": 1},
        "metrics": {"log_freq": 4},
    }
    assert go(pool, tiny(tmp_path, **sections), stop_at=3) == ["stopped"]
    assert go(pool, tiny(tmp_path, **sections)) == ["data_ended"]
    rows = lines(tmp_path / "metrics.jsonl")
    last = rows[-1]["step"]
    assert last == -(-2 * 175 // 64) == 6
    assert rows[-1]["learning_rate"] == pytest.approx(1e-3 / 5)
    assert rows[-1]["epoch"] == 2
    assert len(lines(tmp_path / "consumed.jsonl")[-1]["sequences"]) == 350 - 5 * 64


def test_steps_that_run_again_are_shown_once(pool, tiny, tmp_path):
    """Lost after step 7 with a checkpoint of step 5: files and TensorBoard have steps 1 to 10 once."""
    config = tiny(
        tmp_path,
        training={"steps": 10, "global_batch_size": 2},
        checkpoint={"interval": 5},
        metrics={"log_freq": 1, "enable_tensorboard": True},
    )
    fault = "raise:step=8,phase=data"
    (error,) = pool.run("tests.jobs.inspections:run_into", world=1, group=False, config=config, fault=fault)
    assert "step 8" in error and column(tmp_path, "step")[-1] == 7
    first = column(tmp_path, "loss")
    go(pool, config)
    assert column(tmp_path, "step") == list(range(1, 11))
    assert column(tmp_path, "loss")[:7] == first
    (event,) = [event for event in lines(tmp_path / "events.jsonl") if event["kind"] == "replayed"]
    assert (event["step"], event["last_logged_step"]) == (5, 7)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    tag = next(tag for tag in board.Tags()["scalars"] if tag.endswith("loss"))
    assert [point.step for point in board.Scalars(tag)] == list(range(1, 11))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_offline_wandb_has_each_step_once(tiny, launch, tmp_path):
    """The real package, in processes of its own."""
    pytest.importorskip("wandb")
    config = tiny(
        tmp_path / "run",
        training={"steps": 10, "global_batch_size": 2},
        checkpoint={"interval": 5},
        metrics={"log_freq": 1, "enable_wandb": True},
    )
    offline = {"NGPU": "1", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    job = launch(config, TITANLIKE_FAULT="raise:step=8,phase=data", **offline)
    assert job.wait() == 1
    job = launch(config, **offline)
    assert job.wait() == 0, job.err
    assert "W&B" not in job.out, "it was not switched off"
    files = sorted((tmp_path / "run").rglob("*.wandb"))
    assert len({file.stem for file in files}) == 1, "one run in W&B's eyes"
    steps = [step for file in files for step in wandb_steps(file)]
    assert sorted(steps) == list(range(1, 11))


def wandb_steps(file):
    """The steps in W&B's file: a log of protobuf records as LevelDB writes them, after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = file.read_bytes(), 7, b""
    block, header = 1 << 15, 7
    while at + header <= len(data):
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + header : at + header + length]
        at += header + length
        if kind in (1, 4):  # whole, or the last part of one
            parsed = wandb_internal_pb2.Record.FromString(record)
            record = b""
            if parsed.HasField("history"):
                yield parsed.history.step.num
        if block - at % block < header:
            at += block - at % block
