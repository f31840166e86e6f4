"""Weights in float8 with a scale a block: read as what they stand for, in whole and in parts."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.hub import models
from titanlike.config import load_config
from titanlike.errors import CheckpointError, ConfigError
from titanlike.models.hub.quantised import blocks_of
from titanlike.models.hub.reading import configured_source
from titanlike.models.hub.tensors import HubTensors
from titanlike.models.spec import folder_form

transformers = pytest.importorskip("transformers")

BLOCKS = [12, 20]  # neither divides the matrices


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """DeepSeek's form as it is, and a layer for the token after the next."""
    folder = tmp_path_factory.mktemp("plain")
    models.reference("deepseek-v3").save_pretrained(folder)
    return folder


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values in float8, scales, what they stand for), block by block."""
    rows, columns = weight.shape
    values = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // BLOCKS[0]), -(-columns // BLOCKS[1]))
    meant = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * BLOCKS[0], (i + 1) * BLOCKS[0]), slice(j * BLOCKS[1], (j + 1) * BLOCKS[1]))
            scales[i, j] = weight[block].abs().max() / 448
            values[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[block] = values[block].float() * scales[i, j]
    return values, scales, meant


@pytest.fixture(scope="module")
def folders(plain, tmp_path_factory):
    """(quantised, the same values in float32)."""
    given, quantised, meant = load_file(plain / "model.safetensors"), {}, {}
    for name, tensor in given.items():
        if name.endswith("_proj.weight"):
            quantised[name], quantised[f"{name}_scale_inv"], meant[name] = quantise(tensor)
        else:
            quantised[name] = meant[name] = tensor
    config = json.loads((plain / "config.json").read_text())
    quantised["model.layers.3.eh_proj.weight"] = torch.zeros(3, 5)
    config |= {"num_nextn_predict_layers": 1}
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCKS, "activation_scheme": "dynamic"}
    found = []
    for name, tensors, more in (("quantised", quantised, {"quantization_config": quantization}), ("meant", meant, {})):
        found.append(tmp_path_factory.mktemp(name))
        save_file(tensors, found[-1] / "model.safetensors", metadata={"format": "pt"})
        (found[-1] / "config.json").write_text(json.dumps({**config, **more}))
    return found


def test_values_are_those_that_are_meant(folders, caplog):
    quantised, meant = folders
    with caplog.at_level(logging.INFO, "titanlike"):
        got = models.load(quantised).state_dict()
    assert "1 layers that predict further tokens are left aside" in caplog.text
    for name, want in models.load(meant).state_dict().items():
        assert got[name].dtype == torch.float32
        assert torch.equal(got[name], want), name


def test_every_box_is_a_box_of_the_whole(folders):
    quantised, meant = (
        HubTensors(folder, blocks) for folder, blocks in zip(folders, (tuple(BLOCKS), None), strict=True)
    )
    name = "model.layers.1.self_attn.kv_b_proj.weight"  # 56 x 16
    whole = meant.read(name)
    assert torch.equal(quantised.read(name), whole)
    rows, columns = whole.shape
    for first in range(0, rows, 5):
        for last in range(first, rows + 1, 3):
            for left in range(0, columns, 3):
                box = (slice(first, last), slice(left, columns))
                assert torch.equal(quantised.read(name, box), whole[box]), box


def test_only_blocks_of_fp8(plain, folders, tmp_path):
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text())

    def read(found):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": found}))
        return folder_form(tmp_path)

    with pytest.raises(ConfigError, match=r"quantization_config\.quant_method = 'awq': only blocks of fp8"):
        read({"quant_method": "awq", "bits": 4})
    with pytest.raises(ConfigError, match=r"quantization_config\.weight_block_size = None: must be the rows"):
        read({"quant_method": "fp8"})


def test_scales_must_fit(folders, tmp_path):
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    given = load_file(folders[0] / "model.safetensors")
    scales = f"{name}_scale_inv"
    broken = {
        rf"no scales beside {name}": {k: v for k, v in given.items() if k != scales},
        rf"{scales} has no {name}": {k: v for k, v in given.items() if k != name},
        rf"{scales} doesn't fit blocks of \(12, 20\)": {**given, scales: torch.zeros(2, 1)},
    }
    for message, tensors in broken.items():
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            HubTensors(tmp_path, (12, 20))


def test_a_run_that_expects_them(folders, plain):
    def config(folder):
        arguments = {"model.hf_assets_path": folder, "checkpoint.initial_load_in_hf": "true"}
        arguments |= {"checkpoint.initial_load_in_hf_quantized": "true", "training.seq_len": "16"}
        return load_config([f"--{key}={value}" for key, value in arguments.items()])

    configured_source(config(folders[0]))
    with pytest.raises(ConfigError, match=r"initial_load_in_hf_quantized = true: .*config\.json has no quanti"):
        configured_source(config(plain))


def test_blocks_of_deepseeks_own_config():
    found = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    from titanlike.models.hub.config_json import HubConfig

    assert blocks_of(HubConfig({"quantization_config": found}, "config.json")) == (128, 128)
