"""A torch optimizer over what this rank holds of each parameter.

An update is elementwise, or says itself what else it needs: so it runs on plain local tensors. Torch's operators on
lists of sharded tensors would first plan, for seconds and for each mesh anew, how those may lie; and a library's
optimizer need not know of sharded tensors at all. Checkpoints see the state sharded, as the parameters are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, the same memory; without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """A tensor of this rank's elements as one that is sharded as the parameter is, in the same memory."""
    if not isinstance(parameter, DTensor):
        return shard
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class ShardedOptimizer:
    """`build` gets the groups with local tensors under "params", and the parameters themselves under "of"."""

    def __init__(self, groups: list[dict[str, Any]], build: Callable[[list[dict]], torch.optim.Optimizer]):
        self._groups = [{**group, "of": group["params"], "params": _shards(group["params"])} for group in groups]
        self.torch = build(self._groups)
        self._shard = {parameter: shard for _, parameter, shard in self.parameters()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.torch.param_groups

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Name, parameter, and the tensor that the torch optimizer knows it by."""
        for group in self.torch.param_groups:
            yield from zip(group["names"], group["of"], group["params"], strict=True)

    @torch.no_grad()
    def step(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Updates those of `parameters` (all of them by default) that have a gradient."""
        wanted = [p for p in (self._shard if parameters is None else parameters) if p.grad is not None]
        for parameter in wanted:
            shard = self._shard[parameter]
            # The memory of a sharded parameter may have been given anew since.
            shard.data, shard.grad = local(parameter), _local_gradient(parameter)
        self.torch.step()
        for parameter in wanted:
            self._shard[parameter].grad = None

    def zero_grad(self) -> None:
        for _, parameter, _ in self.parameters():
            parameter.grad = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state as `optimizer.<parameter>.<key>`; the tensors themselves, so that loading fills them.

        A fresh optimizer is given its state first, by a step with a learning rate of zero.
        """
        self._give_state()
        return {
            f"optimizer.{name}.{key}": like(parameter, value) if value.shape == shard.shape else value
            for name, parameter, shard in self.parameters()
            for key, value in self.torch.state[shard].items()
            if isinstance(value, torch.Tensor)
        }

    @torch.no_grad()
    def _give_state(self) -> None:
        if any(self.torch.state.values()):
            return
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = 0.0
        for _, parameter, _ in self.parameters():
            assert parameter.grad is None, "an optimizer is given its state before the first gradients"
            parameter.grad = torch.zeros_like(parameter)
        self.step()
        self.zero_grad()
        for state in self.torch.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


def _shards(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(local(parameter)) for parameter in parameters]


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None
    if isinstance(parameter, DTensor):
        assert isinstance(grad, DTensor) and grad.placements == parameter.placements, "a gradient that lies elsewhere"
    return local(grad)
