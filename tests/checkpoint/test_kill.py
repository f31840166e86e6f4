"""kill -9 in the middle of a save leaves a folder that is no checkpoint, and the one before as it was."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch

from titanlike.checkpoint import folders
from titanlike.checkpoint.manager import CheckpointManager

PROGRAM = """
import sys, time
import torch, torch.distributed as dist
from types import SimpleNamespace
from titanlike.checkpoint.manager import CheckpointManager

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
settings = SimpleNamespace(async_mode="async", keep_latest_k=2, verify_checksums=True)
manager = CheckpointManager(settings, sys.argv[1])
weight = torch.zeros(1000)
for step in (1, 2):
    manager.save(step, {"weight": weight}, {"step": step})
    manager.before_update()
    weight += 1
    if step == 1:
        manager.wait()
time.sleep(100)
"""


def test_a_save_cut_short_by_kill_is_passed_over(
    manager: Callable[..., CheckpointManager], caplog: pytest.LogCaptureFixture
) -> None:
    first = manager()
    torn = first.folder / "step-2"
    environment = {**os.environ, "TITANLIKE_FAULT": "slow-save:step=2,seconds=2"}
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(first.folder)], env=environment)
    try:
        # The second save has written its tensors and waits before its manifest.
        deadline = time.monotonic() + 60
        while not (torn / "state.json").exists():
            assert program.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        program.send_signal(signal.SIGKILL)
        program.wait()
    assert [(one.step, one.torn) for one in folders.scan(first.folder)] == [(2, True), (1, False)]
    with caplog.at_level(logging.WARNING, "titanlike"):
        found = first.find()
    assert found is not None and (found.step, found.state) == (1, {"step": 1})
    assert "step-2" in caplog.text and "never finished" in caplog.text
    weight = torch.ones(1000)
    first.load(found, {"weight": weight})
    assert not weight.any()
    first.save(2, {"weight": weight + 1}, {})  # the run comes to the same step again
    found = first.find()
    assert found is not None and found.path == torn
