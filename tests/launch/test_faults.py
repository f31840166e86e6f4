import subprocess
import sys
import time

import pytest

from titanlike.errors import ConfigError
from titanlike.launch import faults
from titanlike.launch.faults import Fault, InjectedFault, fault, read_faults


@pytest.fixture
def arm(monkeypatch):
    def arm(text: str, rank: int = 0):
        monkeypatch.setenv("TITANLIKE_FAULT", text)
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(faults, "_armed", None)

    return arm


def test_all_options_are_read(tmp_path):
    text = f"slow-save:rank=1,step=3,phase=save,seconds=0.5,once={tmp_path}; kill:step=7;"
    assert read_faults({"TITANLIKE_FAULT": text}) == (
        Fault("slow-save", 1, 3, "save", 0.5, tmp_path),
        Fault("kill", step=7),
    )


def test_every_mistake_is_named():
    with pytest.raises(ConfigError) as error:
        read_faults({"TITANLIKE_FAULT": "explode:rank=x,colour=red;hang:phase=nap;save-error:phase=data;raise:step"})
    message = str(error.value)
    assert len(error.value.problems) == 6
    for part in ("'explode'", "rank", "'colour=red'", "'nap'", "save-error strikes in phase save only", "'step'"):
        assert part in message


def test_strikes_only_the_named_rank_step_and_phase(arm):
    arm("raise:rank=1,step=3,phase=forward", rank=1)
    fault("forward", 2)
    fault("data", 3)
    with pytest.raises(InjectedFault, match="rank 1 at step 3 in forward"):
        fault("forward", 3)
    arm("raise:rank=1,step=3,phase=forward", rank=0)
    fault("forward", 3)


def test_once_strikes_once(arm, tmp_path):
    for _ in range(2):  # as in a first start and in the one after it
        arm(f"raise:step=3,once={tmp_path / 'struck'}")
        fault("data", 2)
        if (tmp_path / "struck").exists():
            fault("data", 3)
            return
        with pytest.raises(InjectedFault):
            fault("data", 3)
    pytest.fail("the marker was never made")


def test_saves_fail_or_slow_down(arm):
    arm("save-error:step=1;slow-save:step=2,seconds=0.2")
    fault("data", 1)
    with pytest.raises(OSError, match="step 1"):
        fault("save", 1)
    start = time.monotonic()
    fault("save", 2)
    assert time.monotonic() - start >= 0.2


def test_kill_is_a_sigkill():
    code = "from titanlike.launch.faults import fault; fault('data', 1)"
    environment = {"TITANLIKE_FAULT": "kill", "PYTHONPATH": ":".join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == -9


def test_costs_nothing_when_unset(arm):
    arm("")
    fault("data", 1)
    start = time.perf_counter()
    for step in range(100_000):
        fault("data", step)
    assert time.perf_counter() - start < 0.5  # 5 µs a call would be far too much already
