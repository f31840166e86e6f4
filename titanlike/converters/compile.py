"""torch.compile by block: one graph serves all layers, and sharding's gathers stay outside of it."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from titanlike.config import Config
from titanlike.errors import ConfigError
from titanlike.models.decoder import Decoder

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_kernels(config: Config) -> None:
    """Has inductor keep what it compiles where a restart finds it; before anything is compiled.

    Entries are named by the hash of what they were made from and are renamed into place, so ranks may share the folder.
    Raises ConfigError where it can't be written.
    """
    settings = config.compile
    if not settings.enable or (settings.cache_folder is None and _users_own()):
        return
    folder = Path(settings.cache_folder or Path(config.job.dump_folder) / "compiled").expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"compile.cache_folder = {str(folder)!r}: can't be written to ({error.strerror})") from error
    os.environ[CACHE_VARIABLE] = str(folder)


def _users_own() -> bool:
    """Whether the environment names a cache: torch itself writes its default there when it first looks."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return os.environ.get(CACHE_VARIABLE, default_cache_dir()) != default_cache_dir()


def apply_compile(model: Decoder, config: Config) -> None:
    """Compiles the blocks ("model") and the loss's chunks ("loss") as `[compile]` says; in place.

    The optimizer's update ("optimizer") is compiled where the optimizer is built.
    """
    settings = config.compile
    if not settings.enable:
        return
    if "model" in settings.components:
        model.register_forward_pre_hook(_any_number_of_documents, with_kwargs=True)
        for block in model.layers.values():
            # How many tokens go to an expert, and to another rank, is known on the host only: routing stays outside.
            block.compile(backend=settings.backend, fullgraph=block.moe is None)
    if "loss" in settings.components and model.part.last:
        model.output.compile_loss(settings.backend)


def _any_number_of_documents(model: nn.Module, args: tuple, kwargs: dict) -> None:
    """Forward pre-hook: packed rows hold another number of documents each time, which must not mean another graph."""
    offsets = kwargs.get("offsets", args[2] if len(args) > 2 else None)
    if offsets is not None:
        from torch._dynamo import maybe_mark_dynamic  # takes a second to import

        maybe_mark_dynamic(offsets, 0)
