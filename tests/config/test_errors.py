"""What a wrong config says: file, line, key, value, what is allowed, nearest key, all at once."""

from __future__ import annotations

import pytest

from titanlike.config import load_config
from titanlike.config.keys import all_keys
from titanlike.config.nearest import SYNONYMS, nearest_key
from titanlike.errors import ConfigError


def problems(tmp_path, text: str, *argv: str) -> list[str]:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config([str(path), *argv])
    assert caught.value.exit_code == 2
    return [p.removeprefix(f"{tmp_path}/") for p in caught.value.problems]


def test_a_misspelt_key_names_the_nearest(tmp_path):
    (problem,) = problems(tmp_path, "[optimizer]\n\nlearning_rte = 1e-3\n")
    assert problem.startswith("run.toml:3: optimizer.learning_rte = 0.001: no such key; did you mean optimizer.lr?")
    assert "weight_decay" in problem, "what there is"


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("training", "lr", "optimizer.lr"),
        ("training", "stepz", "training.steps"),
        ("optimizer", "warmup_steps", "lr_scheduler.warmup_steps"),
        ("training", "gradient_accumulation_steps", "training.global_batch_size"),
        ("parallelism", "tensor_parallel_size", "parallelism.tensor_parallel_degree"),
        ("checkpoint", "keep_latest", "checkpoint.keep_latest_k"),
        ("parallelism", "tp", "parallelism.tensor_parallel_degree"),
    ],
)
def test_nearest_keys(section, key, meant):
    assert nearest_key((section, key)) == meant


def test_synonyms_lead_to_keys_that_are_there():
    assert set(SYNONYMS.values()) <= set(all_keys())


def test_nothing_near_is_said_where_nothing_is():
    assert nearest_key(("training", "qqqqxxzz")) is None


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('steps = "ten"', 'training.steps = "ten": must be an integer'),
        ("steps = 2.5", "training.steps = 2.5: must be an integer"),
        ("steps = true", "training.steps = true: must be an integer"),
        ("seq_len = 0", "training.seq_len = 0: must be greater than 0"),
        ('max_norm = "1"', 'training.max_norm = "1": must be a number'),
        ("max_norm = inf", "training.max_norm = inf: must be a finite number"),
        ('gc_debug = "false"', 'training.gc_debug = "false": must be true or false'),
        ("gc_debug = 0", "training.gc_debug = 0: must be true or false"),
        ('dtype = "bf16"', 'training.dtype = "bf16": must be one of bfloat16, float32; did you mean bfloat16?'),
        ("dataloader = 3", "training.dataloader = 3: must be a table"),
    ],
)
def test_types_are_strict(tmp_path, line, wanted):
    assert problems(tmp_path, f"[training]\n{line}\n") == [f"run.toml:2: {wanted}"]


def test_an_integer_serves_as_a_number(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[training]\nmax_norm = 1\n[optimizer]\nlr = 1\n")
    config = load_config([str(path)])
    assert config.training.max_norm == 1.0


# Each is a way of asking for a run that can't be.
@pytest.mark.parametrize(
    "override",
    ["training.steps=-1", "training.steps=0", "optimizer.lr=-1", "lr_scheduler.warmup_steps=-3", "training.max_norm=-1",
     "training.seq_len=0", "checkpoint.keep_latest_k=-1", "metrics.log_freq=0", "validation.freq=0",
     "parallelism.tensor_parallel_degree=0", "training.global_batch_size=0", "validation.steps=0"],
)  # fmt: skip
def test_ranges(override):
    with pytest.raises(ConfigError) as caught:
        load_config([f"--{override}"])
    (problem,) = caught.value.problems
    assert override.partition("=")[0] in problem and "must be" in problem


def test_max_norm_zero_and_keep_zero_are_fine():
    load_config(["--training.max_norm=0", "--checkpoint.keep_latest_k=0", "--checkpoint.keep_latest_k=1"])


def test_unknown_sections(tmp_path):
    found = problems(tmp_path, "[trainig]\nsteps = 1\n\n[encoder]\nx = 1\n")
    assert found[0].startswith("run.toml:1: [trainig]: no such section; did you mean [training]?")
    assert found[1].startswith("run.toml:4: [encoder]: no such section; it belongs to the Flux experiment")


def test_arrays_of_tables_are_named_by_number_and_line(tmp_path):
    text = '[optimizer]\nparam_groups = [\n  {pattern = "a"},\n  {pattern = "b", lrr = 1},\n]\n'
    text += "[[data.sources]]\nweight = 1\n"
    found = problems(tmp_path, text)
    assert any(p.startswith("run.toml:4: optimizer.param_groups[1].lrr = 1: no such key") for p in found)
    assert "run.toml:6: data.sources[0].name: is missing and has no default" in found


def test_all_problems_at_once_those_between_keys_too(tmp_path):
    text = '[job]\nx = 1\n[training]\nlocal_batch_size = 3\nglobal_batch_size = 7\n[metrics]\nlog_freq = "a"\n'
    found = problems(tmp_path, text, "--optimizer.name=Adem")
    assert len(found) == 4
    for part in ("job.x", "metrics.log_freq", "training.global_batch_size", "did you mean Adam"):
        assert any(part in p for p in found), part
    assert next(p for p in found if "global_batch_size" in p).startswith("run.toml:5: ")


def test_a_broken_section_is_not_cross_checked(tmp_path):
    """A misspelt batch size must not bring a second, misleading message about the batch."""
    (problem,) = problems(tmp_path, "[training]\nlocal_batch_sise = 4\nglobal_batch_size = 12\n")
    assert "local_batch_sise" in problem
