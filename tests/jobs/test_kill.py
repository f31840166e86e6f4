"""kill -9 at any moment: the next start goes on from a complete checkpoint at most two intervals old."""

import os
import random
import signal
import time

import pytest

from tests.jobs.jobs import consumed, curve, lines
from tests.jobs.processes import PATIENCE, logged_step, write_config

SLOW = {"TITANLIKE_FAULT": "slow-save:seconds=0.05"}  # before a rank's tensors, and again before the manifest


def saving_each_step(steps=100_000):
    """Of a run that never ends by itself. The save of a step is in flight while the next one is trained."""
    return {
        "training": {"local_batch_size": 4, "steps": steps},
        "lr_scheduler": {"total_steps": 200},
        "checkpoint": {"interval": 1, "keep_latest_k": 2, "async_mode": "async"},
    }


@pytest.fixture
def chance():
    seed = random.randrange(1 << 32)
    print("seed", seed)  # shown if the test fails
    return random.Random(seed)


def begun_at(folder, starts):
    """The step that the last of so many starts went on from, None while it hasn't begun."""
    events = lines(folder / "events.jsonl") if (folder / "events.jsonl").exists() else []
    begins = [event["step"] for event in events if event["kind"] in ("start", "restart")]
    return begins[starts - 1] if len(begins) >= starts else None


def check_what_is_left(pool, tiny, tmp_path, world):
    """Ended in good order, curve and data are those of a run that nobody killed."""
    last = logged_step(tmp_path / "run") + 2
    for name in ("run", "whole"):
        config = tiny(tmp_path / name, **saving_each_step(last))
        pool.run("tests.jobs.jobs:run", world=world, group=False, config=config)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert consumed(tmp_path / "run") == consumed(tmp_path / "whole")
    events = lines(tmp_path / "run" / "events.jsonl")
    # Where no save had ended before a kill, the start after it is a fresh one, and sets the rows aside.
    assert any(event["kind"] in ("replayed", "set_aside") for event in events), "or no kill cost a step"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [1, 2])
def test_killed_three_times(pool, forks, tiny, tmp_path, chance, world):
    """Ranks without a launcher, killed one a little after the other; half of them while they mostly save."""
    folder, output = tmp_path / "run", tmp_path / "output"
    config = write_config(tiny(folder, **saving_each_step()), tmp_path / "run.toml")
    for starts in range(1, 4):
        reached = logged_step(folder)
        fault = SLOW if starts % 2 else {}
        pids = forks.start("--job.config_file", str(config), world=world, output=output, **fault)

        def wait_until(happened, pids=pids):
            deadline = time.monotonic() + PATIENCE
            while not happened():
                assert all(map(forks.running, pids)) and time.monotonic() < deadline, output.read_text()
                time.sleep(0.01)

        wait_until(lambda starts=starts: begun_at(folder, starts) is not None)
        begun = begun_at(folder, starts)
        assert reached - 2 <= begun <= reached, "at most two intervals old"
        target = begun + chance.randrange(1, 6)
        wait_until(lambda target=target: logged_step(folder) >= target)
        time.sleep(chance.random() * 0.1)
        for pid in chance.sample(pids, world):
            os.kill(pid, signal.SIGKILL)
            time.sleep(chance.random() * 0.02)
        codes = {forks.wait(pid) for pid in pids}
        assert -signal.SIGKILL in codes and codes <= {-signal.SIGKILL, 1}, "killed, or failed for want of the other"
    check_what_is_left(pool, tiny, tmp_path, world)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [1, 2])
def test_killed_twenty_times(pool, tiny, launch, tmp_path, chance, world):
    """`./run_train.sh`; of two processes, the launcher is killed and takes its workers along."""
    config = tiny(tmp_path / "run", **saving_each_step())
    for starts in range(1, 21):
        reached = logged_step(tmp_path / "run")
        job = launch(config, NGPU=str(world), **(SLOW if starts % 2 else {}))
        job.wait_until(lambda starts=starts, job=job: begun_at(job.folder, starts) is not None)
        begun = begun_at(job.folder, starts)
        assert reached - 2 <= begun <= reached, "at most two intervals old"
        job.wait_for_step(begun + chance.randrange(1, 6))
        time.sleep(chance.random() * 0.2)
        job.process.kill()
        job.wait()
        deadline = time.monotonic() + 10
        while job.members():
            assert time.monotonic() < deadline, "a killed launcher leaves nobody behind"
            time.sleep(0.05)
    check_what_is_left(pool, tiny, tmp_path, world)
