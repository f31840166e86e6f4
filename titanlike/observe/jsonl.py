"""Files of one JSON object a line: the record of a run that scripts read.

Contract: a line is written whole or, when the machine dies under it, torn; a torn line is never the reader's problem
(`read_jsonl` skips it, opening for writing removes it). Floats keep every bit: `json` writes the shortest decimal that
reads back as the same double. JSON has no NaN and no infinity: such a value is written as null and named in one more
key, `"nonfinite": {"loss": "nan"}`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends objects to a file; each is handed to the operating system at once, so that `kill -9` loses none."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        mend_tail(path)
        self._file = path.open("ab")

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends `row` as one line. Scalars of torch and numpy are taken as numbers."""
        self._file.write(encode(row))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def encode(row: Mapping[str, Any]) -> bytes:
    """`row` as a line of strict JSON, in the order of its keys."""
    nonfinite: dict[str, str] = {}
    plain = {key: _plain(value, key, nonfinite) for key, value in row.items()}
    if nonfinite:
        plain["nonfinite"] = nonfinite
    return json.dumps(plain, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _plain(value: Any, name: str, nonfinite: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{name}.{index}", nonfinite) for index, item in enumerate(value)]
    value = scalar(value)
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[name] = str(value)
        return None
    return str(value) if isinstance(value, os.PathLike) else value


def scalar(value: Any) -> Any:
    """A one-element tensor or array as a Python number; anything else as it is."""
    return value.item() if hasattr(value, "item") else value


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object of one line, or None when the line is torn or holds something else."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every whole line of `path`, also while somebody is still writing it; [] when there is no such file."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        return [row for line in file if (row := parse_line(line)) is not None]


def mend_tail(path: Path) -> None:
    """Ends a file that stops in the middle of a line at the line before it, or completes the line if all is there."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        tail, start = _last_line(file)
        if not tail or tail.endswith(b"\n"):
            return
        if parse_line(tail) is None:
            file.truncate(start)
        else:
            file.seek(0, os.SEEK_END)
            file.write(b"\n")


def _last_line(file, block: int = 1 << 16) -> tuple[bytes, int]:
    """The bytes after the last newline but one that ends the file, and where they start; reads backwards."""
    end = start = file.seek(0, os.SEEK_END)
    tail = b""
    while start > 0 and b"\n" not in tail[:-1]:
        start = max(0, start - block)
        file.seek(start)
        tail = file.read(end - start)
    cut = tail.rfind(b"\n", 0, -1) + 1
    return tail[cut:], start + cut


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """What `drop_after` took out of a file."""

    lines: int
    """Whole lines of later steps."""
    damaged: int
    """Lines that were not JSON objects."""
    last_step: int
    """Highest step that the file had told of before; 0 when it was empty."""


def drop_after(path: Path, step: int) -> Dropped:
    """Removes every line whose `step` is above `step`, since these steps are about to run again.

    The file is replaced in one piece, so that an interruption leaves the old one or the new one, and is not touched
    when there is nothing to remove.
    """
    lines = damaged = last = 0
    if not path.exists():
        return Dropped(lines=0, damaged=0, last_step=0)
    new = path.with_name(path.name + ".new")
    with path.open("rb") as old, new.open("wb") as kept:
        for line in old:
            row = parse_line(line)
            if row is None:
                damaged += 1
                continue
            at = int(row.get("step") or 0)
            last = max(last, at)
            if at > step:
                lines += 1
            else:
                kept.write(line if line.endswith(b"\n") else line + b"\n")
        kept.flush()
        os.fsync(kept.fileno())
    if lines or damaged:
        os.replace(new, path)
    else:
        new.unlink()
    return Dropped(lines=lines, damaged=damaged, last_step=last)
