"""[training], [optimizer], [lr_scheduler]: how long, how large, how fast."""

# ruff: noqa: RUF012 (pydantic copies a mutable default)

from __future__ import annotations

from typing import Literal

from titanlike.config.sections.base import (
    BelowOne,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)
from titanlike.config.sections.data import DataLoader


class Training(Section):
    """Batch, length, precision."""

    local_batch_size: Positive = 8
    """Sequences that a data-parallel rank takes through the model at once (a microbatch)."""

    global_batch_size: int = -1
    """Sequences of an optimizer step over all ranks; -1 is local_batch_size x data-parallel degree."""

    seq_len: Positive = 2048
    """Sequence length in tokens."""

    steps: Positive = 10000
    """Optimizer steps of the whole run, those before a restart included."""

    max_norm: NonNegativeFloat = 1.0
    """Largest norm of the whole gradient; larger ones are scaled down to it. 0 switches clipping off."""

    dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of parameters, gradients and optimizer state."""

    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Type that the model computes in."""

    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type that gradients are added up in over ranks."""

    enable_cpu_offload: bool = False
    """Keep parameters and optimizer state in host memory (with an accelerator only)."""

    activation_offload: bool = False
    """Keep activations in host memory until backward (with an accelerator only)."""

    gc_freq: Positive = 50
    """Steps between garbage collections; Python's automatic one is off while training."""

    gc_debug: bool = False
    """Collect after each step and log what was found."""

    dataloader: DataLoader = DataLoader()
    """Loader workers."""


class ParamGroup(Section):
    """[[optimizer.param_groups]]: parameters with settings of their own."""

    pattern: str
    """Regular expression, searched for in the parameter's name. The first group that matches wins."""

    lr: PositiveFloat | None = None
    """Peak learning rate of the group; none takes optimizer.lr."""

    lr_factor: NonNegativeFloat | None = None
    """Factor on optimizer.lr, instead of lr."""

    weight_decay: NonNegativeFloat | None = None
    """Weight decay of the group; none takes optimizer.weight_decay."""


class Optimizer(Section):
    """How gradients become updates."""

    name: str = "AdamW"
    """AdamW, Adam, SGD, Muon, AdamW8bit, AdamW4bit, AdamWFp8, or one that job.import registers."""

    lr: NonNegativeFloat = 8e-4
    """Peak learning rate."""

    beta1: BelowOne = 0.9
    """Decay of the mean of gradients (Adam)."""

    beta2: BelowOne = 0.95
    """Decay of the mean of squared gradients (Adam)."""

    eps: PositiveFloat = 1e-8
    """Added to the root of the squared mean (Adam)."""

    momentum: BelowOne | None = None
    """Momentum (SGD, Muon); none is 0 for SGD and 0.95 for Muon."""

    muon_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Size of Muon's updates: that of AdamW's, so that learning rate and decay serve both; or sqrt(rows / columns)."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, as a share of the learning rate."""

    no_decay: list[Literal["norms", "biases", "embeddings"]] = ["norms", "biases", "embeddings"]
    """Kinds of parameters that are left out of weight decay."""

    param_groups: list[ParamGroup] = []
    """Parameters with settings of their own, by pattern. A pattern that matches nothing is an error."""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """How the update is computed: one kernel, lists, or one by one; compiled it is always lists."""

    in_backward: bool = False
    """Update each parameter as soon as its gradient is there, and free the gradient."""

    in_backward_clip: Literal["parameter", "previous"] | None = None
    """How in_backward clips: each gradient by its own norm, or by the global norm of the step before."""

    state_dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the optimizer's state; none takes training.dtype. The update is computed in float32."""

    stochastic_rounding: bool = False
    """Round bfloat16 weights and state at random, so that small updates are not lost; a function of seed and step."""


class LRScheduler(Section):
    """Warm-up, stable phase, decay."""

    warmup_steps: NonNegative = 200
    """Steps of linear warm-up."""

    total_steps: Positive | None = None
    """Length of the schedule in steps; none takes training.steps, or the end of the data if that comes first."""

    decay_ratio: Fraction | None = None
    """Share of the steps spent in decay; none decays from the end of the warm-up on."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Curve of the decay."""

    min_lr_factor: Fraction = 0.0
    """Learning rate at the end, as a share of the peak."""


class Guard(Section):
    """What is done about losses and gradients that can't be right."""

    enable: bool = False
    """Skip steps whose loss or gradient norm is not finite or far off."""

    sigma: PositiveFloat = 6.0
    """Distance from the mean of the last steps, in standard deviations, that counts as far off."""

    window: Positive = 128
    """Steps of that mean."""

    max_skips: Positive = 5
    """Skips within the window after which the run goes back to the last good checkpoint, past that data."""
