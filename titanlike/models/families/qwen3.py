"""Qwen 3 (Qwen Team 2025, arXiv 2505.09388; published configurations): norms over queries and keys."""

from __future__ import annotations

import dataclasses
from typing import Any

from titanlike.models.families.qwen2 import qwen_windows, write_windows
from titanlike.models.hub.config_json import HubConfig
from titanlike.models.hub.form import EXPERTS, HubForm, read_common
from titanlike.models.spec import DecoderSpec, Experts, Family, families


def _read(config: HubConfig) -> DecoderSpec:
    fields = read_common(config)
    biases = config.get("attention_bias", False)
    return DecoderSpec(**fields, **qwen_windows(config, fields), qk_norm=True, qkv_bias=biases, out_bias=biases)


def _write(spec: DecoderSpec) -> dict[str, Any]:
    return {"attention_bias": spec.qkv_bias, **write_windows(spec)}


def _read_moe(config: HubConfig) -> DecoderSpec:
    step = config.get("decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers", []))
    dense |= {i for i in range(config.require("num_hidden_layers")) if (i + 1) % step}
    experts = Experts(
        n_experts=config.require("num_experts" if config.get("num_experts") else "num_local_experts"),
        top_k=config.require("num_experts_per_tok"),
        ffn_dim=config.require("moe_intermediate_size"),
        normalised=config.get("norm_topk_prob", False),
        balance_loss=config.get("router_aux_loss_coef", 0.001),
        dense_layers=tuple(sorted(dense)),
    )
    return dataclasses.replace(_read(config), experts=experts)


def _write_moe(spec: DecoderSpec) -> dict[str, Any]:
    assert spec.experts is not None
    one = spec.experts
    return {
        **_write(spec),
        "num_experts": one.n_experts,
        "num_experts_per_tok": one.top_k,
        "moe_intermediate_size": one.ffn_dim,
        "norm_topk_prob": one.normalised,
        "router_aux_loss_coef": one.balance_loss,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(one.dense_layers),
    }


QWEN3_MOE = HubForm(
    model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", read=_read_moe, write=_write_moe, names=EXPERTS
)
QWEN3 = HubForm(model_type="qwen3", architecture="Qwen3ForCausalLM", read=_read, write=_write)


def _qwen(dim: int, n_layers: int, n_heads: int, ffn_dim: int, **other) -> DecoderSpec:
    sizes = {"n_kv_heads": 8, **other}
    return DecoderSpec(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        head_dim=128,
        ffn_dim=ffn_dim,
        vocab_size=151936,
        max_seq_len=40960,
        norm_eps=1e-6,
        rope_theta=1e6,
        qk_norm=True,
        **sizes,
    )


def _debug(**other) -> DecoderSpec:
    sizes = {"dim": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "vocab_size": 1024}
    return DecoderSpec(**sizes, max_seq_len=2048, norm_eps=1e-6, rope_theta=1e4, qk_norm=True, **other)


def _experts(ffn_dim: int, *, n_experts: int = 128, top_k: int = 8) -> Experts:
    return Experts(n_experts=n_experts, top_k=top_k, ffn_dim=ffn_dim, balance_loss=0.001)


qwen3 = families.register("qwen3")(
    Family(
        name="qwen3",
        hub=(QWEN3, QWEN3_MOE),
        flavors={
            # Small enough for a laptop.
            "debugmodel": _debug(ffn_dim=352),
            "debugmodel_moe": _debug(ffn_dim=352, experts=_experts(96, n_experts=16, top_k=4)),
            "0.6B": _qwen(1024, 28, 16, 3072, tied_head=True),
            "1.7B": _qwen(2048, 28, 16, 6144, tied_head=True),
            "4B": _qwen(2560, 36, 32, 9728, tied_head=True),
            "8B": _qwen(4096, 36, 32, 12288),
            "14B": _qwen(5120, 40, 40, 17408),
            "32B": _qwen(5120, 64, 64, 25600),
            "30B-A3B": _qwen(2048, 48, 32, 6144, n_kv_heads=4, experts=_experts(768)),
            "235B-A22B": _qwen(4096, 94, 64, 12288, n_kv_heads=4, experts=_experts(1536)),
        },
    )
)
