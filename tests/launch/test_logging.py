import os
import subprocess
import sys

import pytest

from titanlike.errors import ConfigError
from titanlike.launch.logging import shown_ranks

CODE = """
import os, warnings
from titanlike.launch.logging import logger, say, setup_logging
setup_logging(folder=os.environ["FOLDER"])
logger.info("a line")
warnings.warn("a warning")
os.system("echo from a child")
say("a failure")
"""


def run(folder, **environment):
    everything = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), "FOLDER": str(folder), **environment}
    return subprocess.run([sys.executable, "-c", CODE], env=everything, capture_output=True, text=True, check=True)


def test_one_process_writes_to_the_console_alone(tmp_path):
    done = run(tmp_path)
    assert "a line" in done.stdout and "a warning" in done.stdout
    assert done.stderr == "a failure\n"
    assert not (tmp_path / "logs").exists()


def test_a_hidden_rank_writes_everything_to_its_file_but_failures_to_both(tmp_path):
    done = run(tmp_path, RANK="1", WORLD_SIZE="2")
    assert done.stdout == ""
    assert done.stderr == "a failure\n"
    text = (tmp_path / "logs" / "rank-1.log").read_text()
    for part in ("a line", "a warning", "from a child", "a failure"):
        assert part in text


def test_a_shown_rank_writes_to_both_with_its_number(tmp_path):
    done = run(tmp_path, RANK="1", WORLD_SIZE="2", LOG_RANK="0,1")
    assert "[rank 1] a line" in done.stdout
    assert "a line" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_log_rank(monkeypatch):
    monkeypatch.delenv("LOG_RANK", raising=False)
    assert shown_ranks() == {0}
    monkeypatch.setenv("LOG_RANK", "0,3")
    assert shown_ranks() == {0, 3}
    monkeypatch.setenv("LOG_RANK", "all")
    assert shown_ranks() is None
    monkeypatch.setenv("LOG_RANK", "first")
    with pytest.raises(ConfigError, match="LOG_RANK: 'first'"):
        shown_ranks()
