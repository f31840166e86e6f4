"""Attention whose scores are limited to a window of tokens, or bent by a soft cap, over whole rows.

Queries are taken a band at a time, with the keys that the band can see. So a window costs its own width and not the
row's, and plain mathematics, which the soft cap needs, never holds the scores of a whole row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from titanlike.models import kernels
from titanlike.models.kernels import Kernel

_BAND = 256  # queries at a time, at least


def kernel(rows: Kernel, window: int, softcap: float) -> Kernel:
    """`rows` with a window of that many tokens and a soft cap, 0 for none of either; always causal."""
    if softcap:
        banded = (
            functools.partial(kernels.MATH.forward, softcap=softcap),
            functools.partial(kernels.MATH.backward, softcap=softcap),
        )
    elif rows is kernels.CPU:
        banded = rows.forward, rows.backward
    else:
        banded = kernels.MATH.forward, kernels.MATH.backward
    forward, backward = banded

    def all_forward(q, k, v, scale, causal):
        assert causal
        if not softcap and q.shape[1] <= window:
            return rows.forward(q, k, v, scale, True)
        parts = [
            forward(q[:, a:b], k[:, low:b], v[:, low:b], scale, False, visible=seen)
            for a, b, low, seen in _bands(q, window)
        ]
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], -1)

    def all_backward(grad, q, k, v, out, lse, scale, causal):
        assert causal
        if not softcap and q.shape[1] <= window:
            return rows.backward(grad, q, k, v, out, lse, scale, True)
        of_q = []
        of_k, of_v = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (k, v))
        for a, b, low, seen in _bands(q, window):
            cut = grad[:, a:b], q[:, a:b], k[:, low:b], v[:, low:b], out[:, a:b].contiguous()
            one, part_k, part_v = backward(*cut, lse[..., a:b].contiguous(), scale, False, visible=seen)
            of_q.append(one)
            of_k[:, low:b] += part_k
            of_v[:, low:b] += part_v
        return torch.cat(of_q, 1), of_k.to(k.dtype), of_v.to(v.dtype)

    return Kernel(f"banded {rows.name}", all_forward, all_backward)


def _bands(q: torch.Tensor, window: int) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """(first query, end, first key, which of the keys each query sees) of each band; keys end where queries do."""
    length, step = q.shape[1], max(_BAND, window)
    for a in range(0, length, step):
        b = min(a + step, length)
        low = max(0, a + 1 - window) if window else 0
        queries = torch.arange(a, b, device=q.device)[:, None]
        keys = torch.arange(low, b, device=q.device)
        seen = keys <= queries
        yield a, b, low, seen & (keys > queries - window) if window else seen
