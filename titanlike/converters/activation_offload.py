"""Activations wait for the backward in host memory instead of on the device.

    forward     compute ──a──────b──────c────────→          what autograd saves is copied out beside the computing
                copies      └─a→host └─b→host …
    backward    copies      …─c→device ─b→device            and copied back in ahead of its use, last saved first
                compute            c←──────b←─────

A tensor is freed on the device when its copy has left; with full checkpointing that leaves a block's input alone.
The copies run on a stream of their own, in pinned memory, so that computing doesn't wait while the link keeps up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from titanlike.config import Config
from titanlike.models.decoder import Decoder

# Elements below which a copy costs more than it frees.
SMALLEST = 4096
# Saved tensors that are fetched ahead of the one that is asked for: about those of one block.
AHEAD = 16


class Copies(Protocol):
    """Moves tensors between device and host beside the computing."""

    def out(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """A copy on the host, and what makes the computing stream wait until it is whole."""
        ...

    def back(self, host: torch.Tensor, left: Callable[[], None]) -> tuple[torch.Tensor, Callable[[], None]]:
        """A copy on the device of what `out` gave, and what makes the computing stream wait for it."""
        ...


class StreamCopies:
    """Copies on two streams of an accelerator, one for each direction of the link."""

    def __init__(self, device: torch.device):
        self._device = device
        self._leaving, self._arriving = torch.Stream(device), torch.Stream(device)

    def out(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._leaving.wait_stream(self._computing)
        with self._leaving:
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._leaving)  # its memory is not given to others before it has left
        done = self._leaving.record_event()
        return host, lambda: self._arriving.wait_event(done)

    def back(self, host: torch.Tensor, left: Callable[[], None]) -> tuple[torch.Tensor, Callable[[], None]]:
        left()
        # Made on the computing stream, whose allocator it comes from; that memory may still be in use there.
        tensor = torch.empty_like(host, device=self._device)
        self._arriving.wait_stream(self._computing)
        with self._arriving:
            tensor.copy_(host, non_blocking=True)
        tensor.record_stream(self._arriving)
        done = self._arriving.record_event()
        return tensor, lambda: self._computing.wait_event(done)

    @property
    def _computing(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)


class _Away:
    """A saved tensor that is on the host; held by autograd until the backward of all that saved it is done."""

    def __init__(
        self,
        memory: StorageWeakRef,
        host: torch.Tensor,
        left: Callable[[], None],
        before: weakref.ref[_Away] | None,
    ):
        self.memory = memory  # as long as this is here, no other storage has the same identity
        self.host, self.left = host, left
        self.before = before  # the one that was saved before it, which the backward wants after it
        self.fetched: tuple[torch.Tensor, Callable[[], None]] | None = None


class ActivationOffload:
    """Hooks for what autograd saves between `enter` and `leave`."""

    def __init__(self, copies: Copies, kept: Callable[[torch.Tensor], bool], *, ahead: int = AHEAD):
        self._copies, self._kept, self._ahead = copies, kept, ahead
        self._last: weakref.ref[_Away] | None = None
        self._known: weakref.WeakValueDictionary[tuple, _Away] = weakref.WeakValueDictionary()
        self._open: list[saved_tensors_hooks] = []

    def enter(self, *_) -> None:
        hooks = saved_tensors_hooks(self._pack, self._unpack)
        hooks.__enter__()
        self._open.append(hooks)

    def leave(self, *_) -> None:
        self._open.pop().__exit__(None, None, None)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Away:
        if tensor.numel() < SMALLEST or self._kept(tensor):
            return tensor
        # Several layers save one input; it travels once.
        memory = StorageWeakRef(tensor.untyped_storage())
        key = (memory.cdata, tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if (away := self._known.get(key)) is None:
            away = self._known[key] = _Away(memory, *self._copies.out(tensor.detach()), self._last)
            self._last = weakref.ref(away)
        return away

    def _unpack(self, saved: torch.Tensor | _Away) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        self._fetch(saved)
        following = saved
        for _ in range(self._ahead):
            if following.before is None or (before := following.before()) is None:
                break
            self._fetch(following := before)
        assert saved.fetched is not None
        tensor, wait = saved.fetched
        wait()
        return tensor

    def _fetch(self, away: _Away) -> None:
        if away.fetched is None:
            away.fetched = self._copies.back(away.host, away.left)


def _stays(tensor: torch.Tensor) -> bool:
    """Weights have their own place (gathered ones are given back anyway), and what is on the host is there. Tensors of
    another kind, that consist of several, aren't copied so simply.
    """
    is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
    return is_weight or hasattr(tensor, "__tensor_flatten__") or tensor.device.type == "cpu"


def apply_activation_offload(model: Decoder, config: Config) -> None:
    """Sends what the blocks save to the host, as `training.activation_offload` says; in place."""
    if config.training.activation_offload:
        device = torch.accelerator.current_accelerator()
        assert device is not None, "refused when the run starts"
        offload_blocks(model, ActivationOffload(StreamCopies(device), _stays))


def offload_blocks(model: Decoder, offload: ActivationOffload) -> None:
    """Puts the hooks around the model's forward, and takes the head out, whose backward begins at once."""
    model.register_forward_pre_hook(offload.enter)
    model.register_forward_hook(offload.leave, always_call=True)
    if not model.part.last:
        return
    forward = model.output.forward

    def kept_on_the_device(*args, **kwargs):
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return forward(*args, **kwargs)

    model.output.forward = kept_on_the_device
