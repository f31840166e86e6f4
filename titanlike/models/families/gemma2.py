"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118; published configurations): soft caps, every other layer windowed."""

from __future__ import annotations

from typing import Any

from titanlike.models.hub.config_json import HubConfig
from titanlike.models.hub.form import HubForm, layer_types, read_common, read_windows
from titanlike.models.spec import DecoderSpec, Family, families

# Four norms a block: those of Hub names that stand elsewhere than Llama's.
NORMS = {
    "layers.{}.attention_post_norm": "model.layers.{}.post_attention_layernorm",
    "layers.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "layers.{}.ffn_post_norm": "model.layers.{}.post_feedforward_layernorm",
}


SHAPE: dict[str, Any] = {"norm_offset": 1.0, "sandwich_norms": True, "scaled_embedding": True}


def read_gemma(config: HubConfig) -> dict[str, Any]:
    """Fields that Gemma 2 and 3 write alike."""
    fields = read_common(config, tied=True, activation="hidden_activation")
    config.get("hidden_act")  # of older files, where hidden_activation overrules it
    biases = config.get("attention_bias", False)
    fields |= {"qkv_bias": biases, "out_bias": biases, **SHAPE}
    fields["attention_scale"] = config.get("query_pre_attn_scalar", 256) ** -0.5
    fields["logit_softcap"] = config.get("final_logit_softcapping")
    fields["attention_softcap"] = config.get("attn_logit_softcapping")
    config.expect("use_bidirectional_attention", False)
    return fields


def write_gemma(spec: DecoderSpec) -> dict[str, Any]:
    """The reverse of `read_gemma`."""
    scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
    squared = scale**-2
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": spec.qkv_bias,
        "query_pre_attn_scalar": round(squared) if abs(squared - round(squared)) < 1e-6 else squared,
        "final_logit_softcapping": spec.logit_softcap,
        "attn_logit_softcapping": spec.attention_softcap,
        "sliding_window": spec.window or spec.max_seq_len,
        "layer_types": layer_types(spec),
    }


def _read(config: HubConfig) -> DecoderSpec:
    fields = read_gemma(config)
    return DecoderSpec(**fields, **read_windows(config, fields, default=lambda layer: layer % 2 == 0))


GEMMA2 = HubForm(model_type="gemma2", architecture="Gemma2ForCausalLM", read=_read, write=write_gemma, names=NORMS)


def _gemma(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, head_dim: int, ffn_dim: int, per: int
) -> DecoderSpec:
    """`per` is what scores are divided by the root of."""
    return DecoderSpec(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_dim=ffn_dim,
        vocab_size=256000,
        max_seq_len=8192,
        norm_eps=1e-6,
        rope_theta=10000.0,
        activation="gelu_tanh",
        attention_scale=per**-0.5,
        attention_softcap=50.0,
        logit_softcap=30.0,
        window=4096,
        windowed_layers=tuple(range(0, n_layers, 2)),
        tied_head=True,
        **SHAPE,
    )


gemma2 = families.register("gemma2")(
    Family(
        name="gemma2",
        hub=(GEMMA2,),
        flavors={
            "2B": _gemma(2304, 26, 8, 4, 256, 9216, 256),
            "9B": _gemma(3584, 42, 16, 8, 256, 14336, 256),
            "27B": _gemma(4608, 46, 32, 16, 128, 36864, 144),
        },
    )
)
