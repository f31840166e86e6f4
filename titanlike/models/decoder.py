"""The one decoder: every family is this transformer with other numbers.

The model speaks of the model alone. How its modules shard, checkpoint and compile is decided elsewhere, by walking it.
Parameter names are those of TorchTitan's Llama, so that its checkpoints can be continued.

    tokens → tok_embeddings → layers (norm → attention → +, norm → feed-forward → +) → norm → output (head)

A pipeline stage is the same decoder with some modules left out; names and initial values stay those of the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from torch import nn

from titanlike.models import rope
from titanlike.models.attention import Attention, KVCache, LatentAttention
from titanlike.models.dropout import Dropout, layer_keys
from titanlike.models.head import Head
from titanlike.models.moe import FeedForward, MoE
from titanlike.models.norm import RMSNorm
from titanlike.models.spec import DecoderSpec, Part

_STD = 0.02


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, spec: DecoderSpec, layer: int, kernel: str):
        super().__init__()
        self.attention = (Attention if spec.latent is None else LatentAttention)(spec, layer, kernel)
        is_dense = spec.experts is None or layer in spec.experts.dense_layers
        self.feed_forward = FeedForward(spec) if is_dense else None
        self.moe = None if is_dense else MoE(spec)
        self.attention_norm, self.ffn_norm = _norm(spec), _norm(spec)
        self.attention_post_norm = _norm(spec) if spec.sandwich_norms else None
        self.ffn_post_norm = _norm(spec) if spec.sandwich_norms else None
        self.dropout = Dropout(spec.dropout) if spec.dropout else None

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        offsets: torch.Tensor | None = None,
        cache: KVCache | None = None,
        positions: torch.Tensor | None = None,
        keys: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attended = self.attention(self.attention_norm(x), rope, offsets, cache, positions)
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm(attended)
        h = x + (attended if self.dropout is None else self.dropout(attended, keys, 0))
        normed = self.ffn_norm(h)
        forwarded = self.moe(normed, rope[0].shape[-2]) if self.feed_forward is None else self.feed_forward(normed)
        if self.ffn_post_norm is not None:
            forwarded = self.ffn_post_norm(forwarded)
        return h + (forwarded if self.dropout is None else self.dropout(forwarded, keys, 1))


def _norm(spec: DecoderSpec) -> RMSNorm:
    return RMSNorm(spec.dim, spec.norm_eps, spec.norm_offset)


class Decoder(nn.Module):
    """A decoder-only transformer of `spec`'s sizes, or the `part` of it that a pipeline stage holds.

    `seq_len` is the longest row it will see (default: the spec's). Modules that a part doesn't hold don't exist in it.
    """

    tensor_styles: ClassVar = {"tok_embeddings": "vocabulary"}

    rope_table: torch.Tensor
    windowed_rope_table: torch.Tensor | None
    tok_embeddings: nn.Embedding
    norm: RMSNorm
    output: Head

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        kernel: str = "auto",
        seq_len: int | None = None,
        loss: Literal["linear", "logits"] = "linear",
        chunk_size: int = 0,
        part: Part | None = None,
    ):
        super().__init__()
        self.spec = spec
        self.part = part or Part.whole(spec)
        self.seq_len = seq_len or spec.max_seq_len
        if self.part.holds_embedding(spec):
            self.tok_embeddings = nn.Embedding(spec.vocab_size, spec.dim)
        # A dict keeps each layer's number in its name when a pipeline stage holds only some of them.
        self.layers = nn.ModuleDict({str(i): Block(spec, i, kernel) for i in self.part.layers})
        if self.part.last:
            self.norm = _norm(spec)
            self.output = Head(spec, implementation=loss, chunk_size=chunk_size)
        self.register_buffer("rope_table", None, persistent=False)
        self.register_buffer("windowed_rope_table", None, persistent=False)
        self.reset_buffers(next(self.parameters()).device)

    def reset_buffers(self, device: torch.device | str) -> None:
        """Computes what is derived from the spec; anew after the model was built on the meta device."""
        spec = self.spec
        self.rope_table = rope.table(spec, self.seq_len, device)
        if spec.windowed_rope_theta is not None:
            windowed = dataclasses.replace(spec, rope_theta=spec.windowed_rope_theta, rope_scaling=None)
            self.windowed_rope_table = rope.table(windowed, self.seq_len, device)

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
        *,
        labels: torch.Tensor | None = None,
        reduction: Literal["none", "sum"] = "none",
        caches: list[KVCache] | None = None,
        dropout_keys: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [B, S, dim] after the last norm, or, given labels [B, S], their log-probabilities.

        inputs: tokens int64 [B, S], or, in a part that isn't the first, the hidden states [B, S, dim] of the part
        before; a part that isn't the last gives such. positions int64 [B, S] (default: 0 … S-1); offsets int32 [n + 1]
        or None as in `document_attention`. Log-probabilities are float32 [B, S], 0 where the label is ignored; with
        reduction "sum" their sum. With caches, tokens continue each row at `positions`. dropout_keys int64 [B, S] of
        `token_keys`, without which nothing is dropped.
        """
        h = self._embed(inputs) if self.part.first else inputs
        angles = self._angles(self.rope_table, inputs.shape[1], positions)
        windowed = self.windowed_rope_table
        windowed_angles = angles if windowed is None else self._angles(windowed, inputs.shape[1], positions)
        for i, (layer, block) in enumerate(self.layers.items()):
            keys = None if dropout_keys is None else layer_keys(dropout_keys, int(layer))
            own = windowed_angles if self.spec.window_of(int(layer)) else angles
            h = block(h, own, offsets, *((caches[i], positions) if caches else (None, None)), keys)
        if not self.part.last:
            return h
        h = self.norm(h)
        return h if labels is None else self.output(h, labels, self.tied_weight, reduction)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        if self.spec.embedding_scale == 1.0:
            return h
        # As a number of the computation's type, like those who trained such models.
        return h * torch.full((), self.spec.embedding_scale, dtype=h.dtype, device=h.device)

    @staticmethod
    def _angles(table: torch.Tensor, length: int, positions: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = table[:, :length] if positions is None else table[:, positions]
        return cos, sin

    @property
    def tied_weight(self) -> torch.Tensor | None:
        """The embedding's weight where the head shares it, else None."""
        return self.tok_embeddings.weight if self.spec.tied_head else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Full logits [..., vocabulary] of hidden states [..., dim]; for generation and tests, never for training."""
        return self.output.logits(hidden, self.tied_weight)

    def all_parameter_names(self) -> set[str]:
        """The names of the whole model's parameters, also those that this part doesn't hold."""
        return set(parameter_shapes(self.spec))

    def initial_stds(self) -> Iterator[tuple[str, float | None]]:
        """Standard deviation of each parameter's initial values, by name; None for ones (norms without offset).

        As Llama's own code: 0.02, projections back into the residual stream scaled down with depth. A head of its own
        starts lower (logits of variance 1/4), so that the first loss is that of a uniform guess at any width.
        """
        for name, _ in self.named_parameters():
            if "norm" in name:
                yield name, 0.0 if self.spec.norm_offset else None
            elif name.endswith(".bias"):
                yield name, 0.0
            elif name.startswith("layers.") and name.endswith((".wo.weight", ".w2.weight", ".w2")):
                yield name, _STD / (2 * (int(name.split(".")[1]) + 1)) ** 0.5
            elif name.startswith("output."):
                yield name, 0.5 * self.spec.dim**-0.5
            elif name.startswith("tok_embeddings.") and not self.spec.tied_head:
                yield name, 1.0 / self.spec.embedding_scale
            else:
                yield name, _STD


def parameter_shapes(spec: DecoderSpec) -> dict[str, torch.Size]:
    """Names and shapes of all that a whole model keeps: parameters, and buffers that are saved."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in Decoder(spec).state_dict().items()}
