"""One rank fails: the job ends soon, with that rank's traceback, and leaves nobody behind."""

import time

import pytest

from tests.jobs.jobs import curve, lines

SOON = 30  # seconds from the failure to the end of every process


def check_the_end_of(job, phase):
    """Nobody is left, and the person sees first what went wrong where."""
    assert not job.members()
    assert job.err.startswith("rank 1 failed at step 3:\nTraceback"), job.err
    if phase != "save":  # where the others hear of it in a traceback of their own
        assert job.err.count("Traceback") == 1, job.err
    assert f"raised on rank 1 at step 3 in {phase}" in job.err
    assert (job.status.state, job.status.exit_code, job.status.rank, job.status.step) == ("failed", 1, 1, 3)
    assert job.logged_step() <= 3


@pytest.mark.parametrize("phase", ["save", "validate", pytest.param("forward", marks=pytest.mark.slow)])
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
    check_the_end_of(job, phase)


@pytest.mark.timeout(240)
def test_a_restart_goes_on_from_the_newest_checkpoint(pool, tiny, launch, tmp_path):
    """A rank raises once, in data: started again, the job ends well and its curve shows nothing of it."""
    fault = f"raise:rank=1,step=6,phase=data,once={tmp_path / 'once'}"
    config = tiny(tmp_path / "run", checkpoint={"interval": 2, "async_mode": "async"})
    job = launch(config, NGPU="2", MAX_RESTARTS="1", TITANLIKE_FAULT=fault)
    assert job.wait() == 0, job.err
    assert "rank 1 failed at step 6:" in job.err
    assert "started again" in job.out
    assert (job.status.state, job.status.exit_code) == ("done", 0)
    begins = [event for event in lines(job.folder / "events.jsonl") if event["kind"] in ("start", "restart")]
    assert [(event["kind"], event["step"]) for event in begins] == [("start", 0), ("restart", 4)]
    pool.run("tests.jobs.jobs:run", world=2, group=False, config=tiny(tmp_path / "whole"))
    assert curve(job.folder) == curve(tmp_path / "whole")
