"""Quantised moments: against torchao's own optimizers, at every layout, and from one layout to another."""

from __future__ import annotations

import functools
import sys

import pytest
import torch

from tests.parity.layouts import config as parity_config
from titanlike.errors import ConfigError
from titanlike.optim import low_bit, optimizers
from titanlike.optim.low_bit import Blocks, format_named

ao = pytest.importorskip("torchao.optim")
NAMES = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
LEARNING = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6}


def config(name: str, **parallelism: int) -> dict:
    return parity_config(optimizer={"name": name, "lr": 1e-3}, parallelism=parallelism)


@pytest.mark.parametrize("at_once", [1300, 1 << 16])
@pytest.mark.parametrize("name", NAMES)
def test_the_update_is_torchaos_to_the_bit(make_config, monkeypatch, name, at_once):
    """Rows of whole blocks, where ours lie as torchao's; two groups, a rate that changes, a small parameter."""
    monkeypatch.setattr(low_bit, "_CHUNK", at_once)  # elements: five rows and a remainder of the first parameter
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # torchao's would take a minute
    g = torch.Generator().manual_seed(0)
    shapes = ((16, 256), (5, 6, 512), (7,))
    start = [torch.randn(shape, generator=g) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))

    def groups(parameters):
        both = (parameters[:2], 0.1), (parameters[2:], 0.0)
        return [{"params": ps, "of": ps, "names": ["p"] * len(ps), "weight_decay": decay} for ps, decay in both]

    built = optimizers.optimizers.get(name, "")(groups(ours), make_config(optimizer={"name": name, **LEARNING}))
    want = getattr(ao, name)(groups(theirs), lr=0.0, betas=(0.9, 0.95), eps=1e-6)
    for step in range(1, 6):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=g) * torch.rand(a.shape, generator=g) ** 8
            b.grad = a.grad.clone()
        for group in built.param_groups:
            group["lr"] = 1e-2 / step
        for group in want.param_groups:
            group["lr"].fill_(1e-2 / step)
        built.step()
        want.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(ours, start, strict=True))
    kinds = [type(built.state[p]["exp_avg"]) for p in ours]
    assert kinds == [format_named(name).kind] * 2 + [torch.Tensor]


def test_eight_bits_are_near_adamw(make_config):
    """Over a quadratic, after 40 steps: 4% of the way off, for second moments that their block's largest drowns."""
    target = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    ends = {}
    for name in ("AdamW", "AdamW8bit"):
        p = torch.nn.Parameter(torch.zeros(64, 256))
        chosen = make_config(optimizer={"name": name, "lr": 0.02})
        built = optimizers.optimizers.get(name, "")(
            [{"params": [p], "of": [p], "names": ["p"], "weight_decay": 0.0}], chosen
        )
        for _ in range(40):
            p.grad = p.detach() - target
            built.step()
        ends[name] = p.detach()
    assert 0 < (ends["AdamW8bit"] - ends["AdamW"]).norm() / ends["AdamW"].norm() < 0.06


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((64, 512), 256),
        ((64, 320), 64),
        ((128, 96), 32),
        ((512, 40), 0),
        ((8, 256), 0),
        ((4096,), 0),
        ((4, 64, 96), 32),
    ],
)
def test_blocks_lie_in_rows(shape, block):
    blocks = Blocks.of(torch.empty(shape), format_named("AdamW8bit"))
    assert blocks.block == block
    kinds = {type(blocks.zeros(torch.empty(shape), signed)) for signed in (True, False)}
    assert (kinds == {torch.Tensor}) == (block == 0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("signed", [True, False])
def test_stored_parts_are_the_moment(name, signed):
    """Codes and scales as a checkpoint has them give torchao's numbers, and are its memory."""
    blocks = Blocks.of(torch.empty(48, 160), format_named(name))
    moment = blocks.zeros(torch.empty(48, 160), signed)
    moment.copy_(torch.randn(48, 160).abs() if not signed else torch.randn(48, 160))
    (codes, packed), (scale, block) = blocks.parts(moment).values()
    assert (packed, block) == (2 if name == "AdamW4bit" else 1, 32)
    numbers = blocks.format.values(codes, signed) * scale.repeat_interleave(block, -1)
    assert torch.equal(numbers, moment.dequantize())
    scale.zero_()
    assert not moment.dequantize().any()


def test_what_is_kept_for_a_parameter(pool):
    """Bytes of state for each parameter of a model whose weights are all in matrices of 256 columns."""
    model = {
        "dim": 256,
        "n_layers": 1,
        "n_heads": 4,
        "n_kv_heads": 4,
        "head_dim": 64,
        "ffn_dim": 256,
        "vocab_size": 256,
    }
    names = ("AdamW", *NAMES, "Muon")
    configs = [parity_config(model=model, optimizer={"name": name}) for name in names]
    configs += [parity_config(model=model, optimizer={"name": "AdamW", "state_dtype": "bfloat16"})]
    found = pool.run("tests.optim.updates:bytes_of_state", world=1, configs=configs)[0]
    want = {"AdamW": 8, "AdamW8bit": 2 + 8 / 256, "AdamW4bit": 1 + 8 / 128, "AdamWFp8": 2 + 8 / 256}
    got = dict(zip(names, found, strict=False))
    for name, bytes_ in want.items():
        assert got[name] == pytest.approx(bytes_, rel=0.01), name
    # The embedding and the head, 2 of 9 matrices, have AdamW's.
    assert got["Muon"] == pytest.approx((7 * 4 + 2 * 8) / 9, rel=0.01)
    assert found[-1] == pytest.approx(4, rel=0.01)


# ---- layouts -------------------------------------------------------------------------------------------------------

ONE, SHARDS = {}, {"data_parallel_shard_degree": 2}
TENSOR, BOTH = {"tensor_parallel_degree": 2}, {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2}
UPDATED = "tests.optim.updates:updated_each"


def world_of(parallelism: dict[str, int]) -> int:
    return functools.reduce(lambda a, b: a * b, parallelism.values(), 1)


def together(ranks: list[dict]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, tensor in rank.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), f"{name} differs between ranks"
    return found


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory):
    """saved(parallelism) → by optimizer, the folder of a checkpoint of step 3 and what was then."""

    @functools.cache
    def make(parallelism: tuple):
        layout = dict(parallelism)
        folders = {name: str(tmp_path_factory.mktemp(name)) for name in NAMES}
        runs = [{"config": config(name, **layout), "last": 3, "save": folders[name]} for name in NAMES]
        ranks = pool.run(UPDATED, world=world_of(layout), runs=runs)
        state = [together([rank[n]["trained"] for rank in ranks]) for n in range(len(NAMES))]
        return {name: (folders[name], one) for name, one in zip(NAMES, state, strict=True)}

    return lambda parallelism: make(tuple(parallelism.items()))


def numbers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights and moments; how those are kept depends on the layout."""
    return {name: t for name, t in state.items() if not name.endswith((".codes", ".scale"))}


def test_shards_of_rows_change_no_bit(saved):
    one, two = saved(ONE), saved(SHARDS)
    for name in NAMES:
        assert one[name][1].keys() == two[name][1].keys()
        assert not [key for key, value in one[name][1].items() if not torch.equal(two[name][1][key], value)], name


@pytest.mark.parametrize(
    "here",
    [SHARDS, *(pytest.param(one, marks=pytest.mark.slow) for one in (ONE, BOTH))],
    ids=["shard 2", "one process", "shard 2 × tensor 2"],
)
@pytest.mark.parametrize(
    "there", [TENSOR, pytest.param(SHARDS, marks=pytest.mark.slow)], ids=["from tensor 2", "from shard 2"]
)
def test_state_loads_at_another_layout(pool, saved, here, there):
    """Bit for bit where blocks are as long; where they aren't, within the error of being quantised once more."""
    before = saved(there)
    runs = [{"config": config(name, **here), "first": 4, "last": 4, "load": before[name][0]} for name in NAMES]
    ranks = pool.run(UPDATED, world=world_of(here), runs=runs)
    for n, name in enumerate(NAMES):
        came = together([rank[n]["loaded"] for rank in ranks])
        want = before[name][1]
        exact = 0
        for key, value in numbers(want).items():
            scales = [state[f"{key}.scale"].shape for state in (came, want) if f"{key}.scale" in state]
            if len(scales) == 0 or len({*scales}) == 1 < len(scales):
                exact += len(scales) > 0
                assert torch.equal(came[key], value), (name, key)
            else:
                bound = _BOUND[name, key.rsplit(".", 1)[1]]
                assert (came[key] - value).norm() <= bound * value.norm(), (name, key)
        assert exact, "some blocks are as long"


_BOUND = {
    ("AdamW8bit", "exp_avg"): 0.02,
    ("AdamW8bit", "exp_avg_sq"): 0.02,
    ("AdamW4bit", "exp_avg"): 0.2,
    ("AdamW4bit", "exp_avg_sq"): 0.5,
    ("AdamWFp8", "exp_avg"): 0.04,
    ("AdamWFp8", "exp_avg_sq"): 0.04,
}


@pytest.mark.parametrize(
    "layout",
    [SHARDS, *(pytest.param(one, marks=pytest.mark.slow) for one in (ONE, BOTH))],
    ids=["shard 2", "one process", "shard 2 × tensor 2"],
)
def test_going_on_is_bit_equal(pool, saved, layout):
    """Saved after three steps and loaded at the same layout, then two more: as five in one go."""
    before = saved(layout)
    runs = [{"config": config(name, **layout), "first": 4, "last": 5, "load": before[name][0]} for name in NAMES]
    whole = [{"config": config(name, **layout), "last": 5} for name in NAMES]
    ranks = pool.run(UPDATED, world=world_of(layout), runs=[*runs, *whole])
    for n, name in enumerate(NAMES):
        resumed, straight = (together([rank[m]["trained"] for rank in ranks]) for m in (n, n + len(NAMES)))
        assert not [key for key, value in straight.items() if not torch.equal(resumed[key], value)], name


def test_compiling_it_is_its_own_affair(make_config, monkeypatch):
    """On the CPU only where asked for; then the same to rounding, and nothing of torch.compile stays changed."""
    calls = []
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **k: calls.append(k["backend"]) or compiled(*a, **k))
    ends = []
    before = torch._dynamo.config.save_config()
    for components in (["model", "loss"], ["optimizer"]):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 16 * 256).view(16, 256))
        chosen = make_config(
            optimizer={"name": "AdamW8bit", **LEARNING},
            compile={"enable": True, "components": components, "backend": "aot_eager"},
        )
        built = optimizers._low_bit([{"params": [p], "of": [p], "names": ["p"]}], chosen)
        for _ in range(3):
            p.grad = p.detach() ** 3
            built.step()
        ends.append(p.detach())
    assert calls == ["aot_eager"]
    assert torch._dynamo.config.save_config() == before
    assert (ends[0] - ends[1]).abs().mean() < 1e-6, "but for a code here and there"


def test_without_torchao_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim.subclass_8bit", None)
    with pytest.raises(ConfigError, match=r"'AdamW8bit': needs torchao: .*titanlike\[lowbit\]"):
        format_named("AdamW8bit")
