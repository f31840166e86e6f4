"""Keeping what is being written apart from what is being trained.

A save in the background must not see the optimizer's next update. So every tensor's local shard is copied into a buffer
of our own, and the buffers are kept from save to save: allocating memory anew costs several times the copying. (DCP's
own `async_save` hands CPU tensors on without copying them, or copies into fresh memory each time.)

On the CPU, and with `async` on an accelerator, the copy is done when `stage` returns. With `async_with_pinned_mem` on
an accelerator it runs beside the next forward and backward, on a stream of its own into pinned memory; `before_update`
makes the training stream wait for it, and `wait` the thread that writes. The price in host memory is one copy of what
this rank saves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor


class Staging:
    """Kept buffers in host memory, one for each tensor's local shard."""

    def __init__(self, *, pinned: bool):
        self._pinned = pinned
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream: torch.Stream | None = None
        self._copied: torch.Event | None = None

    @torch.no_grad()
    def stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy each tensor's local shard; returns the buffers by name. They are overwritten by the next call.

        With pinned staging on an accelerator the buffers hold the values only after `wait`, and `tensors` must be kept
        alive until then.
        """
        shards = {name: local_shard(tensor) for name, tensor in tensors.items()}
        self._buffers = {name: self._buffer(name, shard) for name, shard in shards.items()}
        device = next((shard.device for shard in shards.values() if shard.device.type != "cpu"), None)
        if self._pinned and device is not None:
            self._copy_beside_training(shards, device)
        else:
            for name, shard in shards.items():
                self._buffers[name].copy_(shard)
        return dict(self._buffers)

    def before_update(self) -> None:
        """Tensors may change once this returns (on an accelerator: work queued after it may change them)."""
        if self._copied is not None:
            torch.accelerator.current_stream().wait_event(self._copied)

    def wait(self) -> None:
        """Block until the buffers hold the values."""
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Give the memory back."""
        self.wait()
        self._buffers, self._copied = {}, None

    def _buffer(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        kept = self._buffers.get(name)
        if kept is not None and kept.shape == shard.shape and kept.dtype == shard.dtype:
            return kept
        pin = self._pinned and shard.device.type != "cpu"
        return torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=pin)

    def _copy_beside_training(self, shards: Mapping[str, torch.Tensor], device: torch.device) -> None:
        stream = self._stream or torch.Stream(device)
        self._stream = stream
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            for name, shard in shards.items():
                self._buffers[name].copy_(shard, non_blocking=True)
            self._copied = stream.record_event()


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `tensor`, sharing its memory, outside autograd."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
