"""One rank fails: the job ends soon, with that rank's traceback, and leaves nobody behind."""

import time

import pytest

from tests.jobs.jobs import curve, lines

SOON = 30  # seconds from the failure to the end of every process


def check_the_end(job, err, phase, step):
    """Nobody is left, and what a person sees first is what went wrong, and where."""
    assert not job.members()
    assert err.startswith(f"rank 1 failed at step {step}:\nTraceback"), err
    assert f"raised on rank 1 at step {step} in {phase}" in err
    if phase != "save":  # where the others hear of it in a traceback of their own
        assert err.count("Traceback") == 1, err
    assert (job.status.state, job.status.exit_code, job.status.rank, job.status.step) == ("failed", 1, 1, step)
    assert job.logged_step() <= step


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["data", "forward", "save", "validate"])
def test_a_rank_that_raises_ends_the_job(tiny, launch, tmp_path, phase):
    config = tiny(
        tmp_path / "run",
        checkpoint={"interval": 1},
        data={"validation_fraction": 0.1},
        validation={"enable": True, "freq": 3, "local_batch_size": 2},
    )
    job = launch(config, NGPU="2", TITANLIKE_FAULT=f"raise:rank=1,step=3,phase={phase}")
    job.wait_for_step(2)
    reached = time.monotonic()
    assert job.wait() == 1
    assert time.monotonic() - reached < SOON
    check_the_end(job, job.err, phase, 3)


@pytest.mark.timeout(240)
def test_a_restart_goes_on_from_the_newest_checkpoint(pool, tiny, launch, tmp_path):
    """Rank 1 raises in data: the job is started again, and its curve shows nothing of it. In a save: that ends it."""
    faults = f"raise:rank=1,step=6,phase=data,once={tmp_path / 'once'}; raise:rank=1,step=10,phase=save"
    config = tiny(tmp_path / "run", checkpoint={"interval": 2, "async_mode": "async"})
    job = launch(config, NGPU="2", MAX_RESTARTS="1", TITANLIKE_FAULT=faults)
    job.wait_for_step(9)
    reached = time.monotonic()
    assert job.wait() == 1, job.err
    assert time.monotonic() - reached < SOON
    assert job.err.startswith("rank 1 failed at step 6:\nTraceback")
    assert "started again" in job.out
    begins = [event for event in lines(job.folder / "events.jsonl") if event["kind"] in ("start", "restart")]
    assert [(event["kind"], event["step"]) for event in begins] == [("start", 0), ("restart", 4)]
    *_, second = job.err.partition("rank 1 failed at step 1")
    assert "raised on rank 1 at step 10 in save" in second
    assert (job.status.state, job.status.exit_code, job.status.rank) == ("failed", 1, 1)
    assert not job.members()
    pool.run("tests.jobs.jobs:run", world=2, group=False, config=tiny(tmp_path / "whole"))
    got, want = curve(job.folder), curve(tmp_path / "whole")
    assert 9 <= len(got) <= 12
    assert got == {step: want[step] for step in got}


@pytest.mark.slow
def test_a_restart_to_the_end(pool, tiny, launch, tmp_path):
    fault = f"kill:rank=1,step=6,phase=optimizer,once={tmp_path / 'once'}"
    job = launch(tiny(tmp_path / "run", checkpoint={"interval": 2}), NGPU="2", MAX_RESTARTS="1", TITANLIKE_FAULT=fault)
    assert job.wait() == 0, job.err
    assert (job.status.state, job.status.exit_code) == ("done", 0)
    pool.run("tests.jobs.jobs:run", world=2, group=False, config=tiny(tmp_path / "whole"))
    assert curve(job.folder) == curve(tmp_path / "whole")
