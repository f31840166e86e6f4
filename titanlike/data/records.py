"""From a block of a file to texts: the part of reading that runs beside the tokenizer, in its processes.

What each kind of bad input does, for every format:

    nothing to read     "" (empty), null (null), white space alone (blank): no document; counted
    a broken record     no JSON, two objects on a line, invalid UTF-8, a lone surrogate, no such column, no string:
                        `bad_lines = "stop"` raises DataError with file and line, "skip" leaves it out and counts it
    an empty line       of JSONL: passed over, not counted
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from titanlike.errors import DataError

KEPT_PROBLEMS = 5  # messages of broken records that are kept for the report


@dataclass(frozen=True, kw_only=True)
class Block:
    """A stretch of one file, small enough to hand to another process. Memory is bounded by a few of them."""

    file: str
    unit: Literal["line", "row", "record", "document"]  # what `first` counts, for messages
    first: int  # number of the first line or row, from 1
    kind: Literal["lines", "records", "values"]  # JSONL as read; parsed JSON records; the texts themselves
    content: Any  # bytes; list of JSON values; list of bytes, str or None
    consumed: int = 0  # bytes of the file (as stored) that are read once this block is


@dataclass(kw_only=True)
class Parsed:
    """The texts of a block, where each stands, and what was left out."""

    texts: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    problems: list[str] = field(default_factory=list)


COUNTED = ("empty", "null", "blank", "broken")


class _Broken(Exception):
    """A record that can't be read; the message says why."""


def parse(block: Block, text_column: str, bad_lines: Literal["stop", "skip"]) -> Parsed:
    """Read the texts of a block. Raises DataError at the first broken record unless they are skipped."""
    parsed = Parsed()
    for place, value in _values(block):
        try:
            text = _text(value, block.kind, text_column)
        except _Broken as broken:
            message = f"{block.file}, {block.unit} {place}: {broken}"
            if bad_lines == "stop":
                raise DataError(f'{message} (data.bad_lines = "skip" leaves such records out)') from None
            parsed.counts["broken"] += 1
            parsed.problems = [*parsed.problems, message][:KEPT_PROBLEMS]
            continue
        if text is None:
            parsed.counts["null"] += 1
        elif not text:
            parsed.counts["empty"] += 1
        elif text.isspace():
            parsed.counts["blank"] += 1
        else:
            parsed.texts.append(text)
            parsed.places.append(place)
    return parsed


def _values(block: Block) -> Iterator[tuple[int, Any]]:
    if block.kind != "lines":
        yield from enumerate(block.content, block.first)
        return
    # Not splitlines(): it would also split at separators that may stand inside a JSON string.
    for place, line in enumerate(block.content.split(b"\n"), block.first):
        if line.strip():
            yield place, line


def _text(value: Any, kind: str, column: str) -> str | None:
    if kind == "lines":
        value = _decode_json(value)
    if kind != "values":
        value = _column(value, column)
    if isinstance(value, bytes):
        value = _decode(value)
    if value is not None and not isinstance(value, str):
        raise _Broken(f"the text should be a string, it is {_json_type(value)}")
    if value and not value.isascii():
        _check_surrogates(value)
    return value


def _decode(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Broken(f"invalid UTF-8 (byte 0x{value[error.start]:02x} at {error.start})") from None


def _decode_json(line: bytes) -> Any:
    text = _decode(line)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise _Broken(f"more than one JSON value on the line (the second starts at column {error.colno})") from None
        raise _Broken(f"no complete JSON value ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise _Broken(f"JSON that can't be read ({error})") from None


def _column(record: Any, column: str) -> Any:
    if not isinstance(record, dict):
        raise _Broken(f"a record should be a JSON object, it is {_json_type(record)}")
    if column not in record:
        raise _Broken(f"no field {column!r} (data.text_column); the record has {', '.join(record) or 'no fields'}")
    return record[column]


def _check_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _Broken(f"a lone surrogate (U+{ord(text[error.start]):04X}) in the text") from None


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    return names.get(type(value), "null" if value is None else type(value).__name__)
