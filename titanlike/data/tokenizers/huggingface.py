"""tokenizer.json, by the `tokenizers` package.

The file is loaded with what would change or lose text taken out: its post-processor (it may add a BOS of its own),
truncation, padding and BPE dropout. A second tokenizer, without the rule that puts a space before a text, is for text
that follows other tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from titanlike.data.tokenizers.base import Origin, Tokenizer
from titanlike.data.tokenizers.specials import choose, read_declared
from titanlike.errors import ConfigError

# Rules that put a space before a text or take it off again, and how to switch each off (None: leave the rule out).
_SPACE_RULES: dict[str, dict[str, Any] | None] = {
    "Prepend": None,
    "Strip": None,
    "Metaspace": {"prepend_scheme": "never", "add_prefix_space": False},
    "ByteLevel": {"add_prefix_space": False},
}


class HuggingFaceTokenizer(Tokenizer):
    kind = "huggingface"

    def __init__(self, origin: Origin):
        # Documents are spread over processes: threads inside each would only get in their way (and warn at a fork).
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        content = origin.file.read_bytes()
        rules = _read_rules(origin.file, content)
        self._first = _backend(origin.file, rules)
        continued = {**rules, **{key: _without_space(rules.get(key)) for key in ("normalizer", "pre_tokenizer")}}
        continued["decoder"] = _without_space(rules.get("decoder"), decoder=True)
        self._next = self._first if continued == rules else _backend(origin.file, continued)
        vocabulary = self._first.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values(), default=-1) + 1  # not the count: ids may have gaps
        special = {token["content"]: token["id"] for token in rules.get("added_tokens") or () if token["special"]}
        super().__init__(
            origin,
            vocab_size=size,
            specials=choose(read_declared(origin.file.parent), special, vocabulary.get, unknown=_unknown_id(rules)),
            content=content,
            gaps=frozenset(range(size)) - frozenset(vocabulary.values()),
        )

    def _encode(self, text: str, continues: bool) -> list[int]:
        backend = self._next if continues else self._first
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids  # the fast form keeps no offsets

    def _decode(self, ids: Sequence[int], continues: bool) -> str:
        return (self._next if continues else self._first).decode(ids, skip_special_tokens=False)

    def _vocabulary_id(self, token: str) -> int | None:
        return self._first.token_to_id(token)


def _read_rules(path: Path, content: bytes) -> dict[str, Any]:
    try:
        rules = json.loads(content)
        rules["model"]["dropout"] = None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"model.hf_assets_path: {path} is no tokenizer.json: {error!r}") from None
    return {**rules, "post_processor": None, "truncation": None, "padding": None}


def _backend(path: Path, rules: dict[str, Any]) -> Backend:
    try:
        backend = Backend.from_str(json.dumps(rules))
    except Exception as error:  # the package raises nothing narrower
        raise ConfigError(f"model.hf_assets_path: {path} can't be loaded: {error}") from None
    backend.encode_special_tokens = True  # i.e. as the ordinary text that they are
    return backend


def _without_space(rule: dict[str, Any] | None, decoder: bool = False) -> dict[str, Any] | None:
    """The rule with its prefix space off; None if nothing is left of it. A decoder keeps `add_prefix_space`."""
    if rule is None:
        return None
    kind = rule["type"]
    if kind == "Sequence":
        key = next(key for key in ("normalizers", "pretokenizers", "decoders") if key in rule)
        parts = [part for part in (_without_space(part, decoder) for part in rule[key]) if part is not None]
        return {**rule, key: parts}
    if kind not in _SPACE_RULES or (kind == "Strip" and not decoder) or (kind == "ByteLevel" and decoder):
        return rule
    off = _SPACE_RULES[kind]
    return None if off is None else {**rule, **{key: value for key, value in off.items() if key in rule}}


def _unknown_id(rules: dict[str, Any]) -> int | None:
    model = rules["model"]
    if model.get("unk_id") is not None:
        return model["unk_id"]
    vocabulary = model.get("vocab")
    return vocabulary.get(model.get("unk_token")) if isinstance(vocabulary, dict) else None
