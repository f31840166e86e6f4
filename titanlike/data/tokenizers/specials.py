"""Which ids are special, and which of them are BOS, EOS and PAD.

Model folders say it in up to four places. They are asked in the order in which Hugging Face's own loaders trust them:
tokenizer_config.json, special_tokens_map.json, generation_config.json, config.json. An explicit null is an answer
("this model has no BOS"). Where nobody says anything, the markers of the model file and then known spellings are used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlike.errors import ConfigError

KNOWN = {
    "bos": ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<|begin▁of▁sentence|>", "[BOS]", "BOS"),
    "eos": (
        *("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "<|end▁of▁sentence|>", "[EOS]", "EOS"),
        *("<|eot_id|>", "<|im_end|>"),
    ),
    "pad": ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]", "PAD", "<|▁pad▁|>"),
}


@dataclass(frozen=True, kw_only=True)
class Specials:
    """Special tokens by text, and the ids of the three that training uses (None: the tokenizer has none)."""

    ids: Mapping[str, int]
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unknown: int | None = None


@dataclass(frozen=True)
class Declared:
    """What the JSON files beside a tokenizer say."""

    markers: dict[str, str | int | None] = field(default_factory=dict)  # bos, eos, pad -> text or id; None: has none
    texts: frozenset[str] = frozenset()  # every text that is called special
    added: dict[str, int] = field(default_factory=dict)  # tokens added beside the model file


def read_declared(folder: Path) -> Declared:
    """Read the JSON files of a model folder. Missing ones say nothing; raises ConfigError for a broken one."""
    config, special_map, generation, model = (
        _read_json(folder / name)
        for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
    )
    markers: dict[str, str | int | None] = {}
    for which in ("bos", "eos", "pad"):
        for source, key in (
            (config, f"{which}_token"),
            (special_map, f"{which}_token"),
            (generation, f"{which}_token_id"),
            (model, f"{which}_token_id"),
        ):
            if key in source:
                markers[which] = _plain(source[key])
                break
    texts = {value for value in markers.values() if isinstance(value, str)}
    for source in (config, special_map):
        texts.update(map(_text, source.get("additional_special_tokens") or ()))
    added = {str(text): int(id) for text, id in _read_json(folder / "added_tokens.json").items()}
    for id, token in (config.get("added_tokens_decoder") or {}).items():
        added[_text(token)] = int(id)
        if token.get("special"):
            texts.add(_text(token))
    return Declared(markers, frozenset(texts), added)


def choose(
    declared: Declared,
    special: Mapping[str, int],
    find: Callable[[str], int | None],
    *,
    own: Mapping[str, int | None] | None = None,
    unknown: int | None = None,
) -> Specials:
    """Settle the specials of a tokenizer.

    `special` are those of the model file, `find` looks any text up in its vocabulary, `own` are the markers that the
    model file itself names. A declared text that is not in the vocabulary is passed over. `unknown` is the id that
    stands for characters outside the vocabulary: it comes out of ordinary text, so it is not special.
    """
    found = {text: find(text) for text in sorted(declared.texts)}
    ids = {**special, **{text: id for text, id in found.items() if id is not None}}
    ids = {text: id for text, id in ids.items() if id != unknown}

    def marker(which: str) -> int | None:
        if which in declared.markers:
            value = declared.markers[which]
            found = find(value) if isinstance(value, str) else value
            if value is None or found is not None:
                return found
        if own and own.get(which) is not None:
            return own[which]
        return next((ids[text] for text in KNOWN[which] if text in ids), None)

    return Specials(ids=ids, bos=marker("bos"), eos=marker("eos"), pad=marker("pad"), unknown=unknown)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.hf_assets_path: {path} can't be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"model.hf_assets_path: {path} should hold a JSON object")
    return value


def _plain(value: Any) -> str | int | None:
    """A marker as files write it: text, {"content": text}, an id, a list of ids (the first counts), null."""
    if isinstance(value, list):
        value = value[0] if value else None
    return value if value is None or isinstance(value, int) else _text(value)


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)
