"""Tokenizers: text to ids and back, from whatever a model's folder holds.

`load_tokenizer` looks into `model.hf_assets_path` (a folder, or one file) and takes the first of

    tokenizer.json                                        HuggingFaceTokenizer
    tokenizer.model, original/tokenizer.model             by content: RanksTokenizer (tiktoken) or PiecesTokenizer
    the one *.model or *.tiktoken that is there           by content, too

A folder of Llama 2's kind holds tokenizer.json and tokenizer.model, which say the same: the first is taken.
`hf_assets_path = "debug"` is the tokenizer that ships with titanlike.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable
from pathlib import Path

from titanlike.config.assets import local_folder
from titanlike.data.tokenizers.base import Origin, Tokenizer
from titanlike.errors import ConfigError

__all__ = ["DEBUG", "Tokenizer", "load_tokenizer"]

DEBUG = "debug"
# TorchTitan's own debug tokenizer lies here in its repository; configs that name it mean "the one that ships".
_DEBUG_ALIAS = "./tests/assets/tokenizer"
_NAMES = ("tokenizer.json", "tokenizer.model", "original/tokenizer.model")
_GLOBS = ("*.model", "*.tiktoken")
_KEY = "model.hf_assets_path"


def load_tokenizer(
    hf_assets_path: str, *, revision: str | None = None, bos_token: str | None = None, eos_token: str | None = None
) -> Tokenizer:
    """Load the tokenizer of a folder, file or Hub id; `bos_token` and `eos_token` override by a token's text.

    Raises ConfigError, naming the key and what was looked for, if there is none, if there are several, if it can't be
    read, or if an override names no token.
    """
    file = _find(hf_assets_path, revision)
    origin = Origin(
        hf_assets_path=hf_assets_path, revision=revision, bos_token=bos_token, eos_token=eos_token, file=file
    )
    return _kind(file)(origin)


def _find(hf_assets_path: str, revision: str | None) -> Path:
    path = local_folder(hf_assets_path, revision)
    if hf_assets_path == DEBUG or (hf_assets_path == _DEBUG_ALIAS and not path.exists()):
        path = Path(str(importlib.resources.files("titanlike"))) / "assets" / "tokenizer"
    if path.is_file():
        return path
    looked_for = ", ".join([*_NAMES, *_GLOBS])
    if not path.is_dir():
        raise ConfigError(
            f"{_KEY} = {hf_assets_path!r}: there is no such folder; it should be a model's folder with one of "
            f"{looked_for} (download it first, with `hf download ORG/NAME --local-dir FOLDER`), or {DEBUG!r}"
        )
    for name in _NAMES:
        if (path / name).is_file():
            return path / name
    found = sorted(file for pattern in _GLOBS for file in path.glob(pattern))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(file.name for file in found)
        raise ConfigError(f"{_KEY} = {hf_assets_path!r}: several tokenizers there ({names}); name one file")
    hint = ""
    if (path / "vocab.json").exists():
        hint = "; vocab.json with merges.txt alone is not read: save it as tokenizer.json with transformers"
    raise ConfigError(f"{_KEY} = {hf_assets_path!r}: no tokenizer there; looked for {looked_for}{hint}")


def _kind(file: Path) -> Callable[[Origin], Tokenizer]:
    """Which kind a file is, by its first bytes. The packages are imported here: a run needs one of the three."""
    with open(file, "rb") as opened:
        start = opened.read(4096)
    if start.startswith(b"version https://git-lfs"):
        raise ConfigError(f"{_KEY}: {file} is a Git LFS pointer, not the file itself; run `git lfs pull` there")
    if start.lstrip()[:1] == b"{":
        from titanlike.data.tokenizers.huggingface import HuggingFaceTokenizer

        return HuggingFaceTokenizer
    from titanlike.data.tokenizers.ranks import LINE, RanksTokenizer

    if LINE.match(start.split(b"\n", 1)[0]):
        return RanksTokenizer
    if start[:1] == b"\n":  # the first field of a sentencepiece model's protobuf message
        from titanlike.data.tokenizers.pieces import PiecesTokenizer

        return PiecesTokenizer
    raise ConfigError(f"{_KEY}: {file} is no tokenizer that is known (tokenizer.json, tiktoken or sentencepiece)")
