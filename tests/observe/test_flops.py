import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from titanlike.models import moe
from titanlike.models.decoder import Decoder
from titanlike.models.families.llama3 import llama3
from titanlike.models.initial import initial_values, materialise
from titanlike.models.spec import DecoderSpec, families
from titanlike.observe.flops import flops_per_token

BATCH, SEQ_LEN = 2, 64
SPECS = {
    "debug": llama3.flavors["debugmodel"],
    "tied head": llama3.flavors["1B"],
    "heads that don't make up dim": DecoderSpec(
        dim=96, n_layers=2, n_heads=4, n_kv_heads=1, head_dim=64, ffn_dim=200, vocab_size=500
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_formula_agrees_with_the_flop_counter(name):
    """Of the real decoder on meta. Of its attention, an operator of ours, torch's counter knows the forward only."""
    spec = SPECS[name]
    with torch.device("meta"):
        model = Decoder(spec, seq_len=SEQ_LEN, loss="logits")
        tokens = torch.zeros(BATCH, SEQ_LEN, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(tokens, labels=tokens, reduction="sum").backward()
    norms = spec.dim * (2 * spec.n_layers + 1)  # the formula takes them for matrices, the counter doesn't
    of_weights = flops_per_token(spec, seq_len=0)
    attention_forward = (flops_per_token(spec, SEQ_LEN) - of_weights) // 3
    assert counter.get_total_flops() == BATCH * SEQ_LEN * (of_weights - 6 * norms + attention_forward)


@pytest.mark.parametrize(("family", "flavor"), [("qwen3", "debugmodel_moe"), ("deepseek_v3", "debugmodel")])
def test_of_experts_those_count_that_a_token_goes_to(monkeypatch, family, flavor):
    """All matrix products of a real step but attention's."""
    monkeypatch.setattr(moe, "_takes_groups", lambda _: False)  # the counter doesn't know the grouped product
    spec = families.get(family).flavors[flavor]
    model = Decoder(spec, seq_len=SEQ_LEN, loss="logits")
    materialise(model, "cpu", initial_values(model, 0))
    tokens = torch.arange(BATCH * SEQ_LEN).view(BATCH, SEQ_LEN)
    with FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens, reduction="sum").backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for operator, n in counts.items() if operator in (torch.ops.aten.mm, torch.ops.aten.addmm))
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert products == BATCH * SEQ_LEN * (flops_per_token(spec, seq_len=0) - 6 * norms)


@pytest.mark.parametrize("name", SPECS)
def test_attention_is_counted_as_the_full_square(name):
    spec = SPECS[name]
    shape = BATCH, spec.n_heads, SEQ_LEN, spec.head_dim
    q, k, v = (torch.empty(shape, device="meta", requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    attention = flops_per_token(spec, SEQ_LEN) - flops_per_token(spec, 0)
    assert spec.n_layers * counter.get_total_flops() == BATCH * SEQ_LEN * attention


def test_8b_at_8192_by_hand():
    without_embedding = 8_030_261_248 - 128256 * 4096
    assert flops_per_token(llama3.flavors["8B"], 8192) == 6 * without_embedding + 12 * 32 * 32 * 128 * 8192


def test_a_tied_head_costs_the_same_as_one_of_its_own():
    tied = llama3.flavors["1B"]
    assert flops_per_token(tied, 1024) == flops_per_token(dataclasses.replace(tied, tied_head=False), 1024)
