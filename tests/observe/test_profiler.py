import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerAction

from titanlike.config.sections.observe import Profiling
from titanlike.errors import ConfigError
from titanlike.observe.profiler import cycle, profiling


def train(folder: Path, settings: Profiling, first: int, last: int) -> None:
    weight = torch.ones(16, 16)
    with profiling(settings, folder, rank=3, resume_step=first - 1) as profiler:
        for _ in range(first, last + 1):
            weight @ weight
            profiler.step()


def traces(folder: Path, settings: Profiling) -> list[str]:
    top = folder / settings.save_traces_folder
    return sorted(str(path.relative_to(top)) for path in folder.rglob("*.json.gz"))


def test_traces_are_of_the_runs_steps_also_after_a_resume(tmp_path):
    settings = Profiling(enable_profiling=True, profile_freq=4, profiler_active=1, profiler_warmup=1)
    train(tmp_path, settings, first=1, last=6)
    assert traces(tmp_path, settings) == ["step-4/rank-3.json.gz"]
    train(tmp_path, settings, first=7, last=9)
    assert traces(tmp_path, settings) == ["step-4/rank-3.json.gz", "step-8/rank-3.json.gz"]
    for path in tmp_path.rglob("*.json.gz"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert any(event.get("name") == "aten::mm" for event in events)


@pytest.mark.parametrize("resume_step", [0, 3, 7, 10])
def test_cycles_end_at_multiples_of_the_frequency(resume_step):
    action = cycle(freq=5, warmup=1, active=2, resume_step=resume_step)
    at_step = {resume_step + 1 + index: action(index) for index in range(20)}
    wait, warm, record, save = (getattr(ProfilerAction, n) for n in ("NONE", "WARMUP", "RECORD", "RECORD_AND_SAVE"))
    for step, what in at_step.items():
        assert what == {1: wait, 2: wait, 3: warm, 4: record, 0: save}[step % 5]


def test_a_cycle_too_short_for_its_parts_is_refused():
    with pytest.raises(ConfigError, match=r"profile_freq = 3.*4"):
        cycle(freq=3, warmup=3, active=1, resume_step=0)


def test_off_means_off(tmp_path):
    train(tmp_path, Profiling(), first=1, last=3)
    assert list(tmp_path.iterdir()) == []


def test_errors_pass_through(tmp_path):
    settings = Profiling(enable_profiling=True, profile_freq=1, profiler_warmup=0)
    with pytest.raises(torch.OutOfMemoryError), profiling(settings, tmp_path, rank=0):
        raise torch.OutOfMemoryError("gone")


def test_memory_snapshots_on_a_cpu_say_that_there_are_none(tmp_path, warnings_of):
    train(tmp_path, Profiling(enable_memory_snapshot=True, profile_freq=1), first=1, last=2)
    assert len(warnings_of()) == 1
    assert "enable_memory_snapshot" in warnings_of()[0]
    assert list(tmp_path.iterdir()) == []


def test_memory_snapshots_are_written_each_cycle_and_when_memory_runs_out(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).touch())
    settings = Profiling(enable_memory_snapshot=True, profile_freq=2)
    context = profiling(settings, tmp_path, rank=1, device_type="cuda", resume_step=3)
    with pytest.raises(torch.OutOfMemoryError), context as profiler:
        profiler.step()  # step 4
        profiler.step()  # step 5
        raise torch.OutOfMemoryError("gone")
    written = sorted(
        str(path.relative_to(tmp_path / settings.save_memory_snapshot_folder)) for path in tmp_path.rglob("*.pickle")
    )
    assert written == ["step-4/rank-1.pickle", "step-6-out-of-memory/rank-1.pickle"]
