"""What every tokenizer does the same way, whatever file it came from.

A kind (`huggingface`, `ranks`, `pieces`) turns ordinary text into ids and back. Everything around that is here, once:
BOS and EOS, special tokens, text that can't be encoded, and ids that mean nothing.

Text is only ever text: an id of `special_ids` never comes out of `encode` for a document that happens to hold a
special token's spelling. Only callers that ask for BOS or EOS, or put ids together themselves, get one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titanlike.data.tokenizers.specials import Specials
from titanlike.errors import ConfigError, DataError

UNKNOWN_TEXT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a tokenizer came from: enough to load it again in another process."""

    hf_assets_path: str
    revision: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    file: Path = field(default_factory=Path)


class Tokenizer:
    """Text to ids and back. Ids are 0 … vocab_size - 1, added tokens included; some may stand for nothing."""

    kind = ""

    def __init__(self, origin: Origin, *, vocab_size: int, specials: Specials, content: bytes, gaps: frozenset[int]):
        self.origin = origin
        self.name = f"{self.kind}:{origin.hf_assets_path}"
        self.vocab_size = vocab_size
        self.special_tokens = specials.ids  # text -> id
        self.special_ids = frozenset(specials.ids.values())
        self._special_texts = {id: text for text, id in specials.ids.items()}
        self._gaps = gaps
        literals = sorted((text for text in specials.ids if text), key=len, reverse=True)
        self._literals = re.compile("|".join(map(re.escape, literals))) if literals else None
        self.bos_id = self._marker("bos", origin.bos_token, specials.bos)
        self.eos_id = self._marker("eos", origin.eos_token, specials.eos)
        self.pad_id = specials.pad
        self.unknown_id = specials.unknown  # what a character outside the vocabulary becomes; None: there are none
        markers = json.dumps([self.kind, specials.ids, self.bos_id, self.eos_id, self.pad_id], sort_keys=True)
        self.fingerprint = hashlib.sha256(markers.encode() + b"\0" + content).hexdigest()[:32]

    # What a kind gives.

    def _encode(self, text: str, continues: bool) -> list[int]:
        """Ids of text without specials. `continues`: other tokens come before it, so no space is put in front."""
        raise NotImplementedError

    def _decode(self, ids: Sequence[int], continues: bool) -> str:
        """Text of ids that are neither special nor gaps. Bytes that are no whole character become U+FFFD."""
        raise NotImplementedError

    def _vocabulary_id(self, token: str) -> int | None:
        """Id of an entry by the spelling that the tokenizer's own file uses."""
        raise NotImplementedError

    # What everybody uses.

    def encode(self, text: str, add_bos: bool, add_eos: bool, *, continues: bool = False) -> list[int]:
        """Ids of a text: `[bos]? text [eos]?`, each exactly once.

        `continues` is for text that follows other tokens (a chat's turn after a special token): a sentencepiece model
        then puts no space in front. A tokenizer without BOS adds none. Raises ConfigError if EOS is asked for and there
        is none, DataError if the text has a lone surrogate.
        """
        ids = self._text_ids(text, continues)
        if add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        if add_eos:
            ids.append(self.require_eos())
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without BOS and EOS."""
        return [self._text_ids(text, continues=False) for text in texts]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of ids. Special tokens come out as their spelling, or not at all with `skip_special`.

        Never raises: half a character and ids that mean nothing become U+FFFD. The space that a sentencepiece model
        puts before a text is taken off again.
        """
        text: list[str] = []
        run: list[int] = []
        continues = False
        for id in [*map(int, ids), None]:
            if id is not None and id not in self.special_ids and 0 <= id < self.vocab_size and id not in self._gaps:
                run.append(id)
                continue
            if run:
                text.append(self._decode(run, continues))
                run, continues = [], True
            if id is not None:
                spelling = self._special_texts.get(id, UNKNOWN_TEXT)
                text.append("" if skip_special and id in self.special_ids else spelling)
        return "".join(text)

    def require_eos(self) -> int:
        """The EOS id. Raises ConfigError if the tokenizer has none."""
        if self.eos_id is None:
            raise ConfigError(
                f"data.add_eos = true: the tokenizer at {self.origin.file} has no end-of-text token; "
                "name one of its tokens in data.eos_token, or set data.add_eos = false"
            )
        return self.eos_id

    def check_rows(self, rows: int, key: str = "model.overrides.vocab_size") -> None:
        """Raises ConfigError if an embedding of so many rows can't hold every id. More rows than ids are fine."""
        if rows < self.vocab_size:
            raise ConfigError(
                f"{key} = {rows}: the tokenizer at {self.origin.file} has ids up to {self.vocab_size - 1}, so the "
                f"model needs a vocabulary of at least {self.vocab_size}"
            )

    def __reduce__(self):
        from titanlike.data.tokenizers import load_tokenizer

        return _load_again, (load_tokenizer, self.origin, self.fingerprint)

    # How it is done.

    def _text_ids(self, text: str, continues: bool) -> list[int]:
        if not text.isascii():
            _refuse_surrogates(text)
        ids = self._encode(text, continues) if text else []
        if self.special_ids.isdisjoint(ids) or len(text) < 2:  # a one-character special has no other way to be written
            return ids
        # The file's own rules would make a control token of this text. Cut it inside each spelling of a special token;
        # the parts can then only become ordinary tokens.
        cuts = [match.start() + 1 for match in self._literals.finditer(text)] if self._literals else []
        cuts = [cut for cut in cuts if cut < len(text)] or [len(text) // 2]  # folded spellings: halve until they part
        parts = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return [id for n, part in enumerate(parts) for id in self._text_ids(part, continues or n > 0)]

    def _marker(self, which: str, wanted: str | None, found: int | None) -> int | None:
        if wanted is None:
            return found
        for id in (self.special_tokens.get(wanted), self._vocabulary_id(wanted), self._only_id(wanted)):
            if id is not None:
                return id
        raise ConfigError(
            f"data.{which}_token = {wanted!r}: no token of the tokenizer at {self.origin.file}; "
            f"its special tokens are {_some(list(self.special_tokens))}"
        )

    def _only_id(self, text: str) -> int | None:
        """The id of a text that is one ordinary token, such as a newline."""
        ids = self._text_ids(text, continues=True)
        return ids[0] if len(ids) == 1 and self._decode(ids, True) == text else None


def _load_again(load, origin: Origin, fingerprint: str) -> Tokenizer:
    tokenizer = load(
        origin.hf_assets_path, revision=origin.revision, bos_token=origin.bos_token, eos_token=origin.eos_token
    )
    if tokenizer.fingerprint != fingerprint:
        raise DataError(f"{origin.file}: the tokenizer changed while the run was using it; start again")
    return tokenizer


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        where = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise DataError(f"text with a lone surrogate ({where}) is not Unicode text and has no tokens") from None


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return f"{shown}, … ({len(names)} in all)" if len(names) > 8 else shown or "none"
