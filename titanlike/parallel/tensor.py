"""Tensor and sequence parallelism (Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198).

Modules declare styles (`tensor_styles`: a child's name, or "" for themselves → style). This file gives each style its
meaning: how the weight lies on the tensor axis, and a forward that computes with this rank's part of it.

    colwise     outputs are split: weight rows over ranks. Its input is whole.
    kv_colwise  colwise over key/value heads; fewer heads than ranks are replicated, each rank computes its own only
    rowwise     inputs are split: weight columns over ranks. Its outputs are summed over ranks.
    replicated  the weight is whole on every rank (norms)
    shared      the same on all tokens, for what only this rank's outputs need: its gradient is a part of the sum
    vocabulary  rows of the embedding or of the head are split
    tokens      no weight; what it is told of each token is cut as the residual stream is

Weights are DTensors, so that full sharding, checkpoints and initial values know what a rank holds; activations are
plain local tensors. With sequence parallelism, between layers a rank holds ceil(S / ranks) tokens of each row, the last
ones padded with zeros: entering a layer gathers them, leaving it adds up and scatters.

Experts are placed before, by `parallel.expert`; here is said which tokens a mixture of them sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding

from titanlike.models.decoder import Decoder
from titanlike.models.linear import Linear
from titanlike.models.logits_chunk import VocabularyShard
from titanlike.models.moe import MoE
from titanlike.parallel import collectives
from titanlike.parallel.swapped import swap


@dataclass(frozen=True)
class TensorAxis:
    """This rank on the tensor axis. `sequence`: between layers, tokens are split over it."""

    mesh: DeviceMesh
    group: str
    size: int
    rank: int
    sequence: bool

    def enter(self, x: torch.Tensor, length: int | None = None, *, summed: bool = True) -> torch.Tensor:
        """From the residual stream to what a split layer reads: all tokens, the first `length` of them.

        `summed`: each rank's gradient is a part of the sum; else all ranks have the whole of it.
        """
        if self.sequence:
            whole = _GatherTokens.apply(x, self, summed)
            return whole if length is None or length == whole.shape[1] else whole[:, :length]
        return _SumGradients.apply(x, self) if summed else x

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x [ranks, *x.shape]; no gradients."""
        return collectives.stack(x, self.size, self.group)

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of x [B, S, …], which all ranks have; no gradients."""
        part = -(-x.shape[1] // self.size)
        x = F.pad(x, (*(0, 0) * (x.ndim - 2), 0, part * self.size - x.shape[1]))
        return x[:, self.rank * part : (self.rank + 1) * part]

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """From a split layer's partial outputs back to the residual stream."""
        if not self.sequence:
            return _Sum.apply(x, self)
        if missing := -x.shape[1] % self.size:
            x = F.pad(x, (0, 0, 0, missing))
        return _ScatterTokens.apply(x, self)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, summed):
        ctx.axis, ctx.summed = axis, summed
        return collectives.gather(x, 1, axis.size, axis.group)

    @staticmethod
    def backward(ctx, grad):
        axis = ctx.axis
        if ctx.summed:
            return collectives.reduce_scatter(grad, 1, axis.size, axis.group), None, None
        return grad.unflatten(1, (axis.size, -1))[:, axis.rank], None, None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return collectives.reduce_scatter(x, 1, axis.size, axis.group)

    @staticmethod
    def backward(ctx, grad):
        return collectives.gather(grad, 1, ctx.axis.size, ctx.axis.group), None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return collectives.all_reduce(grad, ctx.axis.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):
        return collectives.all_reduce(x, axis.group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


# ---- modules that compute with their part of the weight ------------------------------------------------------------


class _OnAxis:
    axis: TensorAxis


class Gathering(_OnAxis):
    """A layer of column-wise and row-wise matrices: its input is gathered once for all of them."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # A layer that mixes tokens knows how many there are from their rotary angles; others may see the padding.
        length = args[0][0].shape[-2] if args else None
        return super().forward(self.axis.enter(x, length), *args, **kwargs)  # type: ignore[misc]


class Colwise(_OnAxis, Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, local(self.weight), None if self.bias is None else local(self.bias))


class SharedColwise(_OnAxis, Linear):
    """Column-wise where several ranks share one unit of outputs: the weight is whole, a rank uses its unit's rows."""

    units: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Each rank has the gradient of its own use only.
        weight, bias = local(self.weight, Partial()), None if self.bias is None else local(self.bias, Partial())
        rows = weight.shape[0] // self.units
        first = self.axis.rank * self.units // self.axis.size * rows
        own = slice(first, first + rows)
        return self.product(x, weight[own], None if bias is None else bias[own])


class Rowwise(_OnAxis, Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.axis.leave(self.product(x, local(self.weight), None))
        return out if self.bias is None else out + local(self.bias, Partial() if self.axis.sequence else None)


class Replicated(_OnAxis):
    """A norm: the whole weight, on this rank's tokens."""

    weight: nn.Parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = local(self.weight, Partial() if self.axis.sequence else None)
        return super().forward(x, weight)  # type: ignore[misc]


class Shared(_OnAxis):
    """A norm or a linear layer that every rank computes whole, to feed its own part of what follows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = local(self.weight, Partial())
        if isinstance(self, Linear):
            return self.product(x, weight, None if self.bias is None else local(self.bias, Partial()))
        return super().forward(x, weight)  # type: ignore[misc]


class GatheringMoE(_OnAxis, MoE):
    """A mixture of experts each of which is split: all ranks route the same tokens, and add their parts up."""

    def routed(self, x: torch.Tensor, length: int) -> torch.Tensor:
        return self.axis.leave(super().routed(self.axis.enter(x, length), length))


class SplitMoE(_OnAxis, MoE):
    """One that routes the tokens which this rank holds between layers; the last ranks' may be padding."""

    def routed(self, x: torch.Tensor, length: int) -> torch.Tensor:
        own = min(max(length - self.axis.rank * x.shape[1], 0), x.shape[1])
        return super().routed(x, own)


class OfTokens(_OnAxis):
    """Reads the residual stream, and something about every token of whole rows [B, S]."""

    def forward(self, x: torch.Tensor, of_tokens: torch.Tensor | None, *args: Any) -> torch.Tensor:
        if of_tokens is not None and self.axis.sequence:
            of_tokens = self.axis.cut(of_tokens)
        return super().forward(x, of_tokens, *args)  # type: ignore[misc]


class VocabularyEmbedding(_OnAxis, nn.Embedding):
    """Looks up the tokens of this rank's rows; the others add zeros."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = local(self.weight)
        own = tokens - first_row(self.weight, self.axis)
        outside = (own < 0) | (own >= weight.shape[0])
        found = F.embedding(own.masked_fill(outside, 0), weight)
        return self.axis.leave(found.masked_fill(outside[..., None], 0.0))


class VocabularyHead(_OnAxis):
    """Log-probabilities from this rank's rows of the head; or, with `whole`, from a head gathered for the call."""

    whole: bool

    def log_probs(self, hidden, weight, labels, reduction, with_entropy=False):
        hidden = self.axis.enter(hidden, labels.shape[1], summed=not self.whole)
        if self.whole:
            everywhere = weight.redistribute(placements=[Replicate()]).to_local()
            return super().log_probs(hidden, everywhere, labels, reduction, with_entropy)  # type: ignore[misc]
        shard = VocabularyShard(first_row(weight, self.axis), self.axis.stack)
        return super().log_probs(hidden, local(weight), labels, reduction, with_entropy, shard)  # type: ignore[misc]


def local(weight: torch.Tensor, gradient: Placement | None = None) -> torch.Tensor:
    """This rank's part of a weight; `gradient` is the placement of its gradient where that isn't the weight's."""
    assert isinstance(weight, DTensor), "a weight without a place on the tensor axis"
    return weight.to_local(grad_placements=None if gradient is None else [gradient])


def first_row(weight: torch.Tensor, axis: TensorAxis) -> int:
    """Where this rank's rows begin: as torch.chunk cuts them, the last ones may be fewer."""
    return axis.rank * -(-weight.shape[0] // axis.size)


# ---- application ---------------------------------------------------------------------------------------------------


def apply_tensor(
    model: Decoder, mesh: DeviceMesh, *, sequence: bool, whole_head: bool, overlap: bool, split_routing: bool = False
) -> None:
    """Spreads the model over the 1-D tensor mesh by the styles its modules declare; in place, on the meta device too.

    `split_routing`: mixtures of experts route the tokens that each rank holds between layers. `whole_head`: gather the
    head for the loss instead of computing with the vocabulary split. `overlap`: have compiled blocks exchange tokens in
    pieces, while the pieces that are there are multiplied.
    """
    axis = TensorAxis(mesh, mesh.get_group().group_name, mesh.size(), mesh.get_local_rank(), sequence)
    for module in list(model.modules()):
        styles = getattr(module, "tensor_styles", {})
        for name, style in styles.items():
            target = module if name == "" else getattr(module, name, None)  # a part lacks some
            if target is not None:
                _STYLES[style](target, axis, module)
        if "colwise" in styles.values():
            _swap(module, Gathering, axis)
        if isinstance(module, MoE):
            _swap(module, SplitMoE if split_routing else GatheringMoE, axis)
    for module in model.modules():
        if isinstance(module, VocabularyHead):
            module.whole = whole_head
    if overlap:
        _overlap_in_compiled_blocks(axis.group)
    # For debug.detect_anomaly, which looks for NaN in the gradients of weights: torch has no rule of its own.
    register_sharding(torch.ops.aten._is_any_true.default)(lambda x: [([Replicate()], [Replicate()])])
    left = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    assert not left, f"no module declares a tensor style for {left}"


def _overlap_in_compiled_blocks(group: str) -> None:
    """Torch rewrites gather → product and product → scatter over symmetric memory, on GPUs with direct links."""
    from torch._inductor import config as inductor
    from torch.distributed import _symmetric_memory

    inductor._micro_pipeline_tp = True
    _symmetric_memory.enable_symm_mem_for_group(group)


def _colwise(linear: Linear, axis: TensorAxis, owner: nn.Module) -> None:
    _place(linear, axis, Shard(0))
    _swap(linear, Colwise, axis)


def _kv_colwise(linear: Linear, axis: TensorAxis, owner: nn.Module) -> None:
    heads = linear.out_features // owner.head_dim
    if heads % axis.size == 0:
        _colwise(linear, axis, owner)
        return
    assert axis.size % heads == 0, f"{heads} key/value heads over {axis.size} ranks"
    _place(linear, axis, Replicate())
    _swap(linear, SharedColwise, axis)
    linear.units = heads


def _rowwise(linear: Linear, axis: TensorAxis, owner: nn.Module) -> None:
    _place(linear, axis, Shard(1), bias=Replicate())
    _swap(linear, Rowwise, axis)


def _replicated(module: nn.Module, axis: TensorAxis, owner: nn.Module) -> None:
    _place(module, axis, Replicate())
    _swap(module, Replicated, axis)


def _shared(module: nn.Module, axis: TensorAxis, owner: nn.Module) -> None:
    _place(module, axis, Replicate())
    _swap(module, Shared, axis)


def _tokens(module: nn.Module, axis: TensorAxis, owner: nn.Module) -> None:
    _swap(module, OfTokens, axis)


def _vocabulary(module: nn.Module, axis: TensorAxis, owner: nn.Module) -> None:
    _place(module, axis, Shard(0))
    _swap(module, VocabularyEmbedding if isinstance(module, nn.Embedding) else VocabularyHead, axis)


_STYLES = {
    "colwise": _colwise,
    "kv_colwise": _kv_colwise,
    "rowwise": _rowwise,
    "replicated": _replicated,
    "shared": _shared,
    "vocabulary": _vocabulary,
    "tokens": _tokens,
}


def local_features(model: nn.Module, size: int) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of what a rank multiplies with in each linear layer, by name; the model is not split yet.

    Layers that are never in low precision are left out. Where a split leaves ranks unequal parts, the largest.
    """
    found = {}
    for prefix, owner in model.named_modules():
        styles = getattr(owner, "tensor_styles", {})
        for name, module in owner.named_children():
            if isinstance(module, Linear) and not module.exact:
                style = styles.get(name)
                inputs = -(-module.in_features // size) if style == "rowwise" else module.in_features
                outputs = -(-module.out_features // size) if style == "colwise" else module.out_features
                if style == "kv_colwise":
                    outputs //= min(size, outputs // owner.head_dim)
                found[f"{prefix}.{name}" if prefix else name] = (inputs, outputs)
    return found


def _place(module: nn.Module, axis: TensorAxis, weight: Placement, bias: Placement | None = None) -> None:
    """Makes the module's own parameters DTensors."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        placement = (bias or weight) if name == "bias" else weight
        # No rank sends values: they come later, or are the same everywhere.
        spread = distribute_tensor(parameter.detach(), axis.mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(spread, requires_grad=parameter.requires_grad))


def _swap(module: nn.Module, style: type, axis: TensorAxis) -> None:
    swap(module, style)
    module.axis = axis  # type: ignore[assignment]
