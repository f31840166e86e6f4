"""Whole runs with each optimizer: stopped after five steps and gone on with, at the same layout and at another."""

from __future__ import annotations

import shutil

import pytest

from tests.jobs.jobs import curve

RUN = "tests.jobs.jobs:run"
MODEL = {"dim": 64, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 128}
BF16 = {"training": {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"}}

# What of the loss, and of the gradient norm, another layout changes: the order of additions; 8 and 4 bits on top of it,
# where it decides to which number a moment goes, or where the blocks are others.
OPTIMIZERS = {
    "Muon": ({"optimizer": {"name": "Muon"}}, 1e-4),
    "AdamW, bf16 state": ({"optimizer": {"name": "AdamW", "state_dtype": "bfloat16"}}, 1e-4),
    "AdamW, bf16 at random": ({"optimizer": {"name": "AdamW", "stochastic_rounding": True}, **BF16}, 2e-2),
    "AdamW8bit": ({"optimizer": {"name": "AdamW8bit"}}, 2e-3),
    "AdamW4bit": ({"optimizer": {"name": "AdamW4bit"}}, 2e-2),
    "AdamWFp8": ({"optimizer": {"name": "AdamWFp8"}}, 2e-3),
}
QUICK = ("Muon", "AdamW, bf16 at random", "AdamW8bit")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS]
)
def test_a_run_goes_on_where_it_stopped(pool, tiny, tmp_path, name):
    sections, bound = OPTIMIZERS[name]
    if name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
        pytest.importorskip("torchao")

    def config(folder: str, **parallelism: int):
        settings = tiny(
            tmp_path / folder,
            training={"steps": 7, "seq_len": 16},
            checkpoint={"interval": 5},
            parallelism=parallelism,
        )
        settings["model"] = {"overrides": MODEL}
        for section, values in sections.items():
            settings[section] = {**settings.get(section, {}), **values}
        return settings

    def go(folder: str, world: int, stop_at: int | None = None, **parallelism: int):
        pool.run(RUN, world=world, group=False, config=config(folder, **parallelism), stop_at=stop_at)

    go("whole", 2)
    go("stopped", 2, stop_at=5)
    shutil.copytree(tmp_path / "stopped", tmp_path / "elsewhere")
    go("stopped", 2)
    want = curve(tmp_path / "whole")
    assert curve(tmp_path / "stopped") == want, "bit for bit"
    go("elsewhere", 2, tensor_parallel_degree=2)
    found = curve(tmp_path / "elsewhere")
    for step in (6, 7):
        assert found[step] == pytest.approx(want[step], rel=bound), step
    assert want[7][0] < want[1][0], "it learns"
