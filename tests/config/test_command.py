"""`titanlike config ...` and the dispatch of the command."""

from __future__ import annotations

import json

import pytest

from titanlike import cli
from titanlike.config.shipped import shipped_configs


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_list(capsys):
    code, out, _ = run(capsys, "config", "list")
    assert code == 0 and "debug_model" in out and "llama3_405b" in out
    _, out, _ = run(capsys, "config", "list", "--json")
    assert {row["name"] for row in json.loads(out)} == set(shipped_configs())


def test_copy(capsys, tmp_path):
    target = tmp_path / "mine.toml"
    assert run(capsys, "config", "copy", "llama3_8b", str(target))[0] == 0
    assert target.read_text() == shipped_configs()["llama3_8b"].read_text()
    code, _, err = run(capsys, "config", "copy", "llama3_8b", str(target))
    assert code == 2 and "is there already" in err


def test_show_resolves(capsys):
    code, out, _ = run(capsys, "config", "show", "debug_model", "--training.steps=5", "--json")
    assert code == 0 and json.loads(out)["training"]["steps"] == 5
    _, out, _ = run(capsys, "config", "show", "debug_model")
    assert "[training]" in out and "local_batch_size" in out


@pytest.mark.parametrize("name", shipped_configs())
def test_every_shipped_config_is_right(capsys, name):
    code, out, err = run(capsys, "config", "check", name, "--world", "64")
    assert (code, err) == (0, "") and "ok" in out
    head = shipped_configs()[name].read_text().splitlines()
    assert head[0].startswith("# ") and any("run_train.sh" in line for line in head[:8]), "how to run it"


def test_check_says_the_accumulation(capsys):
    argv = ["--world=2", "--training.local_batch_size=4", "--training.global_batch_size=24"]
    _, out, _ = run(capsys, "config", "check", "debug_model", *argv, "--json")
    (row,) = json.loads(out)
    assert row["ok"] and row["accumulation"] == 3 and row["shard"] == 2


def test_check_reports_all_problems_of_all_files(capsys, tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text("[training]\nsteps = 0\nseq = 1\n")
    code, _, err = run(capsys, "config", "check", str(tmp_path / "a.toml"), str(tmp_path / "b.toml"))
    assert code == 2 and len(err.splitlines()) == 4 and "Traceback" not in err
    code, out, _ = run(capsys, "config", "check", str(tmp_path / "a.toml"), "debug_model", "--json")
    assert code == 2 and [row["ok"] for row in json.loads(out)] == [False, True]


@pytest.mark.parametrize("value", ["0", "two", ""])
def test_a_wrong_world(capsys, value):
    code, _, err = run(capsys, "config", "check", "debug_model", f"--world={value}")
    assert code == 2 and "--world" in err


def test_schema_and_import_write_files(capsys, tmp_path):
    assert run(capsys, "config", "schema", str(tmp_path / "s.json"))[0] == 0
    assert json.loads((tmp_path / "s.json").read_text())["title"] == "titanlike config"
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    old.write_text("[training]\ncompile = true\n")
    code, out, _ = run(capsys, "config", "import", str(old), str(new))
    assert code == 0 and "optimizer.no_decay" in out
    assert "[compile]\nenable = true" in new.read_text()
    old.write_text("[encoder]\nx = 1\n")
    code, _, err = run(capsys, "config", "import", str(old), str(tmp_path / "other.toml"))
    assert code == 2 and "Flux" in err and not (tmp_path / "other.toml").exists()


@pytest.mark.parametrize(
    "argv", [["config", "chekc"], ["trian"], ["plan", "x.toml"], ["config", "copy"], ["config", "list", "--x"]]
)
def test_wrong_commands_exit_2_with_one_message(capsys, argv):
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == "" and err.startswith("error: ")


def test_usage(capsys):
    for argv in ([], ["--help"], ["config", "list", "--help"]):
        code, out, _ = run(capsys, *argv)
        assert code == 0 and "titanlike" in out


@pytest.mark.parametrize("argv", [["train", "--help"], ["config", "--help"], ["train", "debug_model.toml", "--help"]])
def test_help_has_every_key(capsys, argv):
    from titanlike.config.keys import walk

    code, out, _ = run(capsys, *argv)
    assert code == 0
    for path, _field in walk():
        assert path[-1] in out
    assert "--training.seq_len  int  = 2048\n      Sequence length in tokens." in out


def test_help_of_a_section(capsys):
    _, out, _ = run(capsys, "train", "--help", "optimizer")
    assert "--optimizer.lr" in out and "--training.steps" not in out and "[[optimizer.param_groups]]" in out
    code, out, _ = run(capsys, "train", "--help", "optimzer")
    assert code == 2 and "did you mean optimizer?" in out
