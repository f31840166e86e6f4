"""The optimizer's state on its way into and out of checkpoints.

Stored is what is kept: a quantised moment as codes and scales, anything else as it is. At the same layout, and at any
other where blocks are as long, that loads bit for bit. Else the codes arrive first, with the scales of their whole
rows; they become numbers, and those are quantised anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from titanlike.errors import CheckpointError
from titanlike.models.initial import shard_of
from titanlike.optim.low_bit import SIGNED, Blocks, Format
from titanlike.optim.placed import like, local


@dataclass(frozen=True)
class State:
    """One tensor of a parameter's state; `blocks` of an optimizer that quantises."""

    name: str
    key: str
    value: torch.Tensor
    parameter: torch.Tensor
    blocks: Blocks | None

    def stored(self) -> dict[str, torch.Tensor]:
        """What a checkpoint has of it, by name; the tensors themselves."""
        if self.blocks and self.blocks.block and self.key in SIGNED:
            parts = self.blocks.parts(self.value)
            return {f"{self.name}.{part}": like(self.parameter, one, per) for part, (one, per) in parts.items()}
        if self.value.shape == local(self.parameter).shape:
            return {self.name: like(self.parameter, self.value)}
        return {self.name: self.value}


@dataclass(frozen=True)
class Arrival:
    """Tensors for a checkpoint to fill, and what then makes them this optimizer's state."""

    to_fill: dict[str, torch.Tensor]
    settle: Callable[[], None] = lambda: None

    @staticmethod
    def of(state: State, saved: Mapping[str, tuple[int, ...]]) -> Arrival:
        """`saved`: what the checkpoint has, name to shape."""
        stored = state.stored()
        if all(saved.get(name) == tuple(one.shape) for name, one in stored.items()):
            return Arrival(stored)
        if state.blocks and state.name in saved:
            return _from_numbers(state)
        if state.blocks and f"{state.name}.scale" in saved and f"{state.name}.codes" in saved:
            codes, scale = saved[f"{state.name}.codes"], saved[f"{state.name}.scale"]
            return _from_codes(state, state.blocks.format, codes[-1], scale[-1])
        return Arrival(stored)  # the loading says what is missing


def _from_numbers(state: State) -> Arrival:
    """float32 in the checkpoint, quantised here."""
    numbers = torch.empty(state.value.shape, dtype=torch.float32, device=state.value.device)
    return Arrival({state.name: like(state.parameter, numbers)}, lambda: _copy(state, numbers))


def _from_codes(state: State, format: Format, codes_in_row: int, blocks_in_row: int) -> Arrival:
    """Blocks of another length in the checkpoint, or quantised there alone."""
    *rows, columns = state.value.shape
    whole = state.parameter.shape[-1]
    packed, block = format.packed, whole // blocks_in_row
    first = shard_of("", state.parameter).start[-1]
    if codes_in_row * packed != whole:
        raise CheckpointError(f"{state.name}.codes: {codes_in_row} bytes a row; another optimizer's state")
    if columns % packed or first % packed:
        raise CheckpointError(f"{state.name}.codes: {packed} elements share a byte, and this layout parts them")
    device = state.value.device
    codes = torch.empty(*rows, columns // packed, dtype=torch.uint8, device=device)
    scale = torch.empty(*rows, blocks_in_row, device=device)

    def settle() -> None:
        block_of = (first + torch.arange(columns, device=device)) // block
        _copy(state, format.values(codes, SIGNED[state.key]) * scale[..., block_of])

    to_fill = {
        f"{state.name}.codes": like(state.parameter, codes, packed),
        f"{state.name}.scale": like(state.parameter, scale, block, whole_rows=True),
    }
    return Arrival(to_fill, settle)


@torch.no_grad()
def _copy(state: State, numbers: torch.Tensor) -> None:
    if numbers.numel():
        state.value.copy_(numbers)
