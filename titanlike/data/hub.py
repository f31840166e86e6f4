"""Data sets of the Hugging Face Hub: which of a repository's files are a split, and fetching them one by one.

Only data files are ever fetched: a repository's Python files are neither downloaded nor run. Which files belong to a
subset and split is taken from the data set's card where it says so (`configs:`), else from the names: a folder named
like the subset, and "train", "validation" or "test" as a word of the path.

The list of files is kept for a while beside the token stores, so that the ranks of a job agree on one commit and ask
the Hub once; it also serves when the Hub can't be reached.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlike.data.once import Claim, build_once
from titanlike.data.readers import format_of
from titanlike.data.registry import HubFiles
from titanlike.data.store import write_json
from titanlike.errors import DataError

logger = logging.getLogger("titanlike")

_FRESH_SECONDS = 600.0  # within a job's start; a later start sees a newer commit
_SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_PREFERRED = ("parquet", "jsonl", "json", "text")  # where a repository holds several formats


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Files of one subset and split: (path in the repository, size in bytes) at a commit."""

    commit: str
    files: list[tuple[str, int]]


def list_files(where: HubFiles, wanted: str, cache_folder: Path | None) -> Listing:
    """The files of a Hub data set, chosen as the head of this module says.

    Raises DataError if the Hub can't be reached (and no earlier list is kept), if there is no such data set, or if
    nothing fits subset, split and format.
    """
    if "[" in where.split:
        raise DataError(f"data.split = {where.split!r}: a slice of a split can't be read; name the split alone")
    facts = _repository(where) if cache_folder is None else _kept_repository(where, cache_folder)
    files = choose_files(facts["files"], facts["configs"], where, wanted)
    total = sum(size for _, size in files) / 1e9
    logger.info("%s at commit %s: %d files, %.2f GB", where.id, facts["commit"][:12], len(files), total)
    if where.revision is None:
        logger.info("data.revision = %r pins this state of the data set", facts["commit"])
    return Listing(commit=facts["commit"], files=files)


def download(id: str, file: str, commit: str) -> Path:
    """Local path of a file, downloaded to the Hub's own cache if it isn't there. Raises DataError."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(id, file, repo_type="dataset", revision=commit))
    except Exception as error:
        raise _unreachable(id, error) from error


def choose_files(
    files: Mapping[str, int], configs: list[dict[str, Any]], where: HubFiles, wanted: str
) -> list[tuple[str, int]]:
    """Paths and sizes of one subset and split, in the order of their names. Raises DataError if there are none."""
    readable = {name: size for name, size in files.items() if _readable(name, wanted)}
    if not readable:
        there = ", ".join(sorted(files)[:8])
        raise DataError(
            f"{where.id}: no data file that can be read (there are {there}); "
            "Python files of a data set are never run: convert it to parquet or JSONL, and use data.path"
        )
    patterns = _declared_patterns(configs, where)
    if patterns is not None:
        chosen = [name for name in readable if any(_matches(name, pattern) for pattern in patterns)]
    else:
        chosen = _by_name(list(readable), where)
    if not chosen:
        raise DataError(f"{where.id}: no file of subset {where.subset!r} and split {where.split!r} can be read")
    kinds = {format_of(name) for name in chosen}
    kept = next((kind for kind in _PREFERRED if kind in kinds), None) if wanted == "auto" else None
    return sorted((name, readable[name]) for name in chosen if kept is None or format_of(name) == kept)


def _readable(name: str, wanted: str) -> bool:
    if any(part.startswith((".", "_")) for part in name.split("/")):
        return False
    found = format_of(name)
    return found is not None and (wanted == "auto" or found == wanted or {found, wanted} == {"json", "jsonl"})


def _declared_patterns(configs: list[dict[str, Any]], where: HubFiles) -> list[str] | None:
    """File patterns that the data set's card names for a subset and split; None if it names none at all."""
    configs = [config for config in configs if config.get("data_files")]
    if not configs:
        return None
    names = [str(config.get("config_name", "default")) for config in configs]
    subset = where.subset
    if subset is None:
        marked = [name for name, config in zip(names, configs, strict=True) if config.get("default")]
        candidates = marked or [name for name in names if name == "default"] or names
        if len(candidates) > 1:
            raise DataError(f"{where.id}: name one of its subsets in data.subset: {', '.join(names)}")
        subset = candidates[0]
    if subset not in names:
        raise DataError(f"{where.id}: no subset {subset!r} (data.subset); there are {', '.join(names)}")
    entries = configs[names.index(subset)]["data_files"]
    entries = entries if isinstance(entries, list) else [entries]
    splits: dict[str, list[str]] = {}
    for entry in entries:
        split, paths = (entry["split"], entry["path"]) if isinstance(entry, dict) else ("train", entry)
        splits.setdefault(split, []).extend(paths if isinstance(paths, list) else [paths])
    if where.split not in splits:
        raise DataError(f"{where.id}: no split {where.split!r} (data.split); there are {', '.join(splits)}")
    return splits[where.split]


def _matches(name: str, pattern: str) -> bool:
    pattern = pattern.removeprefix("./").rstrip("/")
    return fnmatch.fnmatchcase(name, pattern.replace("**/", "*")) or name.startswith(f"{pattern}/")


def _by_name(names: list[str], where: HubFiles) -> list[str]:
    if where.subset:
        folders = sorted({folder for name in names for folder in name.split("/")[:-1]})
        names = [name for name in names if where.subset in name.split("/")[:-1]]
        if not names:
            raise DataError(
                f"{where.id}: no subset {where.subset!r} (data.subset); folders are {', '.join(folders) or 'none'}"
            )
    splits = {split: [name for name in names if _has_word(name, words)] for split, words in _SPLIT_WORDS.items()}
    splits = {split: found for split, found in splits.items() if found}
    if where.split not in _SPLIT_WORDS:
        splits[where.split] = [name for name in names if _has_word(name, (where.split,))]
    if not splits and where.split == "train":
        return names  # no file says a split: all of it is there to be trained on
    if not splits.get(where.split):
        there = ", ".join(split for split, found in splits.items() if found) or "none"
        raise DataError(f"{where.id}: no split {where.split!r} (data.split) by the names of the files; found {there}")
    return splits[where.split]


def _has_word(name: str, words: tuple[str, ...]) -> bool:
    return any(re.search(rf"(?<![a-zA-Z]){re.escape(word)}(?![a-zA-Z])", name) for word in words)


def _kept_repository(where: HubFiles, cache_folder: Path) -> dict[str, Any]:
    """The repository's file list, asked for by one process of those that start together."""
    name = hashlib.sha256(f"{where.id}@{where.revision}".encode()).hexdigest()[:16]
    kept = cache_folder / "hub" / f"{where.id.replace('/', '--')}-{name}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)

    asked = False  # this process has just asked: its answer is fresh whatever the file server's clock says

    def fresh() -> bool:
        return kept.exists() and (asked or time.time() - kept.stat().st_mtime < _FRESH_SECONDS)

    def ask(claim: Claim) -> None:
        nonlocal asked
        try:
            write_json(kept, _repository(where))
        except DataError as error:
            if not kept.exists():
                raise
            logger.warning("%s; using the list of its files from an earlier run", error)
            kept.touch()
        asked = True

    build_once(kept, fresh, ask)
    return json.loads(kept.read_text("utf-8"))


def _repository(where: HubFiles) -> dict[str, Any]:
    """Commit, files with sizes, and the card's `configs` of a data set. Raises DataError."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(where.id, revision=where.revision, files_metadata=True, timeout=30)
    except Exception as error:  # the client's network errors share no base class over its versions
        raise _unreachable(where.id, error) from error
    card = info.card_data.to_dict() if info.card_data else {}
    return {
        "commit": info.sha,
        "files": {file.rfilename: file.size or 0 for file in info.siblings or ()},
        "configs": card.get("configs") or [],
    }


def _unreachable(id: str, error: Exception) -> DataError:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return DataError(f"data.dataset = {id!r}: it is gated; accept its terms and log in (`hf auth login`)")
    if isinstance(error, RepositoryNotFoundError):
        return DataError(f"data.dataset = {id!r}: the Hub has no such data set, or it is private (`hf auth login`)")
    if isinstance(error, RevisionNotFoundError):
        return DataError(f"data.dataset = {id!r}: no such data.revision on the Hub")
    first = (str(error).splitlines() or [""])[0]
    return DataError(
        f"data.dataset = {id!r}: the Hugging Face Hub can't be reached ({type(error).__name__}: {first}); "
        "without a network, download the files elsewhere and name them in data.path"
    )
