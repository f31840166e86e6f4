"""Mixture of experts in the feed-forward's place: a router, stacked experts, and what keeps them evenly used.

    tokens → router: weights of the chosen experts → tokens sorted by expert → experts → back, weighted and added up

No token is dropped: experts take as many as come. Names are TorchTitan's. How experts are spread over ranks is decided
elsewhere (`parallel/expert.py`), in place of `Experts.route`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from titanlike.models.linear import Linear
from titanlike.models.spec import DecoderSpec, Experts

_ALIGNMENT = 16  # bytes; of rows that the grouped product takes


def gate(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The gate's activation by the spec's name."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")


class FeedForward(nn.Module):
    """Gated feed-forward (Shazeer 2020, arXiv 2002.05202): w2(activation(w1 x) * w3 x)."""

    tensor_styles: ClassVar = {"w1": "colwise", "w3": "colwise", "w2": "rowwise"}

    def __init__(self, spec: DecoderSpec, ffn_dim: int | None = None):
        super().__init__()
        self.activation = spec.activation
        width = ffn_dim or spec.ffn_dim
        self.w1 = Linear(spec.dim, width, bias=spec.ffn_bias)
        self.w2 = Linear(width, spec.dim, bias=spec.ffn_bias)
        self.w3 = Linear(spec.dim, width, bias=spec.ffn_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(gate(self.w1(x), self.activation) * self.w3(x))


class Router(nn.Module):
    """Which experts a token goes to, and with what weights; scores in float32."""

    tensor_styles: ClassVar = {"gate": "shared"}

    def __init__(self, spec: DecoderSpec, experts: Experts):
        super().__init__()
        self.rule = experts
        self.in_turn = False  # for measuring: experts are chosen one after the other, whatever the scores
        self.gate = RouterGate(spec.dim, experts.n_experts, bias=False)

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, dim] → weights float32 [T, k], chosen int64 [T, k], scores float32 [T, E], logits float32 [T, E].

        `bias` [E] counts in choosing only (Wang et al. 2024, arXiv 2408.15664).
        """
        rule = self.rule
        logits = self.gate(x)
        scores = logits.softmax(-1) if rule.score == "softmax" else logits.sigmoid()
        with torch.no_grad():
            wanted = scores if bias is None else scores + bias
            if rule.n_groups > 1:
                wanted = self._of_best_groups(wanted)
            chosen = self._next_ones(len(x), x.device) if self.in_turn else wanted.topk(rule.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        if rule.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * rule.scale, chosen, scores, logits

    def _next_ones(self, tokens: int, device: torch.device) -> torch.Tensor:
        return (torch.arange(tokens * self.rule.top_k, device=device) % self.rule.n_experts).view(tokens, -1)

    def _of_best_groups(self, wanted: torch.Tensor) -> torch.Tensor:
        """Only experts of the groups whose two best add up to most (DeepSeek-AI 2024, arXiv 2412.19437, 2.1.2)."""
        groups = wanted.unflatten(-1, (self.rule.n_groups, -1))
        best = groups.topk(2, -1).values.sum(-1).topk(self.rule.top_groups, -1).indices
        kept = torch.zeros(groups.shape[:-1], dtype=torch.bool, device=wanted.device).scatter_(-1, best, True)
        return groups.masked_fill(~kept[..., None], float("-inf")).flatten(-2)


class RouterGate(Linear):
    """A linear layer in float32, whatever comes in."""

    exact = True

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x.float(), weight.float(), bias)


class StackedExperts(nn.Module):
    """All experts' matrices, one tensor a kind: w1 and w3 [E, ffn_dim, dim], w2 [E, dim, ffn_dim]."""

    def __init__(self, spec: DecoderSpec, experts: Experts):
        super().__init__()
        self.activation = spec.activation
        shape = experts.n_experts, experts.ffn_dim, spec.dim
        self.w1 = nn.Parameter(torch.empty(shape))
        self.w2 = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))
        self.w3 = nn.Parameter(torch.empty(shape))

    def weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """w1, w2 and w3, as far as this rank has them."""
        return self.w1, self.w2, self.w3

    def compute(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """x [N, dim], sorted by expert, of which expert e takes the next counts[e] rows → [N, dim]."""
        w1, w2, w3 = (weight.to(x.dtype) for weight in self.weights())
        h = gate(grouped_product(x, w1, counts), self.activation) * grouped_product(x, w3, counts)
        return grouped_product(h, w2, counts)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """x [T, dim] with weights and experts [T, k] → [T, dim]: the chosen experts' outputs, weighted and added."""
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.w1.shape[0])
        out = self.exchange(x[order // chosen.shape[1]], counts)
        # Back in the tokens' own order, where adding up is in a fixed order too.
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        each = out[back].unflatten(0, chosen.shape)
        return (each.float() * weights[..., None]).sum(1).to(x.dtype)

    def exchange(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """`compute`, wherever the experts are; counts [E] of all of them."""
        return self.compute(x, counts)


def grouped_product(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows of x [N, in], in groups of counts [E], each times its own matrix of weight [E, out, in] → [N, out]."""
    aligned = all(size * x.element_size() % _ALIGNMENT == 0 for size in weight.shape[1:])
    if aligned and len(x) and _takes_groups(x):
        offsets = counts.cumsum(0).to(torch.int32)
        return F.grouped_mm(x.contiguous(), weight.transpose(-2, -1), offs=offsets)
    parts = x.split(counts.tolist())
    return torch.cat([F.linear(part, one) for part, one in zip(parts, weight.unbind(), strict=True)])


def _takes_groups(x: torch.Tensor) -> bool:
    if not hasattr(F, "grouped_mm"):
        return False
    return x.device.type == "cpu" or x.dtype is torch.bfloat16


class _Injected(torch.autograd.Function):
    """Passes x on; in the backward, `loss` gets the gradient `share`, and `counts` are added to `total`.

    So a loss on the side needs no way out of the model, whose stages have one output each; and what is counted is
    counted once, although a recomputed forward runs twice.
    """

    @staticmethod
    def forward(ctx, x, loss, balance, counts):
        ctx.balance = balance
        ctx.save_for_backward(loss, counts)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        loss, counts = ctx.saved_tensors
        ctx.balance.add(loss, counts)
        return grad, torch.full_like(loss, ctx.balance.share), None, None


class Balance:
    """Of one layer: how often each expert was chosen since the last update, and what its own losses were.

    `share` is what one row's loss counts for in the step. `across` adds tensors up over the ranks that hold other
    tokens of the same rows; `copies` of this rank compute the same tokens.
    """

    def __init__(self, n_experts: int):
        self.share = 1.0
        self.copies = 1
        self.across = lambda tensor: tensor
        self.n_experts = n_experts
        self.reset()

    def reset(self) -> None:
        self.counts: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None

    def add(self, loss: torch.Tensor, counts: torch.Tensor) -> None:
        loss = loss.detach() * self.share
        self.counts = counts if self.counts is None else self.counts + counts
        self.loss = loss if self.loss is None else self.loss + loss


class MoE(nn.Module):
    """Routed experts and, where the spec has them, shared ones that every token goes through."""

    expert_bias: torch.Tensor | None

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        assert spec.experts is not None
        rule = self.rule = spec.experts
        self.router = Router(spec, rule)
        self.experts = StackedExperts(spec, rule)
        self.shared_experts = FeedForward(spec, rule.n_shared * rule.ffn_dim) if rule.n_shared else None
        self.register_buffer("expert_bias", torch.zeros(rule.n_experts) if rule.bias else None)
        self.balance = Balance(rule.n_experts)

    def forward(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """x [B, S, dim] → the same; tokens from `length` on are padding."""
        out = self.routed(x, length)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    @torch.compiler.disable
    def routed(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """What the routed experts make of x [B, S, dim]."""
        weights, chosen, scores, logits = self.router(x.flatten(0, 1), self.expert_bias)
        out = self.experts(x.flatten(0, 1), weights, chosen).view_as(x)
        if not (self.training and torch.is_grad_enabled()):
            return out
        rows = (t.unflatten(0, x.shape[:2])[:, :length] for t in (scores, logits, chosen))
        loss, counts = self._side(*rows)
        return _Injected.apply(out, loss, self.balance, counts)

    def _side(
        self, scores: torch.Tensor, logits: torch.Tensor, chosen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's share of the losses on the side, and how often its tokens chose each expert [E].

        Balance by row: α · E / (k · n²) · Σ over experts of (how often it is chosen) · (sum of its normed scores), over
        the row's n tokens (arXiv 2412.19437, equations 17-20; Fedus et al. 2021, arXiv 2101.03961). z-loss: the mean of
        the squared log-normaliser over the row (Zoph et al. 2022, arXiv 2202.08906). A row's losses don't depend on
        how its tokens are spread.
        """
        rule, balance = self.rule, self.balance
        picked = torch.zeros_like(scores).scatter_(-1, chosen, 1.0).sum(1)  # [B, E]
        length = balance.across(torch.tensor([float(scores.shape[1])], device=scores.device))
        loss = scores.new_zeros(())
        if rule.balance_loss:
            often = balance.across(picked)
            normed = scores / (scores.sum(-1, keepdim=True) + 1e-20)
            by_row = (often * normed.sum(1)).sum(-1) * rule.n_experts / (rule.top_k * length**2)
            loss = loss + rule.balance_loss * by_row.sum()
        if rule.z_loss:
            loss = loss + rule.z_loss * (logits.logsumexp(-1).square() / length).sum()
        return loss / balance.copies, picked.sum(0) / balance.copies

    def reset_buffers(self, device: torch.device | str) -> None:
        """After the model was built on the meta device."""
        if self.expert_bias is not None:
            self.expert_bias = torch.zeros(self.rule.n_experts, device=device)
