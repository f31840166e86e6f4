"""Where a model's files are: a folder, or a repository of the Hugging Face Hub that is fetched into its cache.

Only tensors, tokenizers and JSON are fetched. A repository's Python files are neither downloaded nor run, and pickled
weights never opened.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

from titanlike.errors import ConfigError

logger = logging.getLogger("titanlike")

KEY = "model.hf_assets_path"
SETTINGS = ("config.json", "generation_config.json")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "original/tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_hub_id(name: str) -> bool:
    """Whether a name is a repository's, ORG/NAME, and not a folder that is there."""
    return bool(_ID.fullmatch(name)) and not Path(name).expanduser().exists()


def local_folder(name: str, revision: str | None = None, *, weights: bool = False, key: str = KEY) -> Path:
    """The folder of a name: the folder itself, or a Hub repository's files in the Hub's cache, fetched if need be.

    Raises ConfigError if there is neither, or if the Hub doesn't give it.
    """
    if not is_hub_id(name):
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download

    patterns = [*SETTINGS, *TOKENIZER, *(WEIGHTS if weights else ())]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the client's network errors share no base class over its versions
        raise ConfigError(_unreachable(name, revision, key, error)) from error


def _unreachable(name: str, revision: str | None, key: str, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    start = f"{key} = {name!r}: "
    if isinstance(error, GatedRepoError):
        return f"{start}it is gated; accept its terms and log in (`hf auth login`)"
    if isinstance(error, RepositoryNotFoundError):
        return f"{start}the Hub has no such model, or it is private (`hf auth login`)"
    if isinstance(error, RevisionNotFoundError):
        return f"{start}no revision {revision!r} (model.hf_revision) on the Hub"
    first = (str(error).splitlines() or [""])[0]
    return (
        f"{start}there is no such folder, and the Hugging Face Hub can't be reached ({type(error).__name__}: {first}); "
        "without a network, download it elsewhere (`hf download`) and name the folder"
    )


def say_what_is_never_run(folder: Path) -> None:
    """Notes Python files of a model's folder."""
    if scripts := sorted(path.name for path in folder.glob("*.py")):
        logger.warning("%s: holds code (%s), which is never run", folder, ", ".join(scripts[:4]))
