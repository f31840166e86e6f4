"""A config as TOML that loads again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from titanlike.config.schema import Config
from titanlike.config.sections.base import fields_by_key

_BARE = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")


def dump_toml(config: Config, comment: str = "") -> str:
    """Every key of a config, with `comment` at the head. Where it was read from is left out."""
    values = config.model_dump(by_alias=True)
    values["job"].pop("config_file")
    return _comment(comment) + write_tables(_explicit_none(values, Config))


def write_tables(values: Mapping[str, Any]) -> str:
    """Nested values as TOML."""
    lines: list[str] = []
    _table(values, (), lines)
    return "\n".join(lines).strip() + "\n"


def _explicit_none(values: dict[str, Any], section: type[BaseModel]) -> dict[str, Any]:
    """TOML has no null: None is left out where it is the default, and is the word "none" where it isn't."""
    kept: dict[str, Any] = {}
    for key, field in fields_by_key(section).items():
        value = values.get(key)
        if value is None and field.default is None:
            continue
        annotation = field.annotation
        if isinstance(value, dict) and isinstance(annotation, type) and issubclass(annotation, BaseModel):
            value = _explicit_none(value, annotation)
        kept[key] = "none" if value is None else value
    return kept


def _table(values: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    plain = {k: v for k, v in values.items() if not _is_table(v) and not _is_tables(v)}
    if path and (plain or not values):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    lines += [f"{_key(k)} = {toml_value(v)}" for k, v in plain.items() if v is not None]
    for key, value in values.items():
        if _is_table(value) and value:
            _table(value, (*path, key), lines)
        elif _is_table(value):
            lines += ["", f"[{'.'.join(map(_key, (*path, key)))}]"]
        elif _is_tables(value):
            for element in value:
                lines += ["", f"[[{'.'.join(map(_key, (*path, key)))}]]"]
                lines += [f"{_key(k)} = {toml_value(v)}" for k, v in element.items() if v is not None]


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _key(key: str) -> str:
    return key if key and set(key) <= _BARE else _text(key)


def toml_value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    return repr(value)


def _text(text: str) -> str:
    # JSON's escapes are TOML's, but for one control character that JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines()) + ("\n" if text else "")
