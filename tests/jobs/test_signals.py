"""A signal to any part of a job stops all of it: the step is finished and saved, and nothing shows in the curve."""

import os
import random
import signal
import time

import pytest

from tests.jobs.jobs import consumed, curve, lines

LONG = {"training": {"steps": 60, "local_batch_size": 1}, "lr_scheduler": {"warmup_steps": 4, "total_steps": 60}}


def pids(job, target):
    launcher, workers = job.process.pid, job.workers()
    return {
        "rank 0": [workers[0]],
        "rank 1": [workers[1]],
        "launcher": [launcher],
        "all": [launcher, *workers.values()],
        "group": [-launcher],  # as a terminal's Ctrl-C reaches it; workers have sessions of their own
    }[target]


TERM, INTERRUPT = signal.SIGTERM, signal.SIGINT


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "ways",
    [
        [("rank 1", TERM)],
        pytest.param(
            [("group", INTERRUPT), ("all", TERM), ("launcher", TERM), ("rank 0", signal.SIGHUP)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["usual", "unusual"],
)
def test_every_way_a_signal_can_come(pool, tiny, launch, tmp_path, ways):
    """One run of two processes, stopped and started again after each way; bit-equal to the one that was left alone."""
    config = tiny(tmp_path / "run", **LONG)
    done = 0
    for target, number in ways:
        job = launch(config, NGPU="2")
        job.wait_for_step(done + 2)
        workers = job.workers()
        assert set(workers) == {0, 1}
        for pid in pids(job, target):
            os.kill(pid, number)
        asked_at = job.logged_step()
        assert job.wait() == 75, (target, job.err)
        assert not job.members(), target
        assert (job.status.state, job.status.exit_code) == ("stopped", 75)
        stopped_at = job.status.step
        assert asked_at <= stopped_at <= asked_at + 3, "the step is finished, and not many more"
        assert (job.folder / "checkpoints" / f"step-{stopped_at}" / "manifest.json").exists()
        assert "Traceback" not in job.out + job.err
        assert done < stopped_at < 60
        done = stopped_at
    last = done + 3
    steps = {"training": {**LONG["training"], "steps": last}}
    pool.run("tests.jobs.jobs:run", world=2, group=False, config=tiny(tmp_path / "run", **{**LONG, **steps}))
    pool.run("tests.jobs.jobs:run", world=2, group=False, config=tiny(tmp_path / "whole", **{**LONG, **steps}))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert consumed(tmp_path / "run") == consumed(tmp_path / "whole")
    kinds = [event["kind"] for event in lines(tmp_path / "run" / "events.jsonl")]
    assert "replayed" not in kinds, "nothing was done twice"
    assert (kinds.count("restart"), kinds.count("stop")) == (len(ways), len(ways) + 1)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_signal_while_the_ranks_meet(tiny, launch, tmp_path):
    """Rank 0 waits in C code for a rank that is slow to come: the start ends all the same, long before the grace."""
    job = launch(tiny(tmp_path / "run", training={"steps": 100_000}), NGPU="2")
    job.wait_until(lambda: 1 in job.workers())
    late = job.workers()[1]
    os.kill(late, signal.SIGSTOP)
    job.wait_until(lambda: "data:" in job.out)
    time.sleep(10)
    os.kill(job.process.pid, signal.SIGTERM)
    sent = time.monotonic()
    time.sleep(0.2)
    os.kill(late, signal.SIGCONT)
    assert job.wait() == 75, job.err
    assert time.monotonic() - sent < 30, "the grace is 120 s"
    assert (job.status.state, job.status.exit_code) == ("stopped", 75)
    assert not job.members()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2])
def test_forty_steps_stopped_three_times(pool, tiny, launch, tmp_path, processes):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    sections = {"training": {"steps": 40, "local_batch_size": 1}}
    config = tiny(tmp_path / "run", **sections)
    for share in (1, 2, 3):
        job = launch(config, NGPU=str(processes))
        job.wait_for_step(chance.randrange(12 * share - 11, 12 * share - 1))
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.wait() == 75, job.err
    assert launch(config, NGPU=str(processes)).wait() == 0
    pool.run("tests.jobs.jobs:run", world=processes, group=False, config=tiny(tmp_path / "whole", **sections))
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert list(curve(tmp_path / "run")) == list(range(1, 41))
    assert consumed(tmp_path / "run") == consumed(tmp_path / "whole")
