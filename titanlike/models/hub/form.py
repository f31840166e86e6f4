"""How a family is written on the Hub: its config.json and the names of its tensors. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titanlike.models.hub.config_json import HubConfig
from titanlike.models.hub.quantised import blocks_of

if TYPE_CHECKING:
    from titanlike.models.spec import DecoderSpec, RopeScaling

# Ours → the Hub's, without ".weight" and ".bias"; {} is the layer's number.
NAMES: Mapping[str, str] = {
    "tok_embeddings": "model.embed_tokens",
    "layers.{}.attention.wq": "model.layers.{}.self_attn.q_proj",
    "layers.{}.attention.wk": "model.layers.{}.self_attn.k_proj",
    "layers.{}.attention.wv": "model.layers.{}.self_attn.v_proj",
    "layers.{}.attention.wo": "model.layers.{}.self_attn.o_proj",
    "layers.{}.attention.q_norm": "model.layers.{}.self_attn.q_norm",
    "layers.{}.attention.k_norm": "model.layers.{}.self_attn.k_norm",
    "layers.{}.feed_forward.w1": "model.layers.{}.mlp.gate_proj",
    "layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",
    "layers.{}.feed_forward.w3": "model.layers.{}.mlp.up_proj",
    "layers.{}.attention_norm": "model.layers.{}.input_layernorm",
    "layers.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "norm": "model.norm",
    "output": "lm_head",
}

# A mixture of experts beside those: {} a second time is the expert's number.
EXPERTS: Mapping[str, str] = {
    "layers.{}.moe.router.gate": "model.layers.{}.mlp.gate",
    "layers.{}.moe.experts.w1": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "layers.{}.moe.experts.w2": "model.layers.{}.mlp.experts.{}.down_proj.weight",
    "layers.{}.moe.experts.w3": "model.layers.{}.mlp.experts.{}.up_proj.weight",
}
# transformers 5 may write all of a layer's in one: name, which share of its rows, of how many.
STACKED: Mapping[str, tuple[str, int, int]] = {
    "w1": ("model.layers.{}.mlp.experts.gate_up_proj", 0, 2),
    "w2": ("model.layers.{}.mlp.experts.down_proj", 0, 1),
    "w3": ("model.layers.{}.mlp.experts.gate_up_proj", 1, 2),
}


@dataclass(frozen=True, kw_only=True)
class HubForm:
    """One `model_type` of config.json: the class that transformers has for it, and the way to a spec and back.

    `write` gives the keys of config.json that `common` doesn't. `names` are laid over `NAMES`.
    """

    model_type: str
    architecture: str
    read: Callable[[HubConfig], DecoderSpec]
    write: Callable[[DecoderSpec], dict[str, Any]]
    names: Mapping[str, str] | None = None

    def all_names(self) -> dict[str, str]:
        return {**NAMES, **(self.names or {})}

    def spec(self, config: HubConfig) -> DecoderSpec:
        """The decoder of a config.json. Raises ConfigError by the name of each key that asks for something else."""
        spec = self.read(config)
        blocks_of(config)
        config.finish()
        return spec

    def config(self, spec: DecoderSpec) -> dict[str, Any]:
        """What config.json says of a decoder. Raises ConfigError if this form has no words for it."""
        config = {"architectures": [self.architecture], "model_type": self.model_type, **common(spec)}
        return {**config, **self.write(spec)}


def read_common(config: HubConfig, *, tied: bool = False, activation: str = "hidden_act") -> dict[str, Any]:
    """Fields of a spec that all families write alike; `tied` is the family's default."""
    dim, heads = config.require("hidden_size"), config.require("num_attention_heads")
    theta, scaling = read_rope(config)
    name = config.expect(activation, "silu", "gelu_pytorch_tanh")
    return {
        "dim": dim,
        "n_layers": config.require("num_hidden_layers"),
        "n_heads": heads,
        "n_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or dim // heads,
        "ffn_dim": config.require("intermediate_size"),
        "vocab_size": config.require("vocab_size"),
        "max_seq_len": config.require("max_position_embeddings"),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "activation": "gelu_tanh" if name == "gelu_pytorch_tanh" else "silu",
        "tied_head": config.get("tie_word_embeddings", tied),
    }


def common(spec: DecoderSpec) -> dict[str, Any]:
    """The reverse of `read_common`, in the form that every transformers since 4.43 reads."""
    activation = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[spec.activation]
    return {
        "hidden_size": spec.dim,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn_dim,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": write_scaling(spec.rope_scaling),
        "hidden_act": activation,
        "tie_word_embeddings": spec.tied_head,
        "attention_dropout": 0.0,
        "use_cache": True,
    }


def read_rope(config: HubConfig, kind: str | None = None) -> tuple[float, RopeScaling | None]:
    """Base and scaling of rotary frequencies, from either form of config.json; of one kind of layers, if it names some.

    transformers 5 writes `rope_parameters`, all before it `rope_theta` and `rope_scaling`.
    """
    found = config.get("rope_parameters")
    key = "rope_parameters"
    if found is not None and kind is not None and kind in found:
        found, key = found[kind], f"rope_parameters.{kind}"
    if found is None:
        key, found = "rope_scaling", config.get("rope_scaling") or {}
    found = dict(found)
    theta = float(found.pop("rope_theta", None) or config.get("rope_theta", 10000.0))
    config.expect("partial_rotary_factor", 1.0)
    if found.pop("partial_rotary_factor", 1.0) != 1.0:
        raise config.error(f"{key}.partial_rotary_factor", "heads are rotated whole")
    return theta, _scaling(config, key, found)


def _scaling(config: HubConfig, key: str, found: dict[str, Any]) -> RopeScaling | None:
    from titanlike.models.spec import RopeScaling

    old = found.pop("type", None)
    kind = found.pop("rope_type", None) or old or "default"
    if kind == "default":
        return None
    fields: dict[str, Any] = {"factor": float(found.pop("factor", 1.0))}
    original = found.pop("original_max_position_embeddings", None) or config.require("max_position_embeddings")
    if kind == "llama3":
        fields |= {f"{name}_freq_factor": float(found.pop(f"{name}_freq_factor")) for name in ("low", "high")}
    elif kind == "yarn":
        fields |= {f"beta_{name}": float(found.pop(f"beta_{name}", None) or default) for name, default in _BETAS}
        fields["whole_pairs"] = found.pop("truncate", True)
        fields["attention_factor"] = _attention_factor(fields["factor"], found)
    elif kind != "linear":
        raise config.error(f"{key}.rope_type", 'is none of "default", "linear", "llama3", "yarn"', kind)
    for name, value in found.items():
        raise config.error(f"{key}.{name}", f"is not known of {kind!r} frequencies", value)
    if kind != "linear":
        fields["original_max_seq_len"] = int(original)
    return RopeScaling(kind=kind, **fields)


_BETAS = (("fast", 32.0), ("slow", 1.0))


def _attention_factor(factor: float, found: dict[str, Any]) -> float:
    given = found.pop("attention_factor", None)
    scale, of_all = found.pop("mscale", None), found.pop("mscale_all_dim", None)
    if given is not None:
        return float(given)
    if scale and of_all:
        return magnitude(factor, scale) / magnitude(factor, of_all)
    return magnitude(factor, 1.0)


def magnitude(factor: float, weight: float) -> float:
    """How much YaRN sharpens attention for a stretch by `factor` (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """`rope_scaling` of config.json."""
    if scaling is None:
        return None
    found: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return found
    found["original_max_position_embeddings"] = scaling.original_max_seq_len
    if scaling.kind == "llama3":
        return {**found, "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    found |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    return {**found, "attention_factor": scaling.attention_factor, "truncate": scaling.whole_pairs}


def sharpening(config: HubConfig) -> float:
    """YaRN's `mscale_all_dim`, by which DeepSeek's models scale their scores; 0 if there is none."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found.get("mscale_all_dim") or 0.0


def sharpened_scale(head_dim: int, scaling: RopeScaling | None, weight: float) -> float | None:
    """The scale of scores with that in it; None where it is the usual one."""
    if scaling is None or not weight:
        return None
    return head_dim**-0.5 * magnitude(scaling.factor, weight) ** 2


def write_sharpened(spec: DecoderSpec) -> dict[str, Any]:
    """`rope_scaling` of config.json with the weight that a scale of scores was made with."""
    scaling = write_scaling(spec.rope_scaling)
    if scaling is None or spec.attention_scale is None:
        return {}
    sharpened = (spec.attention_scale * spec.head_dim**0.5) ** 0.5
    weight = round((sharpened - 1) / (magnitude(scaling["factor"], 1.0) - 1), 9)
    return {"rope_scaling": {**scaling, "mscale": weight, "mscale_all_dim": weight}}


def read_windows(config: HubConfig, spec: dict[str, Any], *, default: Callable[[int], bool]) -> dict[str, Any]:
    """`window` and `windowed_layers` from `sliding_window` and `layer_types`; by `default` of a layer's number."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    n_layers = spec["n_layers"]
    if kinds is None:
        windowed = [i for i in range(n_layers) if default(i)]
    else:
        for kind in set(kinds) - {"full_attention", "sliding_attention"}:
            raise config.error("layer_types", "layers are full_attention or sliding_attention", kind)
        if len(kinds) != n_layers:
            raise config.error("layer_types", f"must name all {n_layers} layers", kinds)
        windowed = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
    if window is None or not windowed:
        return {}
    return {"window": window, "windowed_layers": tuple(windowed)}


def layer_types(spec: DecoderSpec) -> list[str]:
    """`layer_types` of config.json."""
    return ["sliding_attention" if spec.window_of(i) else "full_attention" for i in range(spec.n_layers)]
