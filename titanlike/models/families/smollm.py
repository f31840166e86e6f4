"""SmolLM2 (Ben Allal et al. 2025, arXiv 2502.02737): Llama's form, small, with tied heads."""

from __future__ import annotations

from titanlike.models.families.llama3 import LLAMA
from titanlike.models.spec import DecoderSpec, Family, families


def _smollm(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int, rope_theta: float) -> DecoderSpec:
    return DecoderSpec(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=64,
        ffn_dim=ffn_dim,
        vocab_size=49152,
        max_seq_len=8192,
        rope_theta=rope_theta,
        tied_head=True,
    )


smollm = families.register("smollm")(
    Family(
        name="smollm",
        hub=(LLAMA,),
        flavors={
            "135M": _smollm(576, 30, 9, 3, 1536, 1e5),
            "360M": _smollm(960, 32, 15, 5, 2560, 1e5),
            "1.7B": _smollm(2048, 24, 32, 32, 8192, 1.3e5),
        },
    )
)
