"""What a folder in the Hub's form may be wrong in: always an error that names the file, the tensor or the key."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.models.hub import models
from tests.models.hub.folders import DIM, EMBEDDING, HEAD, KEYS, QUERIES, UP, WIDE, halves, random_tensors, save
from titanlike.errors import CheckpointError, ConfigError
from titanlike.models.hub.tensors import INDEX
from titanlike.models.spec import folder_form


def without(name: str):
    return lambda tensors: tensors.pop(name)


def instead(**shapes: tuple[int, ...]):
    return lambda tensors: tensors.update({name: torch.zeros(shape) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    ("change", "config", "says"),
    [
        (without(UP), {}, rf"lacks {UP}"),
        (without(HEAD), {}, rf"lacks {HEAD}"),
        (lambda tensors: None, {"attention_bias": True}, r"lacks model\.layers\.0\.self_attn\.k_proj\.bias"),
        (lambda tensors: None, {"num_hidden_layers": 1}, r"has no place for: .*model\.layers\.1\.mlp\.down_proj"),
        (instead(**{"model.layers.0.self_attn.q_norm.weight": (8,)}), {}, r"no place for: .*0\.self_attn\.q_norm"),
        (instead(**{KEYS: (DIM, DIM)}), {}, rf"{KEYS} is \(32, 32\), should be \(16, 32\)"),
        (instead(**{QUERIES: (DIM, DIM, 1)}), {}, rf"{QUERIES} is \(32, 32, 1\), should be \(32, 32\)"),
        (lambda tensors: None, {"vocab_size": 500}, rf"{EMBEDDING} is \(512, 32\), should be \(500, 32\)"),
    ],
)
def test_another_model_is_named(tmp_path, change, config, says):
    tensors = random_tensors()
    change(tensors)
    folder = save(tmp_path / "source", tensors, **config)
    with pytest.raises(CheckpointError, match=says) as refused:
        models.load(folder)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": {UP: "../x.safetensors"}}, r"\.\./x\.safetensors'; only .* of the folder itself"),
        ({"weight_map": {UP: "/etc/x.safetensors"}}, "only .* of the folder itself"),
        ({"weight_map": {UP: "x.bin"}}, "x.bin'; only"),
        ({"weight_map": {UP: "gone.safetensors"}}, "gone.safetensors, which is not there"),
        ({"weight_map": {UP: "model.safetensors", "no.such": "model.safetensors"}}, r"don't hold: no\.such"),
        ({"weight_map": [UP]}, "must map names to files"),
        ({}, "can't be read as an index"),
        ('{"weight_map": {', "can't be read as an index"),
        ("[" * 100_000, "can't be read as an index"),
    ],
)
def test_broken_index_is_named(tmp_path, index, says):
    folder = save(tmp_path / "source", random_tensors())
    save_file({UP: torch.zeros(WIDE, DIM)}, tmp_path / "x.safetensors")
    (folder / "x.bin").write_bytes(pickle.dumps([]))
    (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(CheckpointError, match=says) as refused:
        models.load(folder)
    assert str(folder / INDEX) in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", None])
def test_broken_file_is_named(tmp_path, content):
    folder = save(tmp_path / "source", random_tensors())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(CheckpointError, match=rf"{file}: can't be read as safetensors"):
        models.load(folder)


class Marks:
    """Unpickled, it leaves a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_pickled_weights_are_never_opened(tmp_path):
    folder = save(tmp_path / "source")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Marks(tmp_path / "marker")))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*never opened"):
        models.load(folder)
    assert not (tmp_path / "marker").exists()


def test_two_files_without_an_index_are_refused(tmp_path):
    folder = save(tmp_path / "source")
    for name, tensors in zip(("a", "b"), halves(random_tensors()), strict=True):
        save_file(tensors, folder / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors, b\.safetensors.*which one is the model"):
        models.load(folder)
    for n, name in enumerate(("a", "b")):
        (folder / f"{name}.safetensors").rename(folder / f"model-0000{n + 1}-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=rf"model-00001-of-00002\.safetensors.*no {re.escape(INDEX)}"):
        models.load(folder)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("model_type", "mamba", "no family here"),
        ("model_type", None, "no family here"),
        ("hidden_size", "32", "positive whole number"),
        ("num_hidden_layers", 0, "positive whole number"),
        ("vocab_size", None, "positive whole number"),
        ("hidden_act", "relu", "must be 'silu'"),
        ("sliding_window", 128, "does not do that"),
        ("layer_types", ["sliding_attention"] * 2, "does not do that"),
        ("attn_logit_softcapping", 50.0, "does not do that"),
        ("num_local_experts", 8, "does not do that"),
        ("clip_qkv", 8.0, "does not do that"),
        ("quantization_config", {"quant_method": "gptq"}, "only blocks of fp8"),
        ("is_encoder_decoder", True, "does not do that"),
        ("partial_rotary_factor", 0.5, "must be 1.0"),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "rope_scaling.rope_type = 'dynamic'"),
        ("rope_scaling", {"type": "longrope", "long_factor": [1.0]}, "rope_scaling.rope_type = 'longrope'"),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0, "short": [1]}, "rope_scaling.short"),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary"),
    ],
)
def test_what_the_decoder_does_not_do_is_named(tmp_path, key, value, says):
    folder = save(tmp_path / "source", **{key: value})
    with pytest.raises(ConfigError, match=re.escape(says)) as refused:
        folder_form(folder)
    assert key in str(refused.value) and str(folder / "config.json") in str(refused.value)


def test_every_key_is_named_at_once(tmp_path):
    folder = save(tmp_path / "source", clip_qkv=8.0, sliding_window=4, num_experts=2)
    with pytest.raises(ConfigError) as refused:
        folder_form(folder)
    assert [problem.partition(": ")[2].partition(" ")[0] for problem in refused.value.problems] == [
        "clip_qkv",
        "num_experts",
        "sliding_window",
    ]


def test_keys_without_effect_are_passed_over_and_unknown_ones_noted(tmp_path, caplog):
    folder = save(
        tmp_path / "source", clip_qkv=None, sliding_window=None, use_cache=False, torch_dtype="float16", new=3
    )
    assert folder_form(folder) == folder_form(save(tmp_path / "plain"))
    assert caplog.messages == [f"{folder / 'config.json'}: new = 3: is not known here, and left aside"]


@pytest.mark.parametrize("text", ["", "{", "[]", '"llama"', "[" * 100_000, None])
def test_broken_config_json_is_named(tmp_path, text):
    folder = save(tmp_path / "source")
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"can't be read as JSON|must hold an object") as refused:
        folder_form(folder)
    assert str(folder / "config.json") in str(refused.value)
