"""What the pool's ranks are asked to do for test_context: attention over rows that are spread over them.

The yardstick is torch's scaled-dot-product attention in float64 over whole rows, with a dense mask.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from titanlike.config import Config
from titanlike.converters.activation_checkpoint import apply_activation_checkpointing
from titanlike.converters.compile import apply_compile
from titanlike.data.batch import IGNORE, Batch
from titanlike.models import kernels
from titanlike.models.decoder import Decoder
from titanlike.models.initial import initial_values, materialise
from titanlike.models.spec import DecoderSpec
from titanlike.parallel import context, context_ring
from titanlike.parallel.context import apply_context, cut
from titanlike.parallel.context_pieces import Deal

B, S, D = 2, 48, 8
H = 8
# Lengths of the documents of both rows. Chunks are 6, 12 or 24 long.
DOCUMENTS = {
    "rows": None,
    "packed": [31, 17, 5, 43],
    "tiny": [1, 1, 3, 1, 2, 1, 7, 1, 1, 5, 1, 13, 1, 1, 9] + [1] * 6 + [11, 24, 6, 1],
    "inside chunks": [6, 6, 12, 24, 24, 12, 6, 6],
}


def offsets_of(name: str) -> torch.Tensor | None:
    lengths = DOCUMENTS[name]
    return None if lengths is None else torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def dense(q, k, v, offsets, scale):
    """Whole rows, float64, one process."""
    bounds = torch.arange(0, B * S + 1, S) if offsets is None else offsets
    documents = torch.bucketize(torch.arange(B * S), bounds[1:], right=True).view(B, S)
    mask = (documents[:, :, None] == documents[:, None]) & torch.ones(S, S, dtype=torch.bool).tril()
    heads_first = (t.double().transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask[:, None], scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def inputs(kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and the output's gradient, over whole rows."""
    g = torch.Generator().manual_seed(kv_heads)
    return [torch.randn(B, S, n, D, generator=g).to(dtype) for n in (H, kv_heads, kv_heads, H)]


def expected(whole: list[torch.Tensor], offsets) -> list[torch.Tensor]:
    """The output and the gradients of q, k and v."""
    *qkv, grad = (t.double() for t in whole)
    qkv = [t.requires_grad_() for t in qkv]
    out = dense(*qkv, offsets, D**-0.5)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


def attend_over(method: str, balancer: str | None):
    """The operator that `apply_context` puts into a block."""
    keys = {"context_parallel_rotate_method": method, "context_parallel_load_balancer": balancer}
    block = nn.Module()
    block.attention = nn.Module()
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": block})
    apply_context(model, dist.group.WORLD, Config.model_validate({"parallelism": keys}).parallelism)
    return block.attention.attend


def columns(t: torch.Tensor, rank: int, world: int, balancer: str | None) -> torch.Tensor:
    return torch.cat([t[:, part] for part in Deal(world, balancer or "none", S).columns(rank)], 1)


def compare(
    rank: int, world: int, *, method: str, dtype: str, kernel: str, documents: list[str]
) -> dict[str, list[float]]:
    """Every combination: largest error of the output and of each gradient, relative to the largest value."""
    kind, results = getattr(torch, dtype), {}
    for balancer in ("headtail", None):
        attend = attend_over(method, balancer)
        for name, kv_heads in itertools.product(documents, (H, 2, 1)):
            offsets, whole = offsets_of(name), inputs(kv_heads, kind)
            want = [columns(t, rank, world, balancer) for t in expected(whole, offsets)]
            *qkv, grad = (columns(t, rank, world, balancer) for t in whole)
            with torch.no_grad():
                quiet = attend(*qkv, offsets, D**-0.5, kernel)
            qkv = [t.requires_grad_() for t in qkv]
            out = attend(*qkv, offsets, D**-0.5, kernel)
            assert out.dtype == kind and torch.equal(out, quiet)
            got = [out.detach(), *torch.autograd.grad(out, qkv, grad)]
            errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want, strict=True)]
            results[f"{balancer}, {name}, {kv_heads} kv heads"] = errors
    return results


def largest(results: dict[str, list[float]]) -> float:
    return max(itertools.chain(*results.values()))


def skewed(rank: int, world: int) -> float:
    """The ring with ranks of unequal speed: who runs ahead must not write into what another still reads."""
    plain = kernels.row_kernel("math", torch.device("cpu"))

    def late(function):
        def call(*arguments):
            time.sleep(0.01 * ((rank * 3 + 1) % world))
            return function(*arguments)

        return call

    slow = dataclasses.replace(plain, forward=late(plain.forward), backward=late(plain.backward))
    with mock.patch.object(kernels, "row_kernel", lambda *_: slow):
        return largest(compare(rank, world, method="alltoall", dtype="float32", kernel="math", documents=["packed"]))


def repeated(rank: int, world: int, *, method: str) -> bool:
    """Whether output and gradients have the same bits each time."""
    attend, whole = attend_over(method, "headtail"), inputs(2, torch.float32)
    runs = []
    for _ in range(2):
        *qkv, grad = (columns(t, rank, world, "headtail") for t in whole)
        qkv = [t.requires_grad_() for t in qkv]
        out = attend(*qkv, offsets_of("packed"), D**-0.5, "sdpa")
        runs.append([out, *torch.autograd.grad(out, qkv, grad)])
    return all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def _spans_of(spans: kernels.Spans, tokens: int) -> list[slice]:
    bounds = spans.offsets.tolist()
    assert (
        bounds[0] == 0 and bounds[-1] == tokens and spans.longest == max(b - a for a, b in itertools.pairwise(bounds))
    )
    assert all(a < b for a, b in itertools.pairwise(bounds)), "an empty document reached the kernel"
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def _varlen_forward(q, k, v, queries, keys, scale, causal, window=0):
    assert window == 0
    assert all(t.ndim == 3 for t in (q, k, v)) and queries.offsets.dtype == keys.offsets.dtype == torch.int32
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for a, b in zip(_spans_of(queries, len(q)), _spans_of(keys, len(k)), strict=True):
        assert not causal or a.stop - a.start == b.stop - b.start
        part, part_lse = kernels.MATH.forward(q[None, a], k[None, b], v[None, b], scale, causal)
        out[a], lse[:, a] = part[0], part_lse[0]
    return out, lse


def _varlen_backward(grad, q, k, v, out, lse, queries, keys, scale, causal, window=0):
    assert window == 0
    grads = [torch.empty_like(t) for t in (q, k, v)]
    assert lse.shape == (q.shape[1], q.shape[0]) and lse.is_contiguous()
    for a, b in zip(_spans_of(queries, len(q)), _spans_of(keys, len(k)), strict=True):
        parts = (grad[None, a], q[None, a], k[None, b], v[None, b], out[None, a], lse[None, :, a])
        for whole, where, part in zip(grads, (a, b, b), kernels.MATH.backward(*parts, scale, causal), strict=True):
            whole[where] = part[0]
    return tuple(grads)


def varlen(rank: int, world: int, *, method: str) -> float:
    """The path of the variable-length kernel, with a stand-in for the kernel, which needs a GPU."""
    stand_ins = {
        "varlen_works": lambda *_: True,
        "varlen_forward": _varlen_forward,
        "varlen_backward": _varlen_backward,
    }
    with mock.patch.multiple(kernels, **stand_ins):
        return largest(compare(rank, world, method=method, dtype="float32", kernel="auto", documents=[*DOCUMENTS]))


def registered(rank: int, world: int) -> None:
    """torch's own check of schema, fake kernels and autograd."""
    q, k, v, _ = (columns(t, rank, world, "headtail").requires_grad_() for t in inputs(2, torch.float32))
    group = attend_over("alltoall", "headtail").group
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # compiled: test_compiled_blocks…
    settings = (offsets_of("packed"), D**-0.5, "sdpa", "allgather", "headtail", group)
    torch.library.opcheck(context_ring.context_attention, (q, k, v, *settings), test_utils=tests)
    parts = q.unflatten(1, (world, -1)).transpose(0, 1)
    torch.library.opcheck(context.exchange, (parts, group), test_utils=tests)


SPEC = DecoderSpec(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=48, vocab_size=61)


def _gradients(model: Decoder, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = -model(batch.tokens, batch.positions, batch.offsets, labels=batch.labels, reduction="sum")
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def decoder(rank: int, world: int, *, method: str, sections: dict[str, Any]) -> tuple[float, int]:
    """A small decoder over cut batches of two kinds, against one process.

    The largest error of the loss and of any gradient, and how often a block's attention ran, backwards counted.
    """
    settings = Config.model_validate({"parallelism": {"context_parallel_rotate_method": method}, **sections})
    model = Decoder(SPEC, seq_len=S, loss="logits")
    materialise(model, "cpu", initial_values(model, 0))
    batches = [made_up(SPEC.vocab_size, documents) for documents in ("rows", "packed")]
    want = [_gradients(model, batch) for batch in batches]
    apply_context(model, dist.group.WORLD, settings.parallelism)
    apply_activation_checkpointing(model, settings)
    apply_compile(model, settings)
    worst, run = 0.0, mock.Mock(side_effect=context_ring._prepare)
    for batch, expected_here in zip(batches, want, strict=True):
        with mock.patch.object(context_ring, "_prepare", run):
            got = _gradients(model, cut(batch, rank, world, "headtail"))
        for name, value in got.items():
            dist.all_reduce(value)
            worst = max(worst, ((value - expected_here[name]).norm() / expected_here[name].norm()).item())
    return worst, run.call_count // len(batches)


def made_up(vocab: int, documents: str) -> Batch:
    """A batch of B rows with these documents; some tokens aren't trained on."""
    g = torch.Generator().manual_seed(3)
    tokens, labels = torch.randint(0, vocab, (2, B, S), generator=g)
    labels[:, ::5] = IGNORE
    offsets = offsets_of(documents)
    starts = torch.arange(0, B * S, S) if offsets is None else offsets[:-1].long()
    numbers = torch.bucketize(torch.arange(B * S), starts, right=True) - 1
    return Batch(
        tokens=tokens,
        labels=labels,
        positions=(torch.arange(B * S) - starts[numbers]).view(B, S),
        documents=numbers.view(B, S).int(),
        sequences=torch.arange(B),
        offsets=offsets,
    )
