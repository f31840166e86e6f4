"""Every family against transformers: logits 1e-5, loss and all gradients 1e-4, in and out again to the bit; fp32."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.models.hub import models
from titanlike.config import Config
from titanlike.models.decoder import parameter_shapes
from titanlike.models.hub import reading, writing
from titanlike.models.hub.config_json import HubConfig
from titanlike.models.spec import families, folder_form, form_of

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(scope="module", params=models.CASES)
def saved(request, tmp_path_factory):
    """(transformers' model, the folder that it saved itself to)."""
    model = models.reference(request.param)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return model, folder


def export(folder, out, *, dtype=torch.float32, **options):
    """A folder's model through ours to another folder."""
    form, spec = folder_form(folder)
    read = reading.hub_source(folder, form, spec, parameter_shapes(spec))
    shapes = parameter_shapes(spec)
    whole = {n: models.Shard(n, s, (0,) * len(s), torch.empty(s, device="meta")) for n, s in shapes.items()}
    out.mkdir()
    writing.write_model(out, form, spec, lambda names: {n: read(whole[n]) for n in names}, dtype=dtype, **options)
    writing.write_settings(out, form, spec, dtype=dtype, tokenizer_folder=None, special=None)


def test_logits_loss_and_gradients(saved):
    theirs, folder = saved
    ours = models.load(folder)
    assert sum(p.numel() for p in ours.parameters()) == ours.spec.parameters()
    tokens = models.tokens()
    want = theirs(tokens)
    got = ours.logits(ours(tokens))
    assert (got - want.logits).abs().max() <= 1e-5 * max(1.0, want.logits.abs().max().item())

    theirs.zero_grad()
    loss = theirs(tokens, labels=tokens).loss
    loss.backward()
    count = tokens[:, 1:].numel()
    mine = -ours(tokens[:, :-1], labels=tokens[:, 1:], reduction="sum") / count
    for layer in ours.layers.values():
        if layer.moe is not None:
            layer.moe.balance.share = 0.0  # theirs is over all rows at once
    mine.backward()
    assert mine.item() == pytest.approx(loss.item(), rel=1e-4)
    gradients = models.as_ours(folder, {name: p.grad for name, p in theirs.named_parameters()})
    assert gradients.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        want = gradients[name]
        assert (parameter.grad - want).norm() <= 1e-4 * want.norm().clamp(min=1e-6), name


def test_out_and_in_again(saved, tmp_path):
    theirs, folder = saved
    export(folder, tmp_path / "out", shard_bytes=20_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        assert torch.equal(again(models.tokens()).logits, theirs(models.tokens()).logits)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    given = load_file(folder / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in given.values())
    found = {}
    for file in set(index["weight_map"].values()):
        part = load_file(tmp_path / "out" / file)
        assert {name for name, where in index["weight_map"].items() if where == file} == part.keys()
        found.update(part)
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
    form, spec = folder_form(folder)
    assert folder_form(tmp_path / "out") == (form, spec)


@pytest.mark.parametrize("case", ["qwen3-moe", "deepseek-v3"])
def test_experts_in_one_tensor_are_read_too(case, tmp_path):
    """transformers 5 keeps them so, and may save them so."""
    model = models.reference(case)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / "model.safetensors"))
    ours = models.load(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            ours.logits(ours(models.tokens())), model(models.tokens()).logits, rtol=1e-5, atol=2e-6
        )


def test_a_config_json_of_transformers_4(tmp_path):
    """Frequencies as everybody before transformers 5 wrote them."""
    model = models.reference("llama 3.1's frequencies")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {**rope, "type": rope["rope_type"]}
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = models.load(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            ours.logits(ours(models.tokens())), model(models.tokens()).logits, rtol=1e-5, atol=2e-6
        )


def _flavors():
    return [(name, flavor) for name in families.names() for flavor in families.get(name).flavors]


@pytest.mark.parametrize(("family", "flavor"), _flavors(), ids=lambda value: value)
def test_flavors_survive_config_json(family, flavor):
    """What a flavor is can be said in its config.json, and transformers makes as many parameters of that."""
    spec = families.get(family).flavors[flavor]
    form = form_of(Config.model_validate({"model": {"name": family, "flavor": flavor}}), spec)
    config = form.config(spec)
    assert form.spec(HubConfig(config, "config.json")) == spec
    theirs = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    assert model.num_parameters() == spec.parameters()
