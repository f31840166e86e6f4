"""Validation errors in words: place, key, value, what is allowed, nearest key."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from titanlike.config.aliases import FOREIGN_SECTIONS
from titanlike.config.keys import annotation_at, choices, describe, section_at
from titanlike.config.layers import Layer, Path, dotted
from titanlike.config.nearest import nearest_key, nearest_section, nearest_word
from titanlike.config.schema import Config
from titanlike.config.sections.base import fields_by_key

_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def explain(error: ValidationError, layer: Layer) -> list[str]:
    """One line for each thing wrong."""
    lines = []
    for detail in error.errors(include_url=False, include_context=True):
        path: Path = detail["loc"]
        lines.append(f"{place(layer, path)}{_about(path, detail)}")
    return lines


def place(layer: Layer, path: Path) -> str:
    """`run.toml:12: ` or `command line: `, empty where nobody wrote the key."""
    origin = layer.origin(path)
    return f"{origin}: " if origin else ""


def show(value: Any) -> str:
    """A value as a TOML would have it, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _about(path: Path, detail: Any) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return _unknown_section(path) if len(path) == 1 else _unknown_key(path, value)
    if kind == "missing":
        return f"{dotted(path)}: is missing and has no default"
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{dotted(path)} = {show(value)}: must be {words} {detail['ctx'][name]:g}"
    if kind == "finite_number":
        return f"{dotted(path)} = {value}: must be a finite number"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{dotted(path)} = {show(value)}: must be a table"
    return f"{dotted(path)} = {show(value)}: must be {_allowed(path, value)}"


def _allowed(path: Path, value: Any) -> str:
    annotation = annotation_at(path)
    if annotation is None:
        return "something else"
    words = describe(annotation)
    allowed = choices(annotation)
    if allowed and isinstance(value, str) and (near := nearest_word(value, [str(c) for c in allowed])):
        words += f"; did you mean {near}?"
    return words


def _unknown_section(path: Path) -> str:
    name = str(path[0])
    if name in FOREIGN_SECTIONS:
        return f"[{name}]: no such section; it belongs to {FOREIGN_SECTIONS[name]}"
    near = nearest_section(name) or nearest_key(path)
    hint = f"; did you mean [{near}]?" if near else ""
    return f"[{name}]: no such section{hint} (there are: {', '.join(fields_by_key(Config))})"


def _unknown_key(path: Path, value: Any) -> str:
    near = nearest_key(path)
    hint = f"; did you mean {near}?" if near else ""
    section = section_at(path[:-1])
    there = f" ({dotted(path[:-1])} has: {', '.join(fields_by_key(section))})" if section else ""
    return f"{dotted(path)} = {show(value)}: no such key{hint}{there}"
