"""Text of 380 languages through tokenizers of every kind and back."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from titanlike.data.tokenizers import load_tokenizer

ASSETS = Path(__file__).parent.parent / "assets"
TOKENIZERS = ASSETS / "tokenizers"
LOSSLESS = {
    "shipped": "debug",
    "tokenizer.json": str(TOKENIZERS / "tiny_llama"),
    "sentencepiece with bytes": str(TOKENIZERS / "tiny_llama" / "tokenizer.model"),
    "tiktoken": str(TOKENIZERS / "llama3_tiktoken"),
}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """The beginning of a text in each language."""
    lines = gzip.decompress((ASSETS / "texts" / "multilingual.jsonl.gz").read_bytes()).decode("utf-8").splitlines()
    found = [json.loads(line)["text"] for line in lines]
    assert len(found) > 380
    return found


@pytest.mark.parametrize("name", LOSSLESS)
def test_every_language_comes_back(texts, name):
    tokenizer = load_tokenizer(LOSSLESS[name])
    found = tokenizer.encode_batch(texts)
    for text, ids in zip(texts, found, strict=True):
        assert tokenizer.decode(ids) == text
        assert not tokenizer.special_ids & set(ids) and tokenizer.unknown_id not in ids
        assert tokenizer.decode(tokenizer.encode(text, True, True), skip_special=True) == text
    together = tokenizer.encode("\n".join(texts), False, False)
    assert tokenizer.decode(together) == "\n".join(texts)


def test_unknown_characters_are_all_that_is_lost(texts):
    """A model without bytes: what it knows every character of comes back, but for what it normalises (NFKC, spaces)."""
    tokenizer = load_tokenizer(str(TOKENIZERS / "unigram_sentencepiece"))
    whole = 0
    for text in texts:
        ids = tokenizer.encode(text, False, False)
        decoded = tokenizer.decode(ids)
        if tokenizer.unknown_id not in ids:
            whole += 1
            assert tokenizer.encode(decoded, False, False) == ids
    assert whole
