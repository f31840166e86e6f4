"""[data] and [validation]: what is read, and in which order."""

# ruff: noqa: RUF012 (pydantic copies a mutable default)

from __future__ import annotations

from typing import Literal

from titanlike.config.sections.base import BelowOne, Names, NonNegative, Positive, PositiveFloat, Section


class DataLoader(Section):
    """Loader workers of one process."""

    num_workers: NonNegative = 0
    """Worker processes that prepare batches; 0 does it in the training process."""

    persistent_workers: bool = False
    """Accepted for TorchTitan's files; workers live as long as the loader here."""

    pin_memory: bool = False
    """Copy batches to page-locked memory first (for GPUs)."""

    prefetch_factor: Positive | None = None
    """Batches that a worker prepares ahead; none picks one."""


class SourceSpec(Section):
    """[[data.sources]]: one source of a mixture."""

    name: str
    """Name of the source in metrics and messages."""

    weight: PositiveFloat = 1.0
    """Share of the sequences, relative to the other sources."""

    dataset: str | None = None
    """As data.dataset, for this source."""

    path: Names = []
    """As data.path, for this source."""

    text_column: str = "text"
    """As data.text_column, for this source."""

    epochs: PositiveFloat | None = None
    """Most passes over this source; none has no limit."""


class StageSpec(Section):
    """[[data.stages]]: what changes from one sequence or step on."""

    from_step: NonNegative
    """Step at which the stage begins."""

    seq_len: Positive | None = None
    """Sequence length in tokens; none keeps the one before."""

    global_batch_size: Positive | None = None
    """Sequences a step; none keeps the number before."""

    weights: dict[str, float] | None = None
    """Weights of the sources by name; none keeps those before."""


class Data(Section):
    """What text is read and how it becomes sequences."""

    dataset: str = "debug"
    """Name of a known data set, or a Hub id such as org/name. Not used where path is set."""

    path: Names = []
    """Files, globs or folders to read. Compressed ones (.gz, .zst) are read as they are."""

    format: Literal["auto", "jsonl", "json", "text", "parquet"] = "auto"
    """Form of the files; auto goes by the file's ending."""

    text_column: str = "text"
    """Field of a record that holds the text."""

    split: str = "train"
    """Split of a Hub data set."""

    subset: str | None = None
    """Subset (configuration) of a Hub data set."""

    revision: str | None = None
    """Branch, tag or commit of a Hub data set."""

    add_bos: bool = True
    """Begin each document with the tokenizer's beginning-of-sequence token."""

    add_eos: bool = True
    """End each document with the tokenizer's end-of-sequence token."""

    bos_token: str | None = None
    """Text of the token to use as beginning of sequence; none takes the tokenizer's."""

    eos_token: str | None = None
    """Text of the token to use as end of sequence; none takes the tokenizer's."""

    document_mask: bool = True
    """Attention stays inside a document, and positions restart with each."""

    long_documents: Literal["split", "truncate"] = "split"
    """A document longer than a sequence is split over several, or cut and the rest counted as dropped."""

    bad_lines: Literal["stop", "skip"] = "stop"
    """What a record that can't be read does: stop the run with file and line, or be skipped and counted."""

    shuffle: bool = True
    """Permute documents once and sequences in each epoch, both by the seed."""

    seed: NonNegative | None = None
    """Seed of the order; none takes debug.seed."""

    epochs: Positive | None = None
    """Passes after which the data ends; none goes on until training.steps."""

    validation_fraction: BelowOne = 0.0
    """Share of the documents that is held out for validation, chosen by hash."""

    cache_folder: str | None = None
    """Folder of the token stores; none takes titanlike's folder in the user's cache."""

    tokenize_workers: NonNegative = 0
    """Processes that tokenise on first use; 0 takes as many as there are cores."""

    log_consumed: bool = False
    """Write the sequence and document numbers of each step to consumed.jsonl."""

    allow_changed: bool = False
    """Resume although the data is not what the checkpoint was trained on."""

    sources: list[SourceSpec] = []
    """Sources of a mixture, instead of dataset and path."""

    stages: list[StageSpec] = []
    """Changes of sequence length, batch or mixture in the course of the run."""

    stream: bool = False
    """Tokenise shards ahead of training instead of all of them before it."""

    stream_cache_gib: PositiveFloat = 50.0
    """Most disk space that token stores of a stream may take, GiB."""


class Validation(Section):
    """Loss on text that is not trained on."""

    enable: bool = False
    """Run validation."""

    freq: Positive = 10
    """Steps between validations."""

    steps: int = -1
    """Batches of a validation; -1 takes every held-out sequence once."""

    dataset: str | None = None
    """Name of a known data set or Hub id; none takes the documents held out by data.validation_fraction."""

    path: Names = []
    """Files, globs or folders to validate on."""

    local_batch_size: Positive = 8
    """Sequences that a rank takes through the model at once."""

    seq_len: Positive | None = None
    """Sequence length in tokens; none takes training.seq_len."""

    dataloader: DataLoader = DataLoader()
    """Loader workers."""
