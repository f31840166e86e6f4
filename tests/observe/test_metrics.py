import json
import subprocess
import sys

import pytest

from titanlike.observe.jsonl import read_jsonl
from titanlike.observe.metrics import Metrics, device_peak
from titanlike.observe.sinks import STEP_KEYS


def run(config, folder, first: int, last: int, **options) -> None:
    """Steps `first` to `last` as a loop would log them; loss 1/step, 100 tokens a step."""
    options = {"rank": 0, "resume_step": first - 1, **options}
    metrics = Metrics(config, folder, **options)
    metrics.meter.start(first - 1, tokens=100 * (first - 1))
    for step in range(first, last + 1):
        if metrics.due(step):
            metrics.log(step, {"loss": 1 / step, "tokens": 100 * step, "trained_tokens": 90 * step, "epoch": 0.1})
    metrics.close()
    metrics.close()


@pytest.fixture
def every_step(make_config):
    return make_config(metrics={"log_freq": 1})


def test_a_row_has_all_keys_in_order_and_null_for_what_is_missing(every_step, tmp_path, capsys):
    run(every_step, tmp_path, 1, 1)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert tuple(row)[: len(STEP_KEYS)] == STEP_KEYS
    assert row["grad_norm"] is None
    assert row["mfu"] is None
    assert row["tokens_per_second"] == pytest.approx(100 / row["step_seconds"])
    assert 0.01 < row["memory_gib"] < 100
    assert "loss 1.0000" in capsys.readouterr().out


def test_values_of_the_loop_win_over_those_measured_here(every_step, tmp_path):
    metrics = Metrics(every_step, tmp_path, rank=0, resume_step=0)
    metrics.log(1, {"tokens": 5, "memory_gib": 77.0, "reward": 1.5})
    metrics.close()
    (row,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert (row["memory_gib"], row["reward"]) == (77.0, 1.5)


def test_due_at_the_first_the_last_every_nth_and_with_a_validation(make_config, tmp_path):
    config = make_config(training={"steps": 14}, metrics={"log_freq": 5}, validation={"enable": True, "freq": 6})
    metrics = Metrics(config, tmp_path, rank=1, resume_step=0)
    assert [step for step in range(1, 15) if metrics.due(step)] == [1, 5, 6, 10, 12, 14]


def test_a_step_appears_once_after_a_resume_and_an_event_says_so(every_step, tmp_path):
    run(every_step, tmp_path, 1, 7)
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 8, "lo')
    run(every_step, tmp_path, 6, 10)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["loss"].hex() for row in rows] == [(1 / step).hex() for step in range(1, 11)]
    assert (tmp_path / "metrics.jsonl").read_bytes().splitlines()[:5] == before[:5]
    (event,) = read_jsonl(tmp_path / "events.jsonl")
    assert event.items() >= {
        ("kind", "replayed"),
        ("step", 5),
        ("last_logged_step", 7),
        ("dropped_lines", 2),
        ("damaged_lines", 1),
    }


def test_a_resume_where_the_log_ends_drops_nothing(every_step, tmp_path):
    run(every_step, tmp_path, 1, 5)
    run(every_step, tmp_path, 6, 10)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(1, 11))
    assert read_jsonl(tmp_path / "events.jsonl") == []


def test_a_fresh_start_keeps_the_metrics_of_the_run_before_it_elsewhere(every_step, tmp_path):
    run(every_step, tmp_path, 1, 3)
    run(every_step, tmp_path, 1, 2)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    (aside,) = tmp_path.glob("metrics-until-*.jsonl")
    assert [row["step"] for row in read_jsonl(aside)] == [1, 2, 3]
    (event,) = read_jsonl(tmp_path / "events.jsonl")
    assert (event["kind"], event["file"]) == ("set_aside", aside.name)


def test_events_have_a_kind_and_a_time_with_its_zone(every_step, tmp_path):
    metrics = Metrics(every_step, tmp_path, rank=0, resume_step=0)
    metrics.event("skip", step=3, grad_norm=float("inf"))
    metrics.close()
    (event,) = read_jsonl(tmp_path / "events.jsonl")
    assert event.pop("time").endswith("+00:00")
    assert event == {"kind": "skip", "step": 3, "grad_norm": None, "nonfinite": {"grad_norm": "inf"}}


def test_other_ranks_write_nothing(every_step, tmp_path, capsys):
    run(every_step, tmp_path / "run", 1, 3, rank=1)
    Metrics(every_step, tmp_path / "run", rank=1, resume_step=0).event("skip")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_the_logging_rank_may_be_another(every_step, tmp_path):
    run(every_step, tmp_path / "run", 1, 3, rank=1, logging_rank=1)
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 3


def test_banner_and_time_left_reach_the_console(every_step, tmp_path, capsys):
    metrics = Metrics(every_step, tmp_path, rank=0, resume_step=0)
    metrics.banner({"model": "llama3 debugmodel"})
    metrics.meter.start(0, 0)
    metrics.meter._began -= 2.0  # the step took two seconds
    metrics.log(1, {"loss": 1.0, "tokens": 10})
    metrics.close()
    out = capsys.readouterr().out
    assert "llama3 debugmodel" in out
    assert "left 18s" in out


def test_a_console_that_is_gone_does_not_stop_the_run(every_step, tmp_path, monkeypatch, warnings_of):
    class Gone:
        encoding = "utf-8"

        def isatty(self):
            return False

        def write(self, text):
            raise OSError("no terminal")

        flush = write

    monkeypatch.setattr(sys, "stdout", Gone())
    metrics = Metrics(every_step, tmp_path, rank=0, resume_step=0)
    for step in (1, 2):
        metrics.log(step, {"loss": 1.0, "tokens": step})
    metrics.close()
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 2
    assert len(warnings_of()) == 1


def test_mfu_on_a_cpu_only_against_a_measured_peak(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr("titanlike.observe.metrics.measure_cpu_peak", lambda dtype: 1e9)
    assert device_peak(make_config(), None) is None
    measuring = make_config(metrics={"measure_cpu_peak": True, "log_freq": 1})
    assert device_peak(measuring, None) == 1e9
    run(measuring, tmp_path, 1, 1, flops_per_token=1000, world_size=2)
    (row,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert row["mfu"] == pytest.approx(1000 * row["tokens_per_second"] / 2e9)


def test_nothing_heavy_is_imported_when_nothing_is_switched_on(tmp_path):
    code = """
import sys
from pathlib import Path
from titanlike.config import Config
from titanlike.observe.metrics import Metrics
metrics = Metrics(Config(), Path(sys.argv[1]), rank=0, resume_step=0)
metrics.log(1, {"loss": 1.0, "tokens": 1})
metrics.close()
sys.exit(", ".join(name for name in ("tensorboard", "wandb", "torch") if name in sys.modules) or None)
"""
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
