"""The command line in all its forms."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.config import load_config
from titanlike.config.overrides import read_command_line
from titanlike.errors import ConfigError


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return caught.value.problems


@pytest.mark.parametrize(
    "form", [["--training.steps", "7"], ["--training.steps=7"], ["--training.steps=1", "--training.steps", "7"]]
)
def test_a_value_follows_or_is_joined_and_the_last_one_wins(form):
    assert load_config(form).training.steps == 7


def test_dashes_and_underscores_are_the_same_in_keys():
    config = load_config(["--activation-checkpoint.selective-ac-option", "op", "--metrics.log-freq=3"])
    assert config.activation_checkpoint.selective_ac_option == "op"
    assert config.metrics.log_freq == 3


# compile.enable is false by default, data.shuffle true.
@pytest.mark.parametrize("word", ["false", "False", "0", "no", "off"])
def test_words_for_false(word):
    config = load_config([f"--compile.enable={word}", f"--data.shuffle={word}"])
    assert config.compile.enable is False
    assert config.data.shuffle is False


@pytest.mark.parametrize("word", ["true", "True", "1", "yes", "on"])
def test_words_for_true(word):
    config = load_config([f"--compile.enable={word}", "--data.shuffle", word])
    assert config.compile.enable is True
    assert config.data.shuffle is True


def test_bare_flags_and_their_negation():
    assert load_config(["--compile.enable", "--debug.deterministic"]).compile.enable is True
    assert load_config(["--data.no-shuffle"]).data.shuffle is False
    assert load_config(["--data.no_shuffle", "--compile.no-enable"]).data.shuffle is False


def test_a_flag_followed_by_false_is_off():
    assert load_config(["--data.shuffle", "false"]).data.shuffle is False


def test_a_key_that_begins_with_no_is_no_negation():
    assert load_config(["--optimizer.no_decay", "norms"]).optimizer.no_decay == ["norms"]


@pytest.mark.parametrize("argv", [["--compile.enable=maybe"], ["--compile.enable", "maybe"]])
def test_other_words_are_refused_by_key(argv):
    (problem,) = problems(*argv)
    assert "compile.enable" in problem and "maybe" in problem and "true or false" in problem


@pytest.mark.parametrize(
    "argv",
    [
        ["--data.path", "a.txt,b.txt"],
        ["--data.path", "a.txt", "b.txt"],
        ["--data.path", '["a.txt", "b.txt"]'],
        ["--data.path=['a.txt', 'b.txt']"],
    ],
)
def test_lists(argv):
    assert load_config(argv).data.path == ["a.txt", "b.txt"]


def test_an_empty_list():
    assert load_config(["--optimizer.no_decay="]).optimizer.no_decay == []
    assert load_config(["--optimizer.no_decay", "[]"]).optimizer.no_decay == []


def test_lists_of_tables_as_a_literal():
    config = load_config(["--optimizer.param_groups", '[{pattern = "norm", lr_factor = 0.5}]'])
    assert config.optimizer.param_groups[0].lr_factor == 0.5


def test_lists_of_lists():
    parts = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "layers.3", "norm", "output"]]
    argv = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.module_fqns_per_model_part", json.dumps(parts)]
    assert load_config(argv).parallelism.module_fqns_per_model_part == parts


def test_tables_in_tables():
    config = load_config(["--training.dataloader.num_workers", "2", "--quantize.linear.float8.recipe_name=rowwise"])
    assert config.training.dataloader.num_workers == 2
    assert config.quantize.linear.float8.recipe_name == "rowwise"


def test_free_tables():
    assert load_config(["--sft.columns.input", "question"]).sft.columns == {"input": "question"}


def test_values_with_an_equals_sign_and_negative_numbers():
    config = load_config(["--job.description=a=b", "--training.global_batch_size", "-1", "--data.path", "x=1.txt"])
    assert config.job.description == "a=b"
    assert config.data.path == ["x=1.txt"]


def test_numbers():
    config = load_config(["--training.steps", "1_000", "--optimizer.lr", "1", "--optimizer.eps=1e-6"])
    assert config.training.steps == 1000
    assert config.optimizer.lr == 1.0
    assert config.optimizer.eps == 1e-6


@pytest.mark.parametrize("value", ["2.5", "ten", "1e3", "", "true"])
def test_what_is_no_integer_is_refused(value):
    (problem,) = problems(f"--training.steps={value}")
    assert problem.startswith("command line: training.steps = ") and "an integer" in problem


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_are_finite(value):
    (problem,) = problems(f"--optimizer.lr={value}")
    assert "optimizer.lr" in problem


def test_none_by_word():
    config = load_config(["--parallelism.context_parallel_load_balancer", "none", "--data.epochs=None"])
    assert config.parallelism.context_parallel_load_balancer is None
    assert config.data.epochs is None
    # Where None is no value, the word is text.
    assert load_config(["--activation_checkpoint.mode", "none"]).activation_checkpoint.mode == "none"


def test_a_key_without_its_value():
    (problem,) = problems("--training.steps", "--compile.enable")
    assert "--training.steps: needs a value" in problem


def test_what_is_no_key():
    found = problems("--steps", "5", "--training.stepz", "5")
    assert any("--steps: no such option" in p for p in found)
    assert any("training.stepz" in p and "did you mean training.steps?" in p for p in found)


def test_a_flag_before_a_file_leaves_the_file():
    line = read_command_line(["--compile.enable", "run.toml", "--job.config_file", "a.toml", "b.toml"])
    assert line.positional == ["run.toml"]
    assert line.config_files == ["a.toml", "b.toml"]
    assert line.overrides.values == {"compile": {"enable": True}}


@settings(deadline=None, max_examples=40)
@given(st.integers(min_value=1, max_value=10**9))
def test_any_integer_comes_through(n):
    assert load_config([f"--training.steps={n}"]).training.steps == n


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=40).filter(lambda text: text not in ("none", "None", "null")))
def test_any_text_comes_through(text):
    assert load_config([f"--job.description={text}"]).job.description == text


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(max_size=12), max_size=6))
def test_a_command_line_never_raises(words):
    read_command_line(words)
