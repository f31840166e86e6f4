"""Which models other than Llama 3 are held against one plain process, and at which layouts: experts above all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.models.hub.models import CASES, SIZES
from tests.parity.layouts import BY_OPERATOR, COMPILED, FULL, RING, ULYSSES, Layout

_SMALL = {"dim": 32, "n_layers": 3, "n_heads": 4, "ffn_dim": 48, "vocab_size": 323}
_EXPERTS = {"n_experts": 8, "top_k": 3, "ffn_dim": 24}
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "name": "qwen3",
        "flavor": "debugmodel_moe",
        "overrides": {
            **_SMALL,
            "n_kv_heads": 2,
            "head_dim": 8,
            "experts": {**_EXPERTS, "balance_loss": 0.02, "z_loss": 0.01},
        },
    },
    # With a layer without experts, a shared expert, biases that move, experts in groups, latent attention.
    "deepseek": {
        "name": "deepseek_v3",
        "flavor": "debugmodel",
        "overrides": {**_SMALL, "experts": {**_EXPERTS, "n_shared": 1, "bias_rate": 0.01, "balance_loss": 0.02}},
    },
}
# Of the cases that transformers' models are made of: windows, caps, norms after a sublayer, two bases, biases.
DENSE = ("gemma2", "gemma3", "qwen2", "mistral with a window")


@dataclass(frozen=True)
class Case:
    """One model at one layout."""

    model: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.model}: {self.layout}"

    def config(self, folder: Path) -> dict[str, Any]:
        """Its run; a model of transformers' gets its config.json in `folder`."""
        settings = self.layout.config()
        settings["model"] = MIXTURES.get(self.model) or {"hf_assets_path": str(folder)}
        if self.model not in MIXTURES:
            import transformers

            name, changes = CASES[self.model]
            getattr(transformers, name)(**{**SIZES, **changes}).save_pretrained(folder)
        return settings


def _of(spread: int = 1, split: int = 1, sections=None, others=None, **degrees: int) -> Layout:
    """Experts spread over that many ranks, and each split over that many."""
    parallelism = dict(others or {})
    if spread > 1:
        parallelism["expert_parallel_degree"] = spread
    if split > 1:
        parallelism["expert_tensor_parallel_degree"] = split
    return Layout(degrees, parallelism, sections or {})


_IN_BACKWARD = {"optimizer": {"in_backward": True}, "training": {"max_norm": 0.0, "local_batch_size": 4}}
_BOTH = (
    _of(2, shard=2),
    _of(2, tensor=2),
    _of(2, context=2, others=RING),
    _of(pipeline=2),
)
_BOTH_SLOW = (
    _of(shard=2),
    _of(tensor=2),
    _of(4, shard=4),
    _of(2, shard=2, tensor=2),
    _of(4, shard=2, tensor=2),
    _of(2, 2, shard=2, tensor=2),
    _of(2, pipeline=2, shard=2),
    _of(2, shard=2, context=2, others=ULYSSES),
    _of(4, shard=2, context=2, others=RING),
    _of(2, replicate=2, shard=2),
    _of(context=2, tensor=2, others=RING),
    _of(2, pipeline=2, tensor=2),
)
QUICK = (
    *(Case(model, layout) for model in MIXTURES for layout in _BOTH),
    Case("deepseek", _of(2, shard=2, sections=BY_OPERATOR)),
    *(Case(model, _of(tensor=2)) for model in DENSE),
    Case("gemma3", _of(pipeline=2)),
    Case("gemma2", _of(context=2, others=ULYSSES)),
)
SLOW = (
    *(Case(model, layout) for model in MIXTURES for layout in _BOTH_SLOW),
    Case("qwen3", _of(2, shard=2, sections=FULL)),
    *(Case(model, _of(2, tensor=2, sections=COMPILED)) for model in MIXTURES),
    Case("deepseek", _of(2, shard=2, context=2, others=RING, sections=FULL)),
    *(Case(model, _of(pipeline=2)) for model in DENSE),
    *(Case(model, _of(context=2, others=ULYSSES)) for model in DENSE),
    *(Case(model, _of(shard=2, tensor=2, sections=COMPILED)) for model in DENSE),
)
UPDATED_EARLY = tuple(Case(model, _of(2, shard=2, sections=_IN_BACKWARD)) for model in MIXTURES)
