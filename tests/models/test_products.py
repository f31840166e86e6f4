"""Products in bfloat16 where the CPU has no instructions for it: the exact product, rounded once."""

import pytest
import torch

from titanlike.models import kernels, products
from titanlike.models.linear import Linear
from titanlike.models.linear_cross_entropy import linear_log_probs
from titanlike.models.products import linear

ULP = 2.0**-8


@pytest.fixture
def no_instructions(monkeypatch):
    monkeypatch.setattr(kernels, "CPU_MULTIPLIES_BF16", False)


def inputs(*shapes):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g).bfloat16().requires_grad_() for shape in shapes]


def with_gradients(function, tensors, upstream):
    out = function(*tensors)
    return out, *torch.autograd.grad(out, tensors, upstream.to(out.dtype))


@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_rounded_once(no_instructions, bias):
    tensors = inputs((3, 50, 64), (96, 64), (96,))[: 3 if bias else 2]
    upstream = torch.randn(3, 50, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = with_gradients(linear, tensors, upstream)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    want = with_gradients(torch.nn.functional.linear, exact, upstream)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype is torch.bfloat16
        assert (ours.double() - theirs).abs().max() <= ULP * theirs.abs().max()
        # Sums in float32 come out on the other side of a rounding boundary now and then.
        assert (ours != theirs.bfloat16()).float().mean() < 1e-3


def test_only_what_is_asked_for_has_a_gradient(no_instructions):
    x, weight = inputs((5, 8), (4, 8))
    linear(x.detach(), weight).sum().backward()
    assert x.grad is None and weight.grad.dtype is torch.bfloat16
    assert not linear(x.detach(), weight.detach()).requires_grad


def test_what_is_kept_is_as_narrow_as_it_came(no_instructions):
    x, weight = inputs((5, 8), (4, 8))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x, weight)
    assert [t.dtype for t in kept] == [torch.bfloat16] * 2


def test_other_types_and_cpus_are_left_alone(monkeypatch):
    x, weight = inputs((5, 8), (4, 8))
    monkeypatch.setattr(products._WideLinear, "apply", None)  # would fail if it were called
    monkeypatch.setattr(kernels, "CPU_MULTIPLIES_BF16", True)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
    monkeypatch.setattr(kernels, "CPU_MULTIPLIES_BF16", False)
    assert linear(x.float(), weight.float()).dtype is torch.float32


def test_a_compiled_layer_stays_one_graph(no_instructions):
    layer = Linear(16, 8, bias=False).bfloat16()
    (x,) = inputs((4, 16))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    got, want = (torch.autograd.grad(f(x).float().square().sum(), (x, layer.weight)) for f in (compiled, layer))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("instructions", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_the_loss_is_as_near_to_the_exact_one(monkeypatch, reduction, instructions):
    """Whether products are widened or not: values to float32's or bfloat16's accuracy, gradients to bfloat16's."""
    monkeypatch.setattr(kernels, "CPU_MULTIPLIES_BF16", instructions)
    hidden, weight = inputs((40, 32), (300, 32))
    labels = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(2))
    out = linear_log_probs(hidden, weight, labels, reduction, chunk_size=16)
    grads = torch.autograd.grad(out.sum(), (hidden, weight))
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = torch.nn.functional.linear(*exact)
    want = -torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out.double(), want, rtol=1e-2 if instructions else 1e-5, atol=0)
    for ours, theirs in zip(grads, torch.autograd.grad(want.sum(), exact), strict=True):
        assert ours.dtype is torch.bfloat16
        assert (ours.double() - theirs).norm() <= (2e-2 if instructions else 4e-3) * theirs.norm()


def test_attention_in_bfloat16_has_gradients_of_bfloat16(no_instructions):
    q, k, v = inputs((2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    out, lse = kernels.CPU.forward(q, k, v, 0.25, True)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.no_grad():
        got = kernels.CPU.backward(upstream, q, k, v, out, lse, 0.25, True)
        wide = [t.detach().double() for t in (q, k, v)]
        exact = kernels.MATH.forward(*wide, 0.25, True)
        want = kernels.MATH.backward(upstream.double(), *wide, *exact, 0.25, True)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype is torch.bfloat16
        assert (ours.double() - theirs).norm() <= 1e-2 * theirs.norm()
