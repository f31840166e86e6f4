"""Fresh machines in small: a clone of this checkout, and Pythons that have or lack things."""

import os
import shutil
import stat
import subprocess
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HIDDEN = ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "TITANLIKE_PYTHON", "TITANLIKE_VENV", "PYTHONHOME")


class Machine:
    """A clone and a PATH. `bin` comes first on it; programs put there are what the scripts find."""

    def __init__(self, folder: Path):
        self.bin, self.clone = folder / "bin", folder / "clone"
        self.bin.mkdir()
        self.clone.mkdir()
        for name in ("pyproject.toml", "constraints.txt", "LICENSE"):
            shutil.copy(ROOT / name, self.clone)
        (self.clone / "README.md").touch()
        for name in ("scripts", "titanlike"):
            shutil.copytree(ROOT / name, self.clone / name, ignore=shutil.ignore_patterns("__pycache__"))

    @property
    def venv(self) -> Path:
        return self.clone / ".venv"

    def program(self, name: str, text: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in HIDDEN}
        return {**kept, "PATH": f"{self.bin}:/usr/bin:/bin", **more}

    def start(self, kind: str, **more: str) -> subprocess.Popen:
        """What run_train.sh (kind run) and run_tests.sh (dev) begin with."""
        script = f'set -euo pipefail; . {self.clone}/scripts/environment.sh; use_environment {kind}; echo "$python"'
        return subprocess.Popen(
            ["bash", "-c", script],
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            start_new_session=True,
        )

    def run(self, kind: str = "run", **more: str) -> tuple[int, str, str]:
        """Exit code, the interpreter that was chosen, and what was said."""
        process = self.start(kind, **more)
        out, err = process.communicate(timeout=500)
        return process.returncode, out.strip(), err


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def active(tmp_path) -> dict[str, str]:
    """Variables of an active environment that has the torch of these tests (and what lies beside it), no titanlike."""
    folder = tmp_path / "active"
    venv.create(folder, with_pip=False)
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "torch_from.pth").write_text(f"{Path(spec.origin).parents[1]}\n")
    return {"VIRTUAL_ENV": str(folder), "PATH": f"{folder}/bin:/usr/bin:/bin"}
