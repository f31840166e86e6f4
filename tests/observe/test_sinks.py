"""TensorBoard and Weights & Biases: read back, resumed, and failing."""

import importlib.machinery
import importlib.util
import math
import os
import subprocess
import sys
import threading
import types

import pytest

from titanlike.errors import ConfigError
from titanlike.observe.jsonl import read_jsonl
from titanlike.observe.metrics import Metrics
from titanlike.observe.sinks import WandbSink


def run(config, folder, first: int, last: int, rank: int = 0, loss=lambda step: 1 / step) -> None:
    metrics = Metrics(config, folder, rank=rank, resume_step=first - 1)
    for step in range(first, last + 1):
        metrics.log(step, {"loss": loss(step), "validation_loss": None, "tokens": step})
    metrics.close()


class FakeRun:
    """What the sink uses of a W&B run; keeps what it was given."""

    def __init__(self, offline: bool = True, step: int = 0):
        self.offline, self.step = offline, step
        self.rows: list[tuple[int, dict]] = []
        self.finished = False

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch):
    """Stands in for the package. `.runs` yields the next run; `.calls` has what init was asked."""
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="fake")
    module.calls, module.runs = [], []

    def init(**options):
        module.calls.append(options)
        return module.runs.pop(0)

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_RUN_ID", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return module


@pytest.fixture
def board(make_config):
    return make_config(metrics={"log_freq": 1, "enable_tensorboard": True})


@pytest.fixture
def wandb_config(make_config):
    return make_config(metrics={"log_freq": 1, "enable_wandb": True})


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestTensorBoard:
    def test_event_files_read_together_have_each_step_once_after_a_resume(self, board, tmp_path):
        run(board, tmp_path, 1, 7, loss=lambda step: 100.0 + step)
        run(board, tmp_path, 6, 10, loss=lambda step: 200.0 + step)
        expected = [100.0 + step for step in range(1, 6)] + [200.0 + step for step in range(6, 11)]
        assert scalars(tmp_path / "tensorboard", "loss") == list(zip(range(1, 11), expected, strict=True))
        assert len(list((tmp_path / "tensorboard").iterdir())) == 2

    def test_a_fresh_start_in_the_same_folder_purges_the_old_curve(self, board, tmp_path):
        run(board, tmp_path, 1, 5)
        run(board, tmp_path, 1, 2, loss=lambda step: 9.0)
        assert scalars(tmp_path / "tensorboard", "loss") == [(1, 9.0), (2, 9.0)]

    def test_tags_are_the_keys_of_metrics_jsonl_that_have_a_value(self, board, tmp_path):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        run(board, tmp_path, 1, 2)
        (row, _) = read_jsonl(tmp_path / "metrics.jsonl")
        tags = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"]
        assert set(tags) == {key for key, value in row.items() if value is not None} - {"step"}

    def test_a_nan_is_in_the_curve(self, board, tmp_path):
        run(board, tmp_path, 1, 2, loss=lambda step: math.nan if step == 2 else math.inf)
        assert [math.isnan(value) for _, value in scalars(tmp_path / "tensorboard", "loss")] == [False, True]

    def test_every_rank_writes_into_its_own_folder_when_asked(self, make_config, tmp_path):
        config = make_config(metrics={"enable_tensorboard": True, "save_for_all_ranks": True, "save_tb_folder": "tb"})
        for rank in (0, 1):
            run(config, tmp_path, 1, 2, rank=rank, loss=lambda step, rank=rank: float(rank))
        for rank in (0, 1):
            assert scalars(tmp_path / "tb" / f"rank-{rank}", "loss") == [(1, rank), (2, rank)]
        assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 2

    def test_a_failing_writer_is_switched_off_with_one_warning(self, board, tmp_path, monkeypatch, warnings_of):
        from torch.utils.tensorboard import SummaryWriter

        def full(*_):
            raise OSError("disk full")

        monkeypatch.setattr(SummaryWriter, "add_scalar", full)
        run(board, tmp_path, 1, 4)
        assert warnings_of() == ["TensorBoard failed and is switched off for this run: OSError: disk full"]
        assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 4


class TestWandb:
    def test_a_resume_goes_on_with_the_same_run_and_sends_no_step_twice(self, wandb_config, fake_wandb, tmp_path):
        first, second = FakeRun(), FakeRun()
        fake_wandb.runs = [first, second]
        run(wandb_config, tmp_path, 1, 7)
        run(wandb_config, tmp_path, 6, 10)
        ids = [call["id"] for call in fake_wandb.calls]
        assert ids[0] == ids[1]
        assert all(call["resume"] == "allow" for call in fake_wandb.calls)
        assert [step for step, _ in first.rows + second.rows] == list(range(1, 11))
        assert second.finished

    def test_online_the_server_says_what_it_has(self, wandb_config, fake_wandb, tmp_path):
        first, second = FakeRun(offline=False), FakeRun(offline=False, step=7)  # step 7's row was lost on its way
        fake_wandb.runs = [first, second]
        run(wandb_config, tmp_path, 1, 7)
        run(wandb_config, tmp_path, 6, 10)
        assert [step for step, _ in second.rows] == [7, 8, 9, 10]

    def test_a_fresh_start_is_a_new_run(self, wandb_config, fake_wandb, tmp_path):
        fake_wandb.runs = [FakeRun(), FakeRun()]
        run(wandb_config, tmp_path, 1, 2)
        run(wandb_config, tmp_path, 1, 2)
        assert fake_wandb.calls[0]["id"] != fake_wandb.calls[1]["id"]

    def test_the_environment_names_run_and_project(self, wandb_config, fake_wandb, tmp_path, monkeypatch):
        monkeypatch.setenv("WANDB_RUN_ID", "mine")
        monkeypatch.setenv("WANDB_PROJECT", "ours")
        fake_wandb.runs = [FakeRun()]
        run(wandb_config, tmp_path, 1, 1)
        (call,) = fake_wandb.calls
        assert (call["id"], call["project"]) == ("mine", "ours")
        assert call["config"]["metrics"]["enable_wandb"] is True

    def test_ranks_have_runs_of_their_own_when_asked(self, make_config, fake_wandb, tmp_path):
        config = make_config(metrics={"enable_wandb": True, "save_for_all_ranks": True})
        fake_wandb.runs = [FakeRun() for _ in range(3)]
        run(config, tmp_path, 1, 2, rank=0)
        run(config, tmp_path, 1, 2, rank=1)
        run(config, tmp_path, 3, 4, rank=1)
        ids = [call["id"] for call in fake_wandb.calls]
        assert ids[0] != ids[1] == ids[2]

    @pytest.mark.parametrize("when", ["init", "log", "finish"])
    def test_a_failure_at_any_time_is_one_warning(self, wandb_config, fake_wandb, tmp_path, warnings_of, when):
        def fail(*_, **__):
            raise RuntimeError("no network\nat all")

        broken = FakeRun()
        fake_wandb.runs = [broken]
        if when == "init":
            fake_wandb.init = fail
        else:
            setattr(broken, when, fail)
        run(wandb_config, tmp_path, 1, 4)
        assert len(warnings_of()) == 1
        assert warnings_of()[0].startswith("W&B")
        assert "RuntimeError: no network" in warnings_of()[0]
        assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 4

    def test_closing_does_not_wait_for_ever(self, wandb_config, fake_wandb, tmp_path, warnings_of, monkeypatch):
        monkeypatch.setattr(WandbSink, "FINISH_SECONDS", 0.05)
        release = threading.Event()
        stuck = FakeRun()
        stuck.finish = release.wait
        fake_wandb.runs = [stuck]
        run(wandb_config, tmp_path, 1, 1)
        release.set()
        assert "wandb sync" in warnings_of()[0]

    def test_a_missing_package_is_a_config_error_on_every_rank(self, wandb_config, tmp_path, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        for rank in (0, 1):
            with pytest.raises(ConfigError, match=r"metrics\.enable_wandb.*titanlike\[wandb\]"):
                Metrics(wandb_config, tmp_path, rank=rank, resume_step=0)

    def test_a_folder_called_wandb_is_not_the_package(self, wandb_config, tmp_path, monkeypatch):
        (tmp_path / "here" / "wandb").mkdir(parents=True)
        monkeypatch.delitem(sys.modules, "wandb", raising=False)
        monkeypatch.setattr(sys, "path", [str(tmp_path / "here")])
        with pytest.raises(ConfigError, match="wandb isn't installed"):
            Metrics(wandb_config, tmp_path, rank=0, resume_step=0)

    def test_the_real_package_offline(self, wandb_config, tmp_path):
        """In a process of its own: W&B starts threads and a service that a test process should not keep."""
        if importlib.util.find_spec("wandb") is None:
            pytest.skip("the extra wandb is not installed")
        code = """
import sys
from pathlib import Path
from titanlike.config import Config
from titanlike.observe.metrics import Metrics
config = Config.model_validate({"metrics": {"enable_wandb": True}})
for first, last in ((1, 7), (6, 10)):
    metrics = Metrics(config, Path(sys.argv[1]), rank=0, resume_step=first - 1)
    for step in range(first, last + 1):
        metrics.log(step, {"loss": 1 / step, "tokens": step})
    metrics.close()
"""
        environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        environment.pop("WANDB_RUN_ID", None)
        result = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        run_id = (tmp_path / "wandb" / "run_id.txt").read_text().strip()
        files = sorted(path.name for path in tmp_path.glob("wandb/offline-run-*/*.wandb"))
        assert files == [f"run-{run_id}.wandb"] * 2
        assert "switched off" not in result.stderr + result.stdout
