"""When a step's update happens: after the backward, by the whole gradient, or parameter by parameter inside it.

In the backward a parameter's gradient lives only until its update, so that gradients take the memory of one layer
instead of the model's. The price: clipping can't know the whole gradient's norm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from titanlike.config import Config
from titanlike.optim.clip import clip_gradients, clipping_factor, counted_square
from titanlike.optim.placed import local
from titanlike.optim.sharded import ShardedOptimizer


class Updated(Protocol):
    """A model, or one rank's part of it, as its update sees it."""

    def parameters(self) -> Iterable[nn.Parameter]: ...

    @property
    def copies(self) -> Collection[nn.Parameter]:
        """Parameters of this rank that another rank counts."""
        ...

    def let_go_of_sums(self) -> None:
        """Frees what is kept of gradients that have been used, while others are still to come."""
        ...


class Update(Protocol):
    """Around a step's backward; `ready` waits until the weights may change."""

    def before_backward(self, step: int) -> None: ...

    def after_backward(self) -> torch.Tensor:
        """Once this returns the step's update is done and no gradient is left. The gradient's norm before clipping."""
        ...

    def state(self) -> dict[str, Any]:
        """What a resumed run needs to know of the steps before it, for JSON."""
        ...

    def load(self, state: dict[str, Any]) -> None: ...


class AfterBackward:
    """The ordinary one: clip by the global norm, then update everything."""

    def __init__(self, model: Updated, optimizer: ShardedOptimizer, max_norm: float, ready: Callable[[], None]):
        self._model, self._optimizer, self._max_norm, self._ready = model, optimizer, max_norm, ready

    def before_backward(self, step: int) -> None:
        self._optimizer.begin(step)

    def after_backward(self) -> torch.Tensor:
        norm = clip_gradients(self._model.parameters(), self._max_norm, copies=self._model.copies)
        self._ready()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass


class InBackward:
    """Each parameter is updated as soon as its gradient is complete, summed over ranks.

    `clip` "parameter" clips each by its own norm, "previous" all by the global norm of the step before (the first step
    of a run is not clipped); "" doesn't clip.
    """

    def __init__(
        self, model: Updated, optimizer: ShardedOptimizer, max_norm: float, clip: str, ready: Callable[[], None]
    ):
        self._model, self._optimizer, self._max_norm, self._clip, self._ready = model, optimizer, max_norm, clip, ready
        self._squares: list[torch.Tensor] = []
        self._previous: torch.Tensor | None = None
        for _, parameter, _ in optimizer.parameters():
            parameter.register_post_accumulate_grad_hook(self._update)

    def before_backward(self, step: int) -> None:
        self._ready()
        self._optimizer.begin(step)
        self._squares = []

    @torch.no_grad()
    def _update(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._model.let_go_of_sums()
        square = counted_square(parameter.grad)
        self._squares.append(square)
        norm = self._previous
        if self._clip == "parameter":
            norm = _over_world([square]).sqrt()
        if self._clip and norm is not None:
            local(parameter.grad).mul_(clipping_factor(norm, self._max_norm).to(parameter.grad.dtype))
        self._optimizer.step([parameter])
        parameter.grad = None

    def after_backward(self) -> torch.Tensor:
        norm = _over_world(self._squares).sqrt()
        if self._clip == "previous":
            self._previous = norm
        return norm.float()

    def state(self) -> dict[str, Any]:
        return {} if self._previous is None else {"previous_norm": self._previous.item()}

    def load(self, state: dict[str, Any]) -> None:
        if "previous_norm" in state and self._clip == "previous":
            self._previous = torch.tensor(state["previous_norm"], dtype=torch.float64)


def _over_world(squares: list[torch.Tensor]) -> torch.Tensor:
    total = torch.stack(squares).sum()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def build_update(config: Config, model: Updated, optimizer: ShardedOptimizer, ready: Callable[[], None]) -> Update:
    """What `[optimizer] in_backward` asks for. `ready` waits until the weights may change."""
    max_norm = config.training.max_norm
    if not config.optimizer.in_backward:
        return AfterBackward(model, optimizer, max_norm, ready)
    clip = (config.optimizer.in_backward_clip or "") if max_norm else ""
    return InBackward(model, optimizer, max_norm, clip, ready)
