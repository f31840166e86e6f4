"""torch.compile by block: one graph serves all layers, and sharding's gathers stay outside of it."""

from __future__ import annotations

from titanlike.config import Config
from titanlike.models.decoder import Decoder


def apply_compile(model: Decoder, config: Config) -> None:
    """Compiles the blocks ("model") and the loss's chunks ("loss") as `[compile]` says; in place."""
    settings = config.compile
    if not settings.enable:
        return
    if "model" in settings.components:
        for block in model.layers.values():
            block.compile(backend=settings.backend, fullgraph=True)
    if "loss" in settings.components and model.part.last:
        model.output.compile_loss(settings.backend)
