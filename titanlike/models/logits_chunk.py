"""What linear cross-entropy computes for one chunk: n tokens' hidden states against the head's weight.

All logits of these tokens, or those of this rank's rows of the vocabulary, exist at once here and nowhere else; what is
done to them passes over them as seldom as eager mode allows, in memory that all chunks share. Statistics are float32
(float64 for float64 inputs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class LogitRule:
    """How logits follow from products: cap · tanh(scale · product / cap), or scale · product without a cap.

    Gemma 2 caps (Gemma Team 2024, arXiv 2408.00118, section 2); Cohere's and Granite's models scale.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, products: torch.Tensor) -> torch.Tensor:
        logits = products if self.scale == 1.0 else products * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def backward(self, grad: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        """Gradient of the products, from the logits and theirs."""
        if self.cap is not None:
            assert logits is not None
            grad = grad * (1.0 - (logits / self.cap).square())
        return grad if self.scale == 1.0 else grad * self.scale


class Statistics(NamedTuple):
    """Of n tokens, each [n, 1]."""

    highest: torch.Tensor
    """The largest logit."""

    total: torch.Tensor
    """Σ exp(logit − highest)."""

    wanted: torch.Tensor
    """The label's logit; 0 where another rank has it."""

    moment: torch.Tensor | None
    """Σ exp(logit − highest) · (logit − highest), where the entropy is asked for."""

    @property
    def log_normaliser(self) -> torch.Tensor:
        return self.highest + self.total.log()

    @property
    def entropy(self) -> torch.Tensor:
        """In nats."""
        assert self.moment is not None
        return self.total.log() - self.moment / self.total


@dataclass(frozen=True)
class VocabularyShard:
    """Rows `first` … of a head whose other rows are on other ranks; `stack` gives every rank's x [ranks, *x.shape].

    Ranks exchange three numbers a token, four with the entropy. All of them return the same values; a rank's gradient
    of the hidden states is that through its own rows, for the caller to add up.
    """

    first: int
    stack: Callable[[torch.Tensor], torch.Tensor]

    def own(self, labels: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each label's row here (any row where it is elsewhere) and whether it is here; [n, 1] each."""
        labels = labels - self.first
        here = (labels >= 0) & (labels < rows)
        return labels.masked_fill(~here, 0), here

    def merge(self, mine: Statistics) -> Statistics:
        """The same over the whole vocabulary."""
        highest, total, wanted, *moment = self.stack(torch.stack([x for x in mine if x is not None])).unbind(1)
        largest = highest.amax(0)
        shift = highest - largest
        factor = shift.exp()
        # With another largest logit: Σ e^(l−m)(l−m) = e^(h−m) (Σ e^(l−h)(l−h) + (h−m) Σ e^(l−h)).
        moments = (factor * (moment[0] + shift * total)).sum(0) if moment else None
        return Statistics(largest, (factor * total).sum(0), wanted.sum(0), moments)


class Workspace:
    """Memory for the products of a chunk, n tokens at most, which the next chunk writes over.

    Pages that the system has to hand out anew for each chunk cost a CPU more than the product that is written there.
    """

    def __init__(self, n: int, hidden: torch.Tensor, weight: torch.Tensor, *, needs_wide: bool):
        self._products = hidden.new_empty(n, weight.shape[0])
        wide = torch.promote_types(hidden.dtype, torch.float32)
        needs_wide = needs_wide and wide != hidden.dtype
        self._wide = torch.empty_like(self._products, dtype=wide) if needs_wide else None

    def multiply(self, hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden [n, dim] @ weight^T [dim, rows], and uninitialised float32 of that shape if it is needed beside it."""
        n = len(hidden)
        products = torch.mm(hidden, weight.t(), out=self._products[:n])
        return products, None if self._wide is None else self._wide[:n]


def _statistics(products, wide, own, here, rule: LogitRule, keep: bool, with_entropy: bool):
    """exp(logits − highest) [n, rows], the logits themselves if they are to be kept, and the statistics.

    The powers take the place of the products, or of what is in `wide`, if that is given.
    """
    if wide is None:
        wide = products.to(torch.promote_types(products.dtype, torch.float32))
    else:
        wide.copy_(products)
    logits = rule(wide)
    wanted = logits.gather(1, own)
    if here is not None:
        wanted = wanted.masked_fill(~here, 0.0)
    highest = logits.amax(-1, keepdim=True)
    kept = logits.clone() if keep else None
    logits = logits.sub_(highest)
    powers = logits.exp() if with_entropy else logits.exp_()
    moment = (powers * logits).sum(-1, keepdim=True) if with_entropy else None
    return powers, kept, Statistics(highest, powers.sum(-1, keepdim=True), wanted, moment)


def _gradient(products, powers, logits, own, here, mine, whole, upstream, of_entropy, rule: LogitRule) -> None:
    """Gradient of the products in their place; powers may be overwritten. `mine`: this rank's statistics.

    With p the probabilities and H the entropy:  (onehot − p) · upstream − p (log p + H) · of_entropy
    """
    if upstream is None:
        upstream = torch.ones_like(whole.total)
    scale = (mine.highest - whole.highest).exp() / whole.total  # powers · scale = p
    if of_entropy is None:
        grad = powers.mul_(-upstream * scale)
    else:
        surprise = logits - (whole.log_normaliser - whole.entropy)
        grad = powers.mul_(scale).mul_(surprise.mul_(of_entropy).add_(upstream)).neg_()
    grad = rule.backward(grad, logits)
    of_label = rule.backward(upstream if here is None else upstream * here, _at(logits, own)) + _at(grad, own)
    products.copy_(grad)  # compiled code never holds `grad`
    products.scatter_(1, own, of_label.to(products.dtype))


def _at(values: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values.gather(1, own)


def _whole_gradient(products, wide, own, upstream, of_entropy, rule: LogitRule) -> Statistics:
    """Both, where the vocabulary is not split: one function to compile."""
    keep = of_entropy is not None or rule.cap is not None
    powers, logits, found = _statistics(products, wide, own, None, rule, keep, of_entropy is not None)
    _gradient(products, powers, logits, own, None, found, found, upstream, of_entropy, rule)
    return found


@cache
def _compiled(function, backend: str):
    return torch.compile(function, backend=backend, dynamic=True)


@dataclass(frozen=True)
class Chunk:
    """How this run computes a chunk. `backend` is torch.compile's; ranks talk outside of what is compiled."""

    rule: LogitRule = LogitRule()
    shard: VocabularyShard | None = None
    backend: str | None = None

    def workspace(self, n: int, hidden: torch.Tensor, weight: torch.Tensor) -> Workspace:
        """For chunks of n tokens at most. Compiled code widens numbers on the way."""
        return Workspace(n, hidden, weight, needs_wide=self.backend is None)

    def forward(self, hidden, weight, labels, with_entropy: bool, space: Workspace) -> Statistics:
        """Of hidden [n, dim] under weight [rows, dim]; labels [n], none of them ignored."""
        own, here = self._own(labels, weight)
        products, wide = space.multiply(hidden, weight)
        _, _, found = self._maybe_compiled(_statistics)(products, wide, own, here, self.rule, False, with_entropy)
        return self.shard.merge(found) if self.shard else found

    def gradient(
        self, hidden, weight, labels, upstream, of_entropy, space: Workspace
    ) -> tuple[torch.Tensor, Statistics]:
        """Gradient of the products [n, rows] in hidden's dtype, until `space` is used again, and the statistics.

        upstream and of_entropy [n]: gradients of the log-probabilities (None: all ones) and of the entropies (or None).
        """
        own, here = self._own(labels, weight)
        products, wide = space.multiply(hidden, weight)
        upstream, of_entropy = (None if x is None else x[:, None] for x in (upstream, of_entropy))
        if self.shard is None:
            return products, self._maybe_compiled(_whole_gradient)(products, wide, own, upstream, of_entropy, self.rule)
        with_entropy = of_entropy is not None
        keep = with_entropy or self.rule.cap is not None
        powers, logits, mine = self._maybe_compiled(_statistics)(
            products, wide, own, here, self.rule, keep, with_entropy
        )
        whole = self.shard.merge(mine)
        self._maybe_compiled(_gradient)(
            products, powers, logits, own, here, mine, whole, upstream, of_entropy, self.rule
        )
        return products, whole

    def _own(self, labels, weight):
        return (labels[:, None], None) if self.shard is None else self.shard.own(labels[:, None], weight.shape[0])

    def _maybe_compiled(self, function):
        return _compiled(function, self.backend) if self.backend else function


PLAIN = Chunk()
