"""Causal attention over documents: one operator for every device and every path.

(q, k, v, document offsets) → (out, log-sum-exp). It is registered with torch, so that a compiled block stays one graph
and selective checkpointing can name it. On CPU it loops over documents with the fused kernel; on a GPU it is one call
of the variable-length kernel. Without offsets each row is one document.

`window` (0: none) is how many tokens a token sees at most, itself among them; `softcap` (0: none) turns scores s into
cap · tanh(s / cap), which no fused kernel does.
"""

from __future__ import annotations

import itertools

import torch
from torch.utils.flop_counter import register_flop_formula

from titanlike.models import banded, kernels


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
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor | None,
    scale: float,
    kernel: str,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention inside each document.

    q [B, S, H, D]; k, v [B, S, K, D]; offsets int32 [n + 1] over the B*S flattened tokens (row starts are among them),
    or None if every row is one document; kernel as `model.attention`. Returns out [B, S, H, D], lse float32 [B, H, S].
    """
    if _takes_varlen(q, kernel, softcap):
        spans = _device_spans(q, offsets)
        out, lse = kernels.varlen_forward(*(t.flatten(0, 1) for t in (q, k, v)), spans, spans, scale, True, window)
        return out.view_as(q), lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1).contiguous()
    rows = _row_kernel(q, kernel, window, softcap)
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


def _takes_varlen(q: torch.Tensor, kernel: str, softcap: float) -> bool:
    return kernel in ("auto", "varlen") and not softcap and kernels.varlen_works(q.device, q.dtype)


def _row_kernel(q: torch.Tensor, kernel: str, window: int, softcap: float) -> kernels.Kernel:
    rows = kernels.row_kernel(kernel, q.device)
    return banded.kernel(rows, window, softcap) if window or softcap else rows


@document_attention.register_fake
def _(q, k, v, offsets, scale, kernel, window=0, softcap=0.0):
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
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v from that of `document_attention`'s output."""
    if _takes_varlen(q, kernel, softcap):
        spans = _device_spans(q, offsets)
        flat = [t.flatten(0, 1) for t in (grad, q, k, v, out)]
        flat_lse = lse.transpose(0, 1).reshape(q.shape[2], -1)
        grads = kernels.varlen_backward(*flat, flat_lse, spans, spans, scale, True, window)
        return tuple(g.view_as(t) for g, t in zip(grads, (q, k, v), strict=True))
    rows = _row_kernel(q, kernel, window, softcap)
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
def _(grad, q, k, v, out, lse, offsets, scale, kernel, window=0, softcap=0.0):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))


def _save(ctx, inputs, output):
    q, k, v, offsets, *ctx.rule = inputs
    ctx.save_for_backward(q, k, v, *output, offsets)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    q, k, v, out, lse, offsets = ctx.saved_tensors
    grads = torch.ops.titanlike.document_attention_backward(grad, q, k, v, out, lse, offsets, *ctx.rule)
    return *grads, *(None for _ in range(1 + len(ctx.rule)))


document_attention.register_autograd(_backward, setup_context=_save)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor | None,
    scale: float,
    kernel: str,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """`document_attention`'s output alone. Context parallelism puts its own in this one's place."""
    return document_attention(q, k, v, offsets, scale, kernel, window, softcap)[0]
