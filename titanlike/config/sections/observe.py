"""[metrics] and [profiling]: how a run is seen."""

from __future__ import annotations

from titanlike.config.sections.base import NonNegative, Positive, Section


class Metrics(Section):
    """What is logged, how often, and where to. metrics.jsonl is always written."""

    log_freq: Positive = 10
    """Steps between log lines."""

    enable_tensorboard: bool = False
    """Write TensorBoard files."""

    save_tb_folder: str = "tensorboard"
    """Folder of the TensorBoard files, under dump_folder."""

    enable_wandb: bool = False
    """Log to Weights & Biases; project, name and mode come from its WANDB_* variables."""

    disable_color_printing: bool = False
    """Plain lines on a terminal too."""

    save_for_all_ranks: bool = False
    """Each rank writes TensorBoard or W&B instead of one."""

    measure_cpu_peak: bool = False
    """On a CPU, measure the rate of a large product at the start and report MFU against it."""


class Profiling(Section):
    """Traces of time and memory."""

    enable_profiling: bool = False
    """Write traces of torch's profiler."""

    save_traces_folder: str = "profiles"
    """Folder of the traces, under dump_folder."""

    profile_freq: Positive = 10
    """Steps of a cycle: wait, warm up, record."""

    profiler_active: Positive = 1
    """Recorded steps a cycle."""

    profiler_warmup: NonNegative = 3
    """Warm-up steps a cycle."""

    enable_memory_snapshot: bool = False
    """Write snapshots of the accelerator's memory, also when it runs out."""

    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the snapshots, under dump_folder."""
