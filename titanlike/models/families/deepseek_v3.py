"""DeepSeek-V3 and R1 (DeepSeek-AI 2024, arXiv 2412.19437; published configurations).

Latent attention; experts of which some are shared, chosen by sigmoid scores with a bias, in groups; the first layers
dense. The layers that predict further tokens, which transformers leaves out too, are not part of the decoder.
"""

from __future__ import annotations

from typing import Any

from titanlike.models.hub.config_json import HubConfig
from titanlike.models.hub.form import EXPERTS, HubForm, read_common, sharpened_scale, sharpening, write_sharpened
from titanlike.models.spec import DecoderSpec, Experts, Family, Latent, RopeScaling, families

_NAMES = {
    **EXPERTS,
    "layers.{}.attention.wq_a": "model.layers.{}.self_attn.q_a_proj",
    "layers.{}.attention.q_norm": "model.layers.{}.self_attn.q_a_layernorm",
    "layers.{}.attention.wq_b": "model.layers.{}.self_attn.q_b_proj",
    "layers.{}.attention.wkv_a": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
    "layers.{}.attention.kv_norm": "model.layers.{}.self_attn.kv_a_layernorm",
    "layers.{}.attention.wkv_b": "model.layers.{}.self_attn.kv_b_proj",
    "layers.{}.moe.shared_experts.w1": "model.layers.{}.mlp.shared_experts.gate_proj",
    "layers.{}.moe.shared_experts.w2": "model.layers.{}.mlp.shared_experts.down_proj",
    "layers.{}.moe.shared_experts.w3": "model.layers.{}.mlp.shared_experts.up_proj",
    "layers.{}.moe.expert_bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
}


def _read(config: HubConfig) -> DecoderSpec:
    latent = Latent(
        query_rank=config.get("q_lora_rank"),
        kv_rank=config.require("kv_lora_rank"),
        nope_dim=config.require("qk_nope_head_dim"),
        rope_dim=config.require("qk_rope_head_dim"),
        value_dim=config.require("v_head_dim"),
    )
    config.expect("rope_interleave", True)
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    config.expect("moe_layer_freq", 1)
    config.get("qk_head_dim")
    config.get("num_nextn_predict_layers")
    experts = Experts(
        n_experts=config.require("n_routed_experts" if config.get("n_routed_experts") else "num_local_experts"),
        top_k=config.require("num_experts_per_tok"),
        ffn_dim=config.require("moe_intermediate_size"),
        n_shared=config.get("n_shared_experts", 0),
        score="sigmoid",
        normalised=config.get("norm_topk_prob", True),
        scale=float(config.get("routed_scaling_factor", 1.0)),
        n_groups=config.get("n_group", 1),
        top_groups=config.get("topk_group", 1),
        bias=True,
        balance_loss=config.get("aux_loss_alpha", 0.0),
        dense_layers=tuple(range(config.get("first_k_dense_replace", 0))),
    )
    biases = config.get("attention_bias", False)
    fields = read_common(config) | {"head_dim": latent.nope_dim + latent.rope_dim}
    fields["n_kv_heads"] = fields["n_heads"]
    fields["attention_scale"] = sharpened_scale(fields["head_dim"], fields["rope_scaling"], sharpening(config))
    return DecoderSpec(**fields, latent=latent, experts=experts, qkv_bias=biases, out_bias=biases)


def _write(spec: DecoderSpec) -> dict[str, Any]:
    assert spec.latent is not None and spec.experts is not None
    latent, experts = spec.latent, spec.experts
    return {
        **write_sharpened(spec),
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_head_dim": spec.head_dim,
        "v_head_dim": latent.value_dim,
        "head_dim": latent.rope_dim,
        "rope_interleave": True,
        "attention_bias": spec.qkv_bias,
        "n_routed_experts": experts.n_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ffn_dim,
        "n_shared_experts": experts.n_shared,
        "norm_topk_prob": experts.normalised,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.n_groups,
        "topk_group": experts.top_groups,
        "aux_loss_alpha": experts.balance_loss,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": len(experts.dense_layers),
    }


DEEPSEEK_V3 = HubForm(
    model_type="deepseek_v3", architecture="DeepseekV3ForCausalLM", read=_read, write=_write, names=_NAMES
)

_YARN = RopeScaling(kind="yarn", factor=40.0, original_max_seq_len=4096)


def _flavor(dense: int, latent: dict[str, Any], experts: dict[str, Any], **sizes: Any) -> DecoderSpec:
    rule = {"score": "sigmoid", "n_shared": 1, "scale": 2.5, "bias": True, "balance_loss": 1e-4, **experts}
    return DecoderSpec(
        n_kv_heads=sizes["n_heads"],
        head_dim=latent["nope_dim"] + latent["rope_dim"],
        norm_eps=1e-6,
        latent=Latent(**latent),
        experts=Experts(**rule, dense_layers=tuple(range(dense))),
        **sizes,
    )


deepseek_v3 = families.register("deepseek_v3")(
    Family(
        name="deepseek_v3",
        hub=(DEEPSEEK_V3,),
        flavors={
            # Everything that the real one has, small enough for a laptop.
            "debugmodel": _flavor(
                1,
                {"query_rank": 64, "kv_rank": 48, "nope_dim": 32, "rope_dim": 16, "value_dim": 32},
                {"n_experts": 12, "top_k": 3, "ffn_dim": 96, "n_groups": 4, "top_groups": 2},
                **{"dim": 128, "n_layers": 4, "n_heads": 4, "ffn_dim": 352, "vocab_size": 1024, "max_seq_len": 2048},
                rope_theta=1e4,
            ),
            "671B": _flavor(
                3,
                {"query_rank": 1536, "kv_rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128},
                {"n_experts": 256, "top_k": 8, "ffn_dim": 2048, "n_groups": 8, "top_groups": 4},
                **{"dim": 7168, "n_layers": 61, "n_heads": 128, "ffn_dim": 18432, "vocab_size": 129280},
                max_seq_len=163840,
                rope_theta=1e4,
                rope_scaling=_YARN,
                attention_scale=sharpened_scale(192, _YARN, 1.0),
            ),
        },
    )
)
