"""Perplexity of a model on documents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from titanlike.data.tokenizers import Tokenizer
from titanlike.errors import DataError
from titanlike.evaluate.scoring import Passage, score
from titanlike.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class Window:
    """What is seen at once, in tokens: `length` at most, of which each window after a document's first scores `stride`.

    `first_only` scores no more of a document than its first window.
    """

    length: int
    stride: int
    first_only: bool = False

    def passages(self, tokens: Sequence[int]) -> Iterator[Passage]:
        """A document's tokens in windows: each token but the first is scored once."""
        end = min(self.length, len(tokens))
        yield Passage(tokens=tokens[:end])
        while end < len(tokens) and not self.first_only:
            begin, end = end, min(end + self.stride, len(tokens))
            first = max(0, end - self.length)
            yield Passage(tokens=tokens[first:end], known=begin - first)


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Over all scored tokens: mean loss in nats, and that per byte of their text in bits."""

    documents: int
    tokens: int
    loss: float
    bits_per_byte: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


def perplexity(
    model: Decoder,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    window: Window,
    *,
    add_bos: bool,
    batch_tokens: int,
) -> Perplexity:
    """Of a model on texts, each by itself. Raises DataError if there is nothing to score.

    With `add_bos` a text's first token is scored too, after the mark.
    """
    passages: list[Passage] = []
    documents = size = 0
    for text in texts:
        tokens = tokenizer.encode(text, add_bos=add_bos, add_eos=False)
        if len(tokens) < 2:
            continue
        documents += 1
        seen = tokens[: window.length] if window.first_only else tokens
        size += len(tokenizer.decode(seen[1:]).encode())
        passages += window.passages(tokens)
    if not documents:
        raise DataError("no document there has two tokens: nothing to score")
    count, total = 0, 0.0
    for one in score(model, passages, batch_tokens=batch_tokens):
        count += len(one.logprobs)
        total -= one.logprobs.sum().item()
    return Perplexity(
        documents=documents, tokens=count, loss=total / count, bits_per_byte=total / math.log(2) / max(1, size)
    )
