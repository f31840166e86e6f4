"""From a file to blocks: JSONL, JSON, plain text and parquet, compressed or not.

A reader cuts a file into blocks of a few megabytes without looking into the records, so that it keeps up with many
tokenizing processes and memory stays bounded. The exceptions: a JSON list is read whole, and a plain text file is one
document. Nothing here runs what it reads.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow
import pyarrow.parquet
import zstandard

from titanlike.data.records import Block
from titanlike.errors import DataError

BLOCK_BYTES = 4 << 20
_LONGEST_LINE = 1 << 30
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

# Ending of the name, compression taken off -> format.
FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "text",
    ".text": "text",
    ".parquet": "parquet",
}
COMPRESSED = (".gz", ".zst", ".zstd", ".bz2", ".xz")
_DATA_LIST = re.compile(rb'\{\s*"data"\s*:\s*\[')
# First bytes of a compressed file: the content decides, a name may lie.
_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz"}


def format_of(name: str) -> str | None:
    """The format that a file's name promises; None if it promises none."""
    path = Path(name.lower())
    if path.suffix in COMPRESSED:
        path = path.with_suffix("")
    return FORMATS.get(path.suffix)


def read_blocks(path: Path, format: str, text_column: str) -> Iterator[Block]:
    """The blocks of a file, in order. Raises DataError, naming the file, if it can't be read or lacks the column."""
    try:
        if format == "parquet":
            yield from _parquet(path, text_column)
            return
        with open(path, "rb") as raw, _decompressed(raw) as stream:
            if format == "text":
                yield Block(
                    file=str(path),
                    unit="document",
                    first=1,
                    kind="values",
                    content=[_without_mark(stream.read())],
                    consumed=raw.tell(),
                )
            elif format == "json":
                yield from _json(path, stream, raw)
            else:
                yield from _lines(path, stream, raw)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: can't be read as {format}: {error}") from None


def _decompressed(raw: IO[bytes]) -> Any:
    start = raw.read(6)
    raw.seek(0)
    kind = next((kind for magic, kind in _MAGIC.items() if start.startswith(magic)), None)
    if kind == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if kind == "zstd":
        return io.BufferedReader(_ZstdFile(raw), BLOCK_BYTES)
    if kind == "bz2":
        return bz2.BZ2File(raw)
    if kind == "xz":
        return lzma.LZMAFile(raw)
    return raw


class _ZstdFile(io.RawIOBase):
    """A zstandard file of any number of frames. The package's own reader takes a file cut short for a whole one."""

    def __init__(self, raw: IO[bytes]):
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._begun = False  # whether the current frame is
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._begun = zstandard.ZstdDecompressor().decompressobj(), False
            data = data or self._raw.read(1 << 17)
            if not data:
                if self._begun:
                    raise EOFError("compressed file ended before the end of a frame")
                return 0
            self._begun = True
            self._ready = memoryview(self._frame.decompress(data))
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _without_mark(data: bytes) -> bytes:
    return data.removeprefix(_BYTE_ORDER_MARK)


def _lines(path: Path, stream: Any, raw: IO[bytes], start: bytes = b"") -> Iterator[Block]:
    """Blocks of whole lines. `start`: what was read of the stream before."""
    line, parts, held = 1, [_without_mark(start)], len(start)
    first = not start
    while True:
        data = stream.read(BLOCK_BYTES)
        if first:
            data, first = _without_mark(data), False
        end = data.rfind(b"\n") + 1 if data else 0
        if data and not end:
            parts.append(data)
            held += len(data)
            if held > _LONGEST_LINE:
                raise DataError(f"{path}, line {line}: longer than {_LONGEST_LINE >> 30} GiB; is this file JSONL?")
            continue
        content = b"".join([*parts, data[:end]])
        if content:
            yield Block(file=str(path), unit="line", first=line, kind="lines", content=content, consumed=raw.tell())
        line += content.count(b"\n")
        parts, held = [data[end:]], len(data) - end
        if not data:
            return


def _json(path: Path, stream: Any, raw: IO[bytes]) -> Iterator[Block]:
    """A list of records, or an object with one under "data"; or JSONL, which many files named .json really are."""
    start = stream.read(BLOCK_BYTES)
    if _is_jsonl(_without_mark(start)):
        yield from _lines(path, stream, raw, start)
        return
    try:
        value = json.loads(_without_mark(start + stream.read()))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: no valid JSON: {error}") from None
    records = value.get("data") if isinstance(value, dict) else value
    if not isinstance(records, list):
        raise DataError(f'{path}: should hold a list of records, or an object with such a list under "data"')
    for first in range(0, len(records), 1000):
        content = records[first : first + 1000]
        yield Block(file=str(path), unit="record", first=first + 1, kind="records", content=content)


def _is_jsonl(start: bytes) -> bool:
    """Whether a file's first line is a record of its own."""
    head = start.lstrip()
    if not head.startswith(b"{"):
        return False
    line, newline, rest = head.partition(b"\n")
    try:
        record = json.loads(line)
    except ValueError:
        # One enormous line that goes on: a record, or a whole file's list. Pretty-printed JSON has short lines.
        return not newline and len(start) >= BLOCK_BYTES and not _DATA_LIST.match(head)
    return bool(rest.strip()) or not isinstance(record.get("data"), list)


def _parquet(path: Path, column: str) -> Iterator[Block]:
    with pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise DataError(f"{path}: no column {column!r} (data.text_column); the file has {', '.join(names)}")
        kind = file.schema_arrow.field(column).type
        value_type = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not (_is_text(value_type) or pyarrow.types.is_null(value_type)):
            raise DataError(f"{path}: column {column!r} (data.text_column) holds {kind}, not strings")
        size, row = path.stat().st_size, 1
        rows = max(file.metadata.num_rows, 1)
        for batch in file.iter_batches(batch_size=_batch_rows(file, column), columns=[column]):
            # As bytes: whether they are UTF-8 is found out, and told, where all other records are looked at.
            content = batch.column(0).cast(pyarrow.large_binary()).to_pylist()
            done = size * (row - 1 + len(content)) // rows
            yield Block(file=str(path), unit="row", first=row, kind="values", content=content, consumed=done)
            row += len(content)


def _is_text(kind: pyarrow.DataType) -> bool:
    types = pyarrow.types
    return types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def _batch_rows(file: pyarrow.parquet.ParquetFile, column: str) -> int:
    """Rows that make about one block, by the column's size in the first row group."""
    metadata = file.metadata
    if not metadata.num_row_groups:
        return 1
    group = metadata.row_group(0)
    size = sum(
        group.column(n).total_uncompressed_size
        for n in range(group.num_columns)
        if group.column(n).path_in_schema == column
    )
    return max(1, min(1 << 16, BLOCK_BYTES * group.num_rows // max(size, 1)))
