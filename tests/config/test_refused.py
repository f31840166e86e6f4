"""What is in the schema and not built."""

from __future__ import annotations

import pytest

from titanlike.config import Config, load_config
from titanlike.config.keys import annotation_at
from titanlike.config.refused import BUILT, DEFAULT_ONLY, SECTIONS, refuse_unbuilt
from titanlike.config.shipped import shipped_configs


def test_defaults_and_what_is_built_pass():
    assert refuse_unbuilt(Config()) == []
    argv = [
        "--model.attention=varlen",
        "--optimizer.name=AdamW8bit",
        "--compile.components=model,optimizer",
        "--activation_checkpoint.mode=selective",
        "--compile.enable",
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.context_parallel_degree=2",
        "--checkpoint.async_mode=async",
        "--loss.implementation=logits",
        "--model.converters=quantize.linear.float8",
        '--optimizer.param_groups=[{pattern = "norm", lr_factor = 0.5}]',
    ]
    assert refuse_unbuilt(load_config(argv)) == []


def test_everything_unbuilt_is_named_at_once():
    argv = [
        "--job.recipe=sft",
        "--parallelism.expert_parallel_comm_backend=deepep",
        "--model.converters=quantize.grouped_mm.float8",
        "--lora.enable",
        "--rl.loss.type=gspo",
        '--environment=[{type = "gsm8k"}]',
    ]
    found = refuse_unbuilt(load_config(argv))
    for part in ("job.recipe = 'sft'", "expert_parallel_comm_backend = 'deepep'", "model.converters", "lora.enable"):
        assert any(part in p and "not built yet" in p for p in found), part
    assert any(p.startswith("rl.loss.type") for p in found) and any(p.startswith("[[environment]]") for p in found)
    assert len(found) == 6


@pytest.mark.parametrize("name", shipped_configs())
def test_shipped_configs_of_what_is_built_train(name):
    assert refuse_unbuilt(load_config([name])) == []


def test_tables_name_keys_that_are_there():
    for key in (*BUILT, *DEFAULT_ONLY):
        assert annotation_at(tuple(key.split("."))) is not None, key
    assert set(SECTIONS) <= set(Config.model_fields)
