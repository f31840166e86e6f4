"""Sources: where the text is, as a list of files whose blocks come in a fixed order.

`open_source` reads the `[data]` section: `path` if it is set (files, globs, folders), else `dataset` (a name of
`titanlike.data.registry`, or a Hub id). Finding the files is quick and every rank does it for itself, so each of them
meets the same error; reading is done by the one process that builds the token store.

A folder stands for the readable files below it in the order of their paths; hidden ones, names that begin with "_" and
endings that are no format are passed over. A plain text file is one document; use JSONL for many short ones.
"""

from __future__ import annotations

import difflib
import glob
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from titanlike.data import hub
from titanlike.data.readers import BLOCK_BYTES, COMPRESSED, FORMATS, format_of, read_blocks
from titanlike.data.records import COUNTED, Block, parse
from titanlike.data.registry import Files, HubFiles, Texts, Where, datasets
from titanlike.errors import DataError

if TYPE_CHECKING:
    from titanlike.config.sections.data import Data

logger = logging.getLogger("titanlike")


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file. `fetch` gives its local path (a Hub file is downloaded when it is first read)."""

    name: str
    format: str
    size: int
    stamp: str  # changes when the content does: modification time, or a Hub commit
    fetch: Callable[[], Path]


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text and where it stands."""

    text: str
    file: str
    line: int


@dataclass(kw_only=True)
class Source:
    """Documents of some files, in order. `counts` and `problems` are of the last pass of `documents`."""

    name: str
    text_column: str = "text"
    bad_lines: Literal["stop", "skip"] = "stop"
    files: list[SourceFile] = field(default_factory=list)
    texts: Texts | None = None
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """Size of all files as they are stored; 0 where it isn't known."""
        return sum(file.size for file in self.files)

    def key(self) -> dict[str, Any]:
        """What decides which documents come out, as JSON. Cheap: no file is opened."""
        files = [[file.name, file.format, file.size, file.stamp] for file in self.files]
        version = self.texts.version if self.texts else None
        return {"files": files, "version": version, "column": self.text_column, "bad_lines": self.bad_lines}

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Every block in order, with the bytes of all files that are read once it is."""
        if self.texts:
            yield from ((block, 0) for block in _text_blocks(self.name, self.texts))
        before = 0
        for file in self.files:
            for block in read_blocks(file.fetch(), file.format, self.text_column):
                yield block, before + block.consumed
            before += file.size

    def documents(self) -> Iterator[Document]:
        """Every document in order, in this process. Raises DataError as `titanlike.data.records` describes."""
        self.counts, self.problems = dict.fromkeys(COUNTED, 0), []
        for block, _ in self.blocks():
            parsed = parse(block, self.text_column, self.bad_lines)
            self.problems += parsed.problems
            for what, count in parsed.counts.items():
                self.counts[what] += count
            for text, place in zip(parsed.texts, parsed.places, strict=True):
                yield Document(text=text, file=block.file, line=place)


def open_source(data: Data, *, cache_folder: Path | None = None) -> Source:
    """The source that the `[data]` section describes.

    Raises DataError for a path that isn't there, matches nothing or holds nothing readable, ConfigError for an unknown
    name. `cache_folder` keeps the file list of Hub data sets.
    """
    where, name = _where(data)
    source = Source(name=name, text_column=data.text_column, bad_lines=data.bad_lines)
    if isinstance(where, Texts):
        source.texts = where
        return source
    source.text_column = where.text_column or data.text_column
    wanted = where.format or data.format
    if isinstance(where, HubFiles):
        source.files = _hub_files(where, wanted, cache_folder)
    else:
        source.files = find_files(where.path, wanted)
    return source


def _where(data: Data) -> tuple[Where, str]:
    if data.path:
        return Files(path=tuple(data.path)), Path(data.path[0]).name
    if "/" in data.dataset and data.dataset not in datasets.names():
        where = HubFiles(id=data.dataset, subset=data.subset, split=data.split, revision=data.revision)
        return where, data.dataset
    return datasets.get(data.dataset, "data.dataset")(data), data.dataset


def find_files(paths: tuple[str, ...] | list[str], format: str = "auto") -> list[SourceFile]:
    """The files that paths, globs and folders stand for, each once. Raises DataError as `open_source` does."""
    found: dict[Path, SourceFile] = {}
    for entry in paths:
        for path in _expand(entry, format):
            absolute = path.absolute()
            if absolute in found:
                logger.warning("%s is named twice in data.path; it is read once", path)
                continue
            found[absolute] = _local_file(absolute, format)
    return list(found.values())


def _expand(entry: str, format: str) -> list[Path]:
    path = Path(entry).expanduser()
    if not path.exists() and glob.has_magic(entry):
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        files = [match for match in matches if match.is_file()]
        if not files:
            raise DataError(f"data.path = {entry!r}: no file matches")
        return files
    if path.is_dir():
        return _below(path, format)
    if not path.exists():
        raise DataError(f"data.path = {entry!r}: no such file or folder{_nearest(path)}")
    return [path]


def _below(folder: Path, format: str) -> list[Path]:
    files: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        files += [Path(parent) / name for name in names if not name.startswith((".", "_"))]
    files.sort()
    fit = [file for file in files if _fits(format_of(file.name), format)]
    if not fit:
        there = ", ".join(file.name for file in files[:5]) or "nothing"
        endings = ", ".join(ending for ending, kind in FORMATS.items() if _fits(kind, format))
        raise DataError(
            f"data.path = {str(folder)!r}: no file in it can be read; looked for {endings} "
            f"(also with {', '.join(COMPRESSED)}), there is {there}"
        )
    kinds = Counter(format_of(file.name) for file in fit)
    if format == "auto" and len(kinds) > 1:
        counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        raise DataError(f"data.path = {str(folder)!r}: files of several formats ({counted}); say which in data.format")
    return fit


def _fits(found: str | None, wanted: str) -> bool:
    if found is None or wanted == "auto":
        return found is not None
    return found == wanted or {found, wanted} == {"json", "jsonl"}  # many files named .json hold JSONL


def _local_file(path: Path, format: str) -> SourceFile:
    kind = format_of(path.name) if format == "auto" else format
    if kind is None:
        raise DataError(f"{path}: its ending says no format that is read ({', '.join(FORMATS)}); set data.format")
    facts = path.stat()
    return SourceFile(name=str(path), format=kind, size=facts.st_size, stamp=str(facts.st_mtime_ns), fetch=lambda: path)


def _hub_files(where: HubFiles, wanted: str, cache_folder: Path | None) -> list[SourceFile]:
    listing = hub.list_files(where, wanted, cache_folder)
    return [
        SourceFile(
            name=f"{where.id}/{file}",
            format=format_of(file) or wanted,
            size=size,
            stamp=listing.commit,
            fetch=lambda file=file: hub.download(where.id, file, listing.commit),
        )
        for file, size in listing.files
    ]


def _text_blocks(name: str, texts: Texts) -> Iterator[Block]:
    held: list[str | None] = []
    size, first = 0, 1
    for text in texts.read():
        held.append(text)
        size += len(text) if isinstance(text, str) else 0
        if size >= BLOCK_BYTES or len(held) >= 10_000:
            yield Block(file=name, unit="document", first=first, kind="values", content=held)
            first, held, size = first + len(held), [], 0
    if held:
        yield Block(file=name, unit="document", first=first, kind="values", content=held)


def _nearest(path: Path) -> str:
    try:
        near = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)
    except OSError:
        return f" ({path.parent} isn't there either)"
    return f"; did you mean {near[0]!r}?" if near else ""
