"""Muon: the matrices of blocks are updated by their momentum, orthogonalised; everything else by AdamW.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon); the scale of the update that lets AdamW's learning rate
and decay serve both: Liu et al. 2025, arXiv 2502.16982. As torch.optim.Muon computes it. Momentum and weights are
updated where they lie; only the direction, in bfloat16, is put together and taken apart again (`optim.whole`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from titanlike.config import Config
from titanlike.optim.narrow import Storage
from titanlike.optim.whole import WholeMatrices

MOMENTUM = 0.95
_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # steepest at zero: singular values end within 0.7 … 1.2 after five steps
_TINY = 1e-7


class Muon(torch.optim.Optimizer):
    """`rest` makes the optimizer of what isn't a matrix of a block. Groups have names, and parameters under "of"."""

    def __init__(
        self,
        groups: list[dict],
        rest: Callable[[list[dict]], torch.optim.Optimizer],
        config: Config,
        storage: Storage,
    ):
        matrices, others = split(groups)
        chosen = config.optimizer
        self._rest = rest(others) if others else None
        super().__init__([*matrices, *others], {"lr": chosen.lr, "weight_decay": 0.0})
        if self._rest:
            self.state = self._rest.state
        self.storage = storage
        self._momentum = MOMENTUM if chosen.momentum is None else chosen.momentum
        self._scale = _SCALES[chosen.muon_scale]
        self._matrices = self.param_groups[: len(matrices)]
        parameters = [of for group in matrices for of in group["of"]]
        self._deal = WholeMatrices(parameters, orthogonalising_cost)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return [self._deal.group] if self._deal.group else []

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        directions = [
            self._direction(name, of, shard)
            for group in self._matrices
            for name, of, shard in zip(group["names"], group["of"], group["params"], strict=True)
        ]
        updates = iter(self._deal.map(directions, orthogonalised) if directions else [])
        for group in self._matrices:
            for name, of, shard in zip(group["names"], group["of"], group["params"], strict=True):
                wide = shard.data.float()
                wide.mul_(1 - group["lr"] * group["weight_decay"])
                wide.add_(next(updates), alpha=-group["lr"] * self._scale(*of.shape))
                self.storage.store(shard.data, wide, name, "", of)
        if self._rest:
            self._rest.step()

    def _direction(self, name: str, of: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """Takes the gradient into the momentum; Nesterov's look ahead of it, bfloat16."""
        assert shard.grad is not None, f"{name}: a matrix without a gradient"
        grad = shard.grad.float()
        state = self.state[shard]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = self.storage.empty_state(shard).zero_()
        kept = state["momentum_buffer"]
        momentum = kept.float().lerp_(grad, 1 - self._momentum)
        self.storage.store(kept, momentum, name, "momentum_buffer", of)
        return grad.lerp(momentum, self._momentum).bfloat16()


def split(groups: list[dict]) -> tuple[list[dict], list[dict]]:
    """Each group's matrices of blocks, and what else it has."""

    def part(group: dict, wanted: bool) -> dict:
        rows = zip(group["names"], group["of"], group["params"], strict=True)
        kept = [row for row in rows if is_matrix(row[0], row[1]) == wanted]
        names, of, params = (list(column) for column in zip(*kept, strict=True)) if kept else ([], [], [])
        return {**group, "names": names, "of": of, "params": params}

    both = ([part(group, wanted) for group in groups] for wanted in (True, False))
    matrices, others = ([group for group in parts if group["params"]] for parts in both)
    return matrices, others


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """A weight of a block. Rows of the embedding and of the head are words, each with an update of its own."""
    return parameter.ndim == 2 and name.startswith("layers.")


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Its singular values brought near 1, bfloat16: X ← aX + (bA + cA²)X with A = XXᵀ, five times."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=_TINY)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def orthogonalising_cost(shape: torch.Size) -> float:
    """Multiply-adds of one iteration."""
    short, long = sorted(shape)
    return float(short * short * (2 * long + short))


_SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
