"""Which key was meant."""

from __future__ import annotations

import difflib

from titanlike.config.keys import all_keys, section_at
from titanlike.config.layers import Path, dotted
from titanlike.config.schema import Config
from titanlike.config.sections.base import fields_by_key

_ENOUGH = 0.6

# What other trainers call things.
SYNONYMS = {
    "learning_rate": "optimizer.lr",
    "max_lr": "optimizer.lr",
    "min_lr": "lr_scheduler.min_lr_factor",
    "betas": "optimizer.beta1",
    "wd": "optimizer.weight_decay",
    "batch_size": "training.local_batch_size",
    "micro_batch_size": "training.local_batch_size",
    "per_device_train_batch_size": "training.local_batch_size",
    "train_batch_size": "training.global_batch_size",
    "gradient_accumulation_steps": "training.global_batch_size",
    "accumulate_grad_batches": "training.global_batch_size",
    "max_steps": "training.steps",
    "train_iters": "training.steps",
    "num_train_epochs": "data.epochs",
    "num_epochs": "data.epochs",
    "max_seq_len": "training.seq_len",
    "block_size": "training.seq_len",
    "sequence_length": "training.seq_len",
    "grad_clip": "training.max_norm",
    "clip_grad_norm": "training.max_norm",
    "max_grad_norm": "training.max_norm",
    "warmup": "lr_scheduler.warmup_steps",
    "num_warmup_steps": "lr_scheduler.warmup_steps",
    "output_dir": "job.dump_folder",
    "tokenizer": "model.hf_assets_path",
    "tokenizer_path": "model.hf_assets_path",
    "gradient_checkpointing": "activation_checkpoint.mode",
    "save_steps": "checkpoint.interval",
    "save_total_limit": "checkpoint.keep_latest_k",
    "logging_steps": "metrics.log_freq",
    "eval_steps": "validation.freq",
    "bf16": "training.mixed_precision_param",
    "torch_compile": "compile.enable",
    "tp": "parallelism.tensor_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "dp": "parallelism.data_parallel_shard_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
}


def nearest_key(path: Path) -> str | None:
    """The key that is most like an unknown one: of the same section, then of any, then by other trainers' words."""
    name = str(path[-1])
    home = section_at(path[:-1])
    candidates: list[tuple[float, str]] = []
    if home is not None:
        prefix = dotted(path[:-1])
        candidates += [(_alike(name, key), f"{prefix}.{key}" if prefix else key) for key in fields_by_key(home)]
    if len(path) > 1 or "." in name:
        # A wrongly nested key has the right name in the wrong place: a little less likely than a slip at home.
        candidates += [(_alike(name, key.rsplit(".", 1)[-1]) - 0.05, key) for key in all_keys()]
        candidates += [(_alike(name, word) - 0.02, key) for word, key in SYNONYMS.items()]
    # Of equals, the one least deep: optimizer.lr before optimizer.param_groups.lr.
    score, key = max(candidates, key=lambda c: (c[0], -c[1].count(".")), default=(0.0, ""))
    return key if score >= _ENOUGH else None


def nearest_section(name: str) -> str | None:
    """The section that is most like an unknown one."""
    near = difflib.get_close_matches(name, list(fields_by_key(Config)), n=1)
    return near[0] if near else None


def nearest_word(word: str, words: list[str]) -> str | None:
    """The word of a list that is most like another, letters' case aside."""
    lower = {w.lower(): w for w in words}
    near = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.5)
    return lower[near[0]] if near else None


def _alike(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()
