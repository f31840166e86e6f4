"""What a run with checkpoint.initial_load_in_hf starts from. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from titanlike.config import Config, assets
from titanlike.errors import ConfigError
from titanlike.models.hub import config_json, quantised
from titanlike.models.hub.config_json import HubConfig
from titanlike.models.hub.form import HubForm
from titanlike.models.spec import DecoderSpec, decoder_spec, differences, folder_form


def place_and_key(config: Config) -> tuple[str, str]:
    """Where the weights are, and the key that says so."""
    if config.checkpoint.initial_load_path is not None:
        return config.checkpoint.initial_load_path, "checkpoint.initial_load_path"
    return config.model.hf_assets_path, assets.KEY


def starting_model(config: Config, folder: Path) -> tuple[HubForm, DecoderSpec]:
    """The form that the folder has and the decoder that the run trains.

    Raises ConfigError if config.json describes another model than the run trains, or isn't there.
    """
    place, key = place_and_key(config)
    if not (folder / config_json.NAME).is_file():
        what = "has no config.json" if folder.is_dir() else "there is no such folder"
        raise ConfigError(f"{key} = {place!r}: {what} (checkpoint.initial_load_in_hf = true starts from a model)")
    form, theirs = folder_form(folder)
    if config.checkpoint.initial_load_in_hf_quantized and quantised.blocks_of(HubConfig.of_folder(folder)) is None:
        raise ConfigError(
            f"checkpoint.initial_load_in_hf_quantized = true: {folder / config_json.NAME} has no {quantised.KEY}, "
            "its weights are read as they are; leave the key out"
        )
    spec = decoder_spec(config)
    if changes := differences(theirs, spec):
        raise ConfigError(
            f"{folder / config_json.NAME}: is of another model than model.flavor and model.overrides ask for: "
            f"{'; '.join(changes)}; to take it as it is, name its folder in model.hf_assets_path and leave those out"
        )
    return form, spec
