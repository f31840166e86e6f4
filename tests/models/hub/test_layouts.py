"""In from the Hub's form and out again at every layout: the files hold the same bits."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from tests.jobs.layouts import layout
from tests.models.hub import models
from tests.models.hub.folders import TOKENIZER, assert_equal, held, through_a_run

pytest.importorskip("transformers")

DENSE = {
    "tensor 2": layout(tp=2),
    "shard 2": layout(shard=2),
    "pipeline 2": layout(pp=2),
}
SPREAD = {
    "shard 2, experts over 2": layout(shard=2, ep=2),
    "tensor 2, experts over 2": layout(tp=2, ep=2),
}
SLOW_DENSE = {
    **DENSE,
    "tensor 2 and pipeline 2": layout(pp=2, tp=2),
    "shard 3": layout(shard=3),
    "several stages a rank": layout("Interleaved1F1B", pp=2, tp=2),
}
SLOW_SPREAD = {
    "pipeline 2 and shard 2, experts over 2": layout(pp=2, shard=2, ep=2),
    "tensor 2 and shard 2, experts over 4": layout(shard=2, tp=2, ep=4),
    "tensor 2 and shard 2, experts over 2, each over 2": layout(shard=2, tp=2, ep=2, etp=2),
    "context 2, experts over 2": layout(cp=2, ep=2),
    "tensor 2, experts each over 2": layout(tp=2),
    "shard 2": layout(shard=2),
}
MIXTURES = ("qwen3-moe", "deepseek-v3")


def _cases(names: tuple[str, ...], layouts: dict, *marks: pytest.MarkDecorator) -> list:
    return [
        pytest.param(name, one, id=f"{name}: {where}", marks=marks) for name in names for where, one in layouts.items()
    ]


@pytest.mark.parametrize(
    ("name", "parallelism"),
    [
        *_cases(("gemma3",), DENSE),
        *_cases(MIXTURES, SPREAD),
        *_cases(("qwen2", "gemma2"), SLOW_DENSE, pytest.mark.slow),
        *_cases(MIXTURES, SLOW_SPREAD, pytest.mark.slow),
    ],
)
def test_same_bits(pool, tmp_path, name, parallelism):
    folder = tmp_path / "source"
    models.reference(name, vocab_size=512, num_hidden_layers=4).save_pretrained(folder)
    for file in TOKENIZER.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    still = {"experts": {"bias_rate": 0.0}} if name == "deepseek-v3" else {}  # else the step moves the biases
    want = load_file(folder / "model.safetensors")
    for out in through_a_run(pool, folder, tmp_path, parallelism, **still):
        assert_equal(held(out), want)
