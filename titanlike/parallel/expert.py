"""Expert parallelism: experts spread over ranks, tokens sent to them and back (Lepikhin et al. 2020, arXiv 2006.16668).

The ranks of an expert group are neighbours, taken from the tensor, context and shard axes in this order. Each holds
some whole experts, and tokens of its own:

    sort by expert → tell each rank how many come → send rows (all to all, uneven) → compute → send back

Where experts are split over the tensor axis too (`expert_tensor_parallel_degree`), or over nothing else, all tensor
ranks see the same tokens and each computes a part of every expert. Else tensor ranks keep the tokens that they hold
between layers, and send those.

What is on the side of the routing (counts, biases, balance) is added up over ranks here, once a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from titanlike.models.decoder import Decoder
from titanlike.models.moe import MoE, StackedExperts
from titanlike.parallel.mesh import Mesh
from titanlike.parallel.swapped import swap

# Dimension of each matrix that a split over the tensor axis cuts: the experts' hidden width.
_WIDTH = {"w1": 1, "w2": 2, "w3": 1}


class _Exchange(torch.autograd.Function):
    """Rows to other ranks, and their gradients back; how many go to and come from each rank is given."""

    @staticmethod
    def forward(ctx, x, to, source, group):
        ctx.args = source, to, group
        return _exchange(x, to, source, group)

    @staticmethod
    def backward(ctx, grad):
        return _exchange(grad, *ctx.args), None, None, None


def _exchange(x: torch.Tensor, to: list[int], source: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    received = x.new_empty((sum(source), *x.shape[1:]))
    dist.all_to_all_single(received, x.contiguous(), source, to, group=group)
    return received


class SpreadExperts(StackedExperts):
    """Experts of which this rank holds a part: some of them, or some of each one's width."""

    def weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return tuple(w.to_local() if isinstance(w, DTensor) else w for w in super().weights())  # type: ignore[return-value]


class DispatchedExperts(SpreadExperts):
    """Experts that are on other ranks of `group` too, equally many on each."""

    group: dist.ProcessGroup

    def exchange(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        size = dist.get_world_size(self.group)
        sent = counts.view(size, -1)
        received = torch.empty_like(sent)  # [source, own expert]
        dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        to, source = sent.sum(1).tolist(), received.sum(1).tolist()
        rows = _Exchange.apply(x, to, source, self.group)
        # They come by source; experts want them by expert.
        expert = torch.arange(received.shape[1], device=x.device).repeat(size)
        order = expert.repeat_interleave(received.flatten()).argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        out = self.compute(rows[order], received.sum(0))[back]
        return _Exchange.apply(out, source, to, self.group)


def apply_experts(model: Decoder, mesh: Mesh) -> None:
    """Spreads the experts over the mesh and tells each layer's balance whom to ask; before `apply_tensor`."""
    for block in model.layers.values():
        if block.moe is None:
            continue
        balance = block.moe.balance
        balance.share = 1.0 / mesh.layout.global_batch
        # Whoever holds other tokens of the same rows.
        groups = [mesh.context] if mesh.context is not None else []
        if mesh.tensor is not None and mesh.keeps_tokens_split:
            groups.append(mesh.tensor.get_group())
        elif mesh.tensor is not None:
            balance.copies = mesh.tensor.size()
        balance.across = _Sum(groups)
        _place(block.moe.experts, mesh)


def _place(experts: StackedExperts, mesh: Mesh) -> None:
    if mesh.experts is None:
        if mesh.tensor is not None:
            _distribute(experts, mesh.tensor, split_width=0)
            swap(experts, SpreadExperts)
        return
    if mesh.experts_split:
        _distribute(experts, mesh.experts["expert", "tensor"], split_width=1)
    else:
        _distribute(experts, mesh.experts["expert"])
    swap(experts, DispatchedExperts)
    experts.group = mesh.experts.get_group("expert")


def _distribute(experts: StackedExperts, mesh: DeviceMesh, split_width: int | None = None) -> None:
    """Makes the matrices DTensors; `split_width` is the mesh's dimension that cuts experts' width, if one does."""
    for name, dim in _WIDTH.items():
        placements = [Shard(0)] * mesh.ndim
        if split_width is not None:
            placements[split_width] = Shard(dim)
        parameter = getattr(experts, name)
        # No rank sends values: they come later, or are the same everywhere.
        spread = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(spread, requires_grad=parameter.requires_grad))


class _Sum:
    """Adds a tensor up over several groups, one after the other."""

    def __init__(self, groups: list[dist.ProcessGroup]):
        self._groups = groups

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._groups:
            return tensor
        total = tensor.clone()
        for group in self._groups:
            dist.all_reduce(total, group=group)
        return total


class Routing:
    """What a rank's layers know of their routing since the last update, added up over the ranks once a step."""

    def __init__(self, parts: Iterable[Decoder], mesh: Mesh):
        self.layers = [module for part in parts for module in part.modules() if isinstance(module, MoE)]
        self._mesh = mesh

    @torch.no_grad()
    def finish_step(self) -> None:
        """Adds up how often each expert was chosen, and moves the biases; a collective of the pipeline stage."""
        if not self.layers or self.layers[0].balance.counts is None:
            return
        counts = torch.stack([layer.balance.counts for layer in self.layers])  # type: ignore[misc]
        losses = torch.stack([layer.balance.loss for layer in self.layers])  # type: ignore[misc]
        both = torch.cat([counts, losses[:, None]], 1)
        dist.all_reduce(both, group=self._mesh.stage)
        self._counts, self._loss = both[:, :-1], both[:, -1].sum()
        for layer, one in zip(self.layers, self._counts, strict=True):
            move_bias(layer, one)
            layer.balance.reset()

    def figures(self) -> dict[str, float]:
        """For the metrics, over all layers of the model; a collective of the world.

        expert_load_max and _min: the most and the least that an expert of any layer was chosen, over the layer's mean;
        balance_loss: the sum of the layers' losses on the side, a row.
        """
        most = torch.full((2,), float("-inf"), dtype=torch.float64)
        loss = torch.zeros((), dtype=torch.float64)
        if self.layers:
            load = self._counts / self._counts.mean(1, keepdim=True)
            most = torch.stack([load.max(), -load.min()]).double().cpu()
            if dist.get_rank(self._mesh.stage) == 0:
                loss = self._loss.double().cpu()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(loss)
        return {"expert_load_max": most[0].item(), "expert_load_min": -most[1].item(), "balance_loss": loss.item()}


def move_bias(layer: MoE, counts: torch.Tensor) -> None:
    """Raises the bias of experts that were chosen less than the mean, lowers that of the others (arXiv 2408.15664)."""
    if layer.expert_bias is not None:
        layer.expert_bias += layer.rule.bias_rate * (counts.mean() - counts).sign()
