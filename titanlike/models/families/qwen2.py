"""Qwen 2 and 2.5 (Qwen Team 2024, arXiv 2412.15115; published configurations): biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from titanlike.models.hub.config_json import HubConfig
from titanlike.models.hub.form import HubForm, layer_types, read_common, read_windows
from titanlike.models.spec import DecoderSpec, Family, families


def qwen_windows(config: HubConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Windows of Qwen's config.json: from `max_window_layers` on, and only if `use_sliding_window` says so."""
    first = config.get("max_window_layers", 28)
    found = read_windows(config, fields, default=lambda layer: layer >= first)
    return found if config.get("use_sliding_window", False) else {}


def write_windows(spec: DecoderSpec) -> dict[str, Any]:
    """The reverse of `qwen_windows`."""
    if not spec.windowed_layers:
        return {"use_sliding_window": False, "sliding_window": None}
    first = min(spec.windowed_layers)
    kinds = {"layer_types": layer_types(spec), "max_window_layers": first}
    return {"use_sliding_window": True, "sliding_window": spec.window, **kinds}


def _read(config: HubConfig) -> DecoderSpec:
    fields = read_common(config)
    return DecoderSpec(**fields, qkv_bias=True, **qwen_windows(config, fields))


QWEN2 = HubForm(model_type="qwen2", architecture="Qwen2ForCausalLM", read=_read, write=write_windows)


def _qwen(dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int, **other) -> DecoderSpec:
    sizes = {"vocab_size": 152064, "max_seq_len": 32768, "norm_eps": 1e-6, **other}
    return DecoderSpec(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=dim // n_heads,
        ffn_dim=ffn_dim,
        rope_theta=1e6,
        qkv_bias=True,
        **sizes,
    )


_SMALL = {"vocab_size": 151936, "tied_head": True}
_LONG = {"max_seq_len": 131072}

qwen2 = families.register("qwen2")(
    Family(
        name="qwen2",
        hub=(QWEN2,),
        # Those of 2.5.
        flavors={
            "0.5B": _qwen(896, 24, 14, 2, 4864, **_SMALL),
            "1.5B": _qwen(1536, 28, 12, 2, 8960, **_SMALL, **_LONG),
            "3B": _qwen(2048, 36, 16, 2, 11008, **_SMALL),
            "7B": _qwen(3584, 28, 28, 4, 18944, **_LONG),
            "14B": _qwen(5120, 48, 40, 8, 13824, norm_eps=1e-5, **_LONG),
            "32B": _qwen(5120, 64, 40, 8, 27648, norm_eps=1e-5, **_LONG),
            "72B": _qwen(8192, 80, 64, 8, 29568, norm_eps=1e-5, **_LONG),
        },
    )
)
