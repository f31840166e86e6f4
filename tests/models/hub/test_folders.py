"""Folders in the Hub's form: sets of files, tied heads, the order of rows, and what lies beside the weights."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.jobs.layouts import layout
from tests.models.hub import models
from tests.models.hub.folders import (
    EMBEDDING,
    HEAD,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    UP,
    assert_equal,
    halves,
    held,
    logits,
    random_tensors,
    run,
    save,
    there_and_back,
    through_a_run,
)
from titanlike.config import Config
from titanlike.models.hub.names import Turn
from titanlike.models.hub.reading import configured_source, halves_from_pairs, pairs_from_halves
from titanlike.models.hub.tensors import INDEX

# ---- sets of files


@pytest.mark.parametrize("alone", [False, True], ids=["beside others", "in a file of its own"])
def test_tied_head_that_the_source_holds_too(tmp_path, alone, caplog):
    """The head is the embedding: it has no file, no place in the index, and no name in what is written."""
    caplog.set_level("INFO", "titanlike")
    tensors = random_tensors(head=False)
    first, last = halves(tensors)
    head = {HEAD: tensors[EMBEDDING].clone()}
    folder = save(
        tmp_path / "source", *((first, last, head) if alone else (first, last | head)), tie_word_embeddings=True
    )
    out = there_and_back(folder, tmp_path, "--max-shard-size", "40KB")
    assert len(list(out.glob("*.safetensors"))) > 2
    assert_equal(held(out), tensors)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert "holds a head although config.json ties it" in caplog.text
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokens = models.tokens()
    with torch.no_grad():
        torch.testing.assert_close(logits(out, tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_set_of_files(tmp_path, dtype):
    tensors = random_tensors(dtype=getattr(torch, dtype))
    out = there_and_back(
        save(tmp_path / "source", *halves(tensors)), tmp_path, "--dtype", dtype, "--max-shard-size=9KB"
    )
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert (
        files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)] and len(files) > 3
    )
    assert_equal(held(out), tensors)
    for file in files:
        part = load_file(out / file)
        assert len(part) == 1 or sum(t.numel() * t.itemsize for t in part.values()) <= 9000
    shapes = {}
    for file in files:
        with safe_open(out / file, framework="np") as opened:
            assert opened.metadata() == {"format": "pt"}  # transformers refuses a file that doesn't say so
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    assert shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_one_file_has_no_index(tmp_path):
    tensors = random_tensors()
    out = there_and_back(save(tmp_path / "source", *halves(tensors)), tmp_path)
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert_equal(held(out), tensors)
    assert torch.equal(logits(out, models.tokens()), logits(tmp_path / "source", models.tokens()))


def test_what_the_index_does_not_name_is_left_aside(tmp_path, caplog):
    tensors = random_tensors()
    folder = save(tmp_path / "source", *halves(tensors))
    save_file({UP: torch.zeros_like(tensors[UP]), "optimizer.state": torch.ones(3)}, folder / "extra.safetensors")
    assert_equal(held(there_and_back(folder, tmp_path)), tensors)
    assert f"extra.safetensors not named by {INDEX}, left aside" in caplog.text


def test_model_safetensors_is_taken_before_others(tmp_path, caplog):
    tensors = random_tensors()
    folder = save(tmp_path / "source", tensors)
    save_file({UP: torch.zeros_like(tensors[UP])}, folder / "adapter_model.safetensors")
    assert_equal(held(there_and_back(folder, tmp_path)), tensors)
    assert "left aside adapter_model.safetensors" in caplog.text


# ---- one parameter for embedding and head


@pytest.mark.parametrize("where", ["one process", "shard 2", "tp 2", "pp 2"])
def test_tied_model_of_a_run(pool, tmp_path, where):
    """Read by the run's ranks, saved by them and exported: the same bits, one parameter; at a rate of 0 nothing moves.

    With a pipeline embedding and head are on different ranks.
    """
    parallelism = {"shard 2": layout(shard=2), "tp 2": layout(tp=2), "pp 2": layout(pp=2)}.get(where, layout())
    tensors = random_tensors(head=False)
    folder = save(tmp_path / "source", *halves(tensors), tie_word_embeddings=True)
    for out in through_a_run(pool, folder, tmp_path, parallelism):
        assert_equal(held(out), tensors)
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
        assert torch.equal(logits(out, models.tokens()), logits(folder, models.tokens()))
    model = models.load(tmp_path / "out")
    assert model.tied_weight is model.tok_embeddings.weight
    assert "output.weight" not in dict(model.named_parameters()) and model.spec.tied_head


# ---- the order of rows


@torch.no_grad()
def logits_by_halves(tensors: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Llama as the Hub's weights mean it: element i of a head turns with element i + HEAD_DIM/2."""
    angles = torch.outer(torch.arange(tokens.shape[1]), 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    cos, sin = (f(angles).repeat(1, 2)[:, None] for f in (torch.cos, torch.sin))

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * tensors[f"{name}.weight"]

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    x = tensors[EMBEDDING][tokens]
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (linear(h, f"{layer}.self_attn.{s}_proj").unflatten(-1, (-1, HEAD_DIM)) for s in "qkv")
        q, k = turned(q), turned(k)
        k, v = (one.repeat_interleave(HEADS // KV_HEADS, 2) for one in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM**-0.5
        scores = scores.masked_fill(torch.ones_like(scores[0, 0]).triu(1).bool(), float("-inf"))
        attended = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(-2)
        x = x + linear(attended, f"{layer}.self_attn.o_proj")
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (linear(h, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        x = x + linear(F.silu(gate) * up, f"{layer}.mlp.down_proj")
    return linear(norm(x, "model.norm"), "lm_head")


@pytest.mark.parametrize("biases", [False, True])
def test_heads_that_share_keys(tmp_path, biases):
    tensors = random_tensors(biases=biases)
    folder = save(tmp_path / "source", tensors, attention_bias=biases)
    found, want = logits(folder, models.tokens()), logits_by_halves(tensors, models.tokens())
    assert (found - want).abs().max() <= 1e-5 * max(1.0, want.abs().max().item())
    assert_equal(held(there_and_back(folder, tmp_path)), tensors)


@pytest.mark.parametrize(
    ("dim", "order"), [(4, [0, 2, 1, 3]), (8, [0, 2, 4, 6, 1, 3, 5, 7]), (6, [0, 2, 4, 1, 3, 5]), (2, [0, 1])]
)
@pytest.mark.parametrize("width", [None, 3], ids=["bias", "weight"])
def test_order_of_rows(dim, order, width):
    """Where the decoder's rows (neighbours in pairs) stand on the Hub, head by head, and back."""
    turn, heads = Turn(dim, dim), 3
    want = torch.tensor([head * dim + row for head in range(heads) for row in order])
    ours = torch.arange(heads * dim) if width is None else torch.arange(heads * dim)[:, None].expand(-1, width)
    theirs = halves_from_pairs(ours, turn)
    assert torch.equal(theirs, want if width is None else want[:, None].expand(-1, width))
    assert torch.equal(pairs_from_halves(theirs, turn), ours)


# ---- what lies beside the weights


def test_code_in_the_folder_is_never_run(tmp_path, caplog, monkeypatch):
    marker = tmp_path / "marker"
    folder = save(tmp_path / "source", random_tensors(), auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"})
    for name in ("modeling_x.py", "conftest.py", "__init__.py"):
        (folder / name).write_text(f"open({str(marker)!r}, 'w').close()\nclass XForCausalLM: ...\n")
    monkeypatch.chdir(folder)
    out = there_and_back(folder, tmp_path)
    run("generate", folder, "--prompt", "a", "--max-new-tokens", "2")
    configured_source(Config.model_validate({"model": {"hf_assets_path": str(folder)}}))
    assert not marker.exists()
    notes = [line for line in caplog.messages if "modeling_x.py" in line]
    assert len(notes) == 3 and all("which is never run" in line for line in notes), "import, generate and training"
    assert not list(out.rglob("*.py")) and "auto_map" not in (out / "config.json").read_text()


def test_tables_that_follow_from_config_json_are_ignored(tmp_path):
    """Older files hold frequencies, which may be stale."""
    tensors = random_tensors()
    stale = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.full((4,), 9.0) for n in range(LAYERS)}
    folder = save(tmp_path / "source", tensors | stale)
    torch.testing.assert_close(logits(folder, models.tokens()), logits_by_halves(tensors, models.tokens()))
    assert_equal(held(there_and_back(folder, tmp_path)), tensors)
