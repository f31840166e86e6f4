"""[sft], [lora], [dpo], [reward], [distill], [qat]: what follows pretraining."""

# ruff: noqa: RUF012 (pydantic copies a mutable default)

from __future__ import annotations

from typing import Literal

from titanlike.config.sections.base import (
    BelowOne,
    Fraction,
    Names,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)


class Sft(Section):
    """Supervised fine-tuning on dialogues and instructions."""

    format: Literal["auto", "messages", "sharegpt", "alpaca", "input_output", "prompt_completion", "text"] = "auto"
    """Form of the records; auto goes by their fields."""

    columns: dict[str, str] = {}
    """Other names of the records' fields, e.g. {input = "question"}."""

    system_prompt: str | None = None
    """System message of dialogues that have none."""

    template: str = "auto"
    """Chat template: auto takes the tokenizer's; else chatml, llama3, ... or a Jinja file."""

    train_on: Literal["assistant", "last", "all", "field"] = "assistant"
    """Which messages are trained on; field goes by each message's own `train` field."""

    too_long: Literal["drop", "keep_start", "keep_end", "error"] = "drop"
    """What is done with a dialogue longer than training.seq_len."""

    packing: bool = True
    """Put several dialogues in a sequence, each attending to itself alone."""

    group_by_length: bool = True
    """Without packing: make batches of similar lengths."""

    neftune_alpha: NonNegativeFloat = 0.0
    """Scale of uniform noise on embeddings; 0 is off."""


class Lora(Section):
    """Low-rank adapters instead of full fine-tuning."""

    enable: bool = False
    """Train adapters; the base is frozen."""

    rank: Positive = 16
    """Rank of the adapters."""

    alpha: PositiveFloat = 32.0
    """Scale of the adapters: alpha / rank (alpha / sqrt(rank) with rslora)."""

    dropout: BelowOne = 0.0
    """Dropout before the adapters."""

    rslora: bool = False
    """Scale by the root of the rank."""

    dora: bool = False
    """Train each column's magnitude apart from its direction."""

    target_modules: Names = ["wq", "wk", "wv", "wo", "w1", "w2", "w3"]
    """Patterns of the linear layers that get adapters."""

    modules_to_save: Names = []
    """Modules that are trained in full and saved with the adapters."""

    quantize_base: Literal["nf4"] | None = None
    """Keep the frozen base in 4 bits (QLoRA)."""

    initial_adapter: str | None = None
    """PEFT adapter folder to go on with."""


class Dpo(Section):
    """Direct preference optimisation and its relatives."""

    loss_type: Literal["sigmoid", "hinge", "ipo", "robust", "cdpo", "simpo", "orpo", "kto"] = "sigmoid"
    """Which loss."""

    beta: PositiveFloat = 0.1
    """Strength of the pull to the reference."""

    label_smoothing: BelowOne = 0.0
    """Share of labels that is taken to be wrong."""

    length_normalized: bool = False
    """Divide an answer's log-probability by its length."""

    simpo_gamma: NonNegativeFloat = 0.5
    """Target margin of simpo."""

    sft_weight: NonNegativeFloat = 0.0
    """Weight of a plain next-token loss on the chosen answers."""

    reference: str | None = None
    """Checkpoint of the reference; none takes the start (with adapters: the model without them)."""

    precompute_reference: bool = False
    """Compute the reference's log-probabilities once and store them beside the data."""


class Reward(Section):
    """Reward model from pairs."""

    margin_column: str | None = None
    """Field of the margin by which the chosen answer should win."""

    center_weight: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's rewards, which keeps them around 0."""


class Distill(Section):
    """Learning from a larger model with the same vocabulary."""

    teacher: str | None = None
    """Checkpoint or Hub folder of the teacher."""

    teacher_name: str = "llama3"
    """Family of the teacher."""

    teacher_flavor: str | None = None
    """Sizes of the teacher; none reads them from its config.json."""

    divergence: Literal["forward_kl", "reverse_kl", "symmetric_kl", "jsd"] = "forward_kl"
    """How teacher and student are compared."""

    jsd_beta: Fraction = 0.5
    """Mixture of the two in jsd."""

    temperature: PositiveFloat = 1.0
    """Softens both distributions."""

    ce_weight: Fraction = 0.0
    """Share of the plain next-token loss."""

    top_k: NonNegative = 0
    """Teacher's logits stored offline a token; 0 runs the teacher beside the student."""


class Qat(Section):
    """Quantisation-aware training (torchao)."""

    enable: bool = False
    """Round weights and activations in the forward as the quantised model will."""

    weight_bits: Literal[4, 8] = 4
    """Bits of the weights."""

    activation_bits: Literal[8] | None = 8
    """Bits of the activations; none leaves them."""

    group_size: Positive = 32
    """Weights that share a scale."""

    embeddings: bool = False
    """Round embeddings too."""

    start_step: NonNegative = 0
    """Step from which rounding is on."""
