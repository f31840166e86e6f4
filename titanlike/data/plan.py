"""The plan: the run's one long list of sequences, as arithmetic on document lengths.

Sequence n of the list is row n % N of pass n // N over the data, N being the number of rows that one pass gives. Which
tokens a row holds is fixed once (`Cut`); each pass takes the rows in another order (`Permutation`). All of it is a
function of (store, seed, n), so the state of the data is one integer: the next n.

    documents     d3 ········ d0 ···· d5 ················ d1 ······      permuted once by the seed, laid end to end
    rows          |r0       |r1       |r2       |r3       |  tail        cut every seq_len tokens
    sequences     pass 0: r2 r0 r3 r1   pass 1: r3 r2 r0 r1   …          permuted by (seed, pass)

What a row trains on: the label of a token is the token after it in its document, also where that one opens the next
row, and the last token of a document has none. So in one pass each token of a document but the first is a target
exactly once: as many targets as tokens, less one a document. The tail that fills no row (less than seq_len tokens a
pass) is left out of training and counted in `Cut.dropped_tail`; held-out data keeps it, in a last row filled up with
padding, so that validation takes every token once.

Memory: 16 bytes a document (its number and where it begins in the line). The list itself is never written down.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from titanlike.data.order import Permutation, derive_key, hash_numbers
from titanlike.errors import DataError

LongDocuments = Literal["split", "truncate"]
_VERSION = 1  # of the list's order: raise it when the same settings would give another list


class Tokens(Protocol):
    """What a plan and its rows ask of a token store."""

    @property
    def boundaries(self) -> np.ndarray: ...  # int64 [documents + 1]: document d is tokens boundaries[d] … [d + 1]

    @property
    def n_documents(self) -> int: ...

    @property
    def n_tokens(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def tokens(self, start: int, stop: int) -> np.ndarray: ...  # a view, not a copy


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of the list: from sequence `first` on, steps take `global_batch` sequences of `seq_len` tokens."""

    first: int = 0
    seq_len: int
    global_batch: int


@dataclass(frozen=True, kw_only=True)
class SequencePieces:
    """Which tokens of the store the asked-for rows hold: P pieces of documents, in the order of rows. All int64.

    A row without pieces is a filler row; a row whose pieces add up to less than seq_len is filled up with padding.
    """

    rows: np.ndarray  # [P] index among the asked-for rows
    documents: np.ndarray  # [P] document number in the store
    starts: np.ndarray  # [P] first token, counted in the whole store
    lengths: np.ndarray  # [P] ≥ 1
    following: np.ndarray  # [rows] the store's token after the row in the line; -1 where the line ends


def hold_out(n_documents: int, fraction: float, seed: int) -> tuple[np.ndarray | None, np.ndarray]:
    """Split documents in (training, validation) by a hash of (seed, number), both int64 and in the store's order.

    Whether a document is held out doesn't change when others are appended (except where the promise of one document on
    either side, given for 0 < fraction < 1 and two documents or more, makes it). Training is None when it is all.
    """
    if fraction <= 0 or n_documents < 2:
        return None, np.empty(0, np.int64)
    hashes = hash_numbers(np.arange(n_documents), derive_key(seed, "hold-out"))
    held = hashes < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    if not held.any():
        held[hashes.argmin()] = True
    if held.all():
        held[hashes.argmax()] = False
    return np.flatnonzero(~held), np.flatnonzero(held)


class Cut:
    """Documents laid end to end and cut in rows of `seq_len` tokens: row number → pieces of documents.

    `documents` (int64, in the order of the line; None for all in the store's order) says which; with `order` they are
    permuted first. `keep_tail` makes a last, shorter row of what is left. `long_documents="truncate"` takes of each
    document the first seq_len tokens only (the one after them is still the last one's label) and counts the rest in
    `truncated_documents` and `truncated_tokens`.
    """

    def __init__(
        self,
        store: Tokens,
        seq_len: int,
        *,
        documents: np.ndarray | None = None,
        order: int | None = None,
        long_documents: LongDocuments = "split",
        keep_tail: bool = False,
    ):
        self.seq_len = seq_len
        self._store = store
        count = store.n_documents if documents is None else len(documents)
        line = np.arange(count) if order is None or count == 0 else Permutation(count, order)[np.arange(count)]
        self.documents = line if documents is None else documents[line]
        lengths = np.diff(store.boundaries)[self.documents]
        self.n_tokens = int(lengths.sum())  # of the chosen documents, whether used or not
        self.truncated_documents = self.truncated_tokens = 0
        if long_documents == "truncate":
            beyond = np.maximum(lengths - (seq_len + 1), 0)
            self.truncated_documents, self.truncated_tokens = int(np.count_nonzero(beyond)), int(beyond.sum())
            lengths = np.minimum(lengths, seq_len)
        self.offsets = np.zeros(count + 1, np.int64)
        np.cumsum(lengths, out=self.offsets[1:])
        self.line_length = int(self.offsets[-1])  # tokens that are laid end to end
        self.n_rows = -(-self.line_length // seq_len) if keep_tail else self.line_length // seq_len
        self.dropped_tail = max(self.line_length - self.n_rows * seq_len, 0)

    def pieces(self, indices: np.ndarray) -> SequencePieces:
        """The pieces of these rows (int64 [rows], in 0 … n_rows-1; a negative index asks for a filler row)."""
        real = np.flatnonzero(indices >= 0)
        begins = indices[real] * self.seq_len
        ends = np.minimum(begins + self.seq_len, self.line_length)
        first = np.searchsorted(self.offsets, begins, side="right") - 1
        last = np.searchsorted(self.offsets, ends, side="left") - 1
        counts = last - first + 1
        rows = np.repeat(np.arange(len(real)), counts)
        places = np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        starts = np.maximum(self.offsets[places], begins[rows])
        lengths = np.minimum(self.offsets[places + 1], ends[rows]) - starts
        if not lengths.all():  # documents without a token between two others
            rows, places, starts, lengths = (x[lengths > 0] for x in (rows, places, starts, lengths))
        following = np.full(len(indices), -1, np.int64)
        more = ends < self.line_length
        following[real[more]] = self._in_store(ends[more])
        documents = self.documents[places]
        starts = starts - self.offsets[places] + self._store.boundaries[documents]
        return SequencePieces(rows=real[rows], documents=documents, starts=starts, lengths=lengths, following=following)

    def _in_store(self, positions: np.ndarray) -> np.ndarray:
        """Positions in the line → token indices of the store."""
        places = np.searchsorted(self.offsets, positions, side="right") - 1
        return positions - self.offsets[places] + self._store.boundaries[self.documents[places]]


class Plan:
    """The list of sequences of a run. `identity` is what the list depends on, by config key, as JSON.

    `end` is the length of the list, None when it has no end. Stages may change the global batch; a change of
    seq_len from stage to stage needs a cut for each length, which is not built yet.
    """

    def __init__(
        self,
        store: Tokens,
        stages: Sequence[Stage],
        *,
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
        validation_fraction: float = 0.0,
        long_documents: LongDocuments = "split",
    ):
        assert stages and stages[0].first == 0, "the list begins with a stage"
        assert all(a.first < b.first for a, b in itertools.pairwise(stages)), "stages follow each other"
        assert len({stage.seq_len for stage in stages}) == 1, "not built yet: stages of several lengths"
        self.stages = tuple(stages)
        self.seed, self.shuffle, self.epochs = seed, shuffle, epochs
        self.seq_len = stages[0].seq_len
        training, self.held_out = hold_out(store.n_documents, validation_fraction, seed)
        order = derive_key(seed, "documents") if shuffle else None
        self.cut = Cut(store, self.seq_len, documents=training, order=order, long_documents=long_documents)
        self.n_sequences_per_epoch = self.cut.n_rows
        if not self.cut.n_rows:
            raise DataError(_too_little(store, self.cut))
        self.identity: dict[str, Any] = {
            "version of the order": _VERSION,
            "fingerprint of the data": store.fingerprint,
            "data.seed": seed if shuffle or validation_fraction > 0 else None,
            "data.shuffle": shuffle,
            "data.validation_fraction": validation_fraction,
            "data.long_documents": long_documents,
            "training.seq_len": self.seq_len,
        }
        self._orders: dict[int, Permutation] = {}

    @property
    def fingerprint(self) -> str:
        """Hex digest of `identity`: the same list of sequences, the same fingerprint."""
        return hashlib.blake2b(json.dumps(self.identity, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def end(self) -> int | None:
        return None if self.epochs is None else self.epochs * self.n_sequences_per_epoch

    def epoch(self, n: int) -> float:
        """How many passes over the data lie before sequence n."""
        return n / self.n_sequences_per_epoch

    def stage(self, n: int) -> Stage:
        """The stage that sequence n belongs to."""
        return next(stage for stage in reversed(self.stages) if stage.first <= n)

    def step_size(self, position: int) -> int:
        """How many sequences the step that begins at sequence `position` takes; 0 when the data has ended.

        The last step of a list that ends takes what is left, so that every sequence is trained on.
        """
        wanted = self.stage(position).global_batch
        return wanted if self.end is None else max(min(wanted, self.end - position), 0)

    def position(self, steps: int) -> int:
        """Where the list stands after so many steps from its start (as if it had no end)."""
        position = 0
        for stage, limit in zip(self.stages, [*(s.first for s in self.stages[1:]), None], strict=True):
            here = steps if limit is None else min(steps, max(-(-(limit - position) // stage.global_batch), 0))
            steps, position = steps - here, position + here * stage.global_batch
        return position

    def steps(self, position: int = 0) -> int | None:
        """How many steps are left from `position` on; None when the list has no end."""
        if self.end is None:
            return None
        count = 0
        for stage, limit in zip(self.stages, [*(s.first for s in self.stages[1:]), self.end], strict=True):
            here = max(-(-(min(limit, self.end) - position) // stage.global_batch), 0)
            count, position = count + here, position + here * stage.global_batch
        return count

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Sequence numbers (int64; -1 for a filler row) → rows of the cut, -1 for fillers."""
        epochs, rows = np.divmod(numbers, self.n_sequences_per_epoch)
        rows = np.where(numbers < 0, -1, rows)
        if self.shuffle:
            for epoch in np.unique(epochs[numbers >= 0]).tolist():
                chosen = (epochs == epoch) & (numbers >= 0)
                rows[chosen] = self._order(epoch)[rows[chosen]]
        return rows

    def sequences(self, numbers: np.ndarray) -> SequencePieces:
        """The pieces of many sequences at once (int64 numbers; -1 asks for a filler row)."""
        return self.cut.pieces(self.rows(numbers))

    def sequence(self, n: int) -> SequencePieces:
        """The pieces of sequence n."""
        return self.sequences(np.array([n]))

    def documents(self, first: int, count: int) -> list[list[int]]:
        """The document numbers of `count` sequences from `first` on, a list a sequence."""
        pieces = self.sequences(np.arange(first, first + count))
        edges = np.searchsorted(pieces.rows, np.arange(1, count))
        return [part.tolist() for part in np.split(pieces.documents, edges)]

    def differences(self, identity: dict[str, Any]) -> list[str]:
        """What another plan's identity says otherwise, as 'key was …, is …'."""
        keys = [*self.identity, *(key for key in identity if key not in self.identity)]
        return [
            f"{key} was {identity.get(key)!r}, is {self.identity.get(key)!r}"
            for key in keys
            if identity.get(key) != self.identity.get(key)
        ]

    def _order(self, epoch: int) -> Permutation:
        if epoch not in self._orders:
            if len(self._orders) >= 2:  # a batch touches two passes at most, as a rule
                self._orders.clear()
            self._orders[epoch] = Permutation(self.n_sequences_per_epoch, derive_key(self.seed, "sequences", epoch))
        return self._orders[epoch]


def _too_little(store: Tokens, cut: Cut) -> str:
    kept = f"{cut.line_length} tokens in {len(cut.documents)} training documents"
    held = store.n_documents - len(cut.documents)
    return (
        f"data.path: {kept}{f' ({held} more are held out for validation)' if held else ''} don't fill one sequence of "
        f"training.seq_len = {cut.seq_len} tokens; give more data, or set training.seq_len to {cut.line_length} or less"
    )
