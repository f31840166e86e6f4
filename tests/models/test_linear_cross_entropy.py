"""Linear cross-entropy against F.cross_entropy on full logits, both measured against float64."""

import pytest
import torch
import torch.nn.functional as F

from titanlike.data.batch import IGNORE
from titanlike.models.linear_cross_entropy import linear_log_probs

N, D, V = 37, 24, 130


def _inputs(ignored: float = 0.3, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=g).mul_(0.3).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (N,), generator=g)
    labels[torch.rand(N, generator=g) < ignored] = IGNORE
    return hidden, weight, labels


def _reference(hidden, weight, labels, upstream, dtype):
    h, w = (t.detach().to(dtype).requires_grad_() for t in (hidden, weight))
    losses = F.cross_entropy(F.linear(h, w), labels, ignore_index=IGNORE, reduction="none")
    (-(losses * upstream.to(dtype)).sum()).backward()
    return -losses.detach(), h.grad, w.grad


@pytest.mark.parametrize("chunk", [1, 7, N - 1, N, N + 1, 0])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("form", ["sum", "none", "weighted"])
def test_values_and_gradients(chunk, ignored, form):
    """Errors against float64 are at most twice those of F.cross_entropy in float32, plus an ulp."""
    hidden, weight, labels = _inputs(ignored)
    upstream = torch.linspace(-1, 2, N) if form == "weighted" else torch.full((N,), 0.1)
    out = linear_log_probs(hidden, weight, labels, "sum" if form == "sum" else "none", chunk)
    (out * 0.1 if form == "sum" else (out * upstream).sum()).backward()
    exact = _reference(hidden, weight, labels, upstream, torch.float64)
    plain = _reference(hidden, weight, labels, upstream, torch.float32)
    ours = (exact[0] if form == "sum" else out.detach(), hidden.grad, weight.grad)
    if form == "sum":
        torch.testing.assert_close(out.double(), exact[0].sum(), rtol=1e-6, atol=1e-5)
    for got, want, yardstick in zip(ours, exact, plain, strict=True):
        allowed = 2 * (yardstick.double() - want).abs().max() + 2.4e-7 * want.abs().max()
        assert (got.double() - want).abs().max() <= allowed


def test_gradcheck():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 5, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, generator=g, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([IGNORE, 3, 10, 0, IGNORE, 7])
    for reduction in ("none", "sum"):
        # The log-probabilities are float32 by contract: differences are taken coarsely enough for that.
        assert torch.autograd.gradcheck(
            lambda h, w, r=reduction: linear_log_probs(h, w, labels, r, 4).double(),
            (hidden, weight),
            eps=1e-2,
            atol=1e-3,
        )


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_all_ignored_gives_zero_and_zero_gradients(reduction):
    hidden, weight, labels = _inputs()
    out = linear_log_probs(hidden, weight, torch.full_like(labels, IGNORE), reduction)
    out.sum().backward()
    assert out.sum().item() == 0
    assert hidden.grad.abs().max() == 0 == weight.grad.abs().max()


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_bf16_inputs_keep_float32_statistics(reduction):
    """bf16 inputs: each value is the exact one of the rounded inputs, to the rounding of a bf16 product."""
    hidden, weight, labels = _inputs(dtype=torch.bfloat16)
    out = linear_log_probs(hidden, weight, labels, reduction, 8)
    exact, grad_hidden, grad_weight = _reference(hidden, weight, labels, torch.ones(N), torch.float64)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact.sum() if reduction == "sum" else exact, rtol=2e-3, atol=2e-2)
    out.sum().backward()
    assert (hidden.grad.double() - grad_hidden).norm() <= 1e-2 * grad_hidden.norm()
    assert (weight.grad.double() - grad_weight).norm() <= 1e-2 * grad_weight.norm()


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_compiled_chunk(reduction):
    hidden, weight, labels = _inputs()
    results = []
    for backend in (None, "aot_eager"):
        hidden.grad = weight.grad = None
        linear_log_probs(hidden, weight, labels, reduction, 8, backend).sum().backward()
        results.append((hidden.grad, weight.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-6, atol=1e-6)
