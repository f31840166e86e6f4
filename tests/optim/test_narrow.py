"""bfloat16 weights and state: the update is float32's, and rounding at random loses nothing on average."""

from __future__ import annotations

import pytest
import torch

from tests.optim.small import Small
from tests.parity.layouts import config as parity_config
from titanlike.optim.narrow import round_at_random
from titanlike.optim.optimizers import build_optimizer

BF16, F32 = torch.bfloat16, torch.float32


def rounded(x: torch.Tensor, key: int) -> torch.Tensor:
    narrow = torch.empty(x.shape, dtype=BF16)
    round_at_random(narrow, x, x, key)
    return narrow.float()


def test_a_sixteenth_of_a_step_is_taken_once_in_sixteen_times():
    for sign in (1, -1):
        x = torch.full((64, 1024), sign * (1 + 2**-11))  # bfloat16 has 1 and 1 + 2^-7
        found = rounded(x, 5)
        assert set(found.unique().tolist()) == {sign * 1.0, sign * (1 + 2**-7)}
        assert (found - sign).abs().mean().item() == pytest.approx(2**-11, rel=0.05)  # 3 sigma of 65,536 draws


def test_it_goes_to_a_neighbour_whatever_the_size():
    x = torch.randn(32, 512) * torch.logspace(-30, 30, 512)
    found, low = rounded(x, 1), (x.view(torch.int32) & -0x10000).view(F32)
    up = (low.view(torch.int32) + 0x10000).view(F32)
    assert ((found == low) | (found == up)).all() and (found == low).any() and (found == up).any()


def test_what_is_exact_or_not_finite_stays():
    special = torch.tensor([[0.0, -0.0, 1.0, -2.5, float("inf"), -float("inf"), float("nan")]])
    found = rounded(special.repeat(50, 1), 2)
    assert torch.equal(found.nan_to_num(nan=7.0), special.repeat(50, 1).nan_to_num(nan=7.0))
    assert rounded(torch.full((3, 3), -float("nan")), 2).isnan().all()


def test_the_key_decides():
    x = torch.randn(16, 300)
    assert torch.equal(rounded(x, 3), rounded(x, 3)) and not torch.equal(rounded(x, 3), rounded(x, 4))


def follow(make_config, steps: int, model: Small, **sections) -> dict[str, torch.Tensor]:
    optimizer = build_optimizer(model, make_config(**sections))
    for step in range(1, steps + 1):
        model.give_gradients(step)
        optimizer.begin(step)
        optimizer.step()
        optimizer.zero_grad()
    return model.values()


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD"])
@pytest.mark.parametrize(
    ("weights", "state"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_the_update_is_torchs_in_float32(make_config, name, weights, state):
    """torch's optimizer over float32 copies; what rests in bfloat16 is rounded after each step."""
    stored, kept = getattr(torch, weights), getattr(torch, state)
    # Weights and state of one type would be torch's own update: rounding at random is then what asks for ours.
    chosen = {"name": name, "lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "no_decay": []}
    if weights == state:
        chosen["stochastic_rounding"] = True
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("titanlike.optim.narrow.round_at_random", lambda narrow, wide, *_: narrow.copy_(wide))
            found = follow(
                make_config, 5, Small(stored), optimizer={**chosen, "state_dtype": state}, training={"dtype": weights}
            )
    else:
        found = follow(
            make_config, 5, Small(stored), optimizer={**chosen, "state_dtype": state}, training={"dtype": weights}
        )
    model = Small(stored)
    for p in model.parameters():
        p.data = p.data.float()
    options = {"betas": (0.9, 0.95), "eps": 1e-8} if name != "SGD" else {"momentum": 0.9}
    plain = getattr(torch.optim, name)(model.parameters(), lr=0.01, weight_decay=0.1, fused=True, **options)
    for step in range(1, 6):
        model.give_gradients(step)
        for p in model.parameters():
            p.grad = p.grad.to(stored).float()
        plain.step()
        for p in model.parameters():
            p.data = p.data.to(stored).float()
            for key, value in plain.state[p].items():
                if key != "step":
                    value.copy_(value.to(kept).float())
    assert not [key for key, value in model.values().items() if not torch.equal(value, found[key].float())]


def test_small_updates_are_not_lost(make_config):
    """Updates of a 30th of what separates bfloat16 numbers: to the nearest, all of them vanish."""
    ends = {}
    for random in (False, True):
        model = Small(BF16)
        for p in model.parameters():
            p.data.fill_(1.0)
        chosen = {
            "name": "SGD",
            "lr": 2**-12,
            "state_dtype": "bfloat16",
            "stochastic_rounding": random,
            "weight_decay": 0,
        }
        optimizer = build_optimizer(model, make_config(optimizer=chosen, training={"dtype": "bfloat16"}))
        for step in range(1, 33):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.begin(step)
            optimizer.step()
        ends[random] = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    assert (ends[False] == 1).all()
    assert ends[True].mean().item() == pytest.approx(1 - 32 * 2**-12, abs=32**0.5 * 2**-8 / len(ends[True]) ** 0.5 * 4)


def test_seed_and_step_decide_what_is_drawn(make_config):
    def end(seed: int, shift: int = 0):
        model = Small(BF16)
        chosen = {"name": "AdamW", "lr": 1e-3, "stochastic_rounding": True}
        config = make_config(optimizer=chosen, training={"dtype": "bfloat16"}, debug={"seed": seed})
        optimizer = build_optimizer(model, config)
        for step in (1, 2, 3):
            model.give_gradients(step)
            optimizer.begin(step + shift)
            optimizer.step()
        return model.values()

    first, again = end(0), end(0)
    assert all(torch.equal(again[key], value) for key, value in first.items())
    for other in (end(1), end(0, shift=1)):
        assert any(not torch.equal(other[key], value) for key, value in first.items())


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Muon"])
def test_every_layout_rounds_alike(pool, name):
    """bfloat16 weights (and state) rounded at random: shards, tensor ranks and replicas give one process's bits."""
    sections = {
        "optimizer": {"name": name, "lr": 1e-3, "stochastic_rounding": True},
        "training": {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"},
    }
    want = pool.run("tests.optim.updates:updated", world=1, config=parity_config(**sections), last=3)[0]["trained"]
    degrees = {"tensor_parallel_degree": 2} if name != "AdamW8bit" else {"data_parallel_replicate_degree": 2}
    config = parity_config(**sections, parallelism={**degrees, "data_parallel_shard_degree": 2})
    for rank in pool.run("tests.optim.updates:updated", world=4, config=config, last=3):
        assert not [key for key, value in want.items() if not torch.equal(rank["trained"][key], value)]
    assert {t.dtype for key, t in want.items() if not key.startswith("optimizer.")} == {BF16}
