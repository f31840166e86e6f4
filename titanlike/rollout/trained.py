"""A trained model by its place: a run's checkpoint, or a model in the Hub's form."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from titanlike import device as devices
from titanlike.checkpoint import folders, loading
from titanlike.config import Config, assets, load_config
from titanlike.config.imports import import_modules
from titanlike.config.layers import Layer
from titanlike.data.tokenizers import Tokenizer, load_tokenizer
from titanlike.errors import CheckpointError, ConfigError
from titanlike.models.decoder import Decoder, parameter_shapes
from titanlike.models.hub import config_json
from titanlike.models.hub.reading import hub_source
from titanlike.models.initial import materialise
from titanlike.models.spec import DecoderSpec, decoder_spec, folder_form

_LONGEST = 8192  # tokens; the table of rotary angles is made for so many, unless --seq-len says otherwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a command that works on a trained model."""
    parser.add_argument(
        "path",
        type=Path,
        help="a run's folder (its newest checkpoint), a step-N folder, a model's folder as on the Hub, or a Hub id",
    )
    parser.add_argument("--seq-len", type=int, help="longest text in tokens (default: as trained)")
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="module that registers the run's model family; one that only the checkpoint names is not imported",
    )


def _checkpoint(path: Path) -> Path:
    """The complete step-N folder that a path means. Raises CheckpointError if there is none."""
    folder, step = folders.locate(path)
    found = loading.find(folder, step, None)
    if found is None:
        raise CheckpointError(f"{path}: no complete checkpoint here; give a run's folder or a step-N folder")
    return found.path


def load_model(
    path: Path, seq_len: int | None = None, imports: Sequence[str] = ()
) -> tuple[Decoder, Tokenizer, Config]:
    """The model of a checkpoint on this machine's device, its tokenizer and the config that it was trained with.

    `imports` are the modules that may be imported first: those that the checkpoint names are a stranger's word.
    """
    if is_model_folder(path):
        return _hub_model(str(path), seq_len)
    step = _checkpoint(path)
    config = load_config(["--job.config_file", str(step / loading.CONFIG)], imports=False)
    spec = _spec(config, imports)
    tokenizer = _tokenizer(config)
    with torch.device("meta"):
        model = Decoder(spec, seq_len=seq_len or config.training.seq_len)
    materialise(model, devices.local_device(), None)
    tensors = model.state_dict()
    loading.load(step, tensors, None)
    if bad := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise CheckpointError(
            f"{step}: {len(bad)} of the weights' tensors hold numbers that aren't finite, {bad[0]} first"
        )
    return model.eval(), tokenizer, config


def _tokenizer(config: Config) -> Tokenizer:
    model, data = config.model, config.data
    return load_tokenizer(
        model.hf_assets_path, revision=model.hf_revision, bos_token=data.bos_token, eos_token=data.eos_token
    )


def is_model_folder(path: Path) -> bool:
    """Whether a path is a model in the Hub's form: a folder with config.json, or a repository's ORG/NAME."""
    return (path / config_json.NAME).is_file() or assets.is_hub_id(str(path))


def _hub_model(place: str, seq_len: int | None) -> tuple[Decoder, Tokenizer, Config]:
    folder = assets.local_folder(place, weights=True, key="PATH")
    assets.say_what_is_never_run(folder)
    form, spec = folder_form(folder)
    config = Config.model_validate({"model": {"hf_assets_path": str(folder)}})
    tokenizer = _tokenizer(config)
    with torch.device("meta"):
        model = Decoder(spec, seq_len=seq_len or min(spec.max_seq_len, _LONGEST))
    source = hub_source(folder, form, spec, parameter_shapes(spec))
    materialise(model, devices.local_device(), source)
    return model.eval(), tokenizer, config


def _spec(config: Config, imports: Sequence[str]) -> DecoderSpec:
    if problems := import_modules(list(imports), Layer()):
        raise ConfigError(problems)
    try:
        return decoder_spec(config)
    except ConfigError as error:
        if left := [f"--import {name}" for name in config.job.imports if name not in imports]:
            raise ConfigError(
                [*error.problems, f"the run was trained with modules of its own: {' '.join(left)}"]
            ) from None
        raise
