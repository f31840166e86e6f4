"""The attention operator against plain scaled-dot-product attention with a dense mask."""

import pytest
import torch
import torch.nn.functional as F

from titanlike.models.document_attention import document_attention

B, S, H, K, D = 2, 40, 4, 2, 16


def _inputs(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(B, S, n, D, generator=g).to(dtype).requires_grad_() for n in (H, K, K)]


def _dense(q, k, v, offsets):
    documents = torch.bucketize(torch.arange(B * S), offsets[1:], right=True).view(B, S)
    mask = (documents[:, :, None] == documents[:, None]) & torch.ones(S, S, dtype=torch.bool).tril()
    out = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask[:, None], enable_gqa=True
    )
    return out.transpose(1, 2)


OFFSETS = {
    "rows": None,
    "documents": torch.tensor([0, 7, 8, 40, 55, 80], dtype=torch.int32),
    "padded": torch.tensor([0, 13, 40, 80, 80, 80], dtype=torch.int32),
}


@pytest.mark.parametrize("kernel", ["auto", "sdpa", "math"])
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS.keys())
def test_equals_dense_mask(kernel, offsets):
    inputs = _inputs()
    grad = torch.randn(B, S, H, D, generator=torch.Generator().manual_seed(1))
    out, lse = document_attention(*inputs, offsets, D**-0.5, kernel)
    ours = torch.autograd.grad(out, inputs, grad)
    want = _dense(*inputs, torch.tensor([0, S, 2 * S]) if offsets is None else offsets)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    for got, expected in zip(ours, torch.autograd.grad(want, inputs, grad), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)
    assert lse.shape == (B, H, S) and lse.dtype == torch.float32


def test_kernels_agree_on_log_sum_exp():
    q, k, v = _inputs()
    results = [document_attention(q, k, v, OFFSETS["documents"], 0.25, kernel)[1] for kernel in ("sdpa", "math")]
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("offsets", [None, OFFSETS["documents"]], ids=["rows", "documents"])
def test_whole_under_compile(offsets):
    """fullgraph: a compiled block stays one graph around the operator, forward and backward."""
    inputs = _inputs()

    def scaled(q, k, v):
        return document_attention(q * 2, k, v, offsets, 0.25, "auto")[0].sin()

    compiled = torch.compile(scaled, backend="aot_eager", fullgraph=True)
    for got, want in zip(
        torch.autograd.grad(compiled(*inputs).sum(), inputs),
        torch.autograd.grad(scaled(*inputs).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_operator_registration():
    """torch's own check of schema, fake kernel and autograd of a custom operator."""
    torch.library.opcheck(document_attention, (*_inputs(), OFFSETS["documents"], 0.25, "sdpa"))
