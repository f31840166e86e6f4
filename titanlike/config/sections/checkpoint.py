"""[checkpoint]: what is kept, where and how often; what a run starts from."""

# ruff: noqa: RUF012 (pydantic copies a mutable default)

from __future__ import annotations

from typing import Literal

from titanlike.config.sections.base import NonNegative, Positive, Section


class Checkpoint(Section):
    """Saving and loading."""

    enable: bool = True
    """Save checkpoints and resume from them."""

    folder: str = "checkpoints"
    """Folder of the checkpoints, under dump_folder; step-N inside."""

    interval: Positive = 500
    """Steps between saves. The end of the run is always saved."""

    keep_latest_k: NonNegative = 10
    """Newest checkpoints to keep; 0 keeps all."""

    keep_every_n: NonNegative = 0
    """Steps between checkpoints that are kept for ever; 0 keeps none so."""

    keep_best_metric: str | None = None
    """Metric whose best checkpoint is kept as well, e.g. validation_loss."""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write while training goes on; with_pinned_mem also keeps page-locked buffers for the copy."""

    load_step: int = -1
    """Step to resume from; -1 takes the newest complete one. A step that isn't there is an error."""

    load_only: bool = False
    """Never save."""

    exclude_from_loading: list[Literal["model", "optimizer", "lr_scheduler", "dataloader", "train_state"]] = []
    """Parts of a checkpoint that are not loaded."""

    initial_load_path: str | None = None
    """Checkpoint to start from when there is nothing to resume: a step-N folder of ours or of TorchTitan."""

    initial_load_model_only: bool = True
    """Take the weights alone from initial_load_path."""

    initial_load_in_hf: bool = False
    """Start from weights in Hub format, at initial_load_path or model.hf_assets_path."""

    initial_load_in_hf_quantized: bool = False
    """Those weights are quantised in blocks (DeepSeek's fp8)."""

    last_save_model_only: bool = False
    """At the end also write the weights alone under exports/. The last checkpoint stays resumable either way."""

    last_save_in_hf: bool = False
    """At the end also write the model in Hub format under exports/."""

    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of the weights under exports/."""

    enable_first_step_checkpoint: bool = False
    """Save after the first step too, to see early that saving works."""

    create_seed_checkpoint: bool = False
    """Save the initial weights as step 0 and stop. Not needed: initial weights don't depend on the layout."""

    grace_seconds: Positive = 120
    """Time that a stop signal leaves for the last save, seconds."""

    fast_folder: str | None = None
    """Local folder of more frequent checkpoints (/dev/shm, NVMe); none is off."""

    fast_interval: Positive = 10
    """Steps between saves to fast_folder."""

    fast_peer_copy: bool = False
    """Keep a copy of each fast checkpoint on another node."""

    verify_checksums: bool = True
    """Check every file against the manifest while loading."""

    on_save_error: Literal["stop", "continue"] = "stop"
    """What a save that fails (a full disk) does to the run."""

    enable_ft_dataloader_checkpoints: bool = True
    """Accepted for TorchTitan's files (torchft); no effect."""
