"""Tiny random models of every family, made by transformers: what our reading and computing is held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from titanlike.models.decoder import Decoder, parameter_shapes
from titanlike.models.hub import reading
from titanlike.models.hub.names import origins
from titanlike.models.initial import Shard, materialise
from titanlike.models.spec import folder_form

VOCABULARY, LENGTH = 97, 40
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_MOE = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 8}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "pad_token_id": 0,
}

# name → (class of the configuration, what differs from SIZES)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama with biases, tied": (
        "LlamaConfig",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 12},
    ),
    "llama 3.1's frequencies": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **_LLAMA3}},
    ),
    "linear frequencies": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "mistral with a window": ("MistralConfig", {"sliding_window": 9}),
    "mistral without": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, windows and yarn": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "rope_parameters": _YARN},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3 with biases": ("Qwen3Config", {"head_dim": 8, "attention_bias": True}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe, not normed, odd width": (
        "Qwen3MoeConfig",
        {**_MOE, "norm_topk_prob": False, "moe_intermediate_size": 18, "decoder_sparse_step": 2},
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            **_DEEPSEEK,
            "q_lora_rank": 20,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek-v3, straight queries": (
        "DeepseekV3Config",
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "v_head_dim": 12,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "attention_bias": True,
        },
    ),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 9, "query_pre_attn_scalar": 11}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 8,
            "sliding_window": 9,
            "query_pre_attn_scalar": 11,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "num_hidden_layers": 7,
        },
    ),
}


def reference(case: str, **sizes: int):
    """transformers' model of a case, in other sizes where given, with weights that make every part of it matter."""
    import transformers

    name, changes = CASES[case]
    config = getattr(transformers, name)(**{**SIZES, **changes, **sizes}, attn_implementation="eager")
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # theirs by groups wants sizes that divide
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3 if parameter.ndim > 1 else 0.2)
    for key, buffer in model.named_buffers():
        if "correction" in key:
            buffer.normal_()
    return model


def tokens(rows: int = 2) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))


def load(folder: Path, *, seq_len: int = LENGTH) -> Decoder:
    """Our model of a folder."""
    form, spec = folder_form(folder)
    with torch.device("meta"):
        model = Decoder(spec, seq_len=seq_len)
    materialise(model, "cpu", reading.hub_source(folder, form, spec, parameter_shapes(spec)))
    return model


class InMemory:
    """Tensors by name, read as a folder's are."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._tensors = tensors

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, box=None) -> torch.Tensor:
        return self._tensors[name][box] if box else self._tensors[name]


def as_ours(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that are named and laid out as transformers' parameters (gradients), as ours."""
    form, spec = folder_form(folder)
    held, found = InMemory(tensors), {}
    shapes = parameter_shapes(spec)
    for name, origin in origins(form, spec, shapes).items():
        if name.endswith("expert_bias"):
            continue
        shape = shapes[name]
        shard = Shard(name, shape, (0,) * len(shape), torch.empty(shape, device="meta"))
        found[name] = reading.read_origin(held, origin, shard)
    return found
