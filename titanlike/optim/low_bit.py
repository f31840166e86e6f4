"""AdamW whose moments rest in 8 bits, 4 bits or float8, with a scale for each block; formats and update are torchao's.

Blocks lie inside rows: sharding by rows cuts none, and codes and scales are tensors that shard as the parameter does.
A parameter's block is the largest that also divides what a tensor rank holds of a row. So what is quantised depends on
the whole parameter and on how its columns are split, not on how many ranks share its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from titanlike.config import Config
from titanlike.errors import ConfigError
from titanlike.optim.narrow import Storage

_FEWEST = 4096  # elements; what has fewer costs little in float32 (as torchao, and bitsandbytes before it)
_CHUNK = 1 << 16  # elements that are updated at once without a compiler
_SMALLEST = 32  # elements of a block; of smaller ones the scales weigh more than is saved
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


@dataclass(frozen=True)
class Format:
    """How torchao keeps a moment: `kind` is its tensor class, `largest` its block, `packed` the elements of a byte."""

    kind: Any
    largest: int
    packed: int = 1

    def zeros(
        self, shape: tuple[int, ...] | torch.Size, signed: bool, block: int, device: torch.device
    ) -> torch.Tensor:
        options: dict[str, Any] = {} if self._is_float8 else {"signed": signed}
        return self.kind.zeros(shape, block_size=block, device=device, dtype=torch.float32, **options)

    def of(self, whole: Any, codes: torch.Tensor, scale: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A part of a moment, from its flat codes and scales."""
        if self._is_float8:
            return self.kind(codes.view(shape), scale, dtype=whole.dtype)
        if self.packed == 1:
            return self.kind(codes.view(shape), scale, whole.qmap, whole.signed, dtype=whole.dtype)
        return self.kind(codes, scale, whole.qmap, whole.signed, shape, dtype=whole.dtype)

    @property
    def _is_float8(self) -> bool:
        return "qmap" not in self.kind.tensor_attrs

    def values(self, codes: torch.Tensor, signed: bool) -> torch.Tensor:
        """Codes (uint8 [..., columns / packed]) as the numbers that the scales multiply, float32 [..., columns]."""
        if self._is_float8:
            return codes.view(torch.float8_e4m3fn).float()
        if self.packed == 2:
            codes = torch.stack([codes >> 4, codes & 0b1111], dim=-1).flatten(-2)
        table: Any = self.zeros((_SMALLEST,), signed, _SMALLEST, codes.device)
        return table.qmap[codes.int()]


def format_named(name: str) -> Format:
    """The format of optimizer.name; ConfigError without torchao."""
    try:
        from torchao.optim.subclass_4bit import OptimState4bit
        from torchao.optim.subclass_8bit import OptimState8bit
        from torchao.optim.subclass_fp8 import OptimStateFp8
    except ImportError as error:
        raise ConfigError(f"optimizer.name = {name!r}: needs torchao: pip install 'titanlike[lowbit]'") from error
    formats = {
        "AdamW8bit": Format(OptimState8bit, 256),
        "AdamW4bit": Format(OptimState4bit, 128, packed=2),
        "AdamWFp8": Format(OptimStateFp8, 256),
    }
    return formats[name]


@dataclass(frozen=True)
class Blocks:
    """How one parameter's moments are kept: codes and scales as [..., columns / packed] and [..., columns / block].

    `block` is 0 where they stay float32. On a rank that holds no element a moment is an empty plain tensor.
    """

    format: Format
    block: int

    @staticmethod
    def of(parameter: torch.Tensor, format: Format) -> Blocks:
        """Norms, biases, what is small, and rows that no block divides stay float32."""
        if parameter.ndim < 2 or parameter.numel() < _FEWEST:
            return Blocks(format, 0)
        columns, block = parameter.shape[-1], format.largest
        held = _columns_held(parameter)
        while columns % block or held % block:
            block //= 2
        return Blocks(format, block if block >= _SMALLEST else 0)

    def zeros(self, shard: torch.Tensor, signed: bool) -> torch.Tensor:
        if not self.block or not shard.numel():
            return torch.zeros_like(shard, dtype=torch.float32)
        return self.format.zeros(shard.shape, signed, self.block, shard.device)

    def rows(self, moment: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Some rows of a moment, in its memory. Blocks never cross rows."""
        if not self.block:
            return moment[first:last]
        kept: Any = moment
        width = moment.shape[1:].numel()
        flat = kept.codes.view(-1)[first * width // self.format.packed : last * width // self.format.packed]
        scale = kept.scale[first * width // self.block : last * width // self.block]
        return self.format.of(kept, flat, scale, (last - first, *moment.shape[1:]))

    def parts(self, moment: torch.Tensor) -> dict[str, tuple[torch.Tensor, int]]:
        """What is stored of a moment, in its memory: by name, a tensor and how many elements one of its stands for."""
        *rows, columns = moment.shape
        codes, scale = (*rows, columns // self.format.packed), (*rows, columns // self.block)
        kept: Any = moment
        if moment.numel():
            tensors = kept.codes.view(torch.uint8).view(codes), kept.scale.view(scale)
        else:
            tensors = moment.new_empty(codes, dtype=torch.uint8), moment.new_empty(scale)
        return {"codes": (tensors[0], self.format.packed), "scale": (tensors[1], self.block)}


def _columns_held(parameter: torch.Tensor) -> int:
    """Columns of the first rank's shard; all ranks but the last have as many."""
    held = parameter.shape[-1]
    if isinstance(parameter, DTensor):
        for placement, ranks in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
            if isinstance(placement, Shard) and placement.dim == parameter.ndim - 1:
                held = -(-held // ranks)
    return held


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), computed in float32, over quantised moments.

    8 bits: Dettmers et al. 2022, arXiv 2110.02861; 4 bits: Li et al. 2023, arXiv 2309.01507. With `compiled` the update
    is compiled: one kernel a parameter instead of some thirty and their memory. Groups have the sharded parameters
    under "of" and their names under "names". Weights in bfloat16 are rounded at random where the config asks for it.
    """

    def __init__(self, groups: list[dict], config: Config, *, compiled: bool):
        c = config.optimizer
        super().__init__(groups, {"lr": c.lr, "betas": (c.beta1, c.beta2), "eps": c.eps, "weight_decay": 0.0})
        self.blocks: dict[torch.Tensor, Blocks] = {}
        format = format_named(c.name)
        for group in self.param_groups:
            for parameter, shard in zip(group["of"], group["params"], strict=True):
                blocks = self.blocks[shard] = Blocks.of(parameter, format)
                moments = {name: blocks.zeros(shard, signed) for name, signed in SIGNED.items()}
                self.state[shard] = {"step": torch.zeros(()), **moments}
        self._compiled, self.storage = compiled, Storage(config)
        self._update = _update(config.compile.backend if compiled else None)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            # A tensor: a number that changes with each step would be compiled in anew each time.
            rate = torch.tensor(group["lr"])
            for name, of, shard in zip(group["names"], group["of"], group["params"], strict=True):
                if shard.grad is not None:
                    self._step(shard, group, rate, name, of)

    def _step(self, shard: torch.Tensor, group: dict, rate: torch.Tensor, name: str, of: torch.Tensor) -> None:
        state = self.state[shard]
        state["step"] += 1
        if not shard.numel():
            return
        moments = [state[key] for key in SIGNED]
        # The update has some thirty intermediate results: a few rows at a time they stay in cache.
        count = len(shard) if self._compiled or shard.ndim < 2 else max(1, _CHUNK // shard[0].numel())
        for first in range(0, len(shard), count):
            last = min(first + count, len(shard))
            kept = shard.detach()[first:last]
            weight = kept.float() if self.storage.needed else kept
            parts = [self.blocks[shard].rows(moment, first, last) for moment in moments]
            self._update_rows(weight, shard.grad[first:last], parts, state["step"], group, rate)
            self.storage.store(kept, weight, name, "", of, first)

    def _update_rows(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        moments: list[torch.Tensor],
        step: torch.Tensor,
        group: dict,
        rate: torch.Tensor,
    ) -> None:
        self._update(
            weight,
            gradient,
            step,
            *moments,
            None,  # no maximum of the second moment
            rate,
            *group["betas"],
            group["weight_decay"],
            group["eps"],
            True,  # decoupled decay
            False,  # rounded by us, if at all
        )


def _update(backend: str | None) -> Callable[..., None]:
    """torchao's update of one parameter; its own optimizers would compile it everywhere, for a minute on a CPU."""
    from torchao.optim.adam import single_param_adam

    if backend is None:
        return single_param_adam
    compiled = torch.compile(single_param_adam, fullgraph=True, dynamic=False, backend=backend)

    def update(*arguments: Any) -> None:
        # As many graphs as there are shapes; the limit is meant for functions that never stop compiling.
        with torch._dynamo.utils.disable_cache_limit():
            compiled(*arguments)

    return update
