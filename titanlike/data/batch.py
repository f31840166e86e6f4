"""The batch: what a data source hands to the trainer.

Everything is indexed by token or by row, so that context parallelism can cut sequences and the pipeline can cut
microbatches without knowing the objective. Shapes: B rows, S tokens a row.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

IGNORE = -100  # label of a token that is not trained on


@dataclass(kw_only=True)
class Batch:
    """One microbatch of one rank.

    `documents` numbers the documents inside a row (0, 1, …; -1 = padding); attention never crosses one. `offsets` are
    their boundaries over the B*S flattened tokens, or None when every row is one document. `sequences` holds the number
    of each row in the run's one long list of sequences; -1 marks a row that is all padding: it only fills the batch up.
    """

    tokens: torch.Tensor  # int64 [B, S]
    labels: torch.Tensor  # int64 [B, S], already shifted; IGNORE = not trained on
    positions: torch.Tensor  # int64 [B, S], from 0 at each document's start in the row
    documents: torch.Tensor  # int32 [B, S]
    sequences: torch.Tensor  # int64 [B]
    offsets: torch.Tensor | None  # int32 [n + 1], or None
    dropout_keys: torch.Tensor | None = None  # int64 [B, S], see models.dropout

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device. Offsets go along: the fused kernels read them where they run."""

        def move(value):
            return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

        return type(self)(**{f.name: move(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory, from which copies to a GPU don't block. (Called by torch's loader.)"""

        def pin(value):
            return value.pin_memory() if isinstance(value, torch.Tensor) else value

        return type(self)(**{f.name: pin(getattr(self, f.name)) for f in dataclasses.fields(self)})

    def rows(self, first: int, count: int) -> Batch:
        """`count` rows from row `first` on, as a batch of their own."""
        part = slice(first, first + count)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "offsets"}
        cut = {name: value[part] if isinstance(value, torch.Tensor) else value for name, value in fields.items()}
        return type(self)(**cut, offsets=None if self.offsets is None else document_offsets(cut["documents"]))

    def token_count(self) -> int:
        """Tokens of documents (padding and filler rows left out)."""
        return int((self.documents >= 0).sum())

    def trained_count(self) -> int:
        """Tokens that the loss is taken on."""
        return int((self.labels != IGNORE).sum())


def document_offsets(documents: torch.Tensor) -> torch.Tensor | None:
    """Boundaries of the documents of [B, S] document numbers over B*S flattened tokens, int32 [n + 1].

    None if every row is one document: then plain causal attention is right, and faster.
    """
    rows, length = documents.shape
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    found = starts.flatten().nonzero().flatten()
    if len(found) == rows:
        return None
    return torch.cat([found, found.new_tensor([rows * length])]).to(torch.int32)
