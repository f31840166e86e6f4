"""Causal attention over documents, and the attention module of the decoder.

One operator for every device and every path: (q, k, v, document offsets) → (out, log-sum-exp). It is registered with
torch, so that a compiled block stays one graph and selective checkpointing can name it. On CPU it loops over documents
with the fused kernel; on a GPU it is one call of the variable-length kernel. Without offsets each row is one document.
"""

from __future__ import annotations

import itertools
from typing import ClassVar

import torch
from torch import nn
from torch.utils.flop_counter import register_flop_formula

from titanlike.models import kernels
from titanlike.models.linear import Linear
from titanlike.models.rope import rotate
from titanlike.models.spec import DecoderSpec


def _spans(offsets: torch.Tensor) -> list[tuple[int, int]]:
    bounds = offsets.tolist()
    return [(a, b) for a, b in itertools.pairwise(bounds) if b > a]


def _device_spans(q: torch.Tensor, offsets: torch.Tensor | None) -> kernels.Spans:
    """What the variable-length kernel wants to know of documents, or of whole rows."""
    rows, length = q.shape[:2]
    if offsets is None:
        return kernels.Spans(torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=q.device), length)
    return kernels.Spans(offsets, int(offsets.diff().max()))


@torch.library.custom_op("titanlike::document_attention", mutates_args=())
def document_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor | None, scale: float, kernel: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention inside each document.

    q [B, S, H, D]; k, v [B, S, K, D]; offsets int32 [n + 1] over the B*S flattened tokens (row starts are among them),
    or None if every row is one document; kernel as `model.attention`. Returns out [B, S, H, D], lse float32 [B, H, S].
    """
    if kernel in ("auto", "varlen") and kernels.varlen_works(q.device, q.dtype):
        spans = _device_spans(q, offsets)
        out, lse = kernels.varlen_forward(*(t.flatten(0, 1) for t in (q, k, v)), spans, spans, scale, True)
        return out.view_as(q), lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1).contiguous()
    rows = kernels.row_kernel(kernel, q.device)
    if offsets is None:
        out, lse = rows.forward(q, k, v, scale, True)
        return out.contiguous(), lse.contiguous()
    out, lse = _empty_outputs(q)
    flat_q, flat_k, flat_v, flat_out = (t.flatten(0, 1)[None] for t in (q, k, v, out))
    for a, b in _spans(offsets):
        part, part_lse = rows.forward(flat_q[:, a:b], flat_k[:, a:b], flat_v[:, a:b], scale, True)
        flat_out[:, a:b] = part
        row, first = divmod(a, q.shape[1])
        lse[row, :, first : first + b - a] = part_lse[0]
    return out, lse


def _empty_outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, length, heads, _ = q.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty((rows, heads, length), dtype=torch.float32)


@document_attention.register_fake
def _(q, k, v, offsets, scale, kernel):
    return _empty_outputs(q)


@register_flop_formula([torch.ops.titanlike.document_attention])
def _flops(q: torch.Size, k: torch.Size, *others, **kwargs) -> int:
    """Two products over the whole square, as torch counts its own; by this the compiler weighs recomputation."""
    rows, length, heads, size = q
    return 4 * rows * heads * size * length * k[1]


@torch.library.custom_op("titanlike::document_attention_backward", mutates_args=())
def document_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    offsets: torch.Tensor | None,
    scale: float,
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v from that of `document_attention`'s output."""
    if kernel in ("auto", "varlen") and kernels.varlen_works(q.device, q.dtype):
        spans = _device_spans(q, offsets)
        flat = [t.flatten(0, 1) for t in (grad, q, k, v, out)]
        flat_lse = lse.transpose(0, 1).reshape(q.shape[2], -1)
        grads = kernels.varlen_backward(*flat, flat_lse, spans, spans, scale, True)
        return tuple(g.view_as(t) for g, t in zip(grads, (q, k, v), strict=True))
    rows = kernels.row_kernel(kernel, q.device)
    if offsets is None:
        return tuple(g.contiguous() for g in rows.backward(grad, q, k, v, out, lse, scale, True))
    grads = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    flat = [t.flatten(0, 1)[None] for t in (grad, q, k, v, out)]
    flat_grads = [t.flatten(0, 1)[None] for t in grads]
    for a, b in _spans(offsets):
        row, first = divmod(a, q.shape[1])
        part_lse = lse[row : row + 1, :, first : first + b - a].contiguous()
        parts = rows.backward(*(t[:, a:b] for t in flat), part_lse, scale, True)
        for whole, part in zip(flat_grads, parts, strict=True):
            whole[:, a:b] = part
    return grads


@document_attention_backward.register_fake
def _(grad, q, k, v, out, lse, offsets, scale, kernel):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))


def _save(ctx, inputs, output):
    q, k, v, offsets, ctx.scale, ctx.kernel = inputs
    ctx.save_for_backward(q, k, v, *output, offsets)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    q, k, v, out, lse, offsets = ctx.saved_tensors
    grads = torch.ops.titanlike.document_attention_backward(grad, q, k, v, out, lse, offsets, ctx.scale, ctx.kernel)
    return *grads, None, None, None


document_attention.register_autograd(_backward, setup_context=_save)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor | None, scale: float, kernel: str
) -> torch.Tensor:
    """`document_attention`'s output alone. Context parallelism puts its own in this one's place."""
    return document_attention(q, k, v, offsets, scale, kernel)[0]


class KVCache:
    """Keys and values of one layer for rows that are being generated: [B, capacity, K, D] each."""

    def __init__(self, rows: int, capacity: int, spec: DecoderSpec, device: torch.device, dtype: torch.dtype):
        shape = (rows, capacity, spec.n_kv_heads, spec.head_dim)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)

    def append(self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> None:
        """Writes k and v [B, S, K, D] at each row's positions [B, S]."""
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        self.k[rows, positions] = k.to(self.k.dtype)
        self.v[rows, positions] = v.to(self.v.dtype)


class Attention(nn.Module):
    """Grouped-query causal attention with rotary positions (names as TorchTitan's Llama)."""

    tensor_styles: ClassVar = {"wq": "colwise", "wk": "kv_colwise", "wv": "kv_colwise", "wo": "rowwise"}

    def __init__(self, spec: DecoderSpec, layer: int, kernel: str = "auto"):
        super().__init__()
        self.head_dim = spec.head_dim
        self.scale = spec.head_dim**-0.5
        self.kernel = kernel
        self.attend = attend
        self.wq = Linear(spec.dim, spec.n_heads * spec.head_dim, bias=False)
        self.wk = Linear(spec.dim, spec.n_kv_heads * spec.head_dim, bias=False)
        self.wv = Linear(spec.dim, spec.n_kv_heads * spec.head_dim, bias=False)
        self.wo = Linear(spec.n_heads * spec.head_dim, spec.dim, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        offsets: torch.Tensor | None = None,
        cache: KVCache | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [B, S, dim] → [B, S, dim]. With a cache, x continues each row at `positions` [B, S]."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, *rope), rotate(k, *rope)
        if cache is None:
            out = self.attend(q, k, v, offsets, self.scale, self.kernel)
        else:
            cache.append(k, v, positions)
            out = _cached_attention(q, cache, positions, self.scale)
        return self.wo(out.flatten(2))


def _cached_attention(q: torch.Tensor, cache: KVCache, positions: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of new queries to all that the cache holds up to their own position; for generation, no gradients."""
    longest = int(positions.max()) + 1
    seen = torch.arange(longest, device=q.device) <= positions[..., None]  # [B, S, longest]
    k, v = cache.k[:, :longest], cache.v[:, :longest]
    out = nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2).to(q.dtype),
        v.transpose(1, 2).to(q.dtype),
        attn_mask=seen[:, None],
        scale=scale,
        enable_gqa=True,
    )
    return out.transpose(1, 2)
