"""The DCP writer and reader: torch's own formats, with checksums on the way out and nothing that can run on the way in.

Writing, as DCP drives it (the arrows are its collectives over the ranks):

    every rank  plan ─┐                         ┌─> write its file, CRC-32 taken of the passing bytes ─┐
    rank 0            └─> make room, split work ┘      .metadata, state.json, manifest.json (last) <───┘

A failure on any rank is seen by all of them. Reading: `.metadata` is a pickle, which `read_metadata` opens with an
unpickler that knows a dozen harmless names; entries that aren't tensors are refused.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import torch
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlike.checkpoint import folders, manifest
from titanlike.checkpoint.manifest import FileRecord
from titanlike.errors import CheckpointError
from titanlike.launch.faults import fault

METADATA = ".metadata"


# ---- writing -------------------------------------------------------------------------------------------------------


class _ChecksumFile(io.FileIO):
    """A file opened for writing that knows the checksum of what passed through it (it is only ever appended to)."""

    size = 0
    crc32 = 0
    failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            count = super().write(data)
        except OSError as error:
            self.failure = error
            raise
        self.size += count
        self.crc32 = crc32(memoryview(data)[:count], self.crc32)
        return count


class _ChecksumFiles(FileSystem):
    """DCP's file operations; remembers size and checksum of every file written."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        raw = _ChecksumFile(path, "w")
        try:
            with io.BufferedWriter(raw) as stream:
                yield stream
        except RuntimeError as error:
            # torch.save swallows the disk's error and complains of a position that doesn't fit.
            raise raw.failure or error from error
        name = os.path.basename(path)
        self.records[name] = FileRecord(name, raw.size, raw.crc32)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        name = os.path.basename(new_path)
        self.records[name] = dataclasses.replace(self.records.pop(os.path.basename(path)), name=name)

    def write_file(self, path: Path, content: bytes) -> None:
        with self.create_stream(path, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())

    def take(self) -> list[FileRecord]:
        taken, self.records = list(self.records.values()), {}
        return taken


class Writer(FileSystemWriter):
    """Writes one checkpoint into `path`: the tensors by DCP, `texts` (name → content) beside them, the manifest last.

    `describe(files)` gives the manifest. The writer is used once.
    """

    fs: _ChecksumFiles

    def __init__(
        self,
        path: Path,
        *,
        step: int,
        texts: Mapping[str, str],
        describe: Callable[[dict[str, FileRecord]], manifest.Manifest],
        staged: bool,
    ):
        # Tensors that still have to come from the device are copied a little ahead of the writing.
        super().__init__(path, sync_files=True, per_thread_copy_ahead=0 if staged else 10_000_000)
        self.folder = path
        self.fs = _ChecksumFiles()
        self._step, self._texts, self._describe = step, texts, describe

    def storage_meta(self) -> StorageMeta | None:
        return None  # torch would store the folder's absolute path

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan  # torch would make the folder on every rank; rank 0 makes room first

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        folders.make_room(self.folder)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        fault("save", self._step)
        written: list[Any] = []
        if plan.items:
            # On a network disk another node may not have noticed the new folder yet: asking for it makes it look.
            self.folder.mkdir(parents=True, exist_ok=True)
            written += super().write_data(plan, planner).wait()
        # The file's record travels to rank 0 with DCP's own results: no collective of ours.
        written += self.fs.take()
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        everything = cast("list[WriteResult | FileRecord]", [one for rank in results for one in rank])
        files = [one for one in everything if isinstance(one, FileRecord)]
        super().finish(metadata, [[one for one in everything if isinstance(one, WriteResult)]])
        for name, content in self._texts.items():
            self.fs.write_file(self.folder / name, content.encode())
        files += self.fs.take()
        fault("save", self._step)
        manifest.write(self.folder, self._describe({record.name: record for record in files}))


class TensorSavePlanner(DefaultSavePlanner):
    """Plans by the layout of `tensors` (replicas are written once); the data come from `staged` where it is given.

    It brings the tensors itself and `dcp.save` gets an empty dict: torch logs two events for each entry of that.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], staged: Mapping[str, torch.Tensor] | None):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors, self._staged = tensors, staged

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(self._tensors, storage_meta, is_coordinator)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(index) if self._staged is None else self._staged[index.fqn]


# ---- reading -------------------------------------------------------------------------------------------------------

_DCP = "torch.distributed.checkpoint"
_HARMLESS = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "StorageMeta")),
    *((f"{_DCP}.metadata", name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),  # torch stores the folder it wrote to
    ("pathlib._local", "PosixPath"),
}


class _Unpickler(pickle.Unpickler):
    """Finds the names that DCP's index needs, and no other."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _HARMLESS:
            # pathlib moved this class about between Python versions.
            return Path if name == "PosixPath" else super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no tensor index needs; refused")


def read_metadata(path: Path) -> Metadata:
    """DCP's index of the checkpoint in `path`. Runs nothing; CheckpointError names the file and what is wrong."""
    file = path / METADATA
    try:
        with file.open("rb") as stream:
            metadata = _Unpickler(stream).load()
    except FileNotFoundError:
        raise CheckpointError(f"{file}: missing: {path} is no (complete) DCP checkpoint") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(f"{file}: can't be read as DCP's index of tensors: {error}") from error
    problem = _index_problem(metadata)
    if problem:
        raise CheckpointError(f"{file}: not a usable index of tensors: {problem}")
    return metadata


def _index_problem(metadata: Any) -> str | None:
    """What is wrong with an index, before anything is done with it: it may come from anywhere."""
    if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        return "it holds something else"
    if not isinstance(metadata.storage_data, dict):
        return "it doesn't say where the tensors are"
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, BytesStorageMetadata) and not _is_tensor_entry(entry):
            return f"the entry of {name!r} is malformed"
    for index, place in metadata.storage_data.items():
        name = getattr(place, "relative_path", None)
        if not isinstance(name, str) or not manifest.is_plain_name(name):
            return f"{getattr(index, 'fqn', index)!r} is said to be in {name!r}, which is not a file of this folder"
        if not all(isinstance(getattr(place, key, None), int) for key in ("offset", "length")):
            return f"it doesn't say where in {name} {getattr(index, 'fqn', index)!r} is"
        if getattr(place, "transform_descriptors", None):
            return f"{name} was written through {place.transform_descriptors}; only plain DCP files are read"
    return None


def _is_tensor_entry(entry: Any) -> bool:
    return (
        isinstance(entry, TensorStorageMetadata)
        and isinstance(entry.size, torch.Size)
        and isinstance(entry.properties, TensorProperties)
        and isinstance(entry.chunks, list)
        and all(
            isinstance(chunk, ChunkStorageMetadata)
            and isinstance(chunk.offsets, torch.Size)
            and isinstance(chunk.sizes, torch.Size)
            and len(chunk.offsets) == len(chunk.sizes) == len(entry.size)
            for chunk in entry.chunks
        )
    )


class Reader(FileSystemReader):
    """Reads tensors as DCP does, by an index that was read (and checked) before; errors name the file."""

    def __init__(self, path: Path, metadata: Metadata):
        super().__init__(path)
        self.folder, self._metadata = path, metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
            try:
                super().read_data(dataclasses.replace(plan, items=items), planner)
            except Exception as error:  # torch.load raises whatever a damaged file makes of it
                raise CheckpointError(f"{self.folder / name}: can't be read: {_first_line(error)}") from error
        future: Future[None] = Future()
        future.set_result(None)
        return future


class TensorLoadPlanner(DefaultLoadPlanner):
    """Fills tensors in place; entries that aren't tensors are pickles, and stay closed."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"entry {read_item.dest_index.fqn!r} is not a tensor; refused")


def saved_shape(metadata: Metadata, name: str) -> tuple[int, ...] | None:
    """Shape of the tensor saved as `name`; None if there is none, or if it is no tensor."""
    entry = metadata.state_dict_metadata.get(name)
    return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None


def is_covered(metadata: Metadata, name: str) -> bool:
    """Whether the saved pieces of tensor `name` add up to the whole of it, each with a place in a file."""
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    pieces = [chunk for chunk in entry.chunks if MetadataIndex(name, chunk.offsets) in metadata.storage_data]
    return sum(chunk.sizes.numel() for chunk in pieces) == entry.size.numel()


def saved_dtype(metadata: Metadata, name: str) -> torch.dtype | None:
    """Dtype of the tensor saved as `name`; None if there is none, or if it is no tensor."""
    entry = metadata.state_dict_metadata.get(name)
    return entry.properties.dtype if isinstance(entry, TensorStorageMetadata) else None


# ---- errors --------------------------------------------------------------------------------------------------------


def explain(error: CheckpointException, doing: str, disk: Path) -> BaseException:
    """DCP's bundle of failures as one: the disk's as a CheckpointError with its free space, ours as they are.

    All ranks get the same one; its `failed_rank` says whose it is.
    """
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    if not isinstance(cause, OSError):
        cause.failed_rank = rank  # type: ignore[attr-defined]
        return cause
    others = f" (and on {len(error.failures) - 1} more ranks)" if len(error.failures) > 1 else ""
    return CheckpointError(f"{doing} failed on rank {rank}{others}: {cause}; {free_space(disk)}")


def free_space(path: Path) -> str:
    """The disk's free bytes at `path`, or at the nearest folder above it that exists."""
    for folder in (path, *path.parents):
        if folder.exists():
            return f"{shutil.disk_usage(folder).free:,} bytes are free at {folder}"
    return "free space unknown"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
