"""Sampling tokens from a decoder, with a cache of keys and values.

A row's tokens depend on (seed, the row's number, position) and its own prompt, never on which other rows are sampled
beside it: the random number of each position is looked up by counter, not drawn in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from titanlike.counter_random import key_of, uniform
from titanlike.models.attention import KVCache
from titanlike.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen. Temperature 0 takes the most likely one."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int = 0


def choose(logits: torch.Tensor, draws: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The next token of each row: logits [B, V], draws in [0, 1) [B] → int64 [B]."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    shares = (logits.double() / sampling.temperature).softmax(-1)
    ordered, tokens = torch.sort(shares, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered  # probability of all that is likelier
    kept = before < sampling.top_p
    if sampling.top_k:
        kept[:, sampling.top_k :] = False
    upto = (ordered * kept).cumsum(-1)
    # The first token whose cumulative share is beyond the draw.
    place = torch.searchsorted(upto, draws[:, None] * upto[:, -1:], right=True)
    last = kept.sum(-1, keepdim=True) - 1
    return tokens.gather(1, torch.minimum(place, last)).squeeze(1)


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    stop: frozenset[int] = frozenset(),
    on_token: Callable[[int, int], None] | None = None,
    ended: Callable[[int, list[int]], bool] | None = None,
) -> list[list[int]]:
    """Continues each prompt (token ids, at least one) until a stop token, which is kept, or `max_new_tokens`.

    Prompt and answer together must fit the model's `seq_len`; ValueError otherwise. `on_token(row, token)` is told of
    each token as it comes; `ended(row, answer)` says whether an answer needs no more.
    """
    longest = max(len(p) for p in prompts)
    if min(len(p) for p in prompts) == 0:
        raise ValueError("a prompt needs at least one token")
    if longest >= model.seq_len:
        raise ValueError(f"the prompt has {longest} tokens, the model sees {model.seq_len}")
    capacity = min(longest + sampling.max_new_tokens, model.seq_len)
    device, dtype = model.tok_embeddings.weight.device, model.tok_embeddings.weight.dtype
    caches = [KVCache(len(prompts), capacity, model.spec, device, dtype) for _ in model.layers]
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    positions = torch.arange(longest, device=device).expand(len(prompts), -1)
    # What shorter prompts leave in the cache beyond their end is overwritten before anything may look at it.
    hidden = model(tokens, positions, caches=caches)
    hidden = hidden[torch.arange(len(prompts), device=device), lengths - 1]

    keys = [key_of("sample", sampling.seed, row) for row in range(len(prompts))]
    answers: list[list[int]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    while True:
        draws = torch.cat([uniform(lengths[row].view(1), keys[row]) for row in range(len(prompts))])
        chosen = choose(model.logits(hidden).float(), draws, sampling)
        for row in live:
            answers[row].append(int(chosen[row]))
            if on_token is not None:
                on_token(row, answers[row][-1])
        live = [
            row
            for row in live
            if answers[row][-1] not in stop
            and not (ended is not None and ended(row, answers[row]))
            and len(answers[row]) < sampling.max_new_tokens
            and len(prompts[row]) + len(answers[row]) < capacity
        ]
        if not live:
            return answers
        # Rows that have ended are computed along, at a place that exists; nothing reads them any more.
        positions = lengths.clamp(max=capacity - 1)[:, None]
        hidden = model(chosen[:, None], positions, caches=caches)[:, 0]
        lengths = lengths + 1
