"""The one module that may touch torch's private operators.

A kernel computes attention over one run of tokens and returns the log-sum-exp beside the output; torch offers
that only below its public API. Each kernel is guarded: where an operator is missing (another torch, another device)
the next one in `choose` takes its place, and plain mathematics is always there.

Shapes: q [B, S, H, D], k and v [B, T, K, D] with H a multiple of K; out as q; lse float32 [B, H, S]. Causal needs
S = T (query i sees keys 0 … i); without it every query sees every key. No query may be left without a key: kernels
return 0 as its log-sum-exp, which is not the -inf that a merge needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from titanlike.errors import ConfigError

Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Kernel:
    """Forward (q, k, v, scale, causal) and backward (grad, q, k, v, out, lse, scale, causal) over whole rows.

    The backward takes out and lse of *all* keys that the queries see, even if k and v are only some of them: its
    gradients are then these keys' share, and shares add up.
    """

    name: str
    forward: Forward
    backward: Backward


def _operator(name: str):
    """An aten operator, or None in a torch that lacks it."""
    return getattr(torch.ops.aten, name, None)


_CPU_FORWARD = _operator("_scaled_dot_product_flash_attention_for_cpu")
_CPU_BACKWARD = _operator("_scaled_dot_product_flash_attention_for_cpu_backward")
_EFFICIENT_FORWARD = _operator("_scaled_dot_product_efficient_attention")
_EFFICIENT_BACKWARD = _operator("_scaled_dot_product_efficient_attention_backward")
_VARLEN_FORWARD = _operator("_flash_attention_forward")
_VARLEN_BACKWARD = _operator("_flash_attention_backward")


def _cpu_multiplies_bf16() -> bool:
    """Whether this CPU's matrix products take bfloat16 as it is; a torch that can't say is left to itself."""
    try:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    except (AttributeError, RuntimeError):
        return True


CPU_MULTIPLIES_BF16 = _cpu_multiplies_bf16()


def graph_is_kept() -> bool:
    """Asked inside a backward: whether another one may come through the same graph; so it is if torch can't say."""
    try:
        return torch._C._autograd._get_current_graph_task_keep_graph()
    except AttributeError:
        return True


def _heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def _additive(visible, q):
    """A mask of what queries see [S, T], as the CPU kernel adds it to scores."""
    return None if visible is None else torch.zeros_like(visible, dtype=q.dtype).masked_fill_(~visible, float("-inf"))


def _cpu_forward(q, k, v, scale, causal, visible=None):
    out, lse = _CPU_FORWARD(*_heads_first(q, k, v), 0.0, causal, attn_mask=_additive(visible, q), scale=scale)
    return out.transpose(1, 2), lse


def _cpu_backward(grad, q, k, v, out, lse, scale, causal, visible=None):
    if q.dtype is torch.bfloat16 and not CPU_MULTIPLIES_BF16:  # see `models.products`; its forward is fast as it is
        wide = (t.float() for t in (grad, q, k, v, out))
        return tuple(g.bfloat16() for g in _cpu_backward(*wide, lse, scale, causal, visible))
    # The kernel reads the gradient and lse by their strides only where they are laid out as the forward left them.
    tensors = _heads_first(grad.contiguous(), q, k, v, out)
    grads = _CPU_BACKWARD(*tensors, lse, 0.0, causal, attn_mask=_additive(visible, q), scale=scale)
    return tuple(_heads_first(*grads))


def _expand(q, k, v):
    """Repeats key and value heads for kernels that don't group queries; [B, S, H, D] each."""
    groups = q.shape[2] // k.shape[2]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2))


def _fold(grad, kv_heads):
    """Adds up the gradients of repeated key/value heads: [B, S, H, D] to [B, S, K, D]."""
    return grad.unflatten(2, (kv_heads, -1)).sum(3)


def _efficient_forward(q, k, v, scale, causal):
    k, v = _expand(q, k, v)
    out, lse, _, _ = _EFFICIENT_FORWARD(*_heads_first(q, k, v), None, True, 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse[..., : q.shape[1]]


def _efficient_backward(grad, q, k, v, out, lse, scale, causal):
    kv_heads = k.shape[2]
    k, v = _expand(q, k, v)
    # The kernel wants lse's rows aligned to 32, as its forward pads them.
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32)).contiguous()
    empty = torch.empty((), dtype=torch.int64, device="cpu")  # seed and offset of a dropout that isn't there
    dq, dk, dv, _ = _EFFICIENT_BACKWARD(
        *_heads_first(grad.contiguous(), q, k, v),
        None,
        out.transpose(1, 2),
        lse,
        empty,
        empty,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    dq, dk, dv = _heads_first(dq, dk, dv)
    return dq, _fold(dk, kv_heads), _fold(dv, kv_heads)


def _scores(q, k, scale, causal, visible, softcap):
    """Scores float32 [B, H, S, T], masked; and, with a soft cap, by how much less than the raw ones they grow."""
    scores = torch.einsum("bshd,bthd->bhst", q.float(), k.float()) * scale
    slope = None
    if softcap:
        bent = (scores / softcap).tanh()
        scores, slope = bent * softcap, 1 - bent.square()
    if causal:
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    return scores if visible is None else scores.masked_fill(~visible, float("-inf")), slope


def _math_forward(q, k, v, scale, causal, visible=None, softcap=0.0):
    k, v = _expand(q, k, v)
    scores, _ = _scores(q, k, scale, causal, visible, softcap)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bhst,bthd->bshd", (scores - lse[..., None]).exp(), v.float())
    return out.to(q.dtype), lse


def _math_backward(grad, q, k, v, out, lse, scale, causal, visible=None, softcap=0.0):
    kv_heads = k.shape[2]
    wide_k, wide_v = _expand(q, k, v)
    grad = grad.float()
    scores, slope = _scores(q, wide_k, scale, causal, visible, softcap)
    p = (scores - lse[..., None]).exp()
    dv = torch.einsum("bhst,bshd->bthd", p, grad)
    dp = torch.einsum("bshd,bthd->bhst", grad, wide_v.float())
    delta = (grad * out.float()).sum(-1).transpose(1, 2)[..., None]
    ds = p * (dp - delta) * scale
    if slope is not None:
        ds = ds * slope
    dq = torch.einsum("bhst,bthd->bshd", ds, wide_k.float())
    dk = torch.einsum("bhst,bshd->bthd", ds, q.float())
    return dq.to(q.dtype), _fold(dk, kv_heads).to(k.dtype), _fold(dv, kv_heads).to(v.dtype)


MATH = Kernel("math", _math_forward, _math_backward)
CPU = Kernel("sdpa", _cpu_forward, _cpu_backward)
EFFICIENT = Kernel("sdpa", _efficient_forward, _efficient_backward)


def varlen_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the fused variable-length kernel takes this device and dtype."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or _VARLEN_BACKWARD is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True)
class Spans:
    """Where documents lie among flattened tokens: int32 [n + 1] boundaries on the device, and the longest of them."""

    offsets: torch.Tensor
    longest: int


def varlen_forward(q, k, v, queries: Spans, keys: Spans, scale, causal, window=0):
    """Flash attention over documents of flattened tokens: q [S, H, D], k and v [T, K, D]; lse float32 [H, S].

    Document i's queries see document i's keys, at most `window` of them if that isn't 0; causal needs as many of the
    one as of the other.
    """
    bounds = (queries.offsets, keys.offsets, queries.longest, keys.longest)
    out, lse, *_ = _VARLEN_FORWARD(q, k, v, *bounds, 0.0, causal, False, scale=scale, **_sides(window))
    return out, lse


def _sides(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def varlen_backward(grad, q, k, v, out, lse, queries: Spans, keys: Spans, scale, causal, window=0):
    """Gradients of `varlen_forward`; out and lse as in `Kernel`."""
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # random state of a dropout that isn't there
    bounds = (queries.offsets, keys.offsets, queries.longest, keys.longest)
    options = {"scale": scale, **_sides(window)}
    return _VARLEN_BACKWARD(grad.contiguous(), q, k, v, out, lse, *bounds, 0.0, causal, unused, unused, **options)


def row_kernel(wanted: str, device: torch.device) -> Kernel:
    """The kernel over whole rows for `model.attention` on a device."""
    if wanted == "math":
        return MATH
    if device.type == "cpu":
        return CPU if _CPU_FORWARD is not None and _CPU_BACKWARD is not None else MATH
    return EFFICIENT if _EFFICIENT_FORWARD is not None and _EFFICIENT_BACKWARD is not None else MATH


def check(wanted: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuses a kernel that was asked for by name and can't run here."""
    if wanted == "varlen" and not varlen_works(device, dtype):
        raise ConfigError(
            f'model.attention = "varlen": the fused variable-length kernel needs a CUDA device of compute capability 8 '
            f'or more and bf16 compute, here it is {dtype} on {device.type}; "auto" takes what fits'
        )
