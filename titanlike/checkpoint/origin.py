"""Whether a checkpoint is of this model and optimizer: said in keys of the config, not in names of tensors."""

from __future__ import annotations

from pathlib import Path

from titanlike.checkpoint.loading import CONFIG
from titanlike.config import Config, load_config
from titanlike.errors import CheckpointError, ConfigError
from titanlike.models.spec import decoder_spec, differences


def check_origin(path: Path, config: Config, excluded: set[str]) -> None:
    """Raises CheckpointError if the checkpoint's own config has another model, or another optimizer to be gone on with.

    A config that can't be read here (of another version, or with names of a user's module) proves nothing: then the
    tensors are left to speak for themselves.
    """
    try:
        saved = load_config(["--job.config_file", str(path / CONFIG)], imports=False)
        theirs, ours = decoder_spec(saved), decoder_spec(config)
    except ConfigError:
        return
    changes = [] if "model" in excluded else differences(theirs, ours)
    if changes:
        raise CheckpointError(
            f"{path} is of another model: {'; '.join(changes)}. Put model.flavor and model.overrides back as they "
            f"were, or give the new model a job.dump_folder of its own"
        )
    if "optimizer" not in excluded and saved.optimizer.name != config.optimizer.name:
        raise CheckpointError(
            f"{path} holds the state of optimizer.name = {saved.optimizer.name!r}, the config has "
            f"{config.optimizer.name!r}: put it back, or start the new one without state by "
            f'checkpoint.exclude_from_loading = ["optimizer"] (for this one start)'
        )
