"""What a decoder is made of, as plain numbers. Imports no torch, so that reading a config stays instant."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titanlike.config.registry import Registry
from titanlike.errors import ConfigError

if TYPE_CHECKING:
    from titanlike.config import Config


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's stretch of rotary frequencies beyond the context length of the first training phase."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """Sizes and kinds of one decoder-only transformer."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int = 8192
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    tied_head: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    dropout: float = 0.0

    def problems(self) -> list[str]:
        """What doesn't fit together, each as 'field = value: reason'; empty when the decoder can be built."""
        found = [
            f"{f.name} = {getattr(self, f.name)}: must be positive"
            for f in dataclasses.fields(self)
            if f.type == "int" and getattr(self, f.name) <= 0
        ]
        if not found and self.n_heads % self.n_kv_heads:
            found.append(f"n_kv_heads = {self.n_kv_heads}: must divide n_heads = {self.n_heads}")
        if self.head_dim % 2:
            found.append(f"head_dim = {self.head_dim}: must be even for rotary embeddings")
        if not 0 <= self.dropout < 1:
            found.append(f"dropout = {self.dropout}: must be in [0, 1)")
        return found

    def layer_parameters(self) -> int:
        """Parameters of one block: attention, feed-forward, two norms."""
        attention = self.dim * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)
        return attention + 3 * self.dim * self.ffn_dim + 2 * self.dim

    def embedding_parameters(self) -> int:
        """Parameters of the token embedding alone."""
        return self.vocab_size * self.dim

    def parameters(self) -> int:
        """All parameters; a tied head is counted once."""
        head = 0 if self.tied_head else self.vocab_size * self.dim
        return self.embedding_parameters() + self.n_layers * self.layer_parameters() + self.dim + head


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one pipeline stage holds of a decoder: layers by number, the embedding if first, norm and head if last."""

    layers: tuple[int, ...]
    first: bool
    last: bool

    @classmethod
    def whole(cls, spec: DecoderSpec) -> Part:
        """All of it."""
        return cls(layers=tuple(range(spec.n_layers)), first=True, last=True)

    def holds_embedding(self, spec: DecoderSpec) -> bool:
        """Whether tok_embeddings is here: for the tokens, or for a head that is tied to it."""
        return self.first or (self.last and spec.tied_head)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: its name and its published sizes."""

    name: str
    flavors: Mapping[str, DecoderSpec]


families: Registry[Family] = Registry("model family", {"llama3": "titanlike.models.families.llama3"})


def decoder_spec(config: Config) -> DecoderSpec:
    """The decoder that `[model]` asks for: the flavor's sizes with `model.overrides` laid over.

    Raises ConfigError for an unknown family or flavor and for sizes that don't fit together.
    """
    family = families.get(config.model.name, "model.name")
    flavors: Registry[DecoderSpec] = Registry(f"flavor of {family.name}")
    for name, spec in family.flavors.items():
        flavors.register(name)(spec)
    flavor = flavors.get(config.model.flavor, "model.flavor")
    overrides = config.model.overrides.model_dump(exclude_none=True)
    if "head_dim" not in overrides and {"dim", "n_heads"} & overrides.keys():
        dim, heads = overrides.get("dim", flavor.dim), overrides.get("n_heads", flavor.n_heads)
        if heads > 0 and dim % heads:
            raise ConfigError(
                f"model.overrides.dim = {dim}: must be a multiple of n_heads = {heads}, or head_dim be set too"
            )
        overrides["head_dim"] = dim // max(heads, 1)
    spec = dataclasses.replace(flavor, **overrides)
    if problems := spec.problems():
        raise ConfigError([f"model.overrides.{p}" for p in problems])
    return spec
