"""The attention modules of the decoder: grouped-query and latent (names as TorchTitan's)."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from titanlike.models.document_attention import attend
from titanlike.models.linear import Linear
from titanlike.models.norm import InnerNorm
from titanlike.models.rope import rotate
from titanlike.models.spec import DecoderSpec

Rope = tuple[torch.Tensor, torch.Tensor]


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


class _Attending(nn.Module):
    """What kinds of attention share: the operator, with what it is told of scores."""

    def __init__(self, spec: DecoderSpec, layer: int, kernel: str):
        super().__init__()
        self.head_dim = spec.head_dim
        self.scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
        self.kernel = kernel
        self.window = spec.window_of(layer)
        self.softcap = spec.attention_softcap or 0.0
        self.attend = attend

    def heads(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        offsets: torch.Tensor | None,
        cache: KVCache | None,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """What the heads make of q [B, S, H, D], k and v [B, S, K, D]: [B, S, H, D]."""
        if cache is None:
            return self.attend(q, k, v, offsets, self.scale, self.kernel, self.window, self.softcap)
        assert positions is not None
        cache.append(k, v, positions)
        return _cached_attention(q, cache, positions, self.scale, self.window, self.softcap)


class Attention(_Attending):
    """Grouped-query causal attention with rotary positions."""

    tensor_styles: ClassVar = {
        "wq": "colwise",
        "wk": "kv_colwise",
        "wv": "kv_colwise",
        "wo": "rowwise",
        "q_norm": "shared",
        "k_norm": "shared",
    }

    def __init__(self, spec: DecoderSpec, layer: int, kernel: str = "auto"):
        super().__init__(spec, layer, kernel)
        size = spec.head_dim
        self.wq = Linear(spec.dim, spec.n_heads * size, bias=spec.qkv_bias)
        self.wk = Linear(spec.dim, spec.n_kv_heads * size, bias=spec.qkv_bias)
        self.wv = Linear(spec.dim, spec.n_kv_heads * size, bias=spec.qkv_bias)
        self.wo = Linear(spec.n_heads * size, spec.dim, bias=spec.out_bias)
        self.q_norm = InnerNorm(size, spec.norm_eps, spec.norm_offset) if spec.qk_norm else None
        self.k_norm = InnerNorm(size, spec.norm_eps, spec.norm_offset) if spec.qk_norm else None

    def forward(
        self,
        x: torch.Tensor,
        rope: Rope,
        offsets: torch.Tensor | None = None,
        cache: KVCache | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [B, S, dim] → [B, S, dim]. With a cache, x continues each row at `positions` [B, S]."""
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rope), rotate(k, *rope)
        return self.wo(self.heads(q, k, v, offsets, cache, positions).flatten(2))


class LatentAttention(_Attending):
    """Multi-head latent attention (arXiv 2405.04434), with its keys and values written out."""

    tensor_styles: ClassVar = {
        "wq": "colwise",
        "wq_a": "shared",
        "q_norm": "shared",
        "wq_b": "colwise",
        "wkv_a": "shared",
        "kv_norm": "shared",
        "wkv_b": "colwise",
        "wo": "rowwise",
    }

    def __init__(self, spec: DecoderSpec, layer: int, kernel: str = "auto"):
        super().__init__(spec, layer, kernel)
        assert spec.latent is not None
        latent = self.latent = spec.latent
        queries = spec.n_heads * spec.head_dim
        if latent.query_rank is None:
            self.wq = Linear(spec.dim, queries, bias=False)
        else:
            self.wq_a = Linear(spec.dim, latent.query_rank, bias=spec.qkv_bias)
            self.q_norm = InnerNorm(latent.query_rank, latent.norm_eps)
            self.wq_b = Linear(latent.query_rank, queries, bias=False)
        self.wkv_a = Linear(spec.dim, latent.kv_rank + latent.rope_dim, bias=spec.qkv_bias)
        self.kv_norm = InnerNorm(latent.kv_rank, latent.norm_eps)
        self.wkv_b = Linear(latent.kv_rank, spec.n_heads * (latent.nope_dim + latent.value_dim), bias=False)
        self.wo = Linear(spec.n_heads * latent.value_dim, spec.dim, bias=spec.out_bias)

    def forward(
        self,
        x: torch.Tensor,
        rope: Rope,
        offsets: torch.Tensor | None = None,
        cache: KVCache | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [B, S, dim] → [B, S, dim]. With a cache, x continues each row at `positions` [B, S]."""
        one = self.latent
        q = self.wq(x) if one.query_rank is None else self.wq_b(self.q_norm(self.wq_a(x)))
        q, q_turned = q.unflatten(-1, (-1, self.head_dim)).split([one.nope_dim, one.rope_dim], -1)
        narrow, k_turned = self.wkv_a(x).split([one.kv_rank, one.rope_dim], -1)
        kv = self.wkv_b(self.kv_norm(narrow)).unflatten(-1, (-1, one.nope_dim + one.value_dim))
        k, v = kv.split([one.nope_dim, one.value_dim], -1)
        k_turned = rotate(k_turned.unsqueeze(2), *rope).expand(*k.shape[:3], -1)
        q, k = torch.cat([q, rotate(q_turned, *rope)], -1), torch.cat([k, k_turned], -1)
        # Kernels want values as wide as keys; what is added stays zero.
        out = self.heads(q, k, F.pad(v, (0, self.head_dim - one.value_dim)), offsets, cache, positions)
        return self.wo(out[..., : one.value_dim].flatten(2))


def _cached_attention(
    q: torch.Tensor, cache: KVCache, positions: torch.Tensor, scale: float, window: int, softcap: float
) -> torch.Tensor:
    """Attention of new queries to all that the cache holds up to their own position; for generation, no gradients."""
    longest = int(positions.max()) + 1
    keys = torch.arange(longest, device=q.device)
    seen = keys <= positions[..., None]  # [B, S, longest]
    if window:
        seen &= keys > positions[..., None] - window
    k, v = (t[:, :longest].transpose(1, 2).to(q.dtype) for t in (cache.k, cache.v))
    q, seen = q.transpose(1, 2), seen[:, None]
    if softcap:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = (q @ k.mT).float() * scale
        scores = ((scores / softcap).tanh() * softcap).masked_fill(~seen, float("-inf"))
        return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True).transpose(1, 2)
