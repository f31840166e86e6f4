"""config.json of a model on the Hub, read so that nothing in it is passed over unseen."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from titanlike.errors import ConfigError

logger = logging.getLogger("titanlike")

NAME = "config.json"

# What speaks of other things than the function that the model computes.
_ASIDE = frozenset(
    [
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "dtype",
        "torch_dtype",
        "initializer_range",
        "model_type",
        "pretraining_tp",
        "transformers_version",
        "transformers.js_config",
        "use_cache",
        "output_router_logits",
        "attention_dropout",
        "attn_implementation",
        "_attn_implementation",
        "cache_implementation",
        "id2label",
        "label2id",
        "router_jitter_noise",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "chunk_size_feed_forward",
        "is_llama_config",
        "rope_interleaved",
        "num_labels",
        "max_window_layers",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "router_aux_loss_coef",
        "task_specific_params",
        "torchscript",
        "use_bfloat16",
        "gradient_checkpointing",
    ]
)


def _is_neutral(value: Any) -> bool:
    """What asks for nothing: a switch that is off, a factor of one."""
    return not value or (value == 1 and not isinstance(value, bool))


class HubConfig:
    """The keys of a config.json; remembers which were asked for."""

    def __init__(self, values: dict[str, Any], path: Path | str):
        self.path = path
        self._values = values
        self._asked: set[str] = set()

    @classmethod
    def of_folder(cls, folder: Path) -> HubConfig:
        """That of a model's folder. Raises ConfigError if it can't be read."""
        path = folder / NAME
        try:
            values = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: can't be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: must hold an object, holds {type(values).__name__}")
        return cls(values, path)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; the default where there is none or it is null."""
        self._asked.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def require(self, key: str) -> Any:
        """The value of a key that must be there, a positive whole number."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.error(key, "must be a positive whole number", value)
        return value

    def expect(self, key: str, *allowed: Any) -> Any:
        """A value that must be among the allowed ones; the first where there is none."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            raise self.error(key, f"must be {' or '.join(map(repr, allowed))}; this decoder does no other", value)
        return value

    def error(self, key: str, what: str, value: Any = None) -> ConfigError:
        return ConfigError(f"{self.path}: {key} = {value!r}: {what}")

    def finish(self) -> None:
        """Once a family has read all that it knows: refuses keys of other families, names those that nobody knows."""
        left = {k: v for k, v in self._values.items() if k not in self._asked | _ASIDE and not _is_neutral(v)}
        foreign = sorted(key for key in left if key in _MEANINGFUL)
        if foreign:
            raise ConfigError(
                [f"{self.path}: {k} = {left[k]!r}: this decoder does not do that for this model" for k in foreign]
            )
        for key in sorted(left):
            logger.warning("%s: %s = %r: is not known here, and left aside", self.path, key, left[key])


# What changes the function that is computed, of any family here: a family that doesn't read it can't have it.
_MEANINGFUL = frozenset(
    [
        "attention_bias",
        "mlp_bias",
        "use_bias",
        "qkv_bias",
        "use_sliding_window",
        "sliding_window",
        "layer_types",
        "sliding_window_pattern",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "logits_soft_cap",
        "query_pre_attn_scalar",
        "use_bidirectional_attention",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "n_shared_experts",
        "shared_expert_intermediate_size",
        "decoder_sparse_step",
        "mlp_only_layers",
        "norm_topk_prob",
        "n_group",
        "topk_group",
        "topk_method",
        "scoring_func",
        "routed_scaling_factor",
        "first_k_dense_replace",
        "moe_layer_freq",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "rope_interleave",
        "rope_scaling",
        "rope_parameters",
        "rope_local_base_freq",
        "partial_rotary_factor",
        "no_rope_layers",
        "no_rope_layer_interval",
        "clip_qkv",
        "alibi",
        "attention_multiplier",
        "embedding_multiplier",
        "residual_multiplier",
        "logits_scaling",
        "use_qk_norm",
        "qk_layernorm",
        "swiglu_limit",
        "is_encoder_decoder",
        "hidden_activation",
        "hidden_act",
        "vision_config",
        "text_config",
    ]
)
