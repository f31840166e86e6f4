"""Gemma 3, text (Gemma Team 2025, arXiv 2503.19786; published configurations): five windowed layers, then a full one.

Windowed layers have rotary frequencies of their own; queries and keys are normed instead of soft-capped.
"""

from __future__ import annotations

from typing import Any

from titanlike.models.families.gemma2 import NORMS, SHAPE, read_gemma, write_gemma
from titanlike.models.hub.config_json import HubConfig
from titanlike.models.hub.form import HubForm, read_rope, read_windows
from titanlike.models.spec import DecoderSpec, Family, RopeScaling, families

_EVERY = 6


def _read(config: HubConfig) -> DecoderSpec:
    fields = read_gemma(config)
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or _EVERY
    fields |= read_windows(config, fields, default=lambda layer: (layer + 1) % every != 0)
    if config.get("rope_parameters"):  # by kind of layer since transformers 5
        fields["rope_theta"], fields["rope_scaling"] = read_rope(config, "full_attention")
        local, scaling = read_rope(config, "sliding_attention")
        if scaling:
            raise config.error("rope_parameters.sliding_attention", "windowed layers have frequencies without scaling")
    else:
        fields["rope_theta"] = config.get("rope_theta", 1e6)
        local = config.get("rope_local_base_freq", 1e4)
    return DecoderSpec(**fields, qk_norm=True, windowed_rope_theta=float(local))


def _write(spec: DecoderSpec) -> dict[str, Any]:
    return {**write_gemma(spec), "rope_local_base_freq": spec.windowed_rope_theta}


GEMMA3 = HubForm(model_type="gemma3_text", architecture="Gemma3ForCausalLM", read=_read, write=_write, names=NORMS)


def _gemma(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int, **other) -> DecoderSpec:
    sizes = {"head_dim": 256, "window": 1024, "vocab_size": 262208, "max_seq_len": 131072, "attention_scale": 256**-0.5}
    return DecoderSpec(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        ffn_dim=ffn_dim,
        norm_eps=1e-6,
        rope_theta=1e6,
        windowed_rope_theta=1e4,
        qk_norm=True,
        activation="gelu_tanh",
        windowed_layers=tuple(i for i in range(n_layers) if (i + 1) % _EVERY),
        tied_head=True,
        **SHAPE,
        **{**sizes, **other},
    )


_SMALL = {"window": 512, "vocab_size": 262144, "max_seq_len": 32768}
_LONG = {"rope_scaling": RopeScaling(kind="linear", factor=8.0)}

gemma3 = families.register("gemma3")(
    Family(
        name="gemma3",
        hub=(GEMMA3,),
        flavors={
            "270M": _gemma(640, 18, 4, 1, 2048, **_SMALL),
            "1B": _gemma(1152, 26, 4, 1, 6912, **_SMALL),
            "4B": _gemma(2560, 34, 8, 4, 10240, **_LONG),
            "12B": _gemma(3840, 48, 16, 8, 15360, **_LONG),
            "27B": _gemma(5376, 62, 32, 16, 21504, **{**_LONG, "head_dim": 128, "attention_scale": 168**-0.5}),
        },
    )
)
