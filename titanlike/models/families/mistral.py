"""Mistral (Jiang et al. 2023, arXiv 2310.06825; published configurations): Llama's form, with a window in 0.1."""

from __future__ import annotations

from typing import Any

from titanlike.models.hub.config_json import HubConfig
from titanlike.models.hub.form import HubForm, read_common, read_windows
from titanlike.models.spec import DecoderSpec, Family, families


def _read(config: HubConfig) -> DecoderSpec:
    fields = read_common(config)
    return DecoderSpec(**fields, **read_windows(config, fields, default=lambda layer: True))


def _write(spec: DecoderSpec) -> dict[str, Any]:
    return {"sliding_window": spec.window}


MISTRAL = HubForm(model_type="mistral", architecture="MistralForCausalLM", read=_read, write=_write)


def _mistral(dim: int, n_layers: int, ffn_dim: int, vocab_size: int, rope_theta: float, **other) -> DecoderSpec:
    return DecoderSpec(
        dim=dim,
        n_layers=n_layers,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        rope_theta=rope_theta,
        **other,
    )


mistral = families.register("mistral")(
    Family(
        name="mistral",
        hub=(MISTRAL,),
        flavors={
            "0.1-7B": _mistral(
                4096, 32, 14336, 32000, 1e4, max_seq_len=32768, window=4096, windowed_layers=tuple(range(32))
            ),
            "7B": _mistral(4096, 32, 14336, 32768, 1e6, max_seq_len=32768),
            "nemo-12B": _mistral(5120, 40, 14336, 131072, 1e6, max_seq_len=131072),
            "small-24B": _mistral(5120, 40, 32768, 131072, 1e8, max_seq_len=32768),
        },
    )
)
