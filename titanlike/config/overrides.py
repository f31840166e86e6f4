"""The command line: `--section.key value` and its other forms, read into the same nested values as a TOML.

    --training.steps 100        --training.steps=100        dashes and underscores are the same in keys
    --compile.enable            --compile.no-enable         --compile.enable=false
    --data.path a.txt b.txt     --model.converters a,b      --model.converters '["a", "b"]'
    --job.config_file a.toml b.toml

Values are read by the type that the key has. What doesn't fit stays as text, for the one validation that reports
every problem.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from titanlike.config.aliases import canonical
from titanlike.config.keys import annotation_at, plain, section_in
from titanlike.config.layers import Layer, Path
from titanlike.config.sections.base import NONE_WORDS
from titanlike.config.tomllib_compat import TOMLDecodeError, loads

ORIGIN = "command line"
TRUE = ("true", "yes", "on", "1")
FALSE = ("false", "no", "off", "0")


@dataclass
class CommandLine:
    """What a command line says: config files, overrides, and what is neither."""

    config_files: list[str] = field(default_factory=list)
    overrides: Layer = field(default_factory=Layer)
    positional: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Take a command line apart. Never raises: problems are kept in the result."""
    read = CommandLine()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            read.positional.append(word)
            continue
        name, given, value = word[2:].partition("=")
        path = tuple(name.replace("-", "_").split("."))
        if path == ("job", "config_file"):
            _config_files(read, value if given else None, rest)
        elif not all(path) or (len(path) < 2 and annotation_at(path) is None):
            read.problems.append(f"{ORIGIN}: {word}: no such option; config keys are given as --section.key value")
        else:
            _override(read, path, value if given else None, rest)
    return read


def _config_files(read: CommandLine, value: str | None, rest: list[str]) -> None:
    files = [value] if value else _values_ahead(rest)
    if not files:
        read.problems.append(f"{ORIGIN}: --job.config_file: needs the name of a TOML file")
    # The last --job.config_file wins, as the last value of any key does.
    read.config_files = files


def _override(read: CommandLine, path: Path, value: str | None, rest: list[str]) -> None:
    """One `--section.key`: find its value, here or in the words that follow."""
    annotation = annotation_at(canonical(path))
    kind = plain(annotation)
    if annotation is None and value is None and (negated := _negated(path)):
        read.overrides.put(negated, False, ORIGIN)
        return
    if value is not None:
        parsed = parse(value, annotation)
    elif kind is bool and not _bool_ahead(rest):
        parsed = True
    elif get_origin(kind) is list and (words := _values_ahead(rest)):
        parsed = parse(words[0], annotation) if len(words) == 1 else [parse(w, get_args(kind)[0]) for w in words]
    elif rest and not rest[0].startswith("--"):
        parsed = parse(rest.pop(0), annotation)
    elif kind is None:
        parsed = True  # an unknown key; validation names it
    else:
        read.problems.append(f"{ORIGIN}: --{'.'.join(map(str, path))}: needs a value")
        return
    read.overrides.put(path, parsed, ORIGIN)


def _negated(path: Path) -> Path | None:
    """The boolean key that `--section.no_key` switches off."""
    name = str(path[-1])
    positive = (*path[:-1], name.removeprefix("no_"))
    return positive if name.startswith("no_") and plain(annotation_at(canonical(positive))) is bool else None


def _bool_ahead(rest: list[str]) -> bool:
    """Whether the next word is meant for a boolean. A file's name after a bare flag is a file's name."""
    return bool(rest) and not rest[0].startswith("--") and not rest[0].endswith(".toml")


def _values_ahead(rest: list[str]) -> list[str]:
    words = []
    while rest and not rest[0].startswith("--"):
        words.append(rest.pop(0))
    return words


def parse(text: str, annotation: Any) -> Any:
    """Text as a value of that type; the text itself where it isn't one (validation then says so)."""
    kind = plain(annotation)
    if annotation is not None and kind is not annotation and text in NONE_WORDS and type(None) in get_args(annotation):
        return None
    if kind is bool:
        word = text.lower()
        return True if word in TRUE else False if word in FALSE else text
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return text
    if get_origin(kind) is list:
        return _parse_list(text, get_args(kind)[0])
    if kind is None or kind is Any or get_origin(kind) is dict or section_in(kind):
        return _literal(text)
    if kind is not str and text.isdecimal() and int(text) in get_args(kind):
        return int(text)  # a choice between numbers
    return text


def _parse_list(text: str, item: Any) -> Any:
    if text.lstrip().startswith("["):
        return _literal(text)
    return [parse(part.strip(), item) for part in text.split(",") if part.strip()]


def _literal(text: str) -> Any:
    """A TOML or JSON value; the text itself if it is neither."""
    try:
        return loads(f"value = {text}")["value"]
    except TOMLDecodeError:
        pass
    try:
        return json.loads(text)
    except ValueError:
        return text
