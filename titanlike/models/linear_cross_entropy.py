"""Linear cross-entropy: from hidden states and the head's weight to log-probabilities, never holding [tokens, vocab].

Tokens that aren't trained on are left out before the projection; the rest goes through in chunks. Two forms:

- "sum": every token counts alike, so the gradients are known up to one factor and are taken chunk by chunk in the
  forward, while a chunk's probabilities are still in cache; the backward only scales them.
- "none": the gradient of each token arrives in the backward, which projects each chunk once more.

Statistics and the weight's gradient are float32 whatever the inputs are (float64 for float64 inputs).
"""

from __future__ import annotations

from typing import Literal

import torch

from titanlike.data.batch import IGNORE
from titanlike.models import kernels
from titanlike.models.logits_chunk import PLAIN, Chunk
from titanlike.models.products import widened

# Bytes of a chunk's float32 logits that keep the passes over them inside a CPU's last-level cache; GPUs want larger
# matrix products instead.
_CPU_CHUNK_BYTES = 32 << 20
_GPU_CHUNK_BYTES = 1 << 30


def chunk_rows(wanted: int, weight: torch.Tensor) -> int:
    """Tokens a chunk: what the config says, or what suits the device, the vocabulary and the width.

    Each chunk reads and writes the weight's whole gradient: with a fraction of the width as its rows that stays below
    what the passes over the logits cost, however large the vocabulary.
    """
    if wanted:
        return wanted
    vocab, dim = weight.shape
    budget = _CPU_CHUNK_BYTES if weight.device.type == "cpu" else _GPU_CHUNK_BYTES
    return max(64, dim // 2, budget // (4 * vocab))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _forward(hidden, weight, labels, rows, chunk: Chunk, with_entropy: bool):
    """Log-probabilities [n] and, if asked for, entropies [n]; no gradients."""
    chosen = hidden.new_empty(labels.shape, dtype=_wide(hidden))
    hidden, weight = widened(hidden.detach()), widened(weight.detach())
    entropy = torch.empty_like(chosen) if with_entropy else None
    space = chunk.workspace(min(rows, len(labels)), hidden, weight)
    for a in range(0, len(labels), rows):
        part = slice(a, a + rows)
        found = chunk.forward(hidden[part], weight, labels[part], with_entropy, space)
        chosen[part] = (found.wanted - found.log_normaliser).squeeze(1)
        if entropy is not None:
            entropy[part] = found.entropy.squeeze(1)
    return chosen, entropy


def _gradients(hidden, weight, labels, upstream, of_entropy, rows, chunk: Chunk):
    """Log-probabilities [n], gradient of hidden [n, dim] and of weight (wide), chunk by chunk."""
    chosen = hidden.new_empty(labels.shape, dtype=_wide(hidden))
    grad_hidden = torch.empty_like(hidden)
    hidden, weight = widened(hidden.detach()), widened(weight.detach())
    grad_weight = None
    space = chunk.workspace(min(rows, len(labels)), hidden, weight)
    for a in range(0, len(labels), rows):
        part = slice(a, a + rows)
        up, of = (None if x is None else x[part] for x in (upstream, of_entropy))
        grad_logits, found = chunk.gradient(hidden[part], weight, labels[part], up, of, space)
        chosen[part] = (found.wanted - found.log_normaliser).squeeze(1)
        if hidden.dtype == grad_hidden.dtype:
            torch.mm(grad_logits, weight, out=grad_hidden[part])
        else:
            grad_hidden[part] = grad_logits @ weight
        grad_weight = _plus(grad_weight, grad_logits, hidden[part])
    if grad_weight is None:
        grad_weight = torch.zeros(weight.shape, dtype=_wide(weight), device=weight.device)
    return chosen, grad_hidden, grad_weight


def _plus(total: torch.Tensor | None, grad_logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """total [vocab, dim], wide, + grad_logits^T [vocab, n] @ hidden [n, dim]; in place where there is a total."""
    if total is None:
        return (grad_logits.t() @ hidden).to(_wide(hidden))
    if hidden.dtype == total.dtype:
        return total.addmm_(grad_logits.t(), hidden)
    return total.add_(grad_logits.t() @ hidden)


class _SumLogProbs(torch.autograd.Function):
    """Σ log p(label); gradients taken in the forward."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, rows, chunk):
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            return _forward(hidden, weight, labels, rows, chunk, False)[0].sum()
        chosen, *gradients = _gradients(hidden, weight, labels, None, None, rows, chunk)
        ctx.save_for_backward(*gradients)
        ctx.weight_dtype = weight.dtype
        return chosen.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream):
        grad_hidden, grad_weight = ctx.saved_tensors
        # A pipeline's schedule that splits the backward asks twice; else the gradient's own memory is used. Straight
        # into the weight's type: a float32 copy on the way would be as large as the weight.
        if ctx.weight_dtype == grad_weight.dtype and not kernels.graph_is_kept():
            scaled = grad_weight
        else:
            scaled = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
        return grad_hidden * upstream, torch.mul(grad_weight, upstream, out=scaled), None, None, None


class _LogProbs(torch.autograd.Function):
    """log p(label) of each token, and its entropy if asked for; gradients by projecting again in the backward."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, rows, chunk, with_entropy):
        ctx.save_for_backward(hidden, weight, labels)
        ctx.chunk, ctx.rows = chunk, rows
        return _forward(hidden, weight, labels, rows, chunk, with_entropy)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream, of_entropy):
        hidden, weight, labels = ctx.saved_tensors
        _, *gradients = _gradients(hidden, weight, labels, upstream, of_entropy, ctx.rows, ctx.chunk)
        return gradients[0], gradients[1].to(weight.dtype), None, None, None, None


class _Kept:
    """The tokens that are trained on, out of all; what is computed of them goes back to its place."""

    def __init__(self, hidden: torch.Tensor, labels: torch.Tensor):
        self._shape = labels.shape
        self.hidden, self.labels = hidden.reshape(-1, hidden.shape[-1]), labels.flatten()
        kept = (self.labels != IGNORE).nonzero().squeeze(1)
        self._kept = None if len(kept) == labels.numel() else kept
        if self._kept is not None:
            self.hidden, self.labels = self.hidden[kept], self.labels[kept]

    def back(self, values: torch.Tensor) -> torch.Tensor:
        """values [n] as the labels were shaped, 0 where ignored."""
        if self._kept is not None:
            values = values.new_zeros(self._shape.numel()).index_copy(0, self._kept, values)
        return values.view(self._shape)


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    reduction: Literal["none", "sum"] = "none",
    *,
    chunk_size: int = 0,
    chunk: Chunk = PLAIN,
) -> torch.Tensor:
    """Log-probabilities of labels under the logits hidden @ weight^T.

    hidden [..., dim] and weight [vocab, dim] of one dtype, labels int64 [...] with IGNORE where a token isn't trained
    on; chunk_size in tokens, 0 for what suits the device. Returns float32 [...], 0 where ignored, or their sum; with
    every token ignored the gradients are zeros, not missing.
    """
    kept, rows = _Kept(hidden, labels), chunk_rows(chunk_size, weight)
    if reduction == "sum":
        return _SumLogProbs.apply(kept.hidden, weight, kept.labels, rows, chunk)
    return kept.back(_LogProbs.apply(kept.hidden, weight, kept.labels, rows, chunk, False)[0])


def linear_log_probs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk_size: int = 0,
    chunk: Chunk = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `linear_log_probs` without reduction, and the entropy of each token's distribution in nats; both [...]."""
    kept, rows = _Kept(hidden, labels), chunk_rows(chunk_size, weight)
    found = _LogProbs.apply(kept.hidden, weight, kept.labels, rows, chunk, True)
    return kept.back(found[0]), kept.back(found[1])
