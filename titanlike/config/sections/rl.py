"""[rl], [ppo], [rollout], [weight_sync], [[environment]]: reinforcement learning."""

# ruff: noqa: RUF012 (pydantic copies a mutable default)

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from titanlike.config.sections.base import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)


class PolicyLoss(Section):
    """[rl.loss]: what is minimised."""

    type: str = "clip"
    """clip, cispo, gspo, dppo, reinforce, or pkg.mod:function."""

    clip_low: PositiveFloat = 0.2
    """How far the ratio may fall below 1."""

    clip_high: PositiveFloat = 0.28
    """How far the ratio may rise above 1."""

    dual_clip: PositiveFloat | None = 3.0
    """Bound of the loss for negative advantages; none is off."""

    ratio_cap: PositiveFloat = 5.0
    """Largest ratio of cispo and reinforce (absolute)."""

    aggregate: Literal["token", "sequence", "fixed"] = "token"
    """What the mean is taken over."""

    kl_weight: NonNegativeFloat = 0.0
    """Weight of the divergence from the reference; 0 is off."""

    kl_in_reward: bool = False
    """Take the divergence off the reward instead of adding it to the loss."""

    entropy_weight: float = 0.0
    """Weight of the entropy bonus."""


class Correction(Section):
    """[rl.correction]: the sampler is not quite the trainer."""

    anchor: Literal["sampler", "proximal"] = "sampler"
    """What ratios are taken against."""

    truncate: PositiveFloat = 2.0
    """Largest weight between proximal policy and sampler (with anchor = "proximal")."""

    sequence_mask: PositiveFloat | None = None
    """Mean log-ratio beyond which bad answers are dropped; none is off."""


class Rl(Section):
    """The policy's side of reinforcement learning."""

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "dppo", "decoupled"] | None = None
    """A vetted setting; keys that are written override it."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "maxrl"] = "dr_grpo"
    """How rewards of a group become advantages."""

    group_size: Positive = 8
    """Answers to a prompt."""

    prompts_per_step: Positive = 32
    """Prompts of an optimizer step."""

    run_ahead: NonNegative = 1
    """Steps that generation may be ahead of training; 0 is synchronous."""

    reorder: Fraction = 0.3
    """Share of the buffer that a batch may look ahead in."""

    straggler_timeout: str = "10m"
    """Longest wait for a group, such as 90s or 10m."""

    drop_zero_variance: bool = True
    """Replace groups whose rewards are all equal."""

    overlong_buffer: NonNegative = 0
    """Tokens before the limit over which the reward is lowered; 0 is off."""

    mask_truncated: bool = False
    """Leave answers that hit the limit out of the loss."""

    reference: str | None = None
    """Checkpoint of the reference; none takes the start."""

    record: bool = False
    """Keep every rollout, so that it can be replayed."""

    loss: PolicyLoss = PolicyLoss()
    """What is minimised."""

    correction: Correction = Correction()
    """Correction for the difference between sampler and trainer."""


class Ppo(Section):
    """The critic."""

    critic: Literal["own", "shared"] = "own"
    """A decoder of its own, or a head on the policy's."""

    gamma: Fraction = 1.0
    """Discount a token."""

    gae_lambda: Fraction = 0.95
    """Mixture of short and long estimates of the advantage."""

    value_clip: PositiveFloat | None = 0.2
    """How far a value may move in a step; none is off."""

    critic_lr: PositiveFloat = 1e-5
    """Peak learning rate of the critic."""


class Rollout(Section):
    """Generation during training."""

    engine: Literal["torch", "vllm"] = "torch"
    """Who generates."""

    placement: Literal["local", "ray"] = "local"
    """Where: processes of this machine, or Ray actors."""

    slots: Positive = 32
    """Answers generated at the same time."""

    max_new_tokens: Positive = 512
    """Longest answer in tokens."""

    temperature: PositiveFloat = 1.0
    """Divides the logits before sampling."""

    top_p: Fraction = 1.0
    """Share of the probability that is sampled from."""

    top_k: NonNegative = 0
    """Tokens that are sampled from; 0 takes all."""

    stop: list[str] = []
    """Texts that end an answer."""

    replicas: Positive = 1
    """Generators."""

    tensor_parallel_degree: Positive = 1
    """Ranks of a generator."""

    server_urls: list[str] = []
    """Running vLLM servers to use."""


class WeightSync(Section):
    """How new weights reach the generators."""

    type: Literal["shm", "file", "nccl"] = "shm"
    """Shared memory, files, or broadcast."""

    verify: bool = True
    """Compare checksums on both sides."""


class RewardTerm(Section):
    """[[environment.reward]]: one part of the reward."""

    type: str
    """exact_number, math, regex, format, length, code, model, or pkg.mod:function."""

    weight: float = 1.0
    """Factor of this part."""

    options: dict[str, Any] = {}
    """Arguments of that reward."""


class Environment(Section):
    """[[environment]]: where prompts come from and what an answer is worth."""

    type: str
    """gsm8k, reasoning_gym, a registered name, or pkg.mod:class."""

    ratio: PositiveFloat = 1.0
    """Share of the prompts, relative to the other environments."""

    path: str | None = None
    """File of the prompts."""

    max_turns: Positive = 1
    """Most turns of a dialogue."""

    options: dict[str, Any] = {}
    """Arguments of that environment."""

    reward: list[RewardTerm] = Field(default=[])
    """Parts of the reward."""
