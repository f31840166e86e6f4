"""Checkpoints to the Hub's form and back: `titanlike checkpoint export | import`, and the export that ends a run."""

from __future__ import annotations

import logging
import os
import warnings
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import titanlike
from titanlike.checkpoint import agree, folders, loading, storage
from titanlike.checkpoint.agree import Group
from titanlike.checkpoint.manifest import Manifest
from titanlike.config import Config, assets, dump_toml, load_config
from titanlike.config.imports import import_modules
from titanlike.config.layers import Layer
from titanlike.config.sections.training import Training
from titanlike.data.tokenizers import load_tokenizer
from titanlike.errors import CheckpointError, ConfigError
from titanlike.models.decoder import parameter_shapes
from titanlike.models.hub.reading import hub_source
from titanlike.models.hub.writing import SHARD_BYTES, make_folder, put_in_place, write_model, write_settings
from titanlike.models.initial import Shard
from titanlike.models.spec import decoder_spec, folder_form, form_of

logger = logging.getLogger("titanlike")


def export_checkpoint(
    step: Path,
    out: Path,
    config: Config,
    *,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    group: Group = None,
) -> None:
    """Writes the model of the checkpoint in `step` to the folder `out`; a collective of the group, if there is one.

    Raises CheckpointError if `out` isn't empty, ConfigError if the model has no form on the Hub.
    """
    spec, rank = decoder_spec(config), agree.rank_of(group)
    form = form_of(config, spec)
    filling = Path(agree.from_first(lambda: str(make_folder(out)), group))

    def read(names: list[str]) -> dict[str, torch.Tensor]:
        shapes = parameter_shapes(spec)
        values = {name: torch.empty(shapes[name], dtype=storage.saved_dtype(metadata, name)) for name in names}
        loading.load(step, values, None)
        return values

    def write() -> None:
        write_model(
            filling, form, spec, read, dtype=dtype, shard_bytes=shard_bytes, rank=rank, world=agree.world_of(group)
        )

    metadata = storage.read_metadata(step)
    agree.together(write, group)

    def finish() -> None:
        model = config.model
        tokenizer = load_tokenizer(
            model.hf_assets_path,
            revision=model.hf_revision,
            bos_token=config.data.bos_token,
            eos_token=config.data.eos_token,
        )
        write_settings(
            filling, form, spec, dtype=dtype, tokenizer_folder=tokenizer.origin.file.parent, special=tokenizer
        )
        put_in_place(filling, out)
        logger.info("exported %s to %s", step, out)

    agree.from_first(finish, group)


def import_model(source: str, out: Path, *, revision: str | None = None, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a model in the Hub's form as a checkpoint of step 0 under `out`; one tensor in memory at a time.

    Returns the step's folder. It is for checkpoint.initial_load_path and for generating.
    """
    folder = assets.local_folder(source, revision, weights=True, key="HF")
    assets.say_what_is_never_run(folder)
    form, spec = folder_form(folder)
    shapes = parameter_shapes(spec)
    read = hub_source(folder, form, spec, shapes)
    tensors = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    step = folders.step_folder(out, 0)
    if step.exists():
        raise CheckpointError(f"{step}: is there already; name another folder, or move it away")
    seq_len = min(spec.max_seq_len, Training().seq_len)
    config = Config.model_validate(
        {"model": {"hf_assets_path": os.path.abspath(folder)}, "training": {"seq_len": seq_len}}
    )

    def describe(files) -> Manifest:
        made = {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "titanlike": titanlike.__version__,
            "torch": str(torch.__version__),
            "world_size": 1,
            "tensors": len(tensors),
            "from": source,
        }
        return Manifest(0, files, {}, {}, made)

    texts = {loading.STATE: "{}", loading.CONFIG: dump_toml(config)}
    writer = storage.Writer(step, step=0, texts=texts, describe=describe, staged=True)
    planner = _Arriving(tensors, lambda name: _whole(read, name, shapes[name]).to(dtype))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    folders.settle(step)
    return step


def _whole(read, name: str, shape: torch.Size) -> torch.Tensor:
    return read(Shard(name, shape, (0,) * len(shape), torch.empty(shape, device="meta")))


class _Arriving(storage.TensorSavePlanner):
    """Plans by shapes alone; a tensor is read when it is about to be written."""

    def __init__(self, tensors: dict[str, torch.Tensor], read):
        super().__init__(tensors, None)
        self._read = read

    def lookup_object(self, index):
        return self._read(index.fqn)


def push(folder: Path, repository: str, *, private: bool) -> str:
    """Uploads a folder to a repository of the Hub; returns its address. Raises CheckpointError."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=folder))
    except Exception as error:  # the client's network errors share no base class over its versions
        raise CheckpointError(
            f"{folder} is written, but not uploaded to {repository!r}: {type(error).__name__}: {error}; log in with "
            f"`hf auth login`, or upload it with `hf upload {repository} {folder}`"
        ) from error


def checkpoint_config(step: Path, imports: list[str]) -> Config:
    """The config that a checkpoint was made with; `imports` are the modules that may be imported first."""
    if problems := import_modules(imports, Layer()):
        raise ConfigError(problems)
    return load_config(["--job.config_file", str(step / loading.CONFIG)], imports=False)
