"""Linear cross-entropy against F.cross_entropy on full logits, both measured against float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.models.heads import N, full, inputs
from titanlike.data.batch import IGNORE
from titanlike.models.linear_cross_entropy import linear_log_probs, linear_log_probs_and_entropy
from titanlike.models.logits_chunk import Chunk, LogitRule

RULES = {"plain": LogitRule(), "scaled": LogitRule(scale=0.7), "capped": LogitRule(scale=1.3, cap=2.0)}


def errors_within(ours, exact, plain, factor=2.0):
    """Errors against float64 are at most `factor` times those of full logits in float32, plus two ulps."""
    for got, want, yardstick in zip(ours, exact, plain, strict=True):
        allowed = factor * (yardstick.double() - want).abs().max() + 2.4e-7 * want.abs().max()
        assert (got.double() - want).abs().max() <= allowed


@pytest.mark.parametrize("chunk", [1, 7, N - 1, N, N + 1, 0])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("form", ["sum", "none", "weighted"])
def test_values_and_gradients(chunk, ignored, form):
    hidden, weight, labels = inputs(ignored)
    labels[0] = IGNORE if ignored else labels[0]
    upstream = torch.linspace(-1, 2, N) if form == "weighted" else torch.full((N,), 0.1)
    out = linear_log_probs(hidden, weight, labels, "sum" if form == "sum" else "none", chunk_size=chunk)
    (out * 0.1 if form == "sum" else (out * upstream).sum()).backward()
    exact, plain = (full(hidden, weight, labels, upstream, dtype=d) for d in (torch.float64, torch.float32))
    if form == "sum":
        torch.testing.assert_close(out.double(), exact[0].sum(), rtol=1e-6, atol=1e-5)
        exact, plain = exact[2:], plain[2:]
        errors_within((hidden.grad, weight.grad), exact, plain)
    else:
        errors_within((out.detach(), hidden.grad, weight.grad), (exact[0], *exact[2:]), (plain[0], *plain[2:]))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunk", [7, 0])
def test_entropy_and_rules_of_logits(rule, chunk):
    hidden, weight, labels = inputs(0.3)
    upstream, of_entropy = torch.linspace(-1, 2, N), torch.linspace(2, -3, N)
    out, entropy = linear_log_probs_and_entropy(hidden, weight, labels, chunk_size=chunk, chunk=Chunk(RULES[rule]))
    ((out * upstream).sum() + (entropy * of_entropy).sum()).backward()
    exact, plain = (
        full(hidden, weight, labels, upstream, of_entropy, RULES[rule], d) for d in (torch.float64, torch.float32)
    )
    errors_within((out.detach(), entropy.detach(), hidden.grad, weight.grad), exact, plain)


@pytest.mark.parametrize("rule", ["scaled", "capped"])
def test_the_sum_follows_the_rule_of_logits(rule):
    hidden, weight, labels = inputs(0.3)
    linear_log_probs(hidden, weight, labels, "sum", chunk_size=7, chunk=Chunk(RULES[rule])).backward()
    exact, plain = (
        full(hidden, weight, labels, torch.ones(N), rule=RULES[rule], dtype=d) for d in (torch.float64, torch.float32)
    )
    errors_within((hidden.grad, weight.grad), exact[2:], plain[2:])


def test_gradcheck():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 5, generator=g, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 5, generator=g, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([IGNORE, 3, 10, 0, IGNORE, 7])
    for rule in RULES.values():
        chunk = Chunk(rule)
        for reduction in ("none", "sum"):
            assert torch.autograd.gradcheck(
                lambda h, w, r=reduction, c=chunk: linear_log_probs(h, w, labels, r, chunk_size=4, chunk=c),
                (hidden, weight),
            )
        assert torch.autograd.gradcheck(
            lambda h, w, c=chunk: linear_log_probs_and_entropy(h, w, labels, chunk_size=4, chunk=c), (hidden, weight)
        )


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_all_ignored_gives_zero_and_zero_gradients(reduction):
    hidden, weight, labels = inputs()
    out = linear_log_probs(hidden, weight, torch.full_like(labels, IGNORE), reduction)
    out.sum().backward()
    assert out.sum().item() == 0
    assert hidden.grad.abs().max() == 0 == weight.grad.abs().max()


def test_backward_twice():
    """As a pipeline's schedule does that splits the backward: once for the hidden states, once for the weight."""
    hidden, weight, labels = inputs()
    out = linear_log_probs(hidden, weight, labels, "sum") * 0.1
    (of_hidden,) = torch.autograd.grad(out, hidden, retain_graph=True)
    (of_weight,) = torch.autograd.grad(out, weight)
    out = linear_log_probs(hidden, weight, labels, "sum") * 0.1
    for got, want in zip((of_hidden, of_weight), torch.autograd.grad(out, (hidden, weight)), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_bf16_inputs_keep_float32_statistics(reduction):
    """bf16 inputs: each value is the exact one of the rounded inputs, to the rounding of a bf16 product."""
    hidden, weight, labels = inputs(dtype=torch.bfloat16)
    out = linear_log_probs(hidden, weight, labels, reduction, chunk_size=8)
    exact, _, grad_hidden, grad_weight = full(hidden, weight, labels, torch.ones(N))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), exact.sum() if reduction == "sum" else exact, rtol=2e-3, atol=2e-2)
    out.sum().backward()
    assert (hidden.grad.double() - grad_hidden).norm() <= 1e-2 * grad_hidden.norm()
    assert (weight.grad.double() - grad_weight).norm() <= 1e-2 * grad_weight.norm()


@pytest.mark.parametrize("rule", RULES)
def test_compiled_chunk(rule):
    results = []
    for backend in (None, "aot_eager"):
        hidden, weight, labels = inputs()
        chunk = Chunk(RULES[rule], backend=backend)
        linear_log_probs(hidden, weight, labels, "sum", chunk_size=8, chunk=chunk).backward()
        linear_log_probs(hidden, weight, labels, chunk_size=8, chunk=chunk).sum().backward()
        out, entropy = linear_log_probs_and_entropy(hidden, weight, labels, chunk_size=8, chunk=chunk)
        (out.sum() - entropy.square().sum()).backward()
        results.append((out.detach(), entropy.detach(), hidden.grad, weight.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world", [2, 4])
def test_a_vocabulary_over_ranks(pool, world):
    """Rows that don't divide, each rule, at two ranks compiled too: every rank's values, the gradients together."""
    cases = list(itertools.product(RULES.values(), (None, "aot_eager") if world == 2 else (None,)))
    ranks = pool.run("tests.models.heads:over_ranks", world=world, cases=cases)
    for i, (rule, _) in enumerate(cases):
        hidden, weight, labels = inputs()
        upstream, of_entropy = torch.linspace(-1, 2, N), torch.linspace(2, -3, N)
        exact, plain = (
            full(hidden, weight, labels, upstream, of_entropy, rule, d) for d in (torch.float64, torch.float32)
        )
        results = [rank[i] for rank in ranks]
        for result in results:
            errors_within(result[:2], exact[:2], plain[:2])
        together = sum(r[2].double() for r in results), torch.cat([r[3] for r in results])
        errors_within(together, exact[2:], plain[2:])


def test_no_table_of_logits_is_made():
    """Whatever is allocated stays well below [tokens, vocab]."""
    tokens, dim, vocab = 512, 32, 4096
    hidden = torch.randn(tokens, dim, requires_grad=True)
    weight = torch.randn(vocab, dim, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    for reduction in ("sum", "none"):
        with torch.profiler.profile(profile_memory=True) as profile:
            linear_log_probs(hidden, weight, labels, reduction, chunk_size=32).sum().backward()
        largest = max(e.self_cpu_memory_usage for e in profile.events())
        assert largest <= max(32 * vocab, dim * vocab) * 4


def test_torch_has_the_same_function():
    """Where torch has linear cross-entropy, its values are ours."""
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        pytest.skip("torch < 2.13 has no F.linear_cross_entropy")
    hidden, weight, labels = inputs(0.0)
    theirs = function(hidden, weight, labels, reduction="none")
    torch.testing.assert_close(-linear_log_probs(hidden, weight, labels), theirs, rtol=1e-6, atol=1e-6)
