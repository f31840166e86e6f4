"""One rank's part of the model, and the way that a microbatch takes through it.

The trainer hands over whole rows; what of them this rank computes, and which ranks know the loss, is decided here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titanlike.config import Config
from titanlike.data.batch import Batch
from titanlike.models.decoder import Decoder
from titanlike.models.dropout import token_keys
from titanlike.models.initial import Source, materialise, saved_buffers
from titanlike.objectives.base import Objective
from titanlike.optim.placed import like, local
from titanlike.parallel.context import cut
from titanlike.parallel.expert import Routing
from titanlike.parallel.fully_shard import let_go_of_sums, summing_groups
from titanlike.parallel.mesh import Mesh
from titanlike.parallel.pipeline import Pipeline
from titanlike.parallel.stages import StagePlan


class DistributedModel:
    """The parts that this rank holds: one, or several stages of a pipeline."""

    def __init__(self, parts: list[Decoder], mesh: Mesh, config: Config, plan: StagePlan | None = None):
        self.parts = parts
        self.spec = parts[0].spec
        self._mesh, self._balancer = mesh, config.parallelism.context_parallel_load_balancer
        self._seed = config.debug.seed
        self._offloads = config.training.enable_cpu_offload
        float8 = config.quantize.linear.float8
        self._takes_scales = (
            "quantize.linear.float8" in config.model.converters and float8.precompute_float8_dynamic_scale_for_fsdp
        )
        self._summing: list[Any] | None = None
        self.routing = Routing(parts, mesh)
        self._pipeline = Pipeline(parts, plan, mesh, config, cut=self._own_columns) if plan else None

    # ---- what it consists of

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each of this rank's parameters once, by its name in the whole model."""
        followers = self._pipeline.followers if self._pipeline else set()
        for part in self.parts:
            yield from ((name, p) for name, p in part.named_parameters() if p not in followers)

    def parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def tensors(self) -> dict[str, torch.Tensor]:
        """What checkpoints hold of it: parameters in their own memory, out of what converters wrap them in; buffers."""
        found = {name: like(parameter, local(parameter)) for name, parameter in self.named_parameters()}
        for part in self.parts:
            found.update(saved_buffers(part))
        return found

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        for part in self.parts:
            yield from part.named_modules()

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for part in self.parts:
            yield from part.named_buffers()

    def initial_stds(self) -> Iterator[tuple[str, float | None]]:
        """See `Decoder.initial_stds`."""
        for part in self.parts:
            yield from part.initial_stds()

    @property
    def copies(self) -> set[nn.Parameter]:
        """Parameters of this rank that another rank holds too, and counts."""
        return self._pipeline.copies if self._pipeline else set()

    def all_parameter_names(self) -> set[str]:
        """The names of the whole model's parameters, those of other stages too."""
        return self.parts[0].all_parameter_names()

    def materialise(self, device: torch.device | str, source: Source | None) -> None:
        """Gives the parts their memory and, if there is a source, their values; see `models.initial`."""
        rest = "cpu" if self._offloads else None
        for part in self.parts:
            materialise(part, device, source, parameters_on=rest)

    def train(self) -> None:
        for part in self.parts:
            part.train()

    def eval(self) -> None:
        for part in self.parts:
            part.eval()

    # ---- what it computes

    def forward_backward(self, batch: Batch, objective: Objective, weight: float, step: int = 0) -> torch.Tensor:
        """Adds the gradients of one microbatch's loss / weight up; `batch` is on the device, `step` tells masks apart.

        Returns the loss sum of this rank's tokens, float64, without gradient; zero where another rank knows it.
        """
        if self.spec.dropout:
            keys = token_keys(batch.sequences, batch.tokens.shape[1], self._seed, step)
            batch = dataclasses.replace(batch, dropout_keys=keys)
        if self._pipeline:
            return self._pipeline.forward_backward(batch, objective, weight)
        loss = self._loss(batch, objective)
        (loss / weight).backward()
        return loss.detach().double()

    @torch.no_grad()
    def loss_sum(self, batch: Batch, objective: Objective) -> torch.Tensor:
        """The loss sum of this rank's tokens, float64; zero where another rank knows it."""
        loss = self._pipeline.loss_sum(batch, objective) if self._pipeline else self._loss(batch, objective).double()
        self._give_gathered_weights_back()
        return loss

    def _give_gathered_weights_back(self) -> None:
        # What stays gathered between forward and backward would stay until a backward that isn't coming, and until then
        # take the place of the sharded weights, rounded to the compute type: a checkpoint would hold those.
        for _, module in self.named_modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _loss(self, batch: Batch, objective: Objective) -> torch.Tensor:
        # Whole rows of one document have the positions 0 … S-1: the model then slices its table instead of gathering.
        is_plain = batch.offsets is None and self._mesh.context is None
        batch = self._own_columns(batch)
        positions = None if is_plain else batch.positions
        (part,) = self.parts
        log_probs = part(
            batch.tokens,
            positions,
            batch.offsets,
            labels=batch.labels,
            reduction=objective.reduction,
            dropout_keys=batch.dropout_keys,
        )
        return objective.loss(log_probs, batch)

    def _own_columns(self, batch: Batch) -> Batch:
        """What this rank computes of whole rows."""
        if self._mesh.context is None:
            return batch
        return cut(batch, self._mesh.place.context, self._mesh.degrees.context, self._balancer)

    def finish_gradients(self) -> None:
        """Once all microbatches of a step are through: adds up what several stages know a part of."""
        if self._pipeline:
            self._pipeline.finish_gradients()

    def let_go_of_sums(self) -> None:
        """While the backward goes on: frees what is kept of gradients that have been summed over replicas, and used."""
        if self._mesh.replicas:
            if self._summing is None:
                self._summing = summing_groups(module for _, module in self.named_modules())
            let_go_of_sums(self._summing)

    def after_update(self) -> None:
        """Once the weights have changed, by an update or by loading."""
        self.routing.finish_step()
        if self._pipeline:
            self._pipeline.after_update()
        if self._takes_scales:
            from titanlike.converters.float8 import precompute_scales  # torchao takes seconds to import

            precompute_scales(self.parameters(), self._mesh.shards.get_group("shard"))
