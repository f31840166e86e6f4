"""`titanlike checkpoint list | verify`, for people and for programs."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from titanlike.checkpoint import command
from titanlike.checkpoint.manager import CheckpointManager
from titanlike.errors import CheckpointError, ConfigError


@pytest.fixture
def run(manager: Callable[..., CheckpointManager], tmp_path: Path) -> Path:
    """A run's folder with complete checkpoints of steps 9 and 10, and a torn one of step 11."""
    first = manager()
    for step in (9, 10):
        first.save(step, {"weight": torch.zeros(100)}, {"counters": {"tokens": step * 1000}})
    (first.folder / "step-11").mkdir()
    return tmp_path


def test_list_for_people(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list", str(run)]) == 0
    torn, ten, nine = capsys.readouterr().out.splitlines()
    assert "step-11  NOT COMPLETE: " in torn and "no manifest.json" in torn
    assert "step-10 " in ten and "tokens 10,000" in ten and "1 ranks" in ten and "MiB" in ten
    assert "step-9 " in nine


def test_list_for_programs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list", str(run / "checkpoints"), "--json"]) == 0
    torn, ten, nine = json.loads(capsys.readouterr().out)
    assert (torn["step"], torn["complete"]) == (11, False) and torn["problems"]
    assert (ten["step"], ten["complete"], ten["problems"], ten["counters"]) == (10, True, [], {"tokens": 10_000})
    assert ten["bytes"] == sum(
        path.stat().st_size for path in Path(ten["path"]).iterdir() if path.name != "manifest.json"
    )
    assert (nine["topology"], nine["made"]["tensors"]) == ({"dp": 1}, 1)


def test_verify_tells_by_exit_code_and_names_the_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = run / "checkpoints" / "step-10"
    assert command.main(["verify", str(step)]) == 0
    assert capsys.readouterr().out == f"{step}: ok\n"
    (step / "__0_0.distcp").write_bytes((step / "__0_0.distcp").read_bytes()[:-1])
    assert command.main(["verify", str(step), "--json"]) == 4
    (report,) = json.loads(capsys.readouterr().out)
    assert report["ok"] is False and "__0_0.distcp" in report["problems"][0]
    assert command.main(["verify", str(run)]) == 4
    verdicts = [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines() if line.startswith(str(run))]
    assert verdicts == ["1 problems", "1 problems", "ok"]  # steps 11 (torn), 10 and 9
    step.rename(run / "copied")
    assert command.main(["verify", str(run / "copied")]) == 4
    assert command.main(["verify", str(run / "checkpoints" / "step-9")]) == 0


def test_what_is_not_there_is_an_error(run: Path) -> None:
    for verb in ("list", "verify"):
        with pytest.raises(CheckpointError, match="nowhere"):
            command.main([verb, str(run / "nowhere")])
        with pytest.raises(CheckpointError, match="step-77"):
            command.main([verb, str(run / "checkpoints" / "step-77")])
    with pytest.raises(ConfigError, match="titanlike checkpoint"):
        command.main(["lst", str(run)])


def test_list_needs_no_torch(run: Path) -> None:
    program = "import sys; from titanlike.checkpoint import command; command.main(sys.argv[1:])"
    program += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program, "list", str(run)], check=True, capture_output=True)
