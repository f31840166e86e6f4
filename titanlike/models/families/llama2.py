"""Llama 2 (Touvron et al. 2023, arXiv 2307.09288; Meta's published configurations)."""

from __future__ import annotations

from titanlike.models.families.llama3 import LLAMA
from titanlike.models.spec import DecoderSpec, Family, families


def _llama(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int) -> DecoderSpec:
    return DecoderSpec(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=dim // n_heads,
        ffn_dim=ffn_dim,
        vocab_size=32000,
        max_seq_len=4096,
        rope_theta=10000.0,
    )


llama2 = families.register("llama2")(
    Family(
        name="llama2",
        hub=(LLAMA,),
        flavors={
            "7B": _llama(4096, 32, 32, 32, 11008),
            "13B": _llama(5120, 40, 40, 40, 13824),
            "70B": _llama(8192, 80, 64, 8, 28672),
        },
    )
)
