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
    lengths = pieces.lengths
    begins = np.cumsum(lengths) - lengths  # of each piece, among all the tokens taken
    first = np.searchsorted(pieces.rows, pieces.rows)  # the piece that opens each piece's row
    columns = begins - begins[first]
    taken = np.arange(lengths.sum())
    source = taken + np.repeat(pieces.starts - begins, lengths)  # indices in the store
    target = taken + np.repeat(pieces.rows * seq_len + columns - begins, lengths)  # places in the flattened batch
    label_source = source + 1
    label_source[begins + lengths - 1] = _after(store, pieces, document_mask)

    shape = (len(numbers), seq_len)
    tokens = np.full(shape, pad_id, np.int64)
    labels = np.full(shape, IGNORE, np.int64)
    positions = np.zeros(shape, np.int32)
    documents = np.full(shape, PADDING, np.int32)
    flat = np.asarray(store.tokens(0, store.n_tokens))
    tokens.flat[target] = flat[source]
    labels.flat[target] = np.where(label_source < 0, IGNORE, flat[label_source].astype(np.int64))
    if document_mask:
        positions.flat[target] = taken - np.repeat(begins, lengths)
        documents.flat[target] = np.repeat(np.arange(len(lengths)) - first, lengths)
    else:
        positions[:] = np.arange(seq_len)
        documents.flat[target] = 0
    document_numbers = torch.from_numpy(documents)
    return Batch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        positions=torch.from_numpy(positions),
        documents=document_numbers,
        sequences=torch.from_numpy(numbers.astype(np.int64)),
        offsets=document_offsets(document_numbers),
    )


def _after(store: Tokens, pieces: SequencePieces, document_mask: bool) -> np.ndarray:
    """Where in the store the label of each piece's last token is, -1 for no label: int64 [P]."""
    if document_mask:
        after = pieces.starts + pieces.lengths
        return np.where(after < store.boundaries[pieces.documents + 1], after, -1)
    after = pieces.following[pieces.rows]
    same_row = np.flatnonzero(pieces.rows[1:] == pieces.rows[:-1])
    after[same_row] = pieces.starts[same_row + 1]
    return after
