"""What the pool's ranks are asked to do for test_expert: experts on other ranks, for tokens that a test deals out."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from titanlike.models.moe import StackedExperts
from titanlike.models.spec import DecoderSpec, Experts
from titanlike.parallel.expert import DispatchedExperts, _distribute
from titanlike.parallel.swapped import swap

DIM, EXPERTS, K = 8, 6, 2
RULE = Experts(n_experts=EXPERTS, top_k=K, ffn_dim=12, normalised=False)
SPEC = DecoderSpec(dim=DIM, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=8, ffn_dim=16, vocab_size=16, experts=RULE)


def experts() -> StackedExperts:
    """All of them, with the same random values everywhere."""
    stacked = StackedExperts(SPEC, RULE)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for matrix in stacked.parameters():
            matrix.copy_(torch.randn(matrix.shape, generator=g))
    return stacked


def tokens(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, dim], weights [T, k], and the output's gradient [T, dim]."""
    g = torch.Generator().manual_seed(1)
    shapes = (number, DIM), (number, K), (number, DIM)
    return tuple(torch.randn(shape, generator=g) for shape in shapes)  # type: ignore[return-value]


def through(stacked: StackedExperts, x, weights, chosen, grad) -> dict[str, Any]:
    """The output, and the gradients of tokens, of weights, and of each matrix by name."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = stacked(x, weights, chosen)
    out.backward(grad)
    matrices = {name: _local(matrix.grad) for name, matrix in stacked.named_parameters()}
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad, "matrices": matrices}


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def dispatched(rank: int, world: int, *, chosen: list[list[list[int]]]) -> dict[str, Any]:
    """`through`, on a rank that holds its share of the experts and those tokens whose experts are chosen[rank]."""
    own = experts()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("expert",))
    _distribute(own, mesh)
    swap(own, DispatchedExperts)
    own.group = mesh.get_group()
    before = sum(len(one) for one in chosen[:rank])
    here = slice(before, before + len(chosen[rank]))
    x, weights, grad = (t[here] for t in tokens(sum(map(len, chosen))))
    return through(own, x, weights, torch.tensor(chosen[rank], dtype=torch.int64).view(-1, K), grad)
