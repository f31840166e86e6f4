"""Pieces of documents → the tensors of a batch. Arithmetic on whole batches: no loop over tokens, pieces or rows."""

from __future__ import annotations

import numpy as np
import torch

from titanlike.data.batch import IGNORE, Batch, document_offsets
from titanlike.data.plan import SequencePieces, Tokens

PADDING = -1  # document number of tokens that only fill a row up


def fill_rows(
    store: Tokens,
    pieces: SequencePieces,
    numbers: np.ndarray,
    seq_len: int,
    *,
    document_mask: bool = True,
    pad_id: int = 0,
) -> Batch:
    """The batch of these pieces on the CPU, one row a sequence number (int64 [B]; -1 = filler row).

    With `document_mask`, positions start anew and attention ends at each document, and a document's last token has no
    label. Without, a row is one run of text: positions 0 … S-1, and labels go on into the next document.
    """
    shape = (len(numbers), seq_len)
    lengths = pieces.lengths
    begins = np.cumsum(lengths) - lengths  # of each piece, among all the tokens taken
    first = np.searchsorted(pieces.rows, pieces.rows)  # the piece that opens each piece's row
    taken = np.arange(lengths.sum())
    source = taken + np.repeat(pieces.starts - begins, lengths)  # indices in the store
    label_source = source + 1
    label_source[begins + lengths - 1] = _after(store, pieces, document_mask)
    flat = np.asarray(store.tokens(0, store.n_tokens))
    tokens = flat[source].astype(np.int64)
    labels = flat[label_source].astype(np.int64)
    labels[label_source < 0] = IGNORE
    if document_mask:
        positions = taken - np.repeat(begins, lengths)
        documents = np.repeat(np.arange(len(lengths)) - first, lengths)
    else:
        positions = taken - np.repeat(begins[first], lengths)
        documents = np.zeros_like(taken)

    if len(taken) == len(numbers) * seq_len:  # every row is full: what was taken lies where it belongs
        places = None
    else:
        places = taken + np.repeat(pieces.rows * seq_len - begins[first], lengths)
    tokens = _lay_out(tokens, places, shape, pad_id, np.int64)
    labels = _lay_out(labels, places, shape, IGNORE, np.int64)
    positions = _lay_out(positions, places, shape, 0, np.int32)
    documents = _lay_out(documents, places, shape, PADDING, np.int32)
    return Batch(
        tokens=tokens,
        labels=labels,
        positions=positions,
        documents=documents,
        sequences=torch.from_numpy(numbers.astype(np.int64)),
        offsets=document_offsets(documents),
    )


def _lay_out(values: np.ndarray, places: np.ndarray | None, shape: tuple[int, int], rest: int, dtype) -> torch.Tensor:
    """Values at their places of a [B, S] tensor, `rest` elsewhere; places None: the values are the whole of it."""
    if places is None:
        return torch.from_numpy(values.astype(dtype, copy=False).reshape(shape))
    whole = np.full(shape, rest, dtype)
    whole.reshape(-1)[places] = values
    return torch.from_numpy(whole)


def _after(store: Tokens, pieces: SequencePieces, document_mask: bool) -> np.ndarray:
    """Where in the store the label of each piece's last token is, -1 for no label: int64 [P]."""
    if document_mask:
        after = pieces.starts + pieces.lengths
        return np.where(after < store.boundaries[pieces.documents + 1], after, -1)
    after = pieces.following[pieces.rows]
    same_row = np.flatnonzero(pieces.rows[1:] == pieces.rows[:-1])
    after[same_row] = pieces.starts[same_row + 1]
    return after
