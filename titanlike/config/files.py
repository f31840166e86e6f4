"""TOML files into layers: syntax, lines, `extends`."""

from __future__ import annotations

import re
from pathlib import Path

from titanlike.config.aliases import translate
from titanlike.config.layers import Layer
from titanlike.config.nearest import nearest_word
from titanlike.config.shipped import find_config, shipped_configs
from titanlike.config.toml_lines import KeyLines
from titanlike.config.tomllib_compat import TOMLDecodeError, loads

_LINE = re.compile(r"\s*\(at line (\d+), column (\d+)\)$")


def read_file(name: str, problems: list[str], parents: tuple[Path, ...] = ()) -> Layer:
    """A config file with what it extends, as one layer. Problems are added to the list; the rest is still read."""
    path = find_config(name)
    if path is None:
        problems.append(_missing(name, parents))
        return Layer()
    if path.resolve() in parents:
        chain = " -> ".join(p.name for p in (*parents, path))
        problems.append(f"{path}: extends = {name!r}: goes in a circle ({chain})")
        return Layer()
    own = _read_one(path, problems)
    bases = own.values.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(b, str) for b in bases):
        problems.append(f"{own.origin(('extends',))}: extends = {bases!r}: must be a file name or a list of them")
        bases = []
    merged = Layer()
    for base in bases:
        beside = path.parent / base
        merged.lay(read_file(str(beside) if beside.is_file() else base, problems, (*parents, path.resolve())))
    own.origins.pop(("extends",), None)
    merged.lay(own)
    return merged


def _read_one(path: Path, problems: list[str]) -> Layer:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        problems.append(f"{path}:{line}: not UTF-8 text, which TOML must be")
        return Layer()
    except OSError as error:
        problems.append(f"{path}: can't be read: {error.strerror}")
        return Layer()
    keys = KeyLines(text)
    try:
        values = loads(text)
    except TOMLDecodeError as error:
        problems.append(_syntax(path, str(error), keys))
        return Layer()
    layer = Layer(values, {key: f"{path}:{line}" for key, line in keys.lines.items()})
    problems += translate(layer)
    return layer


def _syntax(path: Path, message: str, keys: KeyLines) -> str:
    """A parser's message with the line up front. At the end of the file, the line of the statement left open."""
    if found := _LINE.search(message):
        line, column = found.groups()
        return f"{path}:{line}: not valid TOML: {message[: found.start()]} (column {column})"
    reason = message.removesuffix(" (at end of document)")
    return f"{path}:{keys.last_line}: not valid TOML: {reason}: what begins here is never closed"


def _missing(name: str, parents: tuple[Path, ...]) -> str:
    names = list(shipped_configs())
    near = nearest_word(Path(name).name.removesuffix(".toml"), names)
    hint = f"; did you mean {near}?" if near else ""
    by = f"{parents[-1]}: extends = " if parents else ""
    return f"{by}{name}: no such config file{hint} (shipped: {', '.join(names)})"
