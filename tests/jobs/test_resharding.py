"""A checkpoint loads at any layout: weights and optimizer state bit-equal, the next step that of the run itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.jobs.hops import together
from tests.jobs.jobs import curve
from tests.jobs.layouts import layout, world_of
from titanlike.config import Config
from titanlike.models.decoder import Decoder
from titanlike.models.spec import decoder_spec

# Nothing divides. The vocabulary and the feed-forward are uneven over tensor ranks, everything over shards; of six rows
# the last of four shards holds none. There are two key/value heads for up to four tensor ranks.
MODEL = {"dim": 6, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 4, "ffn_dim": 10, "vocab_size": 1031}
TIED = {"model": {"overrides": {**MODEL, "tied_head": True}}}
DEEP = {"model": {"overrides": {**MODEL, "n_layers": 6}}}
# A layer without experts, then some whose biases move, with a shared one; attention is latent.
EXPERTS = {"n_experts": 8, "top_k": 3, "ffn_dim": 5, "n_shared": 1, "bias_rate": 0.01}
LATENT = {"dim": 12, "n_layers": 3, "n_heads": 4, "ffn_dim": 10, "vocab_size": 1031, "experts": EXPERTS}
MIXTURE = {"model": {"name": "deepseek_v3", "flavor": "debugmodel", "overrides": LATENT}}
IN_BACKGROUND = {"checkpoint": {"async_mode": "async", "interval": 1}}
TRAINED = 3  # steps before the checkpoint begins to travel


CHAINS = {
    "pipeline and tensor, shard, ring, one process": (
        [layout(pp=2, tp=2), layout(shard=4), layout(cp=2, tp=2), layout(shard=3), layout()],
        {},
    ),
    "experts": (
        [layout(shard=2, ep=2), layout(tp=2, ep=2), layout(cp=2, ep=2), layout(tp=2), layout()],
        MIXTURE,
    ),
}
SLOW_CHAINS = {
    "experts on four ranks, in the background": (
        [
            layout(shard=2, tp=2, ep=2, etp=2),
            layout(shard=4, ep=4),
            layout(pp=2, tp=2, ep=2),
            layout(replicate=2, shard=2, ep=2),
            layout(shard=2, tp=2, ep=4),
            layout(shard=3),
            layout(),
        ],
        {**MIXTURE, **IN_BACKGROUND},
    ),
    "tied, several stages a rank, in the background": (
        [
            layout("Interleaved1F1B", pp=2, tp=2),
            layout("ZBVZeroBubble", pp=2, shard=2),  # both ends of the pipeline are on one rank
            layout(tp=4),
            layout(pp=2, tp=2),
            layout(),
        ],
        {**TIED, **IN_BACKGROUND},
    ),
    "eight ranks": (
        [
            layout(pp=2, cp=2, tp=2),
            layout(shard=2, tp=4),
            layout("Interleaved1F1B", pp=2, replicate=2, shard=2),
            layout("DualPipeV", pp=2, cp=2, tp=2),
            layout(shard=8),
            layout(),
        ],
        TIED,
    ),
    "eight ranks, more layers": (
        [
            layout("Interleaved1F1B", pp=4, tp=2),
            layout(cp=4, tp=2),
            layout(pp=2, tp=4),
            layout(replicate=2, cp=2, tp=2),
            layout(),
        ],
        {**DEEP, **IN_BACKGROUND},
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chain", [*CHAINS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CHAINS)])
def test_bit_equal_from_layout_to_layout(pool, tiny, tmp_path, chain):
    """Trained at the first layout, then loaded, saved anew and gone on with at each of the others."""
    layouts, sections = (CHAINS | SLOW_CHAINS)[chain]
    sections = {"model": {"overrides": MODEL}, "lr_scheduler": {"total_steps": 12}, **sections}

    def config(folder: str, parallelism: dict[str, Any], steps: int) -> dict[str, Any]:
        local = 4 if world_of(parallelism) % 3 else 2  # 4 microbatches for the longest pipeline
        training = {"steps": steps, "local_batch_size": local}
        return tiny(tmp_path / folder, training=training, parallelism=parallelism, **sections)

    def run(job: str, folder: str, parallelism: dict[str, Any], steps: int, **options) -> list[Any]:
        settings = config(folder, parallelism, steps)
        return pool.run(job, world=world_of(parallelism), group=False, timeout=500, config=settings, **options)

    run("tests.jobs.jobs:run", "never stopped", {}, TRAINED + 1)
    want = curve(tmp_path / "never stopped")[TRAINED + 1]
    expected = together(run("tests.jobs.hops:trained", "hop 1", layouts[0], TRAINED))
    assert_torch_reads(tmp_path / "hop 1" / "checkpoints" / f"step-{TRAINED}", expected)
    for n, parallelism in enumerate(layouts[1:], start=1):
        here, onward = f"hop {n}", str(tmp_path / f"hop {n + 1}")
        ranks = run("tests.jobs.hops:handed_on", here, parallelism, TRAINED + 1, to=onward)
        found = together(ranks)
        assert found.keys() == expected.keys()
        assert not [name for name in expected if not torch.equal(found[name], expected[name])], parallelism
        assert curve(tmp_path / here)[TRAINED + 1] == pytest.approx(want, rel=1e-5), parallelism
        if parallelism in (layout(shard=4), layout(shard=8)):
            assert "norm.weight" in ranks[-1]["empty"], "a rank without any of it was meant to be among them"


def assert_torch_reads(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """torch's own reader, alone, finds the same under the same names."""
    state = {name: torch.full_like(tensor, float("nan")) for name, tensor in expected.items()}
    with pytest.warns(UserWarning, match="assuming the intent is to load in a single process"):
        dcp.load(state, checkpoint_id=path, no_dist=True)
    assert not [name for name in expected if not torch.equal(state[name], expected[name])]


def test_weights_of_another_program_start_a_run_at_any_layout(pool, tiny, tmp_path):
    """A DCP folder without a manifest, its names under "model.", and more in it than the model has."""
    config = tiny(
        tmp_path / "run",
        model={"overrides": MODEL},
        parallelism=layout(pp=2, tp=2),
        checkpoint={"initial_load_path": str(tmp_path / "theirs")},
    )
    with torch.device("meta"):
        model = Decoder(decoder_spec(Config.model_validate(config)))
    g = torch.Generator().manual_seed(0)
    theirs = {name: torch.randn(p.shape, generator=g) * 0.02 for name, p in model.named_parameters()}
    saved = {f"model.{name}": tensor for name, tensor in theirs.items()} | {"extra": torch.zeros(2)}
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        dcp.save(saved, checkpoint_id=tmp_path / "theirs", no_dist=True)
    ranks = pool.run("tests.jobs.hops:started", world=4, group=False, config=config)
    found = together(ranks)
    assert not [name for name in theirs if not torch.equal(found[name], theirs[name])]
    (line,) = (line for line in ranks[0]["log"] if "left alone" in line)
    assert line.endswith(f"read {len(theirs)} tensors; left alone extra"), "of all stages"
