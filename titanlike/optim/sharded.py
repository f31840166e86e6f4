"""A torch optimizer over what this rank holds of each parameter.

An update is elementwise, or says itself what else it needs: so it runs on plain local tensors. Torch's operators on
lists of sharded tensors would first plan, for seconds and for each mesh anew, how those may lie; and a library's
optimizer need not know of sharded tensors at all. Checkpoints see the state sharded, as the parameters are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from titanlike.optim import arriving
from titanlike.optim.low_bit import Blocks
from titanlike.optim.placed import local


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Gives a parameter group its learning rate; a compiled update reads it from a tensor that stays the same."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _compiled(optimizer: torch.optim.Optimizer, backend: str) -> Callable[[], None]:
    """The optimizer's update as one graph. A rate that is a number would be a constant of it: another graph a step."""
    for group in optimizer.param_groups:
        device = group["params"][0].device
        group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
    # Without the wrappers that torch puts around every step (profiler, hooks, gradient mode): they break the graph.
    update = torch.compile(inspect.unwrap(type(optimizer).step), backend=backend)
    return lambda: update(optimizer)


class ShardedOptimizer:
    """`build` gets the groups with local tensors under "params", and the parameters themselves under "of".

    `compile_backend`: of torch.compile for the update, if any.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        build: Callable[[list[dict]], torch.optim.Optimizer],
        compile_backend: str | None = None,
    ):
        self._groups = [{**group, "of": group["params"], "params": _shards(group["params"])} for group in groups]
        self.torch = build(self._groups)
        self._shard = {parameter: shard for _, parameter, shard in self.parameters()}
        self._update = _compiled(self.torch, compile_backend) if compile_backend else self.torch.step

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.torch.param_groups

    def parameters(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Name, parameter, and the tensor that the torch optimizer knows it by."""
        for group in self.torch.param_groups:
            yield from zip(group["names"], group["of"], group["params"], strict=True)

    def groups(self) -> list[dist.ProcessGroup]:
        """Process groups that the update's own collectives run on."""
        return getattr(self.torch, "groups", [])

    def begin(self, step: int) -> None:
        """Says which step the next update is of: what is random in it is a function of that."""
        if storage := getattr(self.torch, "storage", None):
            storage.step = step

    @torch.no_grad()
    def step(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Updates those of `parameters` (all of them by default) that have a gradient."""
        wanted = [p for p in (self._shard if parameters is None else parameters) if p.grad is not None]
        for parameter in wanted:
            shard = self._shard[parameter]
            # The memory of a sharded parameter may have been given anew since.
            shard.data, shard.grad = local(parameter), _local_gradient(parameter)
        self._update()
        for parameter in wanted:
            self._shard[parameter].grad = None

    def zero_grad(self) -> None:
        for _, parameter, _ in self.parameters():
            parameter.grad = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state as `optimizer.<parameter>.<key>`; the tensors themselves, so that loading fills them.

        A quantised moment is two tensors, `….codes` and `….scale`. A fresh optimizer is given its state first, by a
        step with a learning rate of zero.
        """
        return {name: tensor for one in self._state() for name, tensor in one.stored().items()}

    @contextmanager
    def arriving(self, saved: Callable[[], Mapping[str, tuple[int, ...]]]) -> Iterator[dict[str, torch.Tensor]]:
        """The tensors to fill from a checkpoint that has those of `saved` (name to shape), as with `tensors`.

        State that was saved with other blocks, or quantised here and not there, arrives in tensors of its own, which
        are turned into this optimizer's state when the context ends.
        """
        # Only what quantises wants to know what there is.
        shapes = saved() if hasattr(self.torch, "blocks") else {}
        state = [arriving.Arrival.of(one, shapes) for one in self._state()]
        yield {name: tensor for one in state for name, tensor in one.to_fill.items()}
        for one in state:
            one.settle()

    def _state(self) -> list[arriving.State]:
        self._give_state()
        blocks: dict[torch.Tensor, Blocks] = getattr(self.torch, "blocks", {})
        return [
            arriving.State(f"optimizer.{name}.{key}", key, value, parameter, blocks.get(shard))
            for name, parameter, shard in self.parameters()
            for key, value in self.torch.state[shard].items()
            if isinstance(value, torch.Tensor)
        ]

    @torch.no_grad()
    def _give_state(self) -> None:
        if any(self.torch.state.values()):
            return
        rates = [float(group["lr"]) for group in self.param_groups]
        for group in self.param_groups:
            set_rate(group, 0.0)
        for _, parameter, _ in self.parameters():
            assert parameter.grad is None, "an optimizer is given its state before the first gradients"
            parameter.grad = torch.zeros_like(parameter)
        self.begin(0)
        self.step()
        self.zero_grad()
        for state in self.torch.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        for group, rate in zip(self.param_groups, rates, strict=True):
            set_rate(group, rate)


def _shards(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(local(parameter)) for parameter in parameters]


def _local_gradient(parameter: nn.Parameter) -> torch.Tensor:
    grad = parameter.grad
    assert grad is not None
    if isinstance(parameter, DTensor):
        assert isinstance(grad, DTensor) and grad.placements == parameter.placements, "a gradient that lies elsewhere"
    return local(grad)
