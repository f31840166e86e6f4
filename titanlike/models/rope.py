"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864), neighbouring elements paired as in Meta's Llama.

Checkpoints in the Hub's layout pair element i with i + D/2 instead; their q and k projections are permuted on import.
"""

from __future__ import annotations

import math

import torch

from titanlike.models.spec import DecoderSpec, RopeScaling


def frequencies(spec: DecoderSpec) -> torch.Tensor:
    """Radians a position for each pair of elements, float32 [head_dim / 2], always computed on CPU."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32, device="cpu") / spec.head_dim
    freqs = 1.0 / spec.rope_theta**exponents
    return freqs if spec.rope_scaling is None else _stretch(freqs, spec.rope_scaling)


def _stretch(freqs: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: slow frequencies are divided by `factor`, fast ones kept, those between blended."""
    wavelengths = 2 * math.pi / freqs
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0 where a wave is as long as the original context allows at all, 1 where it is short.
    share = ((scaling.original_max_seq_len / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - share) * freqs / scaling.factor + share * freqs


def table(spec: DecoderSpec, length: int, device: torch.device | str) -> torch.Tensor:
    """Cosines and sines of positions 0 … length-1, float32 [2, length, head_dim / 2]; the same bits on every rank."""
    positions = torch.arange(length, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, frequencies(spec))
    return torch.stack([angles.cos(), angles.sin()]).to(device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates each pair of neighbouring elements of x [B, S, H, D]; cos and sin [S, D/2] or [B, S, D/2], in float32."""
    pairs = x.float().unflatten(-1, (-1, 2))
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if not torch.compiler.is_compiling():  # one pass instead of seven; the compiler fuses those, but knows no complex
        return torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin)).flatten(-2).to(x.dtype)
    a, b = pairs.unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)
