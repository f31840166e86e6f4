"""Floating-point operations of training, by the formula that the field compares MFU with.

Per token: 6 for each parameter that multiplies it (2 in the forward pass, 4 in the backward pass; of experts, those
that it goes to), and 12 · layers · heads · head_dim · seq_len for attention's two products (scores and weighted
values). As in TorchTitan and in the published tables,

- attention counts the full seq_len × seq_len square: nothing is taken off for the causal mask or for documents that
  don't see each other, although the kernels skip that work;
- recomputation by activation checkpointing isn't counted: MFU is of the model's work, not of the hardware's;
- the few norm weights are counted as if they were matrices (their share is about 1 / dim).
"""

from __future__ import annotations

from titanlike.models.spec import DecoderSpec


def flops_per_token(spec: DecoderSpec, seq_len: int) -> int:
    """Operations that training on one token costs, forward and backward, in sequences of `seq_len` tokens."""
    # The embedding is a look-up and costs nothing; the head is a product, also when it shares the embedding's weight.
    head = spec.vocab_size * spec.dim
    multiplied = spec.all_layers_parameters(active=True) + spec.dim + head
    # Scores and values; of latent attention, values are narrower than keys.
    widths = spec.head_dim + (spec.latent.value_dim if spec.latent else spec.head_dim)
    attention = spec.n_layers * spec.n_heads * widths * seq_len
    return 6 * multiplied + 6 * attention
