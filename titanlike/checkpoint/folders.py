"""The step folders of a run: how they are named, which of them are whole, and how one gives way to another.

Needs no torch. One process (rank 0) changes folders; all others only read.
"""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from titanlike.checkpoint import manifest
from titanlike.checkpoint.manifest import Manifest
from titanlike.errors import CheckpointError

logger = logging.getLogger("titanlike")

# A complete checkpoint that is being written anew waits under this name until its successor is complete.
REPLACED = ".replaced"
_STEP = re.compile(rf"step-(0|[1-9][0-9]*)({re.escape(REPLACED)})?")


@dataclass(frozen=True)
class StepFolder:
    """One step-N folder and what is wrong with it: nothing, if it is a checkpoint."""

    step: int
    path: Path
    manifest: Manifest | None
    problems: tuple[str, ...] = ()
    torn: bool = False
    """A save that never finished, in contrast to a checkpoint that was damaged later."""

    @property
    def complete(self) -> bool:
        return not self.problems


def locate(path: Path) -> tuple[Path, int]:
    """The folder of checkpoints and the step that a path means: (folder, N) for a step-N folder, else (folder, -1).

    `path` may also be the folder of checkpoints or a run's folder. CheckpointError if it is none of them.
    """
    if match := _STEP.fullmatch(path.absolute().name):
        return path.parent, int(match.group(1))
    for folder in (path, path / "checkpoints", *sorted(path.glob("*/"))):
        if folder.is_dir() and any(_STEP.fullmatch(entry.name) for entry in folder.iterdir()):
            return folder, -1
    raise CheckpointError(
        f"{path}: there is no checkpoint (no step-N folder) here"
        if path.exists()
        else f"{path}: there is no such folder"
    )


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def inspect(path: Path, *, checksums: bool = False) -> StepFolder:
    """Look at one step folder: its manifest and its files' sizes; with `checksums`, every byte."""
    match = _STEP.fullmatch(path.name)
    step = int(match.group(1)) if match else -1
    try:
        content = manifest.read(path)
    except CheckpointError as error:
        return StepFolder(step, path, None, (str(error),), torn=not (path / manifest.NAME).exists())
    problems = manifest.problems(path, content.files.values(), checksums=checksums)
    if match and content.step != step:
        problems.insert(0, f"{path / manifest.NAME}: is of step {content.step}, not of the step in the folder's name")
    return StepFolder(step if match else content.step, path, content, tuple(problems))


def scan(folder: Path) -> list[StepFolder]:
    """All step folders of `folder`, the highest step first (by number, whatever the length and date of their names).

    Of a checkpoint that was being written anew, the new one comes before the old one. No folder: none.
    """
    try:
        names = [entry.name for entry in folder.iterdir() if entry.is_dir()]
    except FileNotFoundError:
        return []
    steps = [(int(match.group(1)), match.group(2) is None, name) for name in names if (match := _STEP.fullmatch(name))]
    return [inspect(folder / name) for _, _, name in sorted(steps, reverse=True)]


def make_room(path: Path) -> None:
    """Make `path` an empty folder. A torn save there goes; a complete checkpoint steps aside until `settle`."""
    if path.exists() and inspect(path).complete:
        remove(_aside(path))
        path.rename(_aside(path))
    elif path.exists():
        remove(path)
    path.mkdir(parents=True)
    manifest.sync_folder(path.parent)


def settle(path: Path) -> None:
    """`path` is complete: what stepped aside for it can go."""
    remove(_aside(path))


def withdraw(path: Path) -> None:
    """The save into `path` failed: give its space back and let what stepped aside return."""
    remove(path)
    aside = _aside(path)
    try:
        if aside.exists() and not path.exists():
            aside.rename(path)
    except OSError as error:
        logger.warning("%s: stays under this name: %s", aside, error)


def remove(path: Path) -> None:
    """Remove a step folder, its manifest first: a removal that is cut short leaves a torn folder, never a false one.

    Files that vanish meanwhile are fine; what can't be removed is logged and stays.
    """
    try:
        (path / manifest.NAME).unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s: can't be removed: %s", path, error)
        return
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("%s: could be removed only in part; remove it by hand", path)


def _aside(path: Path) -> Path:
    return path.with_name(path.name + REPLACED)
