import subprocess
import sys

import pytest

from titanlike.errors import ConfigError
from titanlike.launch import ownership

OTHER = """
import sys, pathlib
from titanlike.launch import ownership
ownership.hold(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _release():
    yield
    ownership.release()


def test_another_run_is_refused_by_name_until_it_ends(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"job.dump_folder = .*another run .*process {other.pid} on "):
            ownership.hold(tmp_path, patience=0.3)
        other.kill()
    ownership.hold(tmp_path, patience=5)


def test_released_with_the_run(tmp_path):
    ownership.hold(tmp_path / "new")
    ownership.release()
    ownership.hold(tmp_path / "new", patience=0)


def test_workers_of_a_launcher_that_holds_it(tmp_path, monkeypatch):
    monkeypatch.setenv(ownership._BY_LAUNCHER, str(tmp_path))
    ownership.hold(tmp_path, patience=0)
    assert not (tmp_path / ownership.FILE).exists()


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"job.dump_folder = .*can't be written to"):
        ownership.hold(tmp_path / "file" / "run")
