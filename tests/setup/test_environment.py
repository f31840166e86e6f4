"""What scripts/environment.sh does on machines of many kinds. The slow ones install (from the package index)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PYTHON = os.path.realpath(sys.executable)
WITHOUT_ENSUREPIP = f"""
case "$*" in
  *ensurepip* | "-m venv "* | "-m virtualenv "*) echo "No module named ensurepip" >&2; exit 1 ;;
esac
exec {PYTHON} "$@"
"""


def installed_in(active: dict[str, str], folder: Path) -> None:
    """Have the active environment import titanlike from that folder."""
    packages = next(Path(active["VIRTUAL_ENV"]).glob("lib/python*/site-packages"))
    (packages / "titanlike.pth").write_text(f"{folder}\n")


def listing(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_an_active_environment_with_titanlike_is_used_as_it_is(machine, active):
    installed_in(active, machine.clone)
    before = listing(Path(active["VIRTUAL_ENV"]))
    code, python, said = machine.run("dev", TITANLIKE_PYTHON="/nowhere", **active)
    assert (code, said) == (0, "")
    assert python == f"{active['VIRTUAL_ENV']}/bin/python3"
    assert not machine.venv.exists()
    assert listing(Path(active["VIRTUAL_ENV"])) == before


def test_titanlike_python(machine, active):
    python = f"{active['VIRTUAL_ENV']}/bin/python"
    assert machine.run(TITANLIKE_PYTHON=python)[:2] == (0, python)
    machine.program("bare", f'exec {PYTHON} -S "$@"')
    code, _, said = machine.run(TITANLIKE_PYTHON=str(machine.bin / "bare"))
    assert code == 2
    assert "lacks some of: torch" in said and "-m pip install" in said


def test_without_ensurepip_uv_and_virtualenv_the_line_that_helps_is_said(machine):
    machine.program("python3", WITHOUT_ENSUREPIP)
    code, _, said = machine.run()
    assert code == 2
    assert "lacks ensurepip" in said and "install" in said.splitlines()[-1]


def test_a_folder_that_is_no_environment_is_not_touched(machine, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    code, _, said = machine.run(TITANLIKE_VENV=str(tmp_path / "thesis"))
    assert code == 2
    assert "choose another TITANLIKE_VENV" in said
    assert (tmp_path / "thesis" / "chapter1.tex").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torch_of_an_active_environment_is_borrowed_and_the_next_start_is_quick(machine, active):
    before = listing(Path(active["VIRTUAL_ENV"]))
    code, python, said = machine.run(**active)
    assert code == 0, said
    assert python == f"{machine.venv}/bin/python"
    assert "taking torch from" in said
    assert not list(machine.venv.glob("lib/python*/site-packages/torch"))
    where = subprocess.run(
        [python, "-c", "import titanlike, torch; print(titanlike.__file__, torch.__file__, sep='\\n')"],
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},  # that of this test's own run
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    import torch

    assert where == [f"{machine.clone}/titanlike/__init__.py", torch.__file__]
    assert listing(Path(active["VIRTUAL_ENV"])) == before
    began = time.monotonic()
    assert machine.run() == (0, python, "")
    assert time.monotonic() - began < 1  # 0.02 s, on a machine with nothing else to do

    lock = machine.clone / "constraints.txt"
    lock.write_text(f"{lock.read_text()}# another lock file\n")
    code, _, said = machine.run(**active)
    assert code == 0, said
    assert "installing" in said and "making" not in said


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("maker", ["uv", "virtualenv"])
def test_without_ensurepip_another_maker_is_used(machine, active, maker):
    machine.program("python3", WITHOUT_ENSUREPIP.replace(PYTHON, f"{active['VIRTUAL_ENV']}/bin/python3"))
    used = machine.bin / "used"
    machine.program(maker, f'echo "$@" > {used}; exec {PYTHON} -m venv "${{@: -1}}"')  # the folder is the last word
    code, python, said = machine.run()
    assert code == 0, said
    assert python == f"{machine.venv}/bin/python"
    assert used.read_text().split()[-1] == str(machine.venv)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_half_made_environment_is_made_again(machine, active):
    first = machine.start("run", **active)
    while not (machine.venv / ".titanlike" / "making").exists() or not (machine.venv / "bin" / "python").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    (machine.venv / "lib" / "left_over").touch()
    code, python, said = machine.run(**active)
    assert code == 0, said
    assert python == f"{machine.venv}/bin/python"
    assert not (machine.venv / "lib" / "left_over").exists()
    assert machine.run() == (0, python, "")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_venv_that_somebody_broke_is_made_again(machine, active):
    (machine.venv / "bin").mkdir(parents=True)
    (machine.venv / "bin" / "python").symlink_to("/usr/bin/python-that-was-removed")
    code, python, said = machine.run(**active)
    assert (code, python) == (0, f"{machine.venv}/bin/python"), said


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("locks", ["flock", "mkdir"])
def test_two_starts_at_once_make_one_environment(machine, active, locks):
    if locks == "mkdir":
        active["PATH"] = f"{machine.bin}:{active['PATH']}"
        machine.program("flock", "exit 75  # as on a disk without locks")
    starts = [machine.start("run", **active) for _ in range(2)]
    ends = [start.communicate(timeout=500) for start in starts]
    assert [start.returncode for start in starts] == [0, 0], ends
    said = "".join(err for _, err in ends)
    assert said.count("taking torch from") == 1
    assert said.count("waiting for it") == 1
    assert said.count("installing titanlike") == 1
