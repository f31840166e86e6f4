import multiprocessing
import time

from titanlike import train
from titanlike.launch import status


def test_round_trip(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(status.progress, "step", 17)
    assert status.write(tmp_path / "run", "stopped", 75, "by SIGTERM")
    read = status.read(tmp_path / "run")
    assert read is not None
    assert (read.state, read.exit_code, read.step, read.rank, read.message) == ("stopped", 75, 17, 3, "by SIGTERM")
    assert abs(read.time - time.time()) < 60


def test_unreadable_is_none(tmp_path):
    assert status.read(tmp_path) is None
    for content in ("", "{", "[]", '{"state": "done", "colour": "red"}'):
        (tmp_path / "status.json").write_text(content)
        assert status.read(tmp_path) is None


def test_a_failure_stays_until_the_next_start(tmp_path):
    assert status.write(tmp_path, "running")
    assert status.write(tmp_path, "failed", 3, "first")
    assert not status.write(tmp_path, "failed", 1, "second")
    assert not status.write(tmp_path, "done", 0)
    assert status.has_failed(tmp_path)
    read = status.read(tmp_path)
    assert read is not None and read.message == "first"
    assert status.write(tmp_path, "running")
    assert not status.has_failed(tmp_path)


def _fail(folder, barrier, results):
    barrier.wait()
    results.put(status.write(folder, "failed", 1, "one of many"))


def test_of_many_at_once_one_is_first(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_fail, args=(tmp_path, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    firsts = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(firsts) == [False, False, False, True]
    assert {path.name for path in tmp_path.iterdir()} == {"status.json", ".status.json.lock"}  # and no drafts


def test_an_exception_with_a_message_of_several_lines_is_told_in_one():
    trace = "Traceback (most recent call last):\n  File …\n{}"
    of_a_pipeline = "RuntimeError: \n            [Stage 0] failed to run forward:\n            args: ()\n            "
    assert train._exception(trace.format(of_a_pipeline)) == "RuntimeError: [Stage 0] failed to run forward: args: ()"
    assert train._exception(trace.format("ValueError: no\n")) == "ValueError: no"
