"""Starts and ends of whole jobs, with a stub in the trainer's place (stub/stub_trainer.py)."""

import os
import signal
import socket
import time

import pytest

from titanlike.launch import status

SOON = 30  # seconds within which a broken job must be gone


def test_one_process_trains_in_the_launchers_process(start):
    job = start("--training.steps", "2", NGPU="1")
    assert job.wait() == 0
    assert "step 2" in job.out
    assert (job.status.state, job.status.exit_code, job.status.step) == ("done", 0, 2)


def test_two_processes_end_well_and_the_second_logs_to_its_file(start):
    job = start("--training.steps", "2", NGPU="2", STUB_OUTCOME="data_ended")
    assert job.wait() == 0
    assert job.out.count("step 2") == 1
    assert "step 2" in (job.folder / "logs" / "rank-1.log").read_text()
    assert (job.status.state, job.status.exit_code) == ("data_ended", 0)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_wrong_config_is_said_once_before_torch_is_there(start, tmp_path, processes):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:{os.getcwd()}"
    job = start("--training.stepz", "3", "--training.seq_len", "0", NGPU=processes, PYTHONPATH=path)
    assert job.wait() == 2
    assert job.err.count("training.stepz") == 1
    assert job.err.count("training.seq_len = 0") == 1
    assert "Traceback" not in job.err


def test_what_does_not_fit_the_processes_is_a_wrong_config(start):
    job = start("--training.local_batch_size", "4", "--training.global_batch_size", "20", NGPU="2")
    assert job.wait() == 2
    for part in ("global_batch_size = 20", "local_batch_size = 4", "8"):
        assert part in job.err
    fault = start(NGPU="2", TITANLIKE_FAULT="explode")
    assert fault.wait() == 2
    assert "'explode'" in fault.err


def test_a_given_port_that_is_busy_is_named(start):
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
        job = start(NGPU="2", RDZV_ENDPOINT=f"localhost:{port}")
        assert job.wait() == 2
        assert f"port {port} is in use" in job.err


def test_a_raising_rank_ends_all_with_its_traceback_first(start):
    job = start("--training.steps", "30", NGPU="2", TITANLIKE_FAULT="raise:rank=1,step=20,phase=forward")
    job.wait_for_step(2, ranks=2)
    reached = time.monotonic()
    workers = job.workers()
    assert job.wait() == 1
    assert time.monotonic() - reached < SOON
    assert set(workers) == {0, 1}
    assert not job.workers()
    assert job.err.index("rank 1 failed at step 20:") < job.err.index("Traceback") < job.err.index("InjectedFault")
    assert job.err.count("Traceback") == 1
    assert (job.status.state, job.status.exit_code, job.status.rank, job.status.step) == ("failed", 1, 1, 20)


@pytest.mark.slow
def test_a_rank_that_waits_for_a_failed_one_does_not_wait_long(start):
    job = start(NGPU="2", STUB_OUTCOME="early-data-error")
    while not status.has_failed(job.folder):
        assert job.process.poll() is None
        time.sleep(0.1)
    failed = time.monotonic()
    assert job.wait() == 3
    assert time.monotonic() - failed < SOON / 2
    assert job.err.count("train.jsonl:7") == 1
    assert "Traceback" not in job.err


@pytest.mark.slow
def test_a_killed_rank_is_named(start):
    job = start("--training.steps", "30", NGPU="2", TITANLIKE_FAULT="kill:rank=1,step=3")
    job.wait_for_step(2, ranks=2)
    reached = time.monotonic()
    assert job.wait() == 1
    assert time.monotonic() - reached < SOON
    assert "rank 1 was ended by SIGKILL" in job.err
    assert "rank-1.log" in job.err
    assert job.status.exit_code == 1


@pytest.mark.parametrize(
    ("outcome", "code", "text"),
    [("data-error", 3, "train.jsonl:7"), pytest.param("config-error", 2, "seq_len", marks=pytest.mark.slow)],
)
def test_a_users_mistake_found_by_a_worker_is_said_once(start, outcome, code, text):
    job = start("--training.steps", "30", NGPU="2", STUB_OUTCOME=outcome)
    assert job.wait() == code
    assert job.err.count(text) == 1
    assert "Traceback" not in job.err
    assert job.status.exit_code == code


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_stops_one_process_with_75(start, number):
    job = start("--training.steps", "3000", NGPU="1", TITANLIKE_FAULT="slow-save:seconds=1")
    job.wait_for_step(2, ranks=1)
    os.kill(job.process.pid, number)
    time.sleep(0.5)
    os.kill(job.process.pid, number)  # in the middle of the save
    assert job.wait() == 75
    assert list(job.folder.glob(f"saved-{job.status.step}-by-0"))
    assert (job.status.state, job.status.exit_code) == ("stopped", 75)


@pytest.mark.parametrize("target", ["all", *(pytest.param(n, marks=pytest.mark.slow) for n in ("rank 1", "launcher"))])
def test_a_signal_stops_all_ranks_at_one_step(start, target):
    job = start("--training.steps", "3000", NGPU="2", TITANLIKE_FAULT="slow-save:seconds=1")
    job.wait_for_step(2, ranks=2)
    workers = job.workers()
    pids = {"rank 1": [workers[1]], "launcher": [job.process.pid], "all": [job.process.pid, *workers.values()]}[target]
    for _ in range(2):  # the second one in the middle of the save
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.5)
    assert job.wait() == 75
    assert not job.workers()
    assert sorted(path.name for path in job.folder.glob("saved-*")) == [
        f"saved-{job.status.step}-by-{rank}" for rank in (0, 1)
    ]


@pytest.mark.slow
def test_what_an_earlier_start_left_is_not_believed(start):
    first = start("--training.steps", "30", NGPU="1", TITANLIKE_FAULT="raise:step=1")
    assert first.wait() == 1
    second = start("--training.steps", "30", NGPU="2", STUB_OUTCOME="vanish")
    assert second.wait() == 0  # workers that left nothing, but ended well


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_workers(start):
    job = start("--training.steps", "3000", NGPU="2")
    job.wait_for_step(1, ranks=2)
    assert len(job.workers()) == 2
    job.process.kill()
    deadline = time.monotonic() + 10
    while job.workers():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_workers_are_started_again(start, tmp_path):
    once = f"raise:rank=1,step=3,once={tmp_path / 'once'}"
    job = start("--training.steps", "4", NGPU="2", MAX_RESTARTS="1", TITANLIKE_FAULT=once)
    assert job.wait() == 0
    assert "started again" in job.out
    assert (job.status.state, job.status.exit_code) == ("done", 0)


@pytest.mark.slow
def test_two_jobs_at_once_and_a_busy_default_port(start):
    busy = socket.socket()
    with busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        busy.bind(("localhost", 29500))
        busy.listen()
        jobs = [start("--training.steps", "5", NGPU="2", folder=name) for name in ("one", "two")]
        assert [job.wait() for job in jobs] == [0, 0]


@pytest.mark.slow
def test_plain_torchrun(start):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "titanlike.train")
    job = start("--training.steps", "3000", command=torchrun)
    job.wait_for_step(2, ranks=2)
    os.kill(job.workers()[1], signal.SIGTERM)
    assert job.wait() == 0  # a code other than 0 would have it started again
    assert (job.status.state, job.status.exit_code) == ("stopped", 75)
    assert len(list(job.folder.glob("saved-*"))) == 2
