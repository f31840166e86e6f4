"""The one decoder: every family is this transformer with other numbers.

The model speaks of the model alone. How its modules shard, checkpoint and compile is decided elsewhere, by walking it.
Parameter names are those of TorchTitan's Llama, so that its checkpoints can be continued.

    tokens → tok_embeddings → layers (norm → attention → +, norm → feed-forward → +) → norm → output (head)

A pipeline stage is the same decoder with some modules left out; names and initial values stay those of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from titanlike.models import rope
from titanlike.models.attention import Attention, KVCache
from titanlike.models.dropout import Dropout, layer_keys
from titanlike.models.head import Head
from titanlike.models.linear import Linear
from titanlike.models.spec import DecoderSpec, Part

_STD = 0.02


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019, arXiv 1910.07467); statistics in float32."""

    tensor_styles: ClassVar = {"": "replicated"}

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., dim]; a `weight` in hand takes the place of the module's own."""
        return F.rms_norm(x, x.shape[-1:], self.weight if weight is None else weight, self.eps)


class FeedForward(nn.Module):
    """SwiGLU feed-forward (Shazeer 2020, arXiv 2002.05202): w2(silu(w1 x) * w3 x)."""

    tensor_styles: ClassVar = {"w1": "colwise", "w3": "colwise", "w2": "rowwise"}

    def __init__(self, spec: DecoderSpec):
        super().__init__()
        self.w1 = Linear(spec.dim, spec.ffn_dim, bias=False)
        self.w2 = Linear(spec.ffn_dim, spec.dim, bias=False)
        self.w3 = Linear(spec.dim, spec.ffn_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, spec: DecoderSpec, layer: int, kernel: str):
        super().__init__()
        self.attention = Attention(spec, layer, kernel)
        self.feed_forward = FeedForward(spec)
        self.attention_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.ffn_norm = RMSNorm(spec.dim, spec.norm_eps)
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
        h = x + (attended if self.dropout is None else self.dropout(attended, keys, 0))
        forwarded = self.feed_forward(self.ffn_norm(h))
        return h + (forwarded if self.dropout is None else self.dropout(forwarded, keys, 1))


class Decoder(nn.Module):
    """A decoder-only transformer of `spec`'s sizes, or the `part` of it that a pipeline stage holds.

    `seq_len` is the longest row it will see (default: the spec's). Modules that a part doesn't hold don't exist in it.
    """

    tensor_styles: ClassVar = {"tok_embeddings": "vocabulary"}

    rope_table: torch.Tensor
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
            self.norm = RMSNorm(spec.dim, spec.norm_eps)
            self.output = Head(spec, implementation=loss, chunk_size=chunk_size)
        self.register_buffer("rope_table", self._rope_table(next(self.parameters()).device), persistent=False)

    def _rope_table(self, device: torch.device) -> torch.Tensor:
        if device.type == "meta":
            return torch.empty(2, self.seq_len, self.spec.head_dim // 2, device=device)
        return rope.table(self.spec, self.seq_len, device)

    def reset_buffers(self, device: torch.device | str) -> None:
        """Recomputes what is derived from the spec, after the model was built on the meta device."""
        self.rope_table = self._rope_table(torch.device(device))

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
        h = self.tok_embeddings(inputs) if self.part.first else inputs
        cos, sin = self.rope_table[:, : inputs.shape[1]] if positions is None else self.rope_table[:, positions]
        for i, (layer, block) in enumerate(self.layers.items()):
            keys = None if dropout_keys is None else layer_keys(dropout_keys, int(layer))
            h = block(h, (cos, sin), offsets, *((caches[i], positions) if caches else (None, None)), keys)
        if not self.part.last:
            return h
        h = self.norm(h)
        return h if labels is None else self.output(h, labels, self.tied_weight, reduction)

    @property
    def tied_weight(self) -> torch.Tensor | None:
        """The embedding's weight where the head shares it, else None."""
        return self.tok_embeddings.weight if self.spec.tied_head else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Full logits [..., vocabulary] of hidden states [..., dim]; for generation and tests, never for training."""
        return self.output.logits(hidden, self.tied_weight)

    def all_parameter_names(self) -> set[str]:
        """The names of the whole model's parameters, also those that this part doesn't hold."""
        with torch.device("meta"):
            return {name for name, _ in Decoder(self.spec).named_parameters()}

    def initial_stds(self) -> Iterator[tuple[str, float | None]]:
        """Standard deviation of each parameter's initial values, by name; None for ones (norms).

        As Llama's own code: 0.02, projections back into the residual stream scaled down with depth. A head of its own
        starts lower (logits of variance 1/4), so that the first loss is that of a uniform guess at any width.
        """
        for name, _ in self.named_parameters():
            if "norm" in name:
                yield name, None
            elif name.startswith("layers.") and name.endswith((".wo.weight", ".w2.weight")):
                yield name, _STD / (2 * (int(name.split(".")[1]) + 1)) ** 0.5
            elif name.startswith("output."):
                yield name, 0.5 * self.spec.dim**-0.5
            elif name.startswith("tok_embeddings.") and not self.spec.tied_head:
                yield name, 1.0
            else:
                yield name, _STD
