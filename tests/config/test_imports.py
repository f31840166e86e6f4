"""`[job] import`: whose modules are imported, when, and what is said of those that aren't there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titanlike.config import load_config
from titanlike.errors import ConfigError
from titanlike.models.spec import families


@pytest.fixture
def module(tmp_path, monkeypatch):
    """module(name, text) makes a module in the current folder, which is not on Python's path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", os.getcwd())])
    known = set(sys.modules)

    def make(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return name

    registered = set(families.names())
    yield make
    for name in set(families.names()) - registered:
        del families._entries[name]  # else every later test would see it
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == tmp_path:
            del sys.modules[name]


def test_a_module_in_the_current_folder_registers_before_the_checks(module):
    name = module(
        "house_style",
        "import dataclasses\n"
        "from titanlike.models.families.llama3 import llama3\n"
        "from titanlike.models.spec import Family, families\n"
        "tiny = dataclasses.replace(llama3.flavors['debugmodel'], max_seq_len=64)\n"
        "families.register('house_style')(Family(name='house_style', flavors={'tiny': tiny}))\n",
    )
    argv = [f"--job.import={name}", "--model.name=house_style", "--model.flavor=tiny"]
    assert load_config([*argv, "--training.seq_len=64"]).job.imports == [name]
    with pytest.raises(ConfigError, match=r"seq_len = 65: is longer than the 64"):
        load_config([*argv, "--training.seq_len=65"])


def test_a_module_that_is_not_there(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('[job]\nimport = [\n  "json",\n  "no_such_package.part",\n]\n\n[training]\nsteps = 0\n')
    with pytest.raises(ConfigError) as caught:
        load_config([str(config)])
    steps, absent = caught.value.problems
    assert f"{config}:4: job.import = 'no_such_package.part': there is no module 'no_such_package'" in absent
    assert "training.steps = 0" in steps, "with everything else that is wrong"


def test_what_a_module_raises_is_its_own(module):
    name = module("needs_more", "import a_package_that_is_not_installed\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_installed"):
        load_config([f"--job.import={name}"])
    name = module("broken", "1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load_config([f"--job.import={name}"])


def test_nothing_is_imported_without_being_asked(module):
    name = module("marks", "open('was_here', 'w').close()\n")
    load_config([f"--job.import={name}"], imports=False)
    old = Path("old.toml")
    old.write_text(f'[experimental]\ncustom_import = "{name}"\n')
    command = [sys.executable, "-m", "titanlike.cli", "config", "import", "old.toml", "new.toml"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    assert not Path("was_here").exists()
    load_config([f"--job.import={name}"])
    assert Path("was_here").exists()
