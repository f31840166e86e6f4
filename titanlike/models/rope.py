"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864), neighbouring elements paired as in Meta's Llama.

Checkpoints in the Hub's layout pair element i with i + D/2 instead; their q and k projections are permuted on import.
"""

from __future__ import annotations

import math

import torch

from titanlike.models.spec import DecoderSpec, RopeScaling


def frequencies(spec: DecoderSpec) -> torch.Tensor:
    """Radians a position for each pair of elements, float32 [rope_dim / 2], always computed on CPU."""
    exponents = torch.arange(0, spec.rope_dim, 2, dtype=torch.float32, device="cpu") / spec.rope_dim
    freqs = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return freqs
    kept = {"linear": lambda: 0.0, "llama3": lambda: _kept_by_wavelength(freqs, scaling)}.get(scaling.kind)
    share = kept() if kept else _kept_by_turns(spec, scaling)
    return (1 - share) * freqs / scaling.factor + share * freqs


def _kept_by_wavelength(freqs: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: 0 where a wave is as long as the original context allows at all, 1 where it is short."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / freqs
    return ((scaling.original_max_seq_len / wavelengths - low) / (high - low)).clamp(0, 1)


def _kept_by_turns(spec: DecoderSpec, scaling: RopeScaling) -> torch.Tensor:
    """YaRN: 1 for pairs that turn more than beta_fast times within the original length, 0 below beta_slow."""

    def pair(turns: float) -> float:
        """The pair that turns so many times."""
        radians = scaling.original_max_seq_len / (turns * 2 * math.pi)
        return spec.rope_dim * math.log(radians) / (2 * math.log(spec.rope_theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.rope_dim - 1)
    pairs = torch.arange(spec.rope_dim // 2, dtype=torch.float32, device="cpu")
    return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)


def table(spec: DecoderSpec, length: int, device: torch.device | str) -> torch.Tensor:
    """Cosines and sines of positions 0 … length-1, float32 [2, length, rope_dim / 2]; the same bits on every rank."""
    if torch.device(device).type == "meta":
        return torch.empty(2, length, spec.rope_dim // 2, device=device)
    positions = torch.arange(length, dtype=torch.float32, device="cpu")
    angles = torch.outer(positions, frequencies(spec))
    factor = spec.rope_scaling.attention_factor if spec.rope_scaling else 1.0
    return (torch.stack([angles.cos(), angles.sin()]) * factor).to(device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates each pair of neighbouring elements of x [B, S, H, D]; cos and sin [S, D/2] or [B, S, D/2], in float32."""
    pairs = x.float().unflatten(-1, (-1, 2))
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if not torch.compiler.is_compiling():  # one pass instead of seven; the compiler fuses those, but knows no complex
        return torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin)).flatten(-2).to(x.dtype)
    a, b = pairs.unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).to(x.dtype)
