"""Weights and state that rest in fewer bits than the update is computed in.

Rounding to the nearest bfloat16 loses every update below a 256th of a weight. Rounding at random, up with the
probability of the share that is cut off, keeps them on average (Gupta et al. 2015, arXiv 1502.02551). The random bits
are a function of (seed, step, parameter, index in the whole parameter): replicas round alike, so does any layout, and
so does a resumed run.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from titanlike.config import Config
from titanlike.counter_random import BITS, key_of, random_bits
from titanlike.models.initial import global_index, shard_of

_CHUNK = 1 << 20  # elements; random bits are made in 64-bit integers
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Storage:
    """The type that state rests in, and how weights and state are rounded. `step` is set before each update."""

    def __init__(self, config: Config):
        chosen = config.optimizer
        self.state_dtype = DTYPES[chosen.state_dtype or config.training.dtype]
        self.needed = self.state_dtype != DTYPES[config.training.dtype] or chosen.stochastic_rounding
        self.step: int | None = None
        self._at_random, self._seed = chosen.stochastic_rounding, config.debug.seed

    def store(
        self, narrow: torch.Tensor, wide: torch.Tensor, name: str, key: str, of: torch.Tensor, first: int = 0
    ) -> None:
        """Rounds this rank's part of the parameter `of`, or of its state `key`, into `narrow`: rows from `first`."""
        if narrow.dtype == torch.bfloat16 and wide.dtype == torch.float32 and self._at_random:
            assert self.step is not None, "rounding at random is by the step"
            round_at_random(narrow, wide, of, key_of(self._seed, self.step, name, key), first)
        elif narrow.data_ptr() != wide.data_ptr():
            narrow.copy_(wide)

    def empty_state(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like, dtype=self.state_dtype)


@torch.no_grad()
def round_at_random(narrow: torch.Tensor, wide: torch.Tensor, of: torch.Tensor, key: int, begin: int = 0) -> None:
    """float32 `wide` to bfloat16 `narrow`, both this rank's part of the parameter `of`, or its rows from `begin` on."""
    if not wide.numel():
        return
    shard = shard_of("", of)
    rows = max(1, _CHUNK // max(1, wide[0].numel()))
    for first in range(0, len(wide), rows):
        part = wide[first : first + rows]
        bits = random_bits(global_index(shard, begin + first, part.shape, part.device), key) >> (BITS - 16)
        # What is added reaches the bits that stay with the probability of what is cut off, away from zero in both
        # signs. Not for what isn't finite: a NaN would become a number.
        up = (part.view(torch.int32) + bits.int()) & -0x10000
        narrow[first : first + rows] = torch.where(part.isfinite(), up.view(torch.float32), part)


class Widened(torch.optim.Optimizer):
    """An optimizer of single parameters, run in float32 over weights and state that rest in other types.

    One parameter at a time is made wide, so the memory of the wide copies is that of the largest. Tensors of the
    state that have the parameter's shape rest in the storage's type; quantised ones look after themselves.
    """

    def __init__(self, inner: torch.optim.Optimizer, storage: Storage):
        super().__init__(inner.param_groups, {})
        self.storage, self._inner = storage, inner
        self.state = inner.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for name, of, shard in zip(group["names"], group["of"], group["params"], strict=True):
                if shard.grad is not None:
                    self._update(group, name, of, shard)
        self._inner.param_groups, self._inner.state = [], defaultdict(dict)

    def _update(self, group: dict, name: str, of: torch.Tensor, shard: torch.Tensor) -> None:
        wide = nn.Parameter(shard.detach().float())
        wide.grad = shard.grad.float()
        state = self.state[shard]
        self._inner.param_groups = [{**group, "params": [wide]}]
        kept = {key: value.float() if self._rests(value, shard) else value for key, value in state.items()}
        self._inner.state = defaultdict(dict, {wide: kept} if kept else {})
        self._inner.step()
        self.storage.store(shard.data, wide.detach(), name, "", of)
        for key, value in self._inner.state[wide].items():
            if self._rests(value, shard):
                narrow = state[key] if key in state else self.storage.empty_state(value)
                self.storage.store(narrow, value, name, key, of)
                state[key] = narrow
            else:
                state[key] = value

    def _rests(self, value: object, shard: torch.Tensor) -> bool:
        """Whether it is state that the storage's type is for."""
        return type(value) is torch.Tensor and value.shape == shard.shape and value.is_floating_point()
