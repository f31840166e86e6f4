"""Every command of the README, in order: run in an empty folder, with fewer steps; those for several processes checked.

The folder is made by the README's first command.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, Command, blocks, commands, write_named_files
from titanlike import cli
from titanlike.config import load_config
from titanlike.models.spec import decoder_spec

README = PAGES[0]
COMMANDS = commands(README)
FIRST = next(command for command in COMMANDS if command.training())
HIDDEN = ("VIRTUAL_ENV", "CONDA_PREFIX", "TITANLIKE_VENV")


def train(command: Command, folder: Path, steps: int) -> None:
    """Run a command that trains, as it is but for the number of steps."""
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    environment |= {**command.variables, "TITANLIKE_PYTHON": sys.executable}
    words = [str(ROOT / command.program), *command.words[1:], "--training.steps", str(steps)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, f"{command.text}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    write_named_files(README, folder)
    shutil.copy(ROOT / "tests/config/torchtitan/llama3_8b.toml", folder / "llama3_8b_of_torchtitan.toml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        train(FIRST, folder, steps=2)
        yield folder


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.text)
def test_command(home, command, capsys):
    if command.words[:2] == (".", ".venv/bin/activate"):
        return  # what run_train.sh makes: tests/setup
    if command.program == "./run_tests.sh":
        assert os.access(ROOT / command.program, os.X_OK)
    elif command.training() and command.world > 1:
        command.check()
    elif command.training():
        command.check()
        if command is not FIRST:
            train(command, home, steps=3)
        assert (home / "outputs" / "metrics.jsonl").exists()
    else:
        assert command.program == "titanlike", "a command that nobody checks"
        assert cli.main(list(command.words[1:])) == 0
        assert capsys.readouterr().out.strip()


def test_the_second_start_went_on(home):
    starts = [line for line in (home / "outputs" / "events.jsonl").read_text().splitlines() if "start" in line]
    if len(starts) > 1:  # else only some of these tests run
        assert '"kind": "restart"' in starts[1] and '"step": 2' in starts[1]


def test_the_run_that_is_shown_is_of_the_config_that_ships():
    (shown,) = [text for text in blocks(README, "text") if text.startswith("$ ./run_train.sh")]
    config = load_config(["debug_model"])
    spec, steps = decoder_spec(config), config.training.steps
    advice = "run the two commands of the README again and paste what they print"
    assert f"{config.model.flavor}, {spec.parameters():,} parameters" in shown, advice
    assert re.search(rf"step +{steps}/{steps}  loss", shown), advice
    assert f"of {config.training.seq_len} tokens" in shown, advice
