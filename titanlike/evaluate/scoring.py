"""How likely a model finds given tokens after given others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from titanlike.data.batch import IGNORE
from titanlike.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Token ids, of which the first `known` (at least one) are given and the rest is scored."""

    tokens: Sequence[int]
    known: int = 1

    def __post_init__(self):
        if not 1 <= self.known <= len(self.tokens):
            raise ValueError(f"{self.known} tokens of {len(self.tokens)} can't be given: at least one, at most all")


@dataclass(frozen=True, kw_only=True)
class Score:
    """Log-probabilities float64 [n] in nats of a passage's scored tokens; whether each was the likeliest."""

    logprobs: torch.Tensor
    greedy: bool


@torch.inference_mode()
def score(model: Decoder, passages: Sequence[Passage], *, batch_tokens: int, greedy: bool = False) -> Iterator[Score]:
    """The score of each passage, in order. Passages lie beside each other in one row, apart as documents are.

    Without `greedy` the logits of a batch are never held as a whole, and `Score.greedy` is False.
    """
    batch: list[Passage] = []
    size = 0
    for passage in passages:
        if batch and size + len(passage.tokens) - 1 > batch_tokens:
            yield from _score_batch(model, batch, greedy)
            batch, size = [], 0
        batch.append(passage)
        size += len(passage.tokens) - 1
    yield from _score_batch(model, batch, greedy)


def _score_batch(model: Decoder, batch: list[Passage], greedy: bool) -> Iterator[Score]:
    lengths = [len(p.tokens) - 1 for p in batch]
    scored = [len(p.tokens) - p.known for p in batch]
    if not any(scored):
        yield from (Score(logprobs=torch.zeros(0, dtype=torch.float64), greedy=greedy) for _ in batch)
        return
    device = model.tok_embeddings.weight.device
    rows: list[list[int]] = [[], [], []]
    for passage, length in zip(batch, lengths, strict=True):
        rows[0] += passage.tokens[:-1]
        rows[1] += [IGNORE] * (passage.known - 1) + [*passage.tokens[passage.known :]]
        rows[2] += range(length)
    tokens, labels, positions = torch.tensor(rows, device=device)[:, None]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    offsets = ends.unique_consecutive().to(device)  # a passage of one token has no place in the row
    wanted = labels != IGNORE
    if greedy:
        logits = model.logits(model(tokens, positions, offsets)[wanted]).float()
        found = logits.log_softmax(-1).gather(-1, labels[wanted][:, None])[:, 0]
        hits = (logits.argmax(-1) == labels[wanted]).split(scored)
    else:
        found = model(tokens, positions, offsets, labels=labels)[wanted]
        hits = [None] * len(batch)
    for logprobs, hit in zip(found.double().cpu().split(scored), hits, strict=True):
        yield Score(logprobs=logprobs, greedy=hit is not None and bool(hit.all()))
