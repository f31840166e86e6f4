"""How much memory this process has needed at its worst moment, from its start until now, and what for.

On an accelerator: the peak of what torch's allocator handed out (what a plan of the model predicts) and of what it
took from the device (what runs out). On a CPU torch counts nothing, so the figure is the process's peak resident set,
which also holds the interpreter, libraries and the mapped files that were touched.

The parts are counted from the tensors themselves and are exact on every device: weights, gradients and the optimizer's
state as this rank holds them, and what autograd keeps for the backward.
"""

from __future__ import annotations

import logging
import resource
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("titanlike")

GIB = 1 << 30
PARTS = ("weights", "gradients", "optimizer", "activations")


def peak_memory(device_type: str) -> dict[str, float | None]:
    """`memory_gib`, and on an accelerator `memory_reserved_gib`; None where it can't be told."""
    if device_type == "cpu":
        return {"memory_gib": _peak_resident_gib()}
    import torch

    if device_type == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    elif device_type == "xpu":
        peak, reserved = torch.xpu.max_memory_allocated(), torch.xpu.max_memory_reserved()
    else:
        return {"memory_gib": None}
    return {"memory_gib": peak / GIB, "memory_reserved_gib": reserved / GIB}


def _peak_resident_gib(status: Path = Path("/proc/self/status")) -> float:
    # getrusage's figure is inherited from the parent over fork and exec, so a small process started by a big one
    # would look big; the kernel's own high-water mark starts anew.
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB


def held_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes on this rank: of a sharded one its shard, of a quantised one all its pieces."""
    return sum(piece.numel() * piece.element_size() for piece in _pieces(tensor))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that one of another kind (sharded, quantised) consists of."""
    import torch

    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        if isinstance(piece := getattr(tensor, name), torch.Tensor):
            yield from _pieces(piece)


class _Held:
    """One piece of memory that autograd keeps; counted until the last who saved it lets go."""

    def __init__(self, count: SavedForBackward, memory: object, size: int):
        self.memory, self._count, self._size = memory, count, size
        count.now += size
        count.peak = max(count.peak, count.now)

    def __del__(self) -> None:
        self._count.now -= self._size


class SavedForBackward:
    """Counts the bytes that autograd keeps from a forward for its backward, each piece of memory once, `weights` not.

    What activation checkpointing recomputes in the backward is not among them; nor is what its selective form keeps by
    operator, in blocks that aren't compiled: torch holds that outside of autograd. One Python call a saved tensor.
    """

    def __init__(self, weights: Callable[[], Iterable[torch.Tensor]]):
        self._weights = weights
        self._weight_memory: set[int] = set()
        self._held: weakref.WeakValueDictionary[int, _Held] = weakref.WeakValueDictionary()
        self.now = self.peak = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        from torch.autograd.graph import saved_tensors_hooks

        with saved_tensors_hooks(self._pack, lambda saved: saved[0]):
            yield

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, list[_Held | None]]:
        return tensor, [self._hold(piece.untyped_storage()) for piece in _pieces(tensor)]

    def _hold(self, storage: torch.UntypedStorage) -> _Held | None:
        from torch.multiprocessing.reductions import StorageWeakRef

        memory = StorageWeakRef(storage)  # as long as it is here, no other storage has the same identity
        if (held := self._held.get(memory.cdata)) is None and not self._is_weight(memory.cdata):
            held = self._held[memory.cdata] = _Held(self, memory, storage.nbytes())
        return held

    def _is_weight(self, identity: int) -> bool:
        # Full sharding makes the gathered weights as the forward goes: what wasn't one may be one now.
        if identity not in self._weight_memory:
            pieces = (piece for weight in self._weights() for piece in _pieces(weight))
            self._weight_memory |= {piece.untyped_storage()._cdata for piece in pieces}
        return identity in self._weight_memory


class MemoryParts:
    """What this rank's memory holds: counted in the first step of a process, the same in all that follow."""

    def __init__(
        self,
        parameters: Callable[[], Iterable[torch.nn.Parameter]],
        state: Callable[[], Iterable],
        *,
        sees_activations: bool = True,
    ):
        self._parameters, self._state, self._sees_activations = parameters, state, sees_activations
        self._sizes: dict[str, int] = {}
        self._said = False

    @property
    def known(self) -> bool:
        return len(self._sizes) == len(PARTS)

    @contextmanager
    def forward_backward(self) -> Iterator[None]:
        """Around the forwards and backwards of a step: weights, activations, gradients."""
        if self.known:
            yield
            return
        saved = SavedForBackward(self._parameters)
        with saved.counting():
            yield
        gradients = (p.grad for p in self._parameters() if p.grad is not None)
        self._sizes = {
            "weights": sum(map(held_bytes, self._parameters())),
            "gradients": sum(map(held_bytes, gradients)),
            "activations": saved.peak,
        }

    def after_update(self) -> None:
        """After the update: the optimizer's state."""
        if not self.known:
            self._sizes["optimizer"] = sum(map(held_bytes, self._state()))

    def figures(self, peak: dict[str, float | None]) -> dict[str, float | None]:
        """`memory_<part>_gib` of each part, and with an allocator's `peak` what of that is none of them."""
        if not self.known:
            return {}
        gib = {part: self._sizes[part] / GIB for part in PARTS}
        figures: dict[str, float | None] = {f"memory_{part}_gib": size for part, size in gib.items()}
        if "memory_reserved_gib" in peak and (whole := peak["memory_gib"]) is not None:
            # Activations are at their most when the gradients aren't there yet.
            parts = gib["weights"] + gib["optimizer"] + max(gib["activations"], gib["gradients"])
            figures["memory_rest_gib"] = max(0.0, whole - parts) if self._sees_activations else None
        if not self._sees_activations:
            figures["memory_activations_gib"] = None
        return figures

    def say(self, figures: Mapping[str, float | None]) -> None:
        """Logs, once, what `figures` has of the parts."""
        parts = {name: figures.get(f"memory_{name}_gib") for name in (*PARTS, "rest")}
        said = [f"{name} {size:.3g}" for name, size in parts.items() if size is not None]
        if said and not self._said:
            self._said = True
            logger.info("memory in GiB, of each part the rank with most: %s", ", ".join(said))
