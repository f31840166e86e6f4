"""The tensors of a model's folder: safetensors files, of which only the bytes that are asked for are read."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from titanlike.errors import CheckpointError
from titanlike.models.hub.quantised import SCALE, Blocks, dequantised, scale_shape

logger = logging.getLogger("titanlike")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NUMBERED = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth")

Box = tuple[slice, ...]


class HubTensors:
    """All tensors of a folder by name. Files are mapped, not read; raises CheckpointError for what doesn't fit.

    With `blocks`, tensors that have scales beside them are read as what they stand for.
    """

    def __init__(self, folder: Path, blocks: Blocks | None = None):
        self.folder = folder
        self._blocks = blocks
        self._file_of = _files_by_tensor(folder)
        self._opened: dict[str, Any] = {}
        self._slices: dict[str, Any] = {}
        _check_presence(folder, self._file_of, self._open)
        self._scaled = {n.removesuffix(SCALE) for n in self._file_of if n.endswith(SCALE)} if blocks else set()
        self._check_scales()

    def names(self) -> set[str]:
        return set(self._file_of) - {name + SCALE for name in self._scaled}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A tensor, or of it a box of some rows and columns; in the file's own type."""
        box = box or tuple(slice(0, n) for n in self.shape(name))
        found = self._slice(name)[box] if box else self._open(self._file_of[name]).get_tensor(name)
        if name not in self._scaled:
            return found
        assert self._blocks is not None
        rows, columns = box
        return dequantised(found, (rows, columns), self._slice(name + SCALE), self._blocks)

    def _check_scales(self) -> None:
        if self._blocks is None:
            return
        problems = []
        for name in sorted(self._scaled):
            if name not in self._file_of:
                problems.append(f"{name + SCALE} has no {name}")
            elif len(self.shape(name)) != 2 or self.shape(name + SCALE) != scale_shape(self.shape(name), self._blocks):
                shapes = f"{self.shape(name + SCALE)} for {self.shape(name)}"
                problems.append(f"{name + SCALE} doesn't fit blocks of {self._blocks}: {shapes}")
        bare = [name for name in self.names() - self._scaled if self._slice(name).get_dtype().startswith("F8")]
        if bare:
            problems.append(f"no scales beside {some(sorted(bare))}")
        if problems:
            raise CheckpointError(f"{self.folder}: quantised weights that can't be read: {'; '.join(problems[:12])}")

    def _slice(self, name: str) -> Any:
        if name not in self._slices:
            self._slices[name] = self._open(self._file_of[name]).get_slice(name)
        return self._slices[name]

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            try:
                self._opened[file] = safe_open(self.folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{self.folder / file}: can't be read as safetensors: {error}") from error
        return self._opened[file]


def _files_by_tensor(folder: Path) -> dict[str, str]:
    """The file of each tensor: by the index if there is one, else those of the one file."""
    index = folder / INDEX
    there = sorted(path.name for path in folder.glob("*.safetensors"))
    if index.is_file():
        found = _read_index(index)
        if extra := sorted(set(there) - set(found.values())):
            logger.warning("%s: %s not named by %s, left aside", folder, ", ".join(extra), INDEX)
        return found
    if SINGLE in there or len(there) == 1:
        file = SINGLE if SINGLE in there else there[0]
        if extra := [name for name in there if name != file]:
            logger.warning("%s: %s taken; left aside %s", folder, file, ", ".join(extra))
        try:
            with safe_open(folder / file, framework="pt") as opened:
                return dict.fromkeys(opened.keys(), file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / file}: can't be read as safetensors: {error}") from error
    if any(_NUMBERED.fullmatch(name) for name in there):
        raise CheckpointError(
            f"{folder}: holds files of a set ({there[0]}, …) but no {INDEX}, which says what's in them"
        )
    if there:
        raise CheckpointError(
            f"{folder}: several files ({', '.join(there[:4])}) and no {INDEX}: which one is the model?"
        )
    if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder}: holds pickled weights only ({', '.join(pickles[:4])}), which can run code and are never "
            "opened; convert them where you trust them: AutoModelForCausalLM.from_pretrained(FOLDER)"
            ".save_pretrained(OUT) of transformers writes safetensors"
        )
    raise CheckpointError(f"{folder}: no {SINGLE} and no {INDEX} there")


def _read_index(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text("utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: can't be read as an index of tensors: {error!r}") from error
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError(f"{index}: weight_map must map names to files")
    for file in set(found.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: names {file!r}; only .safetensors files of the folder itself are read")
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index}: names {file}, which is not there")
    return found


def _check_presence(folder: Path, file_of: dict[str, str], opened) -> None:
    held = {file: set(opened(file).keys()) for file in set(file_of.values())}
    missing = [f"{name} (in {file})" for name, file in file_of.items() if name not in held[file]]
    if missing:
        raise CheckpointError(f"{folder / INDEX}: names tensors that their files don't hold: {some(missing)}")


def some(names: list[str]) -> str:
    """The first few of many names, and how many more there are."""
    rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(sorted(names)[:8]) + rest
