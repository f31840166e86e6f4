"""A model in the Hub's form: sharded safetensors with index, config.json, tokenizer files, a stub of a model card.

Which tensors go into which file follows from names and shapes alone. So ranks write different files, each reading only
what its files hold, and no process ever has the model.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from titanlike.config import assets
from titanlike.errors import CheckpointError
from titanlike.models.decoder import parameter_shapes
from titanlike.models.hub.form import HubForm
from titanlike.models.hub.names import Origin, origins
from titanlike.models.hub.reading import halves_from_pairs
from titanlike.models.hub.tensors import INDEX, SINGLE
from titanlike.models.spec import DecoderSpec

logger = logging.getLogger("titanlike")

SHARD_BYTES = 5_000_000_000  # of a file, as the Hub's own tools cut

Read = Callable[[list[str]], Mapping[str, torch.Tensor]]
"""Whole parameters by their names, as many as one file needs."""


@dataclass
class _File:
    """One file to be: our parameters in it, and the Hub's names with what they take."""

    parameters: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(self.sizes.values())


def write_model(
    folder: Path,
    form: HubForm,
    spec: DecoderSpec,
    read: Read,
    *,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    rank: int = 0,
    world: int = 1,
) -> None:
    """Writes this rank's share of the tensors' files into a folder that is there; rank 0 also the index."""
    shapes = parameter_shapes(spec)
    known = origins(form, spec, shapes)
    files = _plan(known, shapes, dtype, shard_bytes)
    names = _file_names(len(files))
    for name, file in list(zip(names, files, strict=True))[rank::world]:
        values = read(file.parameters)
        tensors = {}
        for parameter in file.parameters:
            tensors.update(_on_the_hub(known[parameter], values[parameter], _type_of(parameter, dtype)))
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(folder.stat().st_mode & 0o666)  # the library's own files are their writer's alone
    if rank == 0 and len(files) > 1:
        index = {
            "metadata": {"total_size": sum(file.size for file in files)},
            "weight_map": {tensor: name for name, file in zip(names, files, strict=True) for tensor in file.sizes},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _type_of(parameter: str, dtype: torch.dtype) -> torch.dtype:
    """That in which a parameter is written: routing biases move by less than 16 bits can hold."""
    return torch.float32 if parameter.endswith(".expert_bias") else dtype


def _plan(
    known: Mapping[str, Origin], shapes: Mapping[str, torch.Size], dtype: torch.dtype, shard_bytes: int
) -> list[_File]:
    files = [_File()]
    for parameter, origin in known.items():
        each = shapes[parameter].numel() * _type_of(parameter, dtype).itemsize // len(origin.names)
        if files[-1].sizes and files[-1].size + each * len(origin.names) > shard_bytes:
            files.append(_File())
        files[-1].parameters.append(parameter)
        files[-1].sizes.update(dict.fromkeys(origin.names, each))
    return files


def _file_names(count: int) -> list[str]:
    return [SINGLE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def _on_the_hub(origin: Origin, value: torch.Tensor, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """A parameter as the Hub's tensors."""
    value = value.to(dtype)
    if len(origin.names) > 1:
        yield from ((name, one.contiguous()) for name, one in zip(origin.names, value, strict=True))
    else:
        turned = halves_from_pairs(value, origin.turn) if origin.turn else value
        yield origin.names[0], turned.contiguous()


def write_settings(
    folder: Path, form: HubForm, spec: DecoderSpec, *, dtype: torch.dtype, tokenizer_folder: Path | None, special: Any
) -> None:
    """config.json, generation_config.json, the tokenizer's files and README.md.

    `special` is the tokenizer, for the ids of its markers; its files come from `tokenizer_folder`.
    """
    ids = {f"{which}_token_id": getattr(special, f"{which}_id", None) for which in ("bos", "eos", "pad")}
    config = {**form.config(spec), **ids, "torch_dtype": str(dtype).removeprefix("torch.")}
    _write_json(folder / "config.json", config)
    generation = {key: value for key, value in ids.items() if value is not None}
    if tokenizer_folder and (given := tokenizer_folder / "generation_config.json").is_file():
        shutil.copyfile(given, folder / given.name)
    else:
        _write_json(folder / "generation_config.json", {"_from_model_config": True, **generation})
    for name in assets.TOKENIZER:
        if tokenizer_folder and (given := tokenizer_folder / name).is_file():
            shutil.copyfile(given, folder / Path(name).name)
    (folder / "README.md").write_text(_CARD.format(type=form.model_type, parameters=spec.parameters()))


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---

A causal language model of type `{type}` with {parameters:,} parameters, exported by titanlike.

Say here what it was trained on, how it does, what it is for and what it is not for, and under which licence it may be
used.
"""


def make_folder(folder: Path) -> Path:
    """A new folder beside `folder`, to be filled and then put in its place by `put_in_place`."""
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder}: is there already; name another folder, or move it away")
    filling = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(filling, ignore_errors=True)
    filling.mkdir(parents=True)
    return filling


def put_in_place(filling: Path, folder: Path) -> None:
    """The filled folder under its own name."""
    if folder.exists():
        folder.rmdir()
    filling.rename(folder)
