"""Llama 3, 3.1, 3.2 and 3.3 (Grattafiori et al. 2024, arXiv 2407.21783; Meta's published configurations)."""

from __future__ import annotations

from typing import Any

from titanlike.models.hub.config_json import HubConfig
from titanlike.models.hub.form import HubForm, read_common
from titanlike.models.spec import DecoderSpec, Family, RopeScaling, families


def _read(config: HubConfig) -> DecoderSpec:
    biases = config.get("attention_bias", False)
    return DecoderSpec(**read_common(config), qkv_bias=biases, out_bias=biases, ffn_bias=config.get("mlp_bias", False))


def _write(spec: DecoderSpec) -> dict[str, Any]:
    return {"attention_bias": spec.qkv_bias, "mlp_bias": spec.ffn_bias}


LLAMA = HubForm(model_type="llama", architecture="LlamaForCausalLM", read=_read, write=_write)

_VOCAB = 128256
# 3.1 and 3.3 stretch the frequencies of 3.0 by 8; the small models of 3.2 by 32.
_SCALING_8 = RopeScaling(factor=8.0)
_SCALING_32 = RopeScaling(factor=32.0)


def _llama(dim: int, n_layers: int, n_heads: int, ffn_dim: int, **other) -> DecoderSpec:
    return DecoderSpec(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=dim // n_heads,
        ffn_dim=ffn_dim,
        vocab_size=_VOCAB,
        **other,
    )


_LONG = {"max_seq_len": 131072, "rope_scaling": _SCALING_8}
_SMALL = {"max_seq_len": 131072, "rope_scaling": _SCALING_32, "tied_head": True}

llama3 = families.register("llama3")(
    Family(
        name="llama3",
        hub=(LLAMA,),
        flavors={
            # Small enough that a laptop's CPU learns something in two minutes.
            "debugmodel": DecoderSpec(
                dim=128,
                n_layers=4,
                n_heads=4,
                n_kv_heads=2,
                head_dim=32,
                ffn_dim=352,
                vocab_size=1024,
                max_seq_len=2048,
                rope_theta=10000.0,
            ),
            "1B": _llama(2048, 16, 32, 8192, **_SMALL),
            "3B": _llama(3072, 28, 24, 8192, **_SMALL),
            # As TorchTitan: without a version, the frequencies of 3.1.
            "8B": _llama(4096, 32, 32, 14336, **_LONG),
            "70B": _llama(8192, 80, 64, 28672, **_LONG),
            "405B": _llama(16384, 126, 128, 53248, **_LONG),
            "3.0-8B": _llama(4096, 32, 32, 14336),
            "3.0-70B": _llama(8192, 80, 64, 28672),
        },
    )
)
