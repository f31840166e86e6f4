"""How rows are dealt to the context ranks, and which queries see which keys then.

A row is cut into equal chunks. "headtail" makes 2n of them for n ranks and gives rank r chunks r and 2n-1-r, so that
causal attention costs each rank the same; without a balancer rank r of n gets the r-th of n chunks.

    headtail, n = 2      rank 0 │ 0 │   │   │ 3 │      in order      rank 0 │ 0 │   │
                         rank 1 │   │ 1 │ 2 │   │                    rank 1 │   │ 1 │

A rank holds its tokens in the row's order. So a document, which is one run of the row, is one run of every rank's
tokens too, and of each document only one piece is left between the queries of rank i and the keys of rank j:

    j = i   all its queries with all its keys, causal
    j < i   all its queries with the keys in chunk j, all visible (chunk 2n-1-j comes after every query of rank i)
    j > i   the queries in chunk 2n-1-i with all its keys, all visible; in order: nothing
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

BALANCERS = ("headtail", "none")


class Piece(NamedTuple):
    """Queries and keys of one document, as runs of the ranks' flattened tokens. Neither is empty."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class Deal:
    """The dealing of rows of `length` tokens to `degree` ranks. `length` must be a multiple of `chunks`."""

    degree: int
    balancer: str
    length: int

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return self.degree * (2 if self.balancer == "headtail" else 1)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.length // self.chunks

    @property
    def share(self) -> int:
        """Tokens of a row that one rank holds."""
        return self.length // self.degree

    def held(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the row's order."""
        return (rank, self.chunks - 1 - rank) if self.balancer == "headtail" else (rank,)

    def columns(self, rank: int) -> list[slice]:
        """The columns of a row that a rank holds."""
        return [slice(i * self.chunk, (i + 1) * self.chunk) for i in self.held(rank)]

    def before(self, rank: int, columns: torch.Tensor) -> torch.Tensor:
        """How many of a rank's tokens in a row lie before each of these columns."""
        return sum((columns - part.start).clamp(0, self.chunk) for part in self.columns(rank))

    def windows(self, rank: int, source: int) -> tuple[int, int] | None:
        """(first query, end of keys) within a share: what is left of causality between two ranks; None = nothing."""
        if source <= rank:
            return 0, self.chunk if source < rank else self.share
        return (self.chunk, self.share) if self.balancer == "headtail" else None

    def runs(self, rank: int, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(row, start, end) of each document among a rank's flattened tokens [B * share]; start = end: it has none."""
        starts, ends = offsets[:-1], offsets[1:]
        rows = starts // self.length
        first, base = rows * self.length, rows * self.share
        return rows, base + self.before(rank, starts - first), base + self.before(rank, ends - first)

    def pieces(self, rank: int, source: int, offsets: torch.Tensor) -> list[Piece]:
        """Pieces between the queries of `rank` and the keys of `source`; causal squares if they are one rank.

        offsets int64 [n + 1] on the host, over the tokens of whole rows; no document crosses a row.
        """
        windows = self.windows(rank, source)
        if windows is None:
            return []
        rows, q_start, q_end = self.runs(rank, offsets)
        _, k_start, k_end = self.runs(source, offsets)
        q_start = q_start.maximum(rows * self.share + windows[0])
        k_end = k_end.minimum(rows * self.share + windows[1])
        some = (q_start < q_end) & (k_start < k_end)
        bounds = torch.stack([q_start, q_end, k_start, k_end], 1)[some].tolist()
        return [Piece(slice(a, b), slice(c, d)) for a, b, c, d in bounds]

    def whole_rows(self, rank: int, source: int) -> list[Piece]:
        """The same for rows of one document each: the piece that all rows have in common, as columns of a share."""
        windows = self.windows(rank, source)
        return [] if windows is None else [Piece(slice(windows[0], self.share), slice(0, windows[1]))]
