"""kill -9 at any moment: the next start goes on from a complete checkpoint at most two intervals old."""

import os
import random
import signal
import time

import pytest

from tests.jobs.jobs import consumed, curve, lines

STEPS = 100_000  # never reached: what ends these runs is kill -9
SCHEDULE = {"warmup_steps": 4, "total_steps": 200}


def sections(**training):
    return {
        "training": {"local_batch_size": 4, **training},
        "lr_scheduler": SCHEDULE,
        "checkpoint": {"interval": 1, "keep_latest_k": 2, "async_mode": "async"},
    }


def begun_at(folder, started):
    """The step that the start number `started` (from 0) went on from, None while it hasn't begun."""
    events = lines(folder / "events.jsonl") if (folder / "events.jsonl").exists() else []
    begins = [event["step"] for event in events if event["kind"] in ("start", "restart")]
    return begins[started] if len(begins) > started else None


def check_whole_run(pool, tiny, tmp_path, world, last):
    """What is left is ended in good order: curve and data are those of a run that nobody killed."""
    for name in ("run", "whole"):
        config = tiny(tmp_path / name, **sections(steps=last))
        pool.run("tests.jobs.jobs:run", world=world, group=False, config=config)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert consumed(tmp_path / "run") == consumed(tmp_path / "whole")
    events = lines(tmp_path / "run" / "events.jsonl")
    assert any(event["kind"] == "replayed" for event in events), "or no kill cost a step"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "kills"), [(1, 4), (2, 4)])
def test_killed_at_random_moments(pool, forks, tiny, tmp_path, free_port, world, kills):
    """Workers without a launcher, all killed, one a little after the other."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    folder = tmp_path / "run"
    config = tmp_path / "run.toml"
    from titanlike.config import Config, dump_toml

    config.write_text(dump_toml(Config.model_validate(tiny(folder, **sections(steps=STEPS)))))
    for n in range(kills):
        pids = [
            forks.start(
                "--job.config_file",
                str(config),
                output=tmp_path / "output",
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world),
                MASTER_ADDR="localhost",
                MASTER_PORT=str(free_port),
            )
            for rank in range(world)
        ]
        before = logged_step(folder)
        wait_until(lambda n=n: begun_at(folder, n) is not None, forks, pids, tmp_path)
        assert begun_at(folder, n) >= before - 2, "at most two intervals old"
        target = begun_at(folder, n) + chance.randrange(1, 6)
        wait_until(lambda target=target: logged_step(folder) >= target, forks, pids, tmp_path)
        time.sleep(chance.random() * 0.1)
        for pid in chance.sample(pids, world):
            os.kill(pid, signal.SIGKILL)
            time.sleep(chance.random() * 0.02)
        assert [forks.wait(pid) for pid in pids] == [-9] * world
    check_whole_run(pool, tiny, tmp_path, world, logged_step(folder) + 2)


def logged_step(folder):
    try:
        text = (folder / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return 0
    rows = text[: text.rfind("\n") + 1].splitlines()
    import json

    return json.loads(rows[-1])["step"] if rows else 0


def wait_until(happened, forks, pids, tmp_path):
    deadline = time.monotonic() + 100
    while not happened():
        assert all(map(forks.running, pids)), (tmp_path / "output").read_text()
        assert time.monotonic() < deadline, (tmp_path / "output").read_text()
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("processes", [1, 2])
def test_twenty_kills_of_the_whole_job(pool, tiny, launch, tmp_path, processes):
    """`./run_train.sh`; of two processes, the launcher is killed and takes its workers along."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    config = tiny(tmp_path / "run", **sections(steps=STEPS))
    for n in range(20):
        before = logged_step(tmp_path / "run")
        job = launch(config, NGPU=str(processes))
        job.wait_until(lambda n=n, job=job: begun_at(job.folder, n) is not None)
        assert begun_at(job.folder, n) >= before - 2, "at most two intervals old"
        job.wait_for_step(begun_at(job.folder, n) + chance.randrange(1, 6))
        time.sleep(chance.random() * 0.2)
        job.process.kill()
        job.wait()
        deadline = time.monotonic() + 10
        while job.members():
            assert time.monotonic() < deadline, "a killed launcher leaves nobody behind"
            time.sleep(0.05)
    check_whole_run(pool, tiny, tmp_path, processes, logged_step(tmp_path / "run") + 2)
