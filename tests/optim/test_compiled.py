"""The compiled update: equal to the eager one, one graph for all steps of a schedule."""

import pytest
import torch
from torch._dynamo.utils import counters

from titanlike.config import load_config
from titanlike.errors import ConfigError
from titanlike.optim.optimizers import build_optimizer
from titanlike.optim.schedule import Schedule

STEPS = 5


class Weights(torch.nn.Module):
    """A matrix and a norm's scale: two groups, with and without decay."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = torch.nn.Linear(8, 6, bias=True)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def all_parameter_names(self):
        return {name for name, _ in self.named_parameters()}


def config(make_config, name, compiled):
    return make_config(
        optimizer={"name": name, "momentum": 0.9 if name == "SGD" else 0.0, "lr": 1e-2},
        training={"steps": STEPS},
        lr_scheduler={"warmup_steps": 2},
        compile={"enable": compiled, "components": ["optimizer"], "backend": "aot_eager"},
    )


def trained(make_config, name, *, compiled, saves=False):
    """Weights and state after five steps of a schedule with a warm-up, and the graphs that this took."""
    torch._dynamo.reset()
    settings, model = config(make_config, name, compiled), Weights()
    graphs = counters["stats"]["unique_graphs"]
    optimizer, schedule = build_optimizer(model, settings), Schedule.of(settings)
    if saves:
        optimizer.tensors()
    generator, rates = torch.Generator().manual_seed(1), []
    for step in range(1, STEPS + 1):
        for parameter in model.parameters():
            # New memory each time, as full sharding and a backward give it.
            parameter.data = parameter.data.clone()
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        rates.append(schedule.apply(optimizer, step))
        optimizer.step()
        optimizer.zero_grad()
    values = {**dict(model.named_parameters()), **optimizer.tensors()}
    return {name: v.detach().double() for name, v in values.items()}, counters["stats"]["unique_graphs"] - graphs, rates


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_equals_the_eager_update(make_config, name):
    want, none, rates = trained(make_config, name, compiled=False)
    assert none == 0 and len(set(rates)) == STEPS - 1, "the rate changes"
    got, graphs, compiled_rates = trained(make_config, name, compiled=True, saves=name == "AdamW")
    # SGD's first update has no momentum yet.
    assert graphs == (2 if name == "SGD" else 1), "a graph for each learning rate"
    assert compiled_rates == rates
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert torch.allclose(got[key], value, rtol=1e-6, atol=1e-7), key


def test_what_has_no_compiled_update_is_refused_by_name():
    argv = ["debug_model", "--compile.enable", "--compile.components=optimizer"]
    for name in ("SGD", "AdamW8bit"):
        load_config([*argv, f"--optimizer.name={name}"])
    with pytest.raises(ConfigError, match=r"compile\.components.*optimizer\.name = 'Muon'"):
        load_config([*argv, "--optimizer.name=Muon"])
