"""Linear cross-entropy: from hidden states and the head's weight to log-probabilities, never holding [tokens, vocab].

Tokens that aren't trained on are left out before the projection; the rest goes through in chunks. Two forms:

- "sum": every token counts alike, so the gradients are known up to one factor and are taken chunk by chunk in the
  forward, while a chunk's probabilities are still in cache; the backward only scales them.
- "none": the gradient of each token arrives in the backward, which projects each chunk once more.

Statistics and the weight's gradient are float32 whatever the inputs are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import torch

from titanlike.data.batch import IGNORE

# Bytes of a chunk's float32 logits that keep the passes over them inside a CPU's last-level cache; GPUs want larger
# matrix products instead.
_CPU_CHUNK_BYTES = 32 << 20
_GPU_CHUNK_BYTES = 1 << 30


def chunk_rows(wanted: int, weight: torch.Tensor) -> int:
    """Tokens a chunk: what the config says, or what suits the device and the vocabulary."""
    if wanted:
        return wanted
    budget = _CPU_CHUNK_BYTES if weight.device.type == "cpu" else _GPU_CHUNK_BYTES
    return max(64, budget // (4 * weight.shape[0]))


@dataclass(frozen=True)
class VocabularyShard:
    """Rows `first` … of a head whose other rows are on other ranks; `stack` gives every rank's x [ranks, *x.shape].

    Ranks exchange three numbers a token. All of them return the same log-probabilities; a rank's gradient of the hidden
    states is that through its own rows, for the caller to add up.
    """

    first: int
    stack: Callable[[torch.Tensor], torch.Tensor]

    def own(self, labels: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each label's row here (any row where it is elsewhere) and whether it is here, [n, 1] each."""
        labels = labels[:, None] - self.first
        here = (labels >= 0) & (labels < rows)
        return labels.masked_fill(~here, 0), here

    def merge(self, highest: torch.Tensor, total: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Over the whole vocabulary: log-probabilities, and the divisor of exp(logits - highest) here; [n, 1] each.

        highest, total, wanted [n, 1]: largest logit, Σ exp(logits - highest), the label's logit or 0 where elsewhere.
        """
        maxima, totals, logits = self.stack(torch.stack([highest, total, wanted])).unbind(1)
        largest = maxima.amax(0)
        everything = (totals * (maxima - largest).exp()).sum(0)
        return logits.sum(0) - largest - everything.log(), everything * (largest - highest).exp()


def _shard_statistics(hidden: torch.Tensor, weight: torch.Tensor, own: torch.Tensor, here: torch.Tensor):
    """exp(logits - highest) [n, rows], and what `VocabularyShard.merge` asks for, of this rank's rows; float32."""
    logits = (hidden @ weight.t()).float()
    wanted = logits.gather(1, own).masked_fill(~here, 0.0)
    highest = logits.amax(-1, keepdim=True)
    powers = logits.sub_(highest).exp_()
    return powers, highest, powers.sum(-1, keepdim=True), wanted


def _sharded_forward(statistics, shard: VocabularyShard, hidden, weight, labels):
    own, here = shard.own(labels, weight.shape[0])
    _, *sums = statistics(hidden, weight, own, here)
    return shard.merge(*sums)[0].squeeze(1)


def _sharded_gradient(statistics, shard: VocabularyShard, hidden, weight, labels, upstream):
    own, here = shard.own(labels, weight.shape[0])
    grad, *sums = statistics(hidden, weight, own, here)
    chosen, divisor = shard.merge(*sums)
    upstream = torch.ones_like(divisor) if upstream is None else upstream[:, None]
    grad.mul_(-upstream / divisor).scatter_add_(1, own, upstream * here)
    return chosen.squeeze(1), grad.to(hidden.dtype)


def _forward_chunk(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the labels [n], float32."""
    logits = (hidden @ weight.t()).float()
    return (logits.gather(1, labels[:, None]) - logits.logsumexp(-1, keepdim=True)).squeeze(1)


def _gradient_chunk(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, upstream: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [n], and the logits' gradient [n, vocab] in hidden's dtype: (onehot − softmax) · upstream."""
    logits = (hidden @ weight.t()).float()
    highest = logits.amax(-1, keepdim=True)
    wanted = logits.gather(1, labels[:, None]) - highest
    # In place and with one factor for all: every pass over [n, vocab] that is saved shows.
    grad = logits.sub_(highest).exp_()
    total = grad.sum(-1, keepdim=True)
    upstream = torch.ones_like(total) if upstream is None else upstream[:, None]
    grad.mul_(-upstream / total).scatter_add_(1, labels[:, None], upstream)
    return (wanted - total.log()).squeeze(1), grad.to(hidden.dtype)


@cache
def _compiled(function, backend: str):
    return torch.compile(function, backend=backend, dynamic=True)


def _chunk_functions(backend: str | None, shard: VocabularyShard | None):
    """The functions of a chunk for this run: log-probabilities alone, and with the logits' gradient."""

    def maybe(function):
        return _compiled(function, backend) if backend else function

    if shard is None:
        return maybe(_forward_chunk), maybe(_gradient_chunk)
    # Talking to the other ranks stays outside of what is compiled.
    statistics = maybe(_shard_statistics)
    return partial(_sharded_forward, statistics, shard), partial(_sharded_gradient, statistics, shard)


def _accumulate(total: torch.Tensor, grad_logits: torch.Tensor, hidden: torch.Tensor) -> None:
    """total [vocab, dim] float32 += grad_logits^T [vocab, n] @ hidden [n, dim]."""
    if hidden.dtype == total.dtype:
        total.addmm_(grad_logits.t(), hidden)
    else:
        total.add_(grad_logits.t() @ hidden)


def _gradients(hidden, weight, labels, upstream, rows, gradient_chunk):
    """Log-probabilities [n], gradient of hidden [n, dim] and of weight (float32), chunk by chunk."""
    hidden, weight = hidden.detach(), weight.detach()
    chosen = hidden.new_empty(labels.shape, dtype=torch.float32)
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros(
        weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device
    )
    for a in range(0, len(labels), rows):
        part = slice(a, a + rows)
        up = None if upstream is None else upstream[part]
        chosen[part], grad_logits = gradient_chunk(hidden[part], weight, labels[part], up)
        grad_hidden[part] = grad_logits @ weight
        _accumulate(grad_weight, grad_logits, hidden[part])
    return chosen, grad_hidden, grad_weight


class _SumLogProbs(torch.autograd.Function):
    """Σ log p(label); gradients taken in the forward."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, rows, chunks):
        log_probs, gradient = chunks
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            return _forward_only(hidden, weight, labels, rows, log_probs).sum()
        chosen, grad_hidden, grad_weight = _gradients(hidden, weight, labels, None, rows, gradient)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return chosen.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * upstream, (grad_weight * upstream).to(ctx.weight_dtype), None, None, None


class _LogProbs(torch.autograd.Function):
    """log p(label) of each token; gradients by projecting again in the backward."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, rows, chunks):
        ctx.save_for_backward(hidden, weight, labels)
        log_probs, ctx.gradient = chunks
        ctx.rows = rows
        return _forward_only(hidden, weight, labels, rows, log_probs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        hidden, weight, labels = ctx.saved_tensors
        _, grad_hidden, grad_weight = _gradients(hidden, weight, labels, upstream, ctx.rows, ctx.gradient)
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _forward_only(hidden, weight, labels, rows, log_probs):
    hidden, weight = hidden.detach(), weight.detach()
    chosen = hidden.new_empty(labels.shape, dtype=torch.float32)
    for a in range(0, len(labels), rows):
        chosen[a : a + rows] = log_probs(hidden[a : a + rows], weight, labels[a : a + rows])
    return chosen


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    reduction: Literal["none", "sum"] = "none",
    chunk_size: int = 0,
    backend: str | None = None,
    shard: VocabularyShard | None = None,
) -> torch.Tensor:
    """Log-probabilities of labels under softmax(hidden @ weight^T).

    hidden [..., dim] and weight [vocab, dim] of one dtype, labels int64 [...] with IGNORE where a token isn't trained
    on; chunk_size in tokens, 0 for what suits the device; backend of torch.compile for a chunk, if any; shard
    where weight is some rows of the vocabulary. Returns float32 [...], 0 where ignored, or their sum; with every token
    ignored the gradients are zeros, not missing.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    kept = (labels.flatten() != IGNORE).nonzero().squeeze(1)
    whole = len(kept) == labels.numel()
    inputs = (flat, labels.flatten()) if whole else (flat[kept], labels.flatten()[kept])
    rows = chunk_rows(chunk_size, weight)
    chunks = _chunk_functions(backend, shard)
    if reduction == "sum":
        return _SumLogProbs.apply(inputs[0], weight, inputs[1], rows, chunks)
    chosen = _LogProbs.apply(inputs[0], weight, inputs[1], rows, chunks)
    if whole:
        return chosen.view(labels.shape)
    return chosen.new_zeros(labels.numel()).index_copy(0, kept, chosen).view(labels.shape)
