"""Keys of TorchTitan's files, of v0.2.2 and before, that have another name or home here.

Every layer is translated before layers are merged, so that an old name in one file and the new one in the next
override each other as they should.
"""

from __future__ import annotations

import os
from typing import Any

from titanlike.config.layers import MISSING, Layer, Path, dotted

# Old key -> the key that means the same. A table stands for all keys in it.
RENAMED = {
    "training.dataset": "data.dataset",
    "training.dataset_path": "data.path",
    "validation.dataset_path": "validation.path",
    "training.compile": "compile.enable",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.batch_size": "training.local_batch_size",
    "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.context_parallel_rotate_method": "parallelism.context_parallel_rotate_method",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": "parallelism.pipeline_parallel_schedule",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "experimental.custom_import": "job.import",
    "optimizer.early_step_in_backward": "optimizer.in_backward",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "model.tokenizer_path": "model.hf_assets_path",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.model_weights_only": "checkpoint.last_save_model_only",
    "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "memory_estimation.enabled": "memory_estimation.enable",
    "validation.enabled": "validation.enable",
    "job.print_args": "job.print_config",
    "float8": "quantize.linear.float8",
    "mx": "quantize.linear.mx",
}

# Keys that can't be honoured, with what to write instead. A value that asks for nothing is let pass.
REFUSED = {
    "job.custom_config_module": 'write job.import = ["your.module"]; a module registers names and adds no keys',
    "experimental.custom_args_module": 'write job.import = ["your.module"]',
    "parallelism.pipeline_parallel_split_points": "write parallelism.module_fqns_per_model_part, "
    "the list of module names of each stage",
    "optimizer.fused": 'write optimizer.implementation = "fused" or "foreach"',
    "metrics.rank_0_only": "write metrics.save_for_all_ranks, which says the opposite",
    "checkpoint.interval_type": "write checkpoint.interval, in steps",
    "checkpoint.create_seed_checkpoint_only": "write checkpoint.create_seed_checkpoint",
    "memory_estimation.enable": "leave it out and run `titanlike plan`",
}

# Tables whose keys all have other homes here; they may stand empty.
EMPTIED = ("experimental", "memory_estimation", "float8", "mx")

# Keys that never did anything for training.
DROPPED = ("job.use_for_integration_test", "memory_estimation.disable_fake_mode")

# Sections that only experiments of TorchTitan knew.
FOREIGN_SECTIONS = {
    "encoder": "the Flux experiment of TorchTitan",
    "inference": "the Flux experiment of TorchTitan",
    "hf_transformers": "the transformers backend of TorchTitan; here write model.hf_assets_path",
}

_TORCHTITAN_TOKENIZER = "tests/assets/tokenizer"
_CONVERTERS = {"float8": "quantize.linear.float8", "mx": "quantize.linear.mx"}
_ATTENTION_FLAVORS = {"_flex_attn": "flex", "_varlen_attn": "varlen", "_flex": "flex", "_varlen": "varlen"}


def canonical(path: Path) -> Path:
    """The path under its present name."""
    for old, new in RENAMED.items():
        parts = tuple(old.split("."))
        if path[: len(parts)] == parts:
            return (*new.split("."), *path[len(parts) :])
    return path


def translate(layer: Layer) -> list[str]:
    """Move old keys and values of a layer to their present form, in place. Returns the problems."""
    problems = []
    for key in DROPPED:
        layer.pop(tuple(key.split(".")))
    for old, new in RENAMED.items():
        problems += _rename(layer, tuple(old.split(".")), tuple(new.split(".")))
    problems += _refuse(layer)
    for section in EMPTIED:
        if layer.get((section,)) == {}:
            layer.pop((section,))
    _values(layer)
    return problems


def _refuse(layer: Layer) -> list[str]:
    problems = []
    for key, instead in REFUSED.items():
        path = tuple(key.split("."))
        value = layer.get(path)
        if value is MISSING:
            continue
        origin = layer.origin(path)
        layer.pop(path)
        if value not in ("", False, None, []):
            problems.append(f"{origin}: {key} = {value!r}: not supported here; {instead}")
    return problems


def _rename(layer: Layer, old: Path, new: Path) -> list[str]:
    value = layer.get(old)
    if value is MISSING:
        return []
    if isinstance(value, dict):
        inner = [(*old, key) for key in value]
        return [p for path in inner for p in _rename(layer, path, (*new, path[-1]))]
    there = layer.get(new)
    origin = layer.origin(old)
    layer.pop(old)
    if there is not MISSING and there != value:
        return [
            f"{origin}: {dotted(old)} = {value!r}: is an old name of {dotted(new)}, "
            f"which {layer.origin(new)} sets to {there!r}; leave one of them"
        ]
    layer.put(new, value, origin)
    return []


def _values(layer: Layer) -> None:
    """Values that mean something else by another name."""
    for path in (("model", "converters"), ("quantize", "linear", "float8", "filter_fqns")):
        if isinstance(value := layer.get(path), str):  # a comma-separated string in v0.1
            _set(layer, path, [part.strip() for part in value.split(",") if part.strip()])
    if isinstance(value := layer.get(("model", "converters")), list):
        _set(layer, ("model", "converters"), [_CONVERTERS.get(v, v) if isinstance(v, str) else v for v in value])
    value = layer.get(("model", "hf_assets_path"))
    if isinstance(value, str) and os.path.normpath(value) == _TORCHTITAN_TOKENIZER and not os.path.isdir(value):
        _set(layer, ("model", "hf_assets_path"), "debug")
    if isinstance(value := layer.get(("data", "path")), str) and not value:
        layer.pop(("data", "path"))
    if isinstance(value := layer.get(("job", "import")), str) and not value:
        layer.pop(("job", "import"))
    _split_flavor(layer)


def _split_flavor(layer: Layer) -> None:
    """A flavor that TorchTitan named after its attention kernel is a flavor and a kernel here."""
    flavor = layer.get(("model", "flavor"))
    if not isinstance(flavor, str):
        return
    for ending, kernel in _ATTENTION_FLAVORS.items():
        if flavor.endswith(ending):
            _set(layer, ("model", "flavor"), flavor.removesuffix(ending))
            if layer.get(("model", "attention")) is MISSING:
                layer.put(("model", "attention"), kernel, layer.origin(("model", "flavor")))
            return


def _set(layer: Layer, path: Path, value: Any) -> None:
    """Replace a value where it stands."""
    layer.put(path, value, layer.origin(path))
