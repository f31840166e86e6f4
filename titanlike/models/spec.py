"""What a decoder is made of, as plain numbers. Imports no torch, so that reading a config stays instant."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from titanlike.config import assets
from titanlike.config.registry import Registry
from titanlike.errors import ConfigError
from titanlike.models.hub import config_json
from titanlike.models.hub.config_json import HubConfig
from titanlike.models.hub.form import HubForm

if TYPE_CHECKING:
    from titanlike.config import Config

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context length of the first training phase.

    linear: all divided by `factor` (Chen et al. 2023, arXiv 2306.15595). llama3: slow ones are, fast ones kept, those
    between blended by their wavelengths (arXiv 2407.21783). yarn: the same by how often they turn within the original
    length (Peng et al. 2023, arXiv 2309.00071); `attention_factor` multiplies cosines and sines.
    """

    factor: float
    kind: Literal["linear", "llama3", "yarn"] = "llama3"
    original_max_seq_len: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    whole_pairs: bool = True
    """yarn: round the bounds of the blended range to whole pairs of elements."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): keys and values from one narrow vector a token.

    A head's queries and keys are `nope_dim` elements without rotation, then `rope_dim` with it, the keys' being shared
    by all heads; its values are `value_dim` wide. Queries come from `query_rank` elements, or straight if that's None.
    """

    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm_eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture of experts (Shazeer et al. 2017, arXiv 1701.06538) for a feed-forward, but in `dense_layers`."""

    n_experts: int
    top_k: int
    """Experts that a token goes to."""
    ffn_dim: int
    """Hidden width of each."""
    n_shared: int = 0
    """Experts beside those, for every token: one feed-forward so many times as wide."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True
    """The weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights."""
    n_groups: int = 1
    top_groups: int = 1
    """Experts come in groups, and a token's from so many of them."""
    bias: bool = False
    """A bias on scores that counts in choosing only, moved against uneven use by `bias_rate` an update."""
    bias_rate: float = 1e-3
    balance_loss: float = 0.0
    """Weight of the loss that punishes uneven use, of each row by itself."""
    z_loss: float = 0.0
    """Weight of the router's squared log-normaliser."""
    dense_layers: tuple[int, ...] = ()

    def problems(self) -> list[str]:
        """As `DecoderSpec.problems`."""
        found = [
            f"experts.{name} = {getattr(self, name)}: must be positive"
            for name in ("n_experts", "top_k", "ffn_dim", "n_groups", "top_groups")
            if getattr(self, name) <= 0
        ]
        if found:
            return found
        if self.n_experts % self.n_groups:
            found.append(f"experts.n_groups = {self.n_groups}: must divide n_experts = {self.n_experts}")
        if self.top_groups > self.n_groups:
            found.append(f"experts.top_groups = {self.top_groups}: are more than n_groups = {self.n_groups}")
        if self.top_k > self.n_experts // self.n_groups * self.top_groups:
            found.append(f"experts.top_k = {self.top_k}: are more than a token may choose from")
        return found


@dataclass(frozen=True, kw_only=True)
class DecoderSpec:
    """Sizes and kinds of one decoder-only transformer."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    """Of queries and keys; with latent attention that of both parts together."""
    ffn_dim: int
    vocab_size: int
    max_seq_len: int = 8192
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    """Norms multiply by this plus their weight."""
    sandwich_norms: bool = False
    """Norms also behind attention and feed-forward, before the residual stream."""
    qk_norm: bool = False
    """Norms over each head's queries and keys."""
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    latent: Latent | None = None
    experts: Experts | None = None
    attention_scale: float | None = None
    """Factor on attention scores; None: head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Scores s become cap · tanh(s / cap)."""
    window: int | None = None
    """In `windowed_layers` a token sees this many tokens, itself among them."""
    windowed_layers: tuple[int, ...] = ()
    rope_theta: float = 500000.0
    rope_scaling: RopeScaling | None = None
    windowed_rope_theta: float | None = None
    """Rotary base of windowed layers, where it is one of their own; without scaling."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of dim."""
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
        if self.latent and self.head_dim != self.latent.nope_dim + self.latent.rope_dim:
            parts = f"{self.latent.nope_dim} + {self.latent.rope_dim}"
            found.append(f"head_dim = {self.head_dim}: latent attention has heads of {parts}")
        if self.rope_dim % 2:
            found.append(f"head_dim = {self.head_dim}: must be even for rotary embeddings")
        if not 0 <= self.dropout < 1:
            found.append(f"dropout = {self.dropout}: must be in [0, 1)")
        return found + (self.experts.problems() if self.experts else [])

    @property
    def rope_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def embedding_scale(self) -> float:
        """Factor on embeddings."""
        return self.dim**0.5 if self.scaled_embedding else 1.0

    def window_of(self, layer: int) -> int:
        """How many tokens a token of this layer sees at most, itself among them; 0 is no limit."""
        return self.window if self.window and layer in self.windowed_layers else 0

    def _attention_parameters(self) -> int:
        heads, norms = self.n_heads, 2 * self.head_dim if self.qk_norm else 0
        if one := self.latent:
            out = heads * one.value_dim * self.dim
            queries = heads * self.head_dim * (one.query_rank or self.dim)
            queries += (self.dim + 1) * one.query_rank if one.query_rank else 0
            narrow = self.dim * (one.kv_rank + one.rope_dim) + one.kv_rank
            biases = (one.kv_rank + one.rope_dim + (one.query_rank or 0)) * self.qkv_bias + self.dim * self.out_bias
            return out + queries + narrow + one.kv_rank * heads * (one.nope_dim + one.value_dim) + biases
        rows = self.head_dim * (heads + 2 * self.n_kv_heads)
        biases = rows * self.qkv_bias + self.dim * self.out_bias
        return self.dim * (rows + self.head_dim * heads) + biases + norms

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def layer_parameters(self, layer: int = 0, *, active: bool = False) -> int:
        """Parameters of a block: attention, feed-forward, norms; `active`: those that a token passes through."""
        others = self._attention_parameters() + (4 if self.sandwich_norms else 2) * self.dim
        if not self.has_experts(layer):
            return others + self._forward_parameters(self.ffn_dim)
        assert self.experts is not None
        one = self.experts
        routed = (one.top_k if active else one.n_experts) * 3 * self.dim * one.ffn_dim
        shared = self._forward_parameters(one.n_shared * one.ffn_dim) if one.n_shared else 0
        return others + one.n_experts * self.dim + routed + shared

    def _forward_parameters(self, width: int) -> int:
        return 3 * self.dim * width + (2 * width + self.dim) * self.ffn_bias

    def all_layers_parameters(self, *, active: bool = False) -> int:
        """Parameters of all blocks."""
        return sum(self.layer_parameters(i, active=active) for i in range(self.n_layers))

    def embedding_parameters(self) -> int:
        """Parameters of the token embedding alone."""
        return self.vocab_size * self.dim

    def parameters(self) -> int:
        """All parameters; a tied head is counted once."""
        head = 0 if self.tied_head else self.vocab_size * self.dim
        return self.embedding_parameters() + self.all_layers_parameters() + self.dim + head


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
    """A model family: its name, its published sizes, and the forms that it has on the Hub."""

    name: str
    flavors: Mapping[str, DecoderSpec]
    hub: tuple[HubForm, ...] = ()


_FOLDER = "titanlike.models.families"
_NAMES = ("llama2", "llama3", "smollm", "mistral", "qwen2", "qwen3", "deepseek_v3", "gemma2", "gemma3")
families: Registry[Family] = Registry("model family", {name: f"{_FOLDER}.{name}" for name in _NAMES})

# A config.json says nothing of Llama's version; the numbers in it say all that there is to know.
_DEFAULT_FAMILY = "llama3"
_DEFAULT_FLAVOR = "debugmodel"


def decoder_spec(config: Config) -> DecoderSpec:
    """The decoder that `[model]` asks for, with `model.overrides` laid over.

    That is the flavor's; without one that of the config.json at model.hf_assets_path; without that the debug model.
    Raises ConfigError for an unknown family or flavor, for what a config.json asks for and the decoder doesn't do, and
    for sizes that don't fit together.
    """
    named = _named_spec(config)
    overrides = config.model.overrides.model_dump(exclude_none=True)
    follows = named.latent is None and named.head_dim * named.n_heads == named.dim  # else it is a size of its own
    if follows and "head_dim" not in overrides and {"dim", "n_heads"} & overrides.keys():
        dim, heads = overrides.get("dim", named.dim), overrides.get("n_heads", named.n_heads)
        if heads > 0 and dim % heads:
            raise ConfigError(
                f"model.overrides.dim = {dim}: must be a multiple of n_heads = {heads}, or head_dim be set too"
            )
        overrides["head_dim"] = dim // max(heads, 1)
    if of_experts := overrides.pop("experts", None):
        if named.experts is None:
            raise ConfigError(f"model.overrides.experts: {title(config)} has no experts")
        overrides["experts"] = dataclasses.replace(named.experts, **of_experts)
    spec = dataclasses.replace(named, **overrides)
    if problems := spec.problems():
        raise ConfigError([f"model.overrides.{p}" for p in problems])
    return spec


def _named_spec(config: Config) -> DecoderSpec:
    model = config.model
    if model.flavor == AUTO and (folder := configured_folder(config)):
        return folder_form(folder, model.name)[1]
    name = _DEFAULT_FAMILY if model.name == AUTO else model.name
    family = families.get(name, "model.name")
    flavors: Registry[DecoderSpec] = Registry(f"flavor of {family.name}")
    for flavor, spec in family.flavors.items():
        flavors.register(flavor)(spec)
    return flavors.get(_DEFAULT_FLAVOR if model.flavor == AUTO else model.flavor, "model.flavor")


def configured_folder(config: Config) -> Path | None:
    """The folder of model.hf_assets_path if there is a config.json in it."""
    model = config.model
    if model.hf_assets_path == "debug":
        return None
    folder = assets.local_folder(model.hf_assets_path, model.hf_revision)
    return folder if (folder / config_json.NAME).is_file() else None


def folder_form(folder: Path, family: str = AUTO) -> tuple[HubForm, DecoderSpec]:
    """The form and the decoder of a folder's config.json. Raises ConfigError, also if it is of another family."""
    found = HubConfig.of_folder(folder)
    kind = found.get("model_type")
    forms = {form.model_type: form for name in families.names() for form in families.get(name).hub}
    if kind not in forms:
        raise found.error("model_type", f"no family here has that form (there are: {', '.join(sorted(forms))})", kind)
    form = forms[kind]
    if family != AUTO and form not in families.get(family, "model.name").hub:
        raise ConfigError(f"model.name = {family!r}: {found.path} has the model_type {kind!r} of another family")
    return form, form.spec(found)


def form_of(config: Config, spec: DecoderSpec) -> HubForm:
    """The form in which a config's model is written on the Hub: one of its family's that can say all of the spec.

    Raises ConfigError if there is none.
    """
    model = config.model
    if model.flavor == AUTO and (folder := configured_folder(config)):
        forms: tuple[HubForm, ...] = (folder_form(folder, model.name)[0],)
    else:
        name = _DEFAULT_FAMILY if model.name == AUTO else model.name
        forms = families.get(name, "model.name").hub
    if not forms:
        raise ConfigError(f"model.name = {model.name!r}: this family has no form on the Hub")
    reasons = []
    for form in forms:
        back = form.spec(HubConfig(form.config(spec), f"config.json of {form.model_type}"))
        changes = differences(dataclasses.replace(spec, dropout=0.0), back)
        if not changes:
            return form
        reasons += changes
    raise ConfigError(f"config.json of {forms[0].model_type} can't say all of this model: {'; '.join(reasons)}")


def title(config: Config) -> str:
    """What a config's model is called: family and flavor, or the folder that its config.json is in."""
    model = config.model
    if model.flavor == AUTO and configured_folder(config):
        return f"that of {model.hf_assets_path}"
    name = _DEFAULT_FAMILY if model.name == AUTO else model.name
    return f"{name} {_DEFAULT_FLAVOR if model.flavor == AUTO else model.flavor}"


# What changes neither shapes nor meaning of the weights.
_FREE = {"max_seq_len", "dropout"}


def differences(was: DecoderSpec, is_: DecoderSpec) -> list[str]:
    """In which fields that weights depend on two specs differ, in words."""
    was, is_ = _as_weights_see(was), _as_weights_see(is_)
    return [
        f"{field.name} was {getattr(was, field.name)}, is {getattr(is_, field.name)}"
        for field in dataclasses.fields(is_)
        if field.name not in _FREE and getattr(was, field.name) != getattr(is_, field.name)
    ]


def _as_weights_see(spec: DecoderSpec) -> DecoderSpec:
    """Without what only training knows of experts."""
    if spec.experts is None:
        return spec
    return dataclasses.replace(
        spec, experts=dataclasses.replace(spec.experts, bias_rate=0.0, balance_loss=0.0, z_loss=0.0)
    )
