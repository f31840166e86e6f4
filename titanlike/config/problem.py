"""What a rule between keys says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from titanlike.config.nearest import nearest_word
from titanlike.config.schema import Config


@dataclass(frozen=True)
class Problem:
    """Something that doesn't fit, and the keys it speaks of."""

    keys: tuple[str, ...]
    text: str


Rule = Callable[[Config], Iterator[Problem]]


def not_among(key: str, value: str, allowed: list[str] | tuple[str, ...], other: str = "") -> Problem:
    """A value that is none of those allowed, with the nearest that is."""
    near = nearest_word(value, list(allowed))
    hint = f"; did you mean {near}?" if near else ""
    end = f", or {other}" if other else ""
    return Problem((key,), f"{key} = {value!r}: must be one of {', '.join(allowed)}{end}{hint}")
