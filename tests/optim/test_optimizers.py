import pytest
import torch

from titanlike.errors import ConfigError
from titanlike.models.decoder import Decoder
from titanlike.models.initial import initial_values, materialise
from titanlike.models.spec import decoder_spec
from titanlike.optim.optimizers import build_optimizer, parameter_groups


@pytest.fixture
def model(make_config):
    with torch.device("meta"):
        model = Decoder(decoder_spec(make_config(model={"overrides": {"n_layers": 2, "dim": 32}})), seq_len=16)
    materialise(model, "cpu", initial_values(model, 0))
    return model


def _decay(groups):
    return {name: g["weight_decay"] for g in groups for name in g["names"]}


def test_decay_spares_norms_and_embeddings(model, make_config):
    decay = _decay(parameter_groups(model, make_config()))
    assert set(decay) == {n for n, _ in model.named_parameters()}
    assert {n for n, d in decay.items() if d == 0} == {
        n for n in decay if "norm" in n or n.startswith("tok_embeddings")
    }
    assert set(_decay(parameter_groups(model, make_config(optimizer={"no_decay": []}))).values()) == {0.1}


def test_groups_by_pattern(model, make_config):
    config = make_config(
        optimizer={
            "param_groups": [
                {"pattern": r"layers\.1\.", "lr": 1e-4},
                {"pattern": "attention", "lr_factor": 0.5, "weight_decay": 0.3},
            ]
        }
    )
    rates = {name: g["peak_lr"] for g in parameter_groups(model, config) for name in g["names"]}
    assert rates["layers.1.attention.wq.weight"] == 1e-4, "the first match wins"
    assert rates["layers.0.attention.wq.weight"] == 4e-4
    assert rates["layers.0.feed_forward.w1.weight"] == 8e-4
    with pytest.raises(ConfigError, match=r"optimizer\.param_groups.*'nothing'"):
        parameter_groups(model, make_config(optimizer={"param_groups": [{"pattern": "nothing", "lr": 1.0}]}))


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_state_as_named_tensors(model, make_config, name, implementation):
    """Giving a fresh optimizer its state moves no weight, and an update after it is that of an untouched one."""
    config = make_config(optimizer={"name": name, "implementation": implementation, "momentum": 0.9})
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = build_optimizer(model, config)
    tensors = optimizer.tensors()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all((t == 0).all() for t in tensors.values())
    want = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "Adam": {"step", "exp_avg", "exp_avg_sq"}}
    assert {k.rsplit(".", 1)[1] for k in tensors} == want.get(name, {"momentum_buffer"})

    def step(optimizer):
        for n, p in model.named_parameters():
            p.data.copy_(before[n])
            p.grad = torch.ones_like(p) * 0.1
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    for a, b in zip(step(optimizer), step(build_optimizer(model, config)), strict=True):
        assert torch.equal(a, b)
