import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from titanlike.models.families.llama3 import llama3
from titanlike.models.spec import DecoderSpec
from titanlike.observe.flops import flops_per_token


class Matrices(nn.Module):
    """The products of a decoder and nothing else, from torch's own parts: what the formula claims to count."""

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.spec = spec
        query, key = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
        shapes = {
            "wq": (spec.dim, query),
            "wk": (spec.dim, key),
            "wv": (spec.dim, key),
            "wo": (query, spec.dim),
            "w1": (spec.dim, spec.ffn_dim),
            "w2": (spec.ffn_dim, spec.dim),
            "w3": (spec.dim, spec.ffn_dim),
        }
        self.embedding = nn.Embedding(spec.vocab_size, spec.dim)
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*shape, bias=False) for name, shape in shapes.items()})
            for _ in range(spec.n_layers)
        )
        self.head = nn.Linear(spec.dim, spec.vocab_size, bias=False)
        if spec.tied_head:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, attend: bool) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            q, k, v = (layer[name](x).unflatten(-1, (-1, self.spec.head_dim)) for name in ("wq", "wk", "wv"))
            groups = self.spec.n_heads // self.spec.n_kv_heads
            k, v = (t.repeat_interleave(groups, dim=2) for t in (k, v))
            out = q + k + v
            if attend:
                q, k, v = (t.transpose(1, 2) for t in (q, k, v))
                with sdpa_kernel(SDPBackend.MATH):
                    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            x = x + layer["wo"](out.flatten(-2))
            x = x + layer["w2"](layer["w1"](x) * layer["w3"](x))
        return self.head(x)


def counted(spec: DecoderSpec, batch: int, seq_len: int, attend: bool) -> int:
    with torch.device("meta"):
        model = Matrices(spec)
        tokens = torch.zeros(batch, seq_len, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(tokens, attend).sum().backward()
    return counter.get_total_flops()


def norm_flops(spec: DecoderSpec) -> int:
    """The formula counts the norms' weights too, which multiply without a matrix."""
    return 6 * spec.dim * (2 * spec.n_layers + 1)


SPECS = {
    "debug": llama3.flavors["debugmodel"],
    "1B, tied head": llama3.flavors["1B"],
    "heads that don't make up dim": DecoderSpec(
        dim=96, n_layers=2, n_heads=4, n_kv_heads=1, head_dim=64, ffn_dim=200, vocab_size=500
    ),
}


@pytest.mark.parametrize("name", SPECS)
def test_products_with_weights_agree_with_the_flop_counter(name):
    spec, batch, seq_len = SPECS[name], 2, 64
    expected = flops_per_token(spec, seq_len=0) - norm_flops(spec)
    assert counted(spec, batch, seq_len, attend=False) == batch * seq_len * expected


@pytest.mark.parametrize("name", SPECS)
def test_attention_is_counted_as_the_full_square(name):
    spec, batch, seq_len = SPECS[name], 2, 64
    expected = flops_per_token(spec, seq_len) - norm_flops(spec)
    assert counted(spec, batch, seq_len, attend=True) == batch * seq_len * expected


def test_8b_at_8192_by_hand():
    spec = llama3.flavors["8B"]
    without_embedding = 8_030_261_248 - 128256 * 4096
    assert flops_per_token(spec, 8192) == 6 * without_embedding + 12 * 32 * 32 * 128 * 8192


def test_a_tied_head_costs_the_same_as_one_of_its_own():
    tied = llama3.flavors["1B"]
    assert flops_per_token(tied, 1024) == flops_per_token(dataclasses.replace(tied, tied_head=False), 1024)
