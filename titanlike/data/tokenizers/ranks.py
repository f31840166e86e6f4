"""tiktoken files: one `base64-of-the-bytes rank` a line, by the `tiktoken` package.

Such a file holds ranks alone. How text is cut before merging, and the special tokens after the ranks, are known only by
convention: OpenAI's files are recognised by their number of ranks, everything else is taken for Llama 3's layout (its
256 special tokens, the 3.1 names).
"""

from __future__ import annotations

import base64
import binascii
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import tiktoken

from titanlike.data.tokenizers.base import Origin, Tokenizer
from titanlike.data.tokenizers.specials import choose, read_declared
from titanlike.errors import ConfigError

LINE = re.compile(rb"^[A-Za-z0-9+/]+={0,2} \d+\r?$")

_GPT2_CUT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O_CUT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FILL_IN = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
# Number of ranks -> (how text is cut, special tokens).
_OPENAI = {
    50256: (_GPT2_CUT, {"<|endoftext|>": 50256}),  # r50k_base, GPT-2's
    50280: (_GPT2_CUT, {"<|endoftext|>": 50256}),  # p50k_base
    100256: (_GPT4_CUT, {"<|endoftext|>": 100257, **_FILL_IN, "<|endofprompt|>": 100276}),  # cl100k_base
    199998: (_GPT4O_CUT, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),  # o200k_base
}
# Llama 3.1's names. Those that 3.0 had too are at the same places there.
_LLAMA3_NAMED = {
    **{0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id", 7: "end_header_id"},
    **{8: "eom_id", 9: "eot_id", 10: "python_tag"},
}
_LLAMA3_SPECIALS = 256
# The regex engine's stack gives out on some hundred thousand white characters in a row, so such runs are cut.
_LONGEST_BLANK = 25_000
_BLANKS = re.compile(rf"\s{{{_LONGEST_BLANK}}}")


class RanksTokenizer(Tokenizer):
    kind = "tiktoken"

    def __init__(self, origin: Origin):
        content = origin.file.read_bytes()
        ranks = _read_ranks(origin.file, content)
        cut, special = _OPENAI.get(len(ranks)) or (_GPT4_CUT, _llama3_specials(len(ranks)))
        declared = read_declared(origin.file.parent)
        added = {text: id for text, id in declared.added.items() if id not in special.values() and id >= len(ranks)}
        special = {**special, **added}
        size = max(max(special.values()), max(ranks.values())) + 1
        self._ranks = ranks
        self._backend = tiktoken.Encoding(origin.file.name, pat_str=cut, mergeable_ranks=ranks, special_tokens=special)
        super().__init__(
            origin,
            vocab_size=size,
            specials=choose(declared, special, special.get),
            content=content,
            gaps=frozenset(range(size)) - frozenset(ranks.values()) - frozenset(special.values()),
        )

    def _encode(self, text: str, continues: bool) -> list[int]:
        if len(text) <= _LONGEST_BLANK or not _BLANKS.search(text):
            return self._backend.encode_ordinary(text)
        cuts = [0, *(match.end() for match in _BLANKS.finditer(text)), len(text)]
        parts = (text[start:stop] for start, stop in itertools.pairwise(cuts))
        return [id for part in parts for id in self._backend.encode_ordinary(part)]

    def _decode(self, ids: Sequence[int], continues: bool) -> str:
        return self._backend.decode(ids, errors="replace")

    def _vocabulary_id(self, token: str) -> int | None:
        return self._ranks.get(token.encode("utf-8", "surrogatepass"))


def _read_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    try:
        pairs = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise ConfigError(f"model.hf_assets_path: {path} is a broken tiktoken file: {error}") from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ConfigError(f"model.hf_assets_path: {path} lacks {len(missing)} of the 256 single bytes: cut short?")
    return ranks


def _llama3_specials(first: int) -> dict[str, int]:
    names, reserved = dict(_LLAMA3_NAMED), 0
    for place in range(_LLAMA3_SPECIALS):
        if place not in names:
            names[place] = f"reserved_special_token_{reserved}"
            reserved += 1
    return {f"<|{names[place]}|>": first + place for place in range(_LLAMA3_SPECIALS)}
