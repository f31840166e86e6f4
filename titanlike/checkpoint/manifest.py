"""The manifest: the file whose presence makes a folder a checkpoint, and what lets us trust the folder's other files.

It names every file with its size and CRC-32 (taken while the file was written, so that writing costs no second read),
and carries a checksum of its own text, so that no bit of a checkpoint can flip unseen. CRC-32 finds damage, not malice:
what is read after it passed is still read without pickle or code.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titanlike.errors import CheckpointError

NAME = "manifest.json"
FORMAT = "titanlike-checkpoint"
VERSION = 1

# The manifest's own checksum is computed with this placeholder in its place.
_UNSIGNED = "00000000"
_SIGNATURE = re.compile(rb'"checksum": "([0-9a-f]{8})"')
_CHUNK = 8 << 20


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: its plain name, its size in bytes, its CRC-32."""

    name: str
    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of. `topology`, `counters` and `made` are for people and reports, not for loading."""

    step: int
    files: dict[str, FileRecord]
    topology: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files together, without the manifest."""
        return sum(record.size for record in self.files.values())


def write(folder: Path, manifest: Manifest) -> None:
    """Make `folder` a checkpoint: the manifest appears whole (rename) and survives a power cut (fsync)."""
    records = sorted(manifest.files.values(), key=lambda record: natural_order(record.name))
    content = {"format": FORMAT, "version": VERSION, "checksum": _UNSIGNED, **asdict(manifest)}
    content["files"] = {record.name: {"size": record.size, "crc32": f"{record.crc32:08x}"} for record in records}
    text = json.dumps(content, indent=1).encode()
    text = text.replace(_UNSIGNED.encode(), f"{zlib.crc32(text):08x}".encode(), 1)
    temporary = folder / (NAME + ".tmp")
    with temporary.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / NAME)
    sync_folder(folder)


def read(folder: Path) -> Manifest:
    """The manifest of `folder`; CheckpointError (naming the file) if it is missing, damaged or of another format."""
    path = folder / NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no {NAME}: the save never finished") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error}") from error
    signature = _SIGNATURE.search(text)
    unsigned = text[: signature.start(1)] + _UNSIGNED.encode() + text[signature.end(1) :] if signature else b""
    if signature is None or zlib.crc32(unsigned) != int(signature.group(1), 16):
        raise CheckpointError(f"{path}: damaged: its own checksum doesn't fit")
    return _parse(path, json.loads(text))


def _parse(path: Path, content: dict[str, Any]) -> Manifest:
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        found = f"{content.get('format')!r} version {content.get('version')!r}"
        raise CheckpointError(f"{path}: is {found}; this program reads {FORMAT!r} version {VERSION}")
    files = {
        name: FileRecord(name, record["size"], int(record["crc32"], 16)) for name, record in content["files"].items()
    }
    for name in files:
        if not is_plain_name(name):
            raise CheckpointError(f"{path}: names the file {name!r}, which is not in its own folder")
    return Manifest(content["step"], files, content["topology"], content["counters"], content["made"])


def problems(folder: Path, records: Iterable[FileRecord], *, checksums: bool) -> list[str]:
    """What is wrong with a checkpoint's files: missing, of another size or, with `checksums`, of other content.

    Checksums read every byte (about 1.5 GB/s a core, once the disk delivers). Each problem names its file.
    """
    found = (_problem(folder / record.name, record, checksums) for record in records)
    return [problem for problem in found if problem is not None]


def _problem(path: Path, record: FileRecord, checksum: bool) -> str | None:
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"{path}: {size:,} bytes, should have {record.size:,}"
        crc32 = file_crc32(path) if checksum else record.crc32
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return f"{path}: can't be read: {error}"
    return f"{path}: damaged: checksum {crc32:08x}, should be {record.crc32:08x}" if crc32 != record.crc32 else None


def file_crc32(path: Path) -> int:
    """CRC-32 of a file's content."""
    buffer = memoryview(bytearray(_CHUNK))
    crc32 = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc32 = zlib.crc32(buffer[:count], crc32)
    return crc32


def is_plain_name(name: str) -> bool:
    """Whether `name` can only mean a file directly in the folder it is looked up in."""
    return bool(name) and name not in (".", "..") and not set(name) & set("/\\\0")


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort key by which __2_0.distcp comes before __10_0.distcp."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def sync_folder(folder: Path) -> None:
    """Make renames and new files in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def counters_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a trainer's state that the manifest repeats, so that a list needs to read no state."""
    counters = state.get("counters", {})
    return dict(counters) if isinstance(counters, Mapping) else {}
