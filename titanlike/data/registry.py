"""Data sets by name: what `data.dataset` may say besides a Hub id.

An entry is a function of the `[data]` section that says where the text is: in local files, on the Hub, or in an
iterator of the user's own. Importing this needs neither torch nor a reader, so that a config check can ask for the
names. A module named in `[job] import` adds its own:

    @datasets.register("support_tickets")
    def support_tickets(data):
        return Files(path=("/data/tickets/*.jsonl.zst",), text_column="body")
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlike.config.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Files:
    """Local files, folders and globs, as in data.path. None leaves a choice to the `[data]` section."""

    path: tuple[str, ...]
    format: str | None = None
    text_column: str | None = None


@dataclass(frozen=True, kw_only=True)
class HubFiles:
    """The data files of a data set on the Hugging Face Hub."""

    id: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    format: str | None = None
    text_column: str | None = None


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Documents from the user's own code. `read()` gives them from the start, the same ones each time.

    Their token store is made once for each `version`: change it when the texts change.
    """

    read: Callable[[], Iterable[str | None]]
    version: str


Where = Files | HubFiles | Texts
datasets: Registry[Callable[[Any], Where]] = Registry("data set")


def _asset(name: str) -> str:
    return str(Path(str(importlib.resources.files("titanlike"))) / "assets" / name)


@datasets.register("debug")
def _debug(data: Any) -> Where:
    return Files(path=(_asset("books.parquet"),), format="parquet", text_column="text")


@datasets.register("c4_test")
def _c4_test(data: Any) -> Where:
    return Files(path=(_asset("c4_test.jsonl.gz"),), format="jsonl", text_column="text")


@datasets.register("c4")
def _c4(data: Any) -> Where:
    return HubFiles(id="allenai/c4", subset="en", split="train", revision=data.revision, text_column="text")


@datasets.register("c4_validation")
def _c4_validation(data: Any) -> Where:
    return HubFiles(id="allenai/c4", subset="en", split="validation", revision=data.revision, text_column="text")
