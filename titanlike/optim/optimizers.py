"""Optimizers by name, and their parameter groups."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import nn

from titanlike.config import Config
from titanlike.config.checks import QUANTISED
from titanlike.config.registry import Registry
from titanlike.errors import ConfigError
from titanlike.models.norm import RMSNorm
from titanlike.optim.low_bit import LowBitAdamW
from titanlike.optim.muon import Muon
from titanlike.optim.narrow import Storage, Widened
from titanlike.optim.sharded import ShardedOptimizer

BuildOptimizer = Callable[[list[dict], Config], torch.optim.Optimizer]

optimizers: Registry[BuildOptimizer] = Registry("optimizer")


class Named(Protocol):
    """A model, or one rank's part of it, as the optimizer sees it."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def all_parameter_names(self) -> set[str]:
        """Names of the whole model's parameters."""
        ...


def is_compiled(config: Config) -> bool:
    """Whether the update is to be compiled: that of all parameters at once, or a quantising one's of each."""
    return config.compile.enable and "optimizer" in config.compile.components


def _implementation(config: Config) -> dict[str, bool]:
    name = config.optimizer.implementation
    if is_compiled(config):
        # The compiler fuses lists over parameters, a kernel that is fused already it could only call; and one by one,
        # torch divides by a rate of zero.
        name = "foreach"
    return {"fused": name == "fused", "foreach": name == "foreach"}


def _adam_options(config: Config) -> dict:
    c = config.optimizer
    # Capturable: the count of steps is a tensor beside the weights, as a learning rate that is a tensor needs it.
    options = {"lr": c.lr, "betas": (c.beta1, c.beta2), "eps": c.eps, "capturable": is_compiled(config)}
    return options | _implementation(config)


@optimizers.register("AdamW")
def _adamw(groups: list[dict], config: Config) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, **_adam_options(config))


@optimizers.register("Adam")
def _adam(groups: list[dict], config: Config) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, **_adam_options(config))


@optimizers.register("SGD")
def _sgd(groups: list[dict], config: Config) -> torch.optim.Optimizer:
    c = config.optimizer
    return torch.optim.SGD(groups, lr=c.lr, momentum=c.momentum or 0.0, **_implementation(config))


@optimizers.register("Muon")
def _muon(groups: list[dict], config: Config) -> torch.optim.Optimizer:
    storage = Storage(config)
    return Muon(groups, lambda rest: _stored(_adamw(rest, config), storage), config, storage)


@optimizers.register("AdamW8bit")
@optimizers.register("AdamW4bit")
@optimizers.register("AdamWFp8")
def _low_bit(groups: list[dict], config: Config) -> torch.optim.Optimizer:
    # Compiling costs a minute and spares an accelerator most of the update's time and memory.
    on_accelerator = any(shard.device.type != "cpu" for group in groups for shard in group["params"])
    return LowBitAdamW(groups, config, compiled=on_accelerator or is_compiled(config))


def _stored(optimizer: torch.optim.Optimizer, storage: Storage) -> torch.optim.Optimizer:
    return Widened(optimizer, storage) if storage.needed else optimizer


def parameter_kinds(model: Named) -> dict[str, str]:
    """Kind of each parameter by name: "norms", "embeddings", "biases" or "weights"."""
    kinds = {}
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            if isinstance(module, RMSNorm):
                kinds[full] = "norms"
            elif isinstance(module, nn.Embedding):
                kinds[full] = "embeddings"
            else:
                kinds[full] = "biases" if name.endswith("bias") else "weights"
    return kinds


def parameter_groups(model: Named, config: Config) -> list[dict]:
    """Groups of parameters with equal settings; each holds its names under "names" and its peak under "peak_lr".

    Raises ConfigError for a pattern of `optimizer.param_groups` that matches no parameter.
    """
    settings = config.optimizer
    kinds = parameter_kinds(model)
    _check_patterns([group.pattern for group in settings.param_groups], model.all_parameter_names())
    groups: dict[tuple[float, float], dict] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        lr, decay = settings.lr, 0.0 if kinds[name] in settings.no_decay else settings.weight_decay
        for group in settings.param_groups:
            if re.search(group.pattern, name):
                lr = group.lr if group.lr is not None else lr * (1.0 if group.lr_factor is None else group.lr_factor)
                decay = decay if group.weight_decay is None else group.weight_decay
                break
        entry = groups.setdefault((lr, decay), {"params": [], "names": [], "peak_lr": lr, "weight_decay": decay})
        entry["params"].append(parameter)
        entry["names"].append(name)
    return list(groups.values())


def _check_patterns(patterns: list[str], names: set[str]) -> None:
    """Every pattern must be the first to match some parameter, of this stage or of another."""
    missed = []
    for pattern in patterns:
        found = {name for name in names if re.search(pattern, name)}
        missed += [] if found else [pattern]
        names = names - found
    if missed:
        raise ConfigError(
            [f"optimizer.param_groups: pattern {p!r} matches no parameter (that an earlier one left)" for p in missed]
        )


def build_optimizer(model: Named, config: Config) -> ShardedOptimizer:
    """The optimizer of `[optimizer]` over the model's trainable parameters."""
    build = optimizers.get(config.optimizer.name, "optimizer.name")

    def complete(groups: list[dict]) -> torch.optim.Optimizer:
        optimizer = build(groups, config)
        return optimizer if hasattr(optimizer, "storage") else _stored(optimizer, Storage(config))

    backend = config.compile.backend if is_compiled(config) and config.optimizer.name not in QUANTISED else None
    return ShardedOptimizer(parameter_groups(model, config), complete, backend)
