"""A rank that starts from a model on the Hub needs memory for its own shard, not for the model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.pool import Pool
from titanlike.config import Config
from titanlike.models.hub.tensors import INDEX

DIM, WIDE, VOCABULARY, LAYERS = 1024, 4096, 32_000, 29
ATTENTION = {"q_proj": DIM, "k_proj": DIM // 4, "v_proj": DIM // 4, "o_proj": DIM}  # rows
CONFIG = {
    "model_type": "llama",
    "hidden_size": DIM,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
}


def parts() -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of the model, file by file."""
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        yield {
            **{f"{layer}.self_attn.{name}.weight": (rows, DIM) for name, rows in ATTENTION.items()},
            f"{layer}.mlp.gate_proj.weight": (WIDE, DIM),
            f"{layer}.mlp.up_proj.weight": (WIDE, DIM),
            f"{layer}.mlp.down_proj.weight": (DIM, WIDE),
            f"{layer}.input_layernorm.weight": (DIM,),
            f"{layer}.post_attention_layernorm.weight": (DIM,),
        }
    yield {"model.embed_tokens.weight": (VOCABULARY, DIM)}
    yield {"lm_head.weight": (VOCABULARY, DIM), "model.norm.weight": (DIM,)}


def write_model(folder: Path) -> int:
    """Random weights of 2 GB in float32, a file at a time; returns the bytes of the largest tensor."""
    g = torch.Generator().manual_seed(0)
    where, sizes = {}, []
    for n, shapes in enumerate(parts()):
        tensors = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
        save_file(tensors, folder / f"part-{n}.safetensors")
        where.update(dict.fromkeys(tensors, f"part-{n}.safetensors"))
        sizes += [tensor.numel() * 4 for tensor in tensors.values()]
    assert 1.9e9 < sum(sizes) < 2.1e9, sum(sizes)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": sum(sizes)}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return max(sizes)


def anonymous() -> int:
    """Bytes that this process holds beside mapped files, of which the machine may take the pages back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@contextmanager
def peak() -> Iterator[list[int]]:
    """The largest `anonymous` of the time inside, looked at every 10 ms; one number in a list."""
    found, done = [anonymous()], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            found[0] = max(found[0], anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        found[0] = max(found[0], anonymous())


def started(rank: int, world: int, *, config: dict[str, Any]) -> dict[str, Any]:
    """Built and filled as a run begins: how much memory was held before, at most, and by this rank's parameters."""
    from titanlike.config.derive import batch_layout
    from titanlike.models.hub.reading import configured_source
    from titanlike.models.initial import shards
    from titanlike.parallel.build import build_model
    from titanlike.parallel.mesh import build_mesh

    settings = Config.model_validate(config)
    mesh = build_mesh(batch_layout(settings, world), "cpu")
    model = build_model(settings, mesh)
    base = anonymous()
    with peak() as most:
        model.materialise("cpu", configured_source(settings))
    own = [shard for part in model.parts for shard in shards(part)]
    return {
        "rise": most[0] - base,
        "own": sum(shard.local.numel() * shard.local.itemsize for shard in own),
        "sums": {shard.name: shard.local.double().sum().item() for shard in own},
    }


@pytest.mark.slow
def test_two_ranks_share_a_model(tmp_path):
    """In processes of their own: in used ones memory that others gave back would not show."""
    largest = write_model(tmp_path)
    config = {"model": {"hf_assets_path": str(tmp_path)}, "checkpoint": {"initial_load_in_hf": True}}
    pool = Pool()
    try:
        ranks = pool.run("tests.models.hub.test_memory:started", world=2, config=config, timeout=900)
    finally:
        pool.close()
    total = sum(shape.numel() for shapes in parts() for shape in map(torch.Size, shapes.values())) * 4
    assert sum(rank["own"] for rank in ranks) == total
    for n, rank in enumerate(ranks):
        print(f"rank {n}: {rank['rise'] / 1e6:.0f} MB more for {rank['own'] / 1e6:.0f} MB of its own")
        assert rank["rise"] <= 1.3 * (rank["own"] + largest), rank
        assert rank["rise"] >= rank["own"], "what was measured is what was filled"
    # Rows are summed over ranks in another order than here: it is enough that each part came from its own place.
    g = torch.Generator().manual_seed(0)
    first = {name: torch.randn(shape, generator=g) for name, shape in next(parts()).items()}
    found = sum(rank["sums"]["layers.0.feed_forward.w1.weight"] for rank in ranks)
    assert found == pytest.approx(first["model.layers.0.mlp.gate_proj.weight"].double().sum().item(), rel=1e-9)
