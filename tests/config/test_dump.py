"""The resolved config as TOML."""

from __future__ import annotations

import json
import subprocess
import sys

import jsonschema
import pytest

from titanlike.config import Config, dump_toml, load_config
from titanlike.config.json_schema import json_schema
from titanlike.config.keys import walk
from titanlike.config.shipped import shipped_configs
from titanlike.config.tomllib_compat import loads


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["llama3_405b.toml"],
        ["--parallelism.context_parallel_load_balancer=none", '--job.description=a "b" \\ \x7f\n é'],
        ['--optimizer.param_groups=[{pattern = "norm", lr_factor = 0}]', "--sft.columns.input=question"],
        ['--environment=[{type = "gsm8k", options = {a = [1, 2]}, reward = [{type = "length", weight = -1}]}]'],
    ],
)
def test_a_dump_loads_as_the_same_config(tmp_path, argv):
    config = load_config(argv)
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(config, "from somewhere"), encoding="utf-8")
    again = load_config([str(path)])
    expected = config.model_dump() | {"job": config.job.model_dump() | {"config_file": [str(path)]}}
    assert again.model_dump() == expected


def test_every_key_has_a_meaning_and_a_default():
    for path, field in walk():
        assert field.description, f"{'.'.join(path)} has no docstring"
    Config()


def test_a_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load_config([]).training.steps = 3  # type: ignore[misc]


def test_the_json_schema_takes_what_is_shipped_and_refuses_what_is_not():
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in shipped_configs().values():
        validator.validate(loads(path.read_text()))
    validator.validate({"extends": "base.toml", "data": {"path": "a.txt"}, "job": {"import": ["x"]}})
    for wrong in (
        {"training": {"steps": "ten"}},
        {"trainig": {}},
        {"training": {"stepz": 1}},
        {"training": {"steps": 0}},
    ):
        assert not validator.is_valid(wrong), wrong
    steps = schema["$defs"]["Training"]["properties"]["steps"]
    assert "Optimizer steps" in steps["description"] and steps["default"] == 10000


def test_reading_a_config_imports_no_torch():
    code = (
        "import sys, json; from titanlike.cli import main;"
        "code = main(['config', 'check', 'llama3_8b', '--world', '8']);"
        "print(json.dumps([code, [m for m in ('torch', 'numpy', 'rich', 'transformers') if m in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]
