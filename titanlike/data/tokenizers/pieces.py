"""sentencepiece models (Llama 2's, Mistral's, Gemma's …), by the `sentencepiece` package.

Such a model may put a space before every text (its "dummy prefix") and take it off when it decodes. That is right at
the start of a text and wrong after a special token, so there are two processors: the model as it is, and the same one
without the prefix.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sentencepiece import SentencePieceProcessor

from titanlike.data.tokenizers.base import Origin, Tokenizer
from titanlike.data.tokenizers.specials import choose, read_declared
from titanlike.errors import ConfigError

# The model is a protobuf message, and appending to one merges: field 3 (normalizer_spec) { field 3 (add_dummy_prefix):
# false }.
_NO_PREFIX = b"\x1a\x02\x18\x00"
# Control tokens that a model keeps as user-defined pieces, which it would match in any text.
_LOOKS_SPECIAL = re.compile(r"<\|[^|\s]+\|>")


class PiecesTokenizer(Tokenizer):
    kind = "sentencepiece"

    def __init__(self, origin: Origin):
        content = origin.file.read_bytes()
        self._first, self._next = SentencePieceProcessor(), SentencePieceProcessor()
        try:
            self._first.LoadFromSerializedProto(content)
            self._next.LoadFromSerializedProto(content + _NO_PREFIX)
        except RuntimeError as error:
            raise ConfigError(f"model.hf_assets_path: {origin.file} is no sentencepiece model: {error}") from None
        declared = read_declared(origin.file.parent)
        pieces = self._first.vocab_size()
        special = {**self._controls(), **{text: id for text, id in declared.added.items() if id >= pieces}}
        size = max([pieces - 1, *special.values()]) + 1
        self._unknown: int = self._first.unk_id()
        own = {"bos": self._first.bos_id(), "eos": self._first.eos_id(), "pad": self._first.pad_id()}
        super().__init__(
            origin,
            vocab_size=size,
            specials=choose(
                declared,
                special,
                lambda text: special.get(text, self._vocabulary_id(text)),
                own={which: id if id >= 0 else None for which, id in own.items()},  # -1: the model has none
                unknown=self._unknown,
            ),
            content=content,
            gaps=frozenset(range(pieces, size)) - frozenset(special.values()),
        )

    def _controls(self) -> dict[str, int]:
        model = self._first
        pieces = {model.id_to_piece(id): id for id in range(model.vocab_size())}
        return {text: id for text, id in pieces.items() if model.is_control(id) or _LOOKS_SPECIAL.fullmatch(text)}

    def _encode(self, text: str, continues: bool) -> list[int]:
        return (self._next if continues else self._first).encode(text)

    def _decode(self, ids: Sequence[int], continues: bool) -> str:
        return (self._next if continues else self._first).decode(list(ids))

    def _vocabulary_id(self, token: str) -> int | None:
        id = self._first.piece_to_id(token)
        return None if id == self._unknown else id
