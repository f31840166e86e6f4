"""[job] and [debug]: what the run is and how strictly it repeats."""

# ruff: noqa: RUF012 (pydantic copies a mutable default)

from __future__ import annotations

from pydantic import Field

from titanlike.config.sections.base import Names, NonNegative, Section


class Job(Section):
    """What the run is and where its outputs go."""

    config_file: Names = []
    """TOML file, or several that are merged from left to right. A bare name is also looked for in train_configs/."""

    recipe: str = "pretrain"
    """What the model is trained for: pretrain, sft, dpo, reward, distill, grpo, ppo, or one of job.import's."""

    dump_folder: str = "./outputs"
    """Folder of everything that the run writes."""

    description: str = "default job"
    """Free text, logged at the start."""

    print_config: bool = False
    """Log the resolved config at the start."""

    save_config_file: str | None = None
    """One more file under dump_folder for the resolved config (config.toml is always written)."""

    imports: Names = Field(default=[], alias="import")
    """Python modules to import first; their decorators register families, data sources, optimizers and the like."""


class Debug(Section):
    """Repeatability and checks."""

    seed: NonNegative = 0
    """Seed of initial weights, data order and dropout."""

    deterministic: bool = False
    """Use deterministic kernels only: the same run twice is bit-equal. Slower on GPUs."""

    deterministic_warn_only: bool = False
    """With deterministic: warn about an operator without a deterministic form instead of stopping."""

    detect_anomaly: bool = False
    """Let autograd name the forward operator behind a NaN gradient. Very slow."""

    check_replicas_freq: NonNegative = 0
    """Steps between checks that replicas hold equal weights; 0 is off."""

    moe_force_load_balance: bool = False
    """Route tokens to experts in turn instead of by the router (for measuring speed)."""
