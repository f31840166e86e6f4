"""Small folders in the Hub's form, made by hand: neither transformers nor our own writing has a part in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.jobs.layouts import world_of
from tests.models.hub import models
from titanlike import cli
from titanlike.models.hub.tensors import INDEX

TOKENIZER = Path(__file__).parents[2] / "assets" / "tokenizers" / "tiny_llama"
LAYERS, HEADS, KV_HEADS, HEAD_DIM, DIM, WIDE, VOCABULARY = 2, 4, 2, 8, 32, 40, 512
CONFIG = {
    "model_type": "llama",
    "hidden_size": DIM,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QUERIES, KEYS, UP = (
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
)


def random_tensors(*, head: bool = True, biases: bool = False, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """A model of CONFIG's sizes as the Hub names and shapes it."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (VOCABULARY, DIM), "model.norm.weight": (DIM,)}
    rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        for name in rows:
            shapes[f"{layer}.self_attn.{name}.weight"] = (rows[name], DIM)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (DIM, HEADS * HEAD_DIM)
        shapes |= {f"{layer}.mlp.{name}.weight": (WIDE, DIM) for name in ("gate_proj", "up_proj")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (DIM, WIDE)
        shapes |= {f"{layer}.{name}.weight": (DIM,) for name in ("input_layernorm", "post_attention_layernorm")}
        if biases:
            shapes |= {f"{layer}.self_attn.{name}.bias": (size,) for name, size in {**rows, "o_proj": DIM}.items()}
    if head:
        shapes[HEAD] = (VOCABULARY, DIM)
    g = torch.Generator().manual_seed(0)
    return {name: (torch.randn(shape, generator=g) * 0.3).to(dtype) for name, shape in shapes.items()}


def save(folder: Path, *files: dict[str, torch.Tensor], **config) -> Path:
    """A model's folder of one file, or of several with their index; keywords go into config.json."""
    shutil.copytree(TOKENIZER, folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    names = [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / (name if len(files) > 1 else "model.safetensors"), metadata={"format": "pt"})
    if len(files) > 1:
        where = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": where}))
    return folder


def halves(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    names = list(tensors)
    return [{name: tensors[name] for name in part} for part in (names[: len(names) // 2], names[len(names) // 2 :])]


def run(*argv: object) -> None:
    assert cli.main([str(word) for word in argv]) == 0


def there_and_back(folder: Path, tmp_path: Path, *options: str) -> Path:
    """The folder that a model's folder becomes by `titanlike checkpoint import` and `export`."""
    run("checkpoint", "import", folder, tmp_path / "checkpoints")
    run("checkpoint", "export", tmp_path / "checkpoints", tmp_path / "out", *options)
    return tmp_path / "out"


def through_a_run(pool, folder: Path, tmp_path: Path, parallelism: dict[str, Any], **overrides: Any) -> list[Path]:
    """A folder's model read by a run's ranks, trained for a step at a rate of 0, exported by them and later."""
    (tmp_path / "text.jsonl").write_text('{"text": "and so it goes on and on and on"}\n' * 40)
    world = world_of(parallelism)
    config = {
        "job": {"dump_folder": str(tmp_path / "run")},
        "model": {"hf_assets_path": str(folder), "overrides": overrides},
        "data": {"path": [str(tmp_path / "text.jsonl")], "cache_folder": str(tmp_path / "store")},
        "training": {"seq_len": 32, "local_batch_size": 2, "global_batch_size": 6 if world == 3 else 4, "steps": 1},
        "optimizer": {"lr": 0.0},
        "checkpoint": {"initial_load_in_hf": True, "last_save_in_hf": True},
        "parallelism": parallelism,
    }
    pool.run("tests.jobs.jobs:run", world=world, group=False, config=config, timeout=200)
    run("checkpoint", "export", tmp_path / "run", tmp_path / "out", "--max-shard-size", "40KB")
    return [tmp_path / "out", tmp_path / "run" / "exports" / "hf-step-1"]


def held(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder by safetensors' own reader; those of a set must be where its index says, and once."""
    found: dict[str, torch.Tensor] = {}
    where = {}
    for file in sorted(path.name for path in folder.glob("*.safetensors")):
        tensors = load_file(folder / file)
        assert tensors and not tensors.keys() & found.keys(), file
        found.update(tensors)
        where.update(dict.fromkeys(tensors, file))
    index = folder / INDEX
    if index.exists():
        listed = json.loads(index.read_text())
        assert listed["weight_map"] == where
        assert listed["metadata"]["total_size"] == sum(t.numel() * t.itemsize for t in found.values())
    return found


def assert_equal(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    assert not [
        name for name in want if found[name].dtype != want[name].dtype or not torch.equal(found[name], want[name])
    ]


@torch.no_grad()
def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = models.load(folder)
    return model.logits(model(tokens))
