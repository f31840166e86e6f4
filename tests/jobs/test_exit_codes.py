"""What a script around `./run_train.sh` can rely on: one exit code for each kind of end, and what is said with it.

The codes of stopped and failed jobs of two processes are those of test_signals and test_faults.
"""

import os
import signal
import subprocess
import sys

import pytest

from tests.jobs.processes import ROOT, write_config


def test_a_checkpoint_that_is_not_there(pool, tiny, launch, tmp_path):
    config = tiny(tmp_path / "run", training={"steps": 2})
    pool.run("tests.jobs.jobs:run", world=1, group=False, config=config)
    job = launch(config, "--checkpoint.load_step", "7", NGPU="1")
    assert job.wait() == 4
    assert "there is no checkpoint of step 7 (checkpoint.load_step); steps: 2" in job.err
    assert "Traceback" not in job.err
    assert (job.status.state, job.status.exit_code) == ("failed", 4)


def test_a_fault_then_done(tiny, launch, tmp_path):
    config = tiny(tmp_path / "run", training={"steps": 2})
    job = launch(config, NGPU="1", TITANLIKE_FAULT="raise:step=2,phase=optimizer")
    assert job.wait() == 1
    assert job.err.startswith("rank 0 failed at step 2:\nTraceback")
    assert (job.status.state, job.status.exit_code) == ("failed", 1)
    job = launch(config, NGPU="1")
    assert job.wait() == 0, job.err
    assert (job.status.state, job.status.exit_code, job.logged_step()) == ("done", 0, 2)


def test_a_stop_signal(tiny, launch, tmp_path):
    """Also one that comes in the middle of the save that the first one asked for."""
    job = launch(tiny(tmp_path / "run", training={"steps": 100_000}), NGPU="1", TITANLIKE_FAULT="slow-save:seconds=1")
    job.wait_for_step(2)
    os.kill(job.process.pid, signal.SIGTERM)
    job.wait_until(lambda: any(job.folder.glob("checkpoints/step-*")))
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait() == 75
    assert (job.folder / "checkpoints" / f"step-{job.status.step}" / "manifest.json").exists()
    assert (job.status.state, job.status.exit_code) == ("stopped", 75)


@pytest.fixture
def broken_text(tmp_path):
    text = tmp_path / "broken.jsonl"
    text.write_text('{"text": "one two three"}\n' * 16 + '{"text": "cut in the mid\n')
    return {"path": [str(text)]}


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_data_that_cannot_be_read(tiny, launch, tmp_path, broken_text, processes):
    job = launch(tiny(tmp_path / "run", data=broken_text), NGPU=processes)
    assert job.wait() == 3
    assert job.err.count("broken.jsonl") == 1 and "line 17" in job.err
    assert "Traceback" not in job.err
    assert (job.status.state, job.status.exit_code) == ("failed", 3)


def test_all_ranks_hear_of_data_that_cannot_be_read(forks, tiny, tmp_path, broken_text):
    config = write_config(tiny(tmp_path / "run", data=broken_text), tmp_path / "run.toml")
    output = tmp_path / "output"
    pids = forks.start("--job.config_file", str(config), world=2, output=output)
    assert [forks.wait(pid) for pid in pids] == [3, 3]
    assert output.read_text().count("line 17") == 1


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise:rank=1,step=2,phase=optimizer", "load_step"])
def test_two_processes(tiny, launch, tmp_path, fault):
    words, environment = ((), {"TITANLIKE_FAULT": fault}) if ":" in fault else (("--checkpoint.load_step", "7"), {})
    config = tiny(tmp_path / "run", training={"steps": 2})
    if words:
        assert launch(config, NGPU="2").wait() == 0
    job = launch(config, *words, NGPU="2", **environment)
    assert job.wait() == (4 if words else 1)


def run_train(config, **environment):
    everything = {**os.environ, "TITANLIKE_PYTHON": sys.executable, "CONFIG_FILE": str(config), **environment}
    return subprocess.run([ROOT / "run_train.sh"], env=everything, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_wrong_config_leaves_nothing_behind(tmp_path, processes):
    toml = tmp_path / "run.toml"
    toml.write_text(f'job.dump_folder = "{tmp_path / "out"}"\n[optimizer]\nlearning_rte = 1e-3\n')
    done = run_train(toml, NGPU=processes)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "optimizer.learning_rte" in line and "optimizer.lr" in line and "run.toml" in line and "3" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("degrees", "says"),
    [
        (
            "data_parallel_shard_degree = 3\ntensor_parallel_degree = 2",
            ["data_parallel_shard_degree = 3", "tensor_parallel_degree = 2", "make 6", "4 processes"],
        ),
        (
            "data_parallel_shard_degree = -1\ndata_parallel_replicate_degree = -1",
            ["data_parallel_shard_degree", "data_parallel_replicate_degree", "-1"],
        ),
        ("tensor_parallel_degree = 0", ["tensor_parallel_degree = 0"]),
    ],
)
def test_degrees_that_do_not_make_four_processes(tmp_path, degrees, says):
    toml = tmp_path / "run.toml"
    toml.write_text(f'job.dump_folder = "{tmp_path / "out"}"\n[parallelism]\n{degrees}\n')
    done = run_train(toml, NGPU="4")
    assert done.returncode == 2
    assert all(part in done.stderr for part in says), done.stderr
    assert done.stderr.count("make 6") <= 1 and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_under_plain_torchrun_one_of_four_ranks_says_it(forks, tmp_path):
    words = [
        "debug_model.toml",
        "--job.dump_folder",
        str(tmp_path / "out"),
        "--parallelism.data_parallel_shard_degree",
        "3",
    ]
    pids = forks.start(*words, world=4, output=tmp_path / "output")
    assert [forks.wait(pid) for pid in pids] == [2] * 4
    (line,) = (tmp_path / "output").read_text().splitlines()
    assert "data_parallel_shard_degree = 3" in line and "make 3" in line and "4 processes" in line
    assert not (tmp_path / "out").exists()
