"""Orders without memory: a permutation of 0 … n-1 that is a function of a key.

`Permutation(n, key)[i]` is where place i leads. Nothing is stored and nothing is drawn, so any process at any moment
can ask for any place: a run resumes at place 10^12 as cheaply as at place 0, and how many ranks or workers ask has no
say in the answer.

How: a Feistel network permutes a power of four at or above n (it cuts the number in two halves and stirs one by a hash
of the other, round by round, which can be undone whatever the hash is, so no two numbers meet). A number that lands at
or above n is sent through again until it falls below ("cycle walking"), which keeps it a permutation of 0 … n-1 and
takes fewer than four passes on average. Few places are sorted by a hash instead: a small network can't reach all
orders evenly.
"""

from __future__ import annotations

import hashlib
from typing import overload

import numpy as np

_ROUNDS = 6
_SORTED_UP_TO = 1024  # places; 8 KiB of table at most


def derive_key(*parts: str | int) -> int:
    """A 64-bit key from parts such as (seed, "sequences", epoch): other parts, unrelated key."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def hash_numbers(numbers: np.ndarray, key: int) -> np.ndarray:
    """Evenly spread 64-bit hashes of whole numbers: uint64, of `numbers`' shape. The same on every machine."""
    return _mix(_mix(numbers.astype(np.uint64)) ^ np.uint64(key))


class Permutation:
    """A bijection of 0 … n-1, chosen by a 64-bit key. `p[i]` takes one place, `p[array]` many at once."""

    def __init__(self, n: int, key: int):
        if n < 1:
            raise ValueError(f"a permutation needs at least one place, not {n}")
        self.n = n
        self._table = np.argsort(hash_numbers(np.arange(n), key), kind="stable") if n <= _SORTED_UP_TO else None
        self._half_bits = ((n - 1).bit_length() + 1) // 2
        self._round_keys = hash_numbers(np.arange(_ROUNDS), key)

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, place: int | np.integer) -> int: ...
    @overload
    def __getitem__(self, place: np.ndarray) -> np.ndarray: ...

    def __getitem__(self, place):
        """Where the place leads: int for an int, int64 of the same shape for an array. IndexError outside 0 … n-1."""
        places = np.atleast_1d(np.asarray(place))
        if places.size and (places.min() < 0 or places.max() >= self.n):
            raise IndexError(f"places must lie in 0 … {self.n - 1}")
        found = self._walk(places.astype(np.uint64)) if self._table is None else self._table[places]
        found = found.astype(np.int64)
        return found if isinstance(place, np.ndarray) else int(found[0])

    def _walk(self, x: np.ndarray) -> np.ndarray:
        x = self._network(x)
        while len(outside := np.flatnonzero(x >= self.n)):
            x.flat[outside] = self._network(x.flat[outside])
        return x

    def _network(self, x: np.ndarray) -> np.ndarray:
        half, mask = np.uint64(self._half_bits), np.uint64((1 << self._half_bits) - 1)
        left, right = x >> half, x & mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << half) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """Stir 64 bits so that each bit of the result hangs on each bit of x (the finaliser of SplitMix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
