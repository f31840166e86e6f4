"""[model] and [loss]: what is trained, and how hidden states become a loss."""

# ruff: noqa: RUF012 (pydantic copies a mutable default)

from __future__ import annotations

from typing import Literal

from titanlike.config.sections.base import (
    BelowOne,
    Names,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)


class ExpertOverrides(Section):
    """[model.overrides.experts]: of a model that has experts."""

    n_experts: Positive | None = None
    """Experts of a layer."""

    top_k: Positive | None = None
    """Experts that a token goes to."""

    ffn_dim: Positive | None = None
    """Hidden width of an expert."""

    n_shared: NonNegative | None = None
    """Experts beside those that every token goes through."""

    balance_loss: NonNegativeFloat | None = None
    """Weight of the loss that punishes uneven use of experts, of each row by itself."""

    z_loss: NonNegativeFloat | None = None
    """Weight of the router's squared log-normaliser."""

    bias_rate: NonNegativeFloat | None = None
    """Step by which the biases of a router that has some are moved against uneven use."""


class ModelOverrides(Section):
    """[model.overrides]: sizes laid over those of the flavor."""

    dim: Positive | None = None
    """Width of the residual stream."""

    n_layers: Positive | None = None
    """Number of blocks."""

    n_heads: Positive | None = None
    """Query heads."""

    n_kv_heads: Positive | None = None
    """Key/value heads; must divide n_heads."""

    head_dim: Positive | None = None
    """Width of a head; follows from dim and n_heads where one of those is overridden."""

    ffn_dim: Positive | None = None
    """Hidden width of the feed-forward layer."""

    vocab_size: Positive | None = None
    """Rows of the embedding; at least the tokenizer's vocabulary."""

    max_seq_len: Positive | None = None
    """Longest sequence in tokens."""

    norm_eps: PositiveFloat | None = None
    """Added to the mean square in RMSNorm."""

    rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies."""

    tied_head: bool | None = None
    """Use the embedding's weight as the head."""

    logit_scale: PositiveFloat | None = None
    """Factor on the logits."""

    logit_softcap: PositiveFloat | None = None
    """Logits l become cap · tanh(l / cap)."""

    experts: ExpertOverrides = ExpertOverrides()
    """Of a model that has experts."""

    dropout: BelowOne | None = None
    """Dropout on the residual stream, as a share of its elements."""


class Model(Section):
    """Which decoder, its tokenizer, and what is done to it when it is built."""

    name: str = "auto"
    """Model family; auto is that of the config.json at hf_assets_path, else llama3."""

    flavor: str = "auto"
    """Sizes of the family by name, such as 8B; auto are those of the config.json at hf_assets_path, else debugmodel."""

    hf_assets_path: str = "debug"
    """Folder or Hub id (ORG/NAME) of a tokenizer, a config.json and weights in Hub form, as far as each is wanted; or
    "debug" for the small tokenizer that ships."""

    hf_revision: str | None = None
    """Branch, tag or commit where hf_assets_path is a Hub id."""

    attention: Literal["auto", "sdpa", "math", "flex", "varlen"] = "auto"
    """Attention kernel; auto picks the fastest that the device has."""

    converters: Names = []
    """What is done to the built model, in order, e.g. quantize.linear.float8."""

    print_after_conversion: bool = False
    """Log the model's modules after the converters ran."""

    freeze: Names = []
    """Patterns of parameter names that are not trained."""

    overrides: ModelOverrides = ModelOverrides()
    """Sizes laid over those of the flavor."""


class Loss(Section):
    """How hidden states and the head become log-probabilities."""

    implementation: Literal["linear", "logits"] = "linear"
    """linear: in chunks of tokens, never a whole table of logits; logits: the whole table (the yardstick)."""

    chunk_size: NonNegative = 0
    """Tokens a chunk of the linear form; 0 picks one by the sizes of vocabulary and cache."""

    z_loss: float = 0.0
    """Weight of the squared log-normaliser added to the loss; 0 is off."""
