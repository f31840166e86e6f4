"""The token store: a corpus as one flat list of token ids, read through memory maps.

A store is a folder:

    tokens.bin       every document's ids one after the other, BOS and EOS included; uint16 or uint32, little-endian
    boundaries.bin   int64 [documents + 1]: document i is tokens[boundaries[i] : boundaries[i + 1]]
    manifest.json    what it is made of, sizes and checksums; written last, so a folder without it is no store

Reading is O(1) in the corpus: opening maps the two files, and pages come in when they are touched. Nothing here imports
torch, so that the processes that build a store start fast.

`fingerprint` is taken from the content alone (ids and boundaries): the same text tokenized again on another machine has
the same one, whatever the files were called.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from titanlike.errors import DataError

FORMAT = "titanlike token store"
VERSION = 1
MANIFEST = "manifest.json"
TOKENS = "tokens.bin"
BOUNDARIES = "boundaries.bin"


def id_dtype(vocab_size: int) -> np.dtype:
    """The narrowest type that holds the ids 0 … vocab_size - 1."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class TokenStore:
    """A store opened for reading. Cheap to send to another process: only the folder travels."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder = folder
        self.manifest = manifest
        self.dtype = np.dtype(manifest["dtype"])
        self.n_documents: int = manifest["documents"]
        self.n_tokens: int = manifest["tokens"]
        self.vocab_size: int = manifest["vocab_size"]
        self.fingerprint: str = manifest["fingerprint"]
        self.report: dict[str, Any] = manifest["report"]
        self.boundaries = _map(folder / BOUNDARIES, np.dtype("<i8"), self.n_documents + 1)
        self._tokens = _map(folder / TOKENS, self.dtype, self.n_tokens)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Ids [start, stop) of the flat list: a read-only view of `dtype`, no copy."""
        return self._tokens[start:stop]

    def document(self, number: int) -> np.ndarray:
        """Ids of one document, BOS and EOS included."""
        return self._tokens[self.boundaries[number] : self.boundaries[number + 1]]

    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]. O(documents) memory."""
        return np.diff(self.boundaries)

    def verify(self) -> list[str]:
        """Problems found by reading everything and comparing checksums; [] if there are none."""
        problems = []
        for name, facts in self.manifest["files"].items():
            if _checksum(self.folder / name) != facts["sha256"]:
                problems.append(f"{self.folder / name}: the content is not what was written (checksum differs)")
        return problems

    def __reduce__(self):
        return open_store, (self.folder,)  # a pickled memory map would carry the whole corpus


def is_store(folder: Path | str) -> bool:
    """Whether the folder is a complete token store."""
    try:
        return json.loads((Path(folder) / MANIFEST).read_text("utf-8")).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def open_store(folder: Path | str) -> TokenStore:
    """Open a store. Raises DataError if it is missing, of a later version, or cut short."""
    folder = Path(folder)
    if not is_store(folder):
        raise DataError(f"{folder}: not a token store (no readable {MANIFEST}); make one with `titanlike tokenize`")
    manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    if manifest["version"] > VERSION:
        raise DataError(
            f"{folder}: a token store of version {manifest['version']}, this titanlike reads up to {VERSION}; "
            "tokenize the text again, or use the newer titanlike"
        )
    for name, facts in manifest["files"].items():
        path = folder / name
        found = path.stat().st_size if path.exists() else 0
        if found != facts["bytes"]:
            raise DataError(f"{path}: {found} bytes where the store's manifest says {facts['bytes']}; remove {folder}")
    return TokenStore(folder, manifest)


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if count == 0:  # an empty file can't be mapped
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


class _HashedFile:
    """A file that is written from front to back, its checksum taken on the way."""

    def __init__(self, path: Path):
        self.path = path
        self.bytes = 0
        self._file = open(path, "wb")  # noqa: SIM115 (closed by close or abandon)
        self._hash = hashlib.sha256()

    def write(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).data.cast("B")
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def close(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self.bytes, "sha256": self._hash.hexdigest()}

    def abandon(self) -> None:
        self._file.close()


class StoreWriter:
    """Writes a store into an existing empty folder, document after document; `finish` makes it one.

    Holds nothing of what it wrote. Callers that share the folder's parent with others write into a folder of their own
    and rename it afterwards.
    """

    def __init__(self, folder: Path, vocab_size: int):
        self.folder = folder
        self.vocab_size = vocab_size
        self.dtype = id_dtype(vocab_size)
        self.documents = 0
        self.tokens = 0
        self.longest = 0
        self._token_file = _HashedFile(folder / TOKENS)
        self._boundary_file = _HashedFile(folder / BOUNDARIES)
        self._boundary_file.write(np.zeros(1, "<i8"))

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents: their ids one after the other [sum of lengths], and the length of each [documents]."""
        assert int(lengths.sum()) == len(tokens)
        if not len(lengths):
            return
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise ValueError(f"ids {tokens.min()} … {tokens.max()} outside a vocabulary of {self.vocab_size}")
        self._token_file.write(tokens.astype(self.dtype, copy=False))
        self._boundary_file.write((self.tokens + np.cumsum(lengths, dtype=np.int64)).astype("<i8", copy=False))
        self.documents += len(lengths)
        self.tokens += len(tokens)
        self.longest = max(self.longest, int(lengths.max()))

    def finish(self, *, report: dict[str, Any] | None = None, about: dict[str, Any] | None = None) -> None:
        """Close the files and write the manifest. `report`: counts for people; `about`: further manifest entries."""
        files = {TOKENS: self._token_file.close(), BOUNDARIES: self._boundary_file.close()}
        content = f"{self.dtype.str} {files[TOKENS]['sha256']} {files[BOUNDARIES]['sha256']}"
        counts = {
            "documents": self.documents,
            "tokens": self.tokens,
            "tokens_per_document": round(self.tokens / max(self.documents, 1), 1),
            "longest_document": self.longest,
        }
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": hashlib.sha256(content.encode()).hexdigest()[:32],
            "dtype": self.dtype.str,
            "documents": self.documents,
            "tokens": self.tokens,
            "vocab_size": self.vocab_size,
            "files": files,
            **(about or {}),
            "report": {**counts, **(report or {})},
        }
        write_json(self.folder / MANIFEST, manifest)

    def abandon(self) -> None:
        """Close the files, whether or not the store was finished."""
        self._token_file.abandon()
        self._boundary_file.abandon()


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file so that readers see the old one or the new one, never a part."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(beside, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def write_store(folder: Path | str, documents: Iterable[np.ndarray], *, vocab_size: int = 1 << 16) -> TokenStore:
    """Make a store of ready ids, one array a document. For tests and for data that is tokens already."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    writer = StoreWriter(folder, vocab_size)
    try:
        for document in documents:
            ids = np.asarray(document)
            writer.add(ids, np.asarray([len(ids)]))
        writer.finish()
    finally:
        writer.abandon()
    return open_store(folder)
