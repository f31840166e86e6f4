"""In from the Hub's form and out again at every layout: the files hold the same bits."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from tests.jobs.layouts import layout, world_of
from tests.models.hub import models
from tests.models.hub.folders import TOKENIZER, assert_equal, held, run

pytest.importorskip("transformers")

DENSE = {
    "tensor 2": layout(tp=2),
    "shard 2": layout(shard=2),
    "pipeline 2": layout(pp=2),
}
SPREAD = {
    "shard 2": layout(shard=2, ep=2),
    "tensor 2": layout(tp=2, ep=2),
}
SLOW_DENSE = {
    "tensor 2 and pipeline 2": layout(pp=2, tp=2),
    "shard 3": layout(shard=3),
    "several stages a rank": layout("Interleaved1F1B", pp=2, tp=2),
}
SLOW_SPREAD = {
    "pipeline 2": layout(pp=2, shard=2, ep=2),
    "tensor and shard": layout(shard=2, tp=2, ep=4),
    "split, too": layout(shard=2, tp=2, ep=2, etp=2),
    "context 2": layout(cp=2, ep=2),
    "only split": layout(tp=2),
    "not spread": layout(shard=2),
}
QUICK = [
    *(("gemma3", DENSE[name]) for name in DENSE),
    *((name, SPREAD[where]) for name in ("qwen3-moe", "deepseek-v3") for where in SPREAD),
]
SLOW = [
    *((name, one) for name in ("qwen2", "gemma2") for one in (*DENSE.values(), *SLOW_DENSE.values())),
    *((name, one) for name in ("qwen3-moe", "deepseek-v3") for one in SLOW_SPREAD.values()),
]


def there_and_back(pool, tmp_path, name, parallelism):
    """Read, trained at a rate of 0, saved and exported by a run's ranks."""
    folder = tmp_path / "source"
    models.reference(name, vocab_size=512, num_hidden_layers=4).save_pretrained(folder)
    for file in TOKENIZER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (tmp_path / "text.jsonl").write_text('{"text": "and so it goes on and on and on"}\n' * 40)
    overrides = {"experts": {"bias_rate": 0.0}} if name == "deepseek-v3" else {}
    config = {
        "job": {"dump_folder": str(tmp_path / "run")},
        "model": {"hf_assets_path": str(folder), "overrides": overrides},
        "data": {"path": [str(tmp_path / "text.jsonl")], "cache_folder": str(tmp_path / "store")},
        "training": {"seq_len": 32, "local_batch_size": 2, "global_batch_size": 4, "steps": 1},
        "optimizer": {"lr": 0.0},
        "checkpoint": {"initial_load_in_hf": True, "last_save_in_hf": True},
        "parallelism": parallelism,
    }
    if world_of(parallelism) == 3:
        config["training"]["global_batch_size"] = 6
    pool.run("tests.jobs.jobs:run", world=world_of(parallelism), group=False, config=config, timeout=200)
    run("checkpoint", "export", tmp_path / "run", tmp_path / "out", "--max-shard-size", "40KB")
    want = load_file(folder / "model.safetensors")
    for out in (tmp_path / "out", tmp_path / "run" / "exports" / "hf-step-1"):
        assert_equal(held(out), want)


@pytest.mark.parametrize(("name", "parallelism"), QUICK)
def test_same_bits(pool, tmp_path, name, parallelism):
    there_and_back(pool, tmp_path, name, parallelism)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parallelism"), SLOW)
def test_same_bits_at_more_layouts(pool, tmp_path, name, parallelism):
    there_and_back(pool, tmp_path, name, parallelism)
