"""TOML files: syntax errors, merging, extends."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanlike.config import load_config
from titanlike.errors import ConfigError


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[job]\na = 1\n\n\n\n\ndescription = "open\n[training]\n', 7),  # unclosed string
        ('[job]\n\ndescription = """open\n[training]\nsteps = 1\n', 3),  # never closed: where it begins
        ("[job]\n\n\nimport = [\n  'a',\n", 4),
        ("[training]\nsteps = 1\nsteps = 2\n", 3),
        ("[training\n", 1),
        ("[training]\nsteps\n", 2),
    ],
)
def test_broken_toml_names_file_and_line(tmp_path, text, line):
    name = write(tmp_path / "run.toml", text)
    (problem,) = problems(name)
    assert problem.startswith(f"{name}:{line}: not valid TOML")


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"[job]\n# \xff\n")
    (problem,) = problems(str(path))
    assert problem.startswith(f"{path}:2: not UTF-8")


def test_a_missing_file():
    (problem,) = problems("lama3_8b.toml")
    assert "lama3_8b.toml: no such config file" in problem and "did you mean llama3_8b?" in problem


def test_a_folder_is_no_file(tmp_path):
    (problem,) = problems(str(tmp_path / "x") + "/")
    assert "no such config file" in problem


def test_files_merge_from_left_to_right(tmp_path):
    a = write(tmp_path / "a.toml", "[training]\nsteps = 1\nseq_len = 64\n[data]\npath = ['x', 'y']\n")
    b = write(tmp_path / "b.toml", "[training]\nsteps = 2\n[data]\npath = ['z']\n")
    config = load_config(["--job.config_file", a, b, "--training.local_batch_size", "3"])
    assert (config.training.steps, config.training.seq_len, config.training.local_batch_size) == (2, 64, 3)
    assert config.data.path == ["z"], "lists are replaced, not joined"
    assert config.job.config_file == [a, b]


def test_extends_is_relative_to_the_file_and_lies_below_it(tmp_path):
    (tmp_path / "base").mkdir()
    write(tmp_path / "base" / "one.toml", "[training]\nsteps = 1\nseq_len = 64\n")
    write(tmp_path / "base" / "two.toml", "extends = 'one.toml'\n[training]\nsteps = 2\n[optimizer]\nlr = 0.5\n")
    name = write(tmp_path / "run.toml", "extends = ['base/two.toml']\n[optimizer]\nlr = 0.25\n")
    config = load_config([name])
    assert (config.training.steps, config.training.seq_len, config.optimizer.lr) == (2, 64, 0.25)


def test_extends_finds_shipped_files(tmp_path):
    name = write(tmp_path / "run.toml", "extends = 'debug_model.toml'\n[training]\nsteps = 3\n")
    config = load_config([name])
    assert config.training.steps == 3
    assert config.training.seq_len == load_config(["debug_model"]).training.seq_len


def test_extends_in_a_circle_is_refused(tmp_path):
    a = write(tmp_path / "a.toml", "extends = 'b.toml'\n")
    write(tmp_path / "b.toml", "extends = 'a.toml'\n")
    (problem,) = problems(a)
    assert "circle (a.toml -> b.toml -> a.toml)" in problem


def test_extends_of_nothing(tmp_path):
    name = write(tmp_path / "a.toml", "extends = 'not_there.toml'\n")
    (problem,) = problems(name)
    assert "extends" in problem and "not_there.toml: no such config file" in problem
    name = write(tmp_path / "b.toml", "\nextends = 3\n")
    (problem,) = problems(name)
    assert problem == f"{name}:2: extends = 3: must be a file name or a list of them"


def test_an_error_in_a_base_names_the_base(tmp_path):
    base = write(tmp_path / "base.toml", "[training]\nsteps = 0\n")
    name = write(tmp_path / "run.toml", "extends = 'base.toml'\n")
    (problem,) = problems(name)
    assert problem == f"{base}:2: training.steps = 0: must be greater than 0"


def test_an_override_answers_for_itself(tmp_path):
    name = write(tmp_path / "run.toml", "[training]\nsteps = 0\n")
    (problem,) = problems(name, "--training.steps", "-2")
    assert problem == "command line: training.steps = -2: must be greater than 0"
    assert load_config([name, "--training.steps", "2"]).training.steps == 2
