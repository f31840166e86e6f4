"""Updates by made-up gradients that are the same at every layout, to the bit; in the pool's processes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Shard as TensorShard

from titanlike.checkpoint.manager import CheckpointManager
from titanlike.config import Config
from titanlike.config.derive import batch_layout
from titanlike.models.initial import Shard, initial_values, normal, shard_of
from titanlike.optim.muon import orthogonalised
from titanlike.optim.optimizers import build_optimizer
from titanlike.optim.placed import like, local
from titanlike.optim.schedule import Schedule
from titanlike.parallel.build import build_model
from titanlike.parallel.mesh import build_mesh


def gradient(name: str, step: int, parameter: torch.Tensor) -> torch.Tensor:
    """A function of name, step and index alone, sharded as the parameter is."""
    here = shard_of(name, parameter)
    return normal(Shard(f"{name} at {step}", here.shape, here.start, here.local), 0.02, 0).to(parameter.dtype)


class Trained:
    """Model and optimizer at the layout of `config`."""

    def __init__(self, config: dict[str, Any], world: int):
        self.settings = Config.model_validate(config)
        self.model = build_model(self.settings, build_mesh(batch_layout(self.settings, world), "cpu"))
        self.model.materialise("cpu", initial_values(self.model, 0))
        self.optimizer = build_optimizer(self.model, self.settings)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            for name, parameter in self.model.named_parameters():
                parameter.grad = like(parameter, gradient(name, step, parameter))
            Schedule.of(self.settings).apply(self.optimizer, step)
            self.optimizer.begin(step)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def manager(self, folder: str) -> CheckpointManager:
        return CheckpointManager(self.settings.checkpoint, folder)

    def save(self, folder: str, step: int) -> None:
        manager = self.manager(folder)
        manager.save(step, {**dict(self.model.named_parameters()), **self.optimizer.tensors()}, {}, final=True)
        manager.close()

    def load(self, folder: str) -> None:
        manager = self.manager(folder)
        found = manager.find()
        assert found
        with self.optimizer.arriving(lambda: manager.shapes(found.path)) as state:
            manager.load(found, {**dict(self.model.named_parameters()), **state})
        manager.close()

    def whole(self) -> dict[str, torch.Tensor]:
        """Weights by name, state as checkpoints name it; numbers of quantised moments under the moment's own name."""
        found = {name: full(p) for name, p in self.model.named_parameters()}
        found |= {name: full(one) for name, one in self.optimizer.tensors().items()}
        for name, parameter, shard in self.optimizer.parameters():
            for key, value in self.optimizer.torch.state[shard].items():
                if hasattr(value, "codes"):
                    found[f"optimizer.{name}.{key}"] = full(like(parameter, value.dequantize()))
        return found


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def updated(
    rank: int,
    world: int,
    *,
    config: dict[str, Any],
    first: int = 1,
    last: int,
    load: str | None = None,
    save: str | None = None,
) -> dict[str, Any]:
    """Steps `first` … `last` after loading, if from anywhere; what then is, and under "loaded" what came."""
    run = Trained(config, world)
    found: dict[str, Any] = {}
    if load:
        run.load(load)
        found["loaded"] = run.whole()
    run.steps(first, last)
    if save:
        run.save(save, last)
    return {**found, "trained": run.whole()}


def updated_each(rank: int, world: int, *, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`updated` for each of `runs`: one start of the ranks serves them all."""
    return [updated(rank, world, **run) for run in runs]


def state_bytes(config: dict[str, Any]) -> float:
    """Bytes of optimizer state for each parameter, after two steps of one process."""
    run = Trained(config, 1)
    run.steps(1, 2)
    seen = 0
    for state in run.optimizer.torch.state.values():
        for value in state.values():
            parts = [getattr(value, name) for name in ("codes", "scale") if hasattr(value, name)] or [value]
            seen += sum(part.numel() * part.element_size() for part in parts)
    return seen / sum(p.numel() for p in run.model.parameters())


def bytes_of_state(rank: int, world: int, *, configs: list[dict[str, Any]]) -> list[float]:
    return [state_bytes(config) for config in configs]


def muon_updated(rank: int, world: int, *, config: dict[str, Any], last: int) -> dict[str, Any]:
    """`updated`, and under "owned" how many matrices this rank has orthogonalised."""
    owned = []

    def counting(matrix: torch.Tensor) -> torch.Tensor:
        owned.append(matrix.shape)
        return orthogonalised(matrix)

    with mock.patch("titanlike.optim.muon.orthogonalised", counting):
        return {**updated(rank, world, config=config, last=last), "owned": len(owned)}


def offloaded(rank: int, world: int) -> tuple[bool, str]:
    """Whether state is in the memory that it was given, and on which device, where the mesh is of another one."""
    parameter = distribute_tensor(torch.zeros(4, 6), init_device_mesh("cpu", (1,)), [TensorShard(0)])
    state = torch.ones(4, 6)
    with mock.patch.object(DeviceMesh, "device_type", "cuda"):
        sharded = like(parameter, state)
        return local(sharded).data_ptr() == state.data_ptr(), local(sharded).device.type
