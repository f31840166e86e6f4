"""What keys there are: a walk over the section classes."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from titanlike.config.layers import Path
from titanlike.config.schema import Config
from titanlike.config.sections.base import fields_by_key


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section class that an annotation holds, alone or in a list; None where it is a plain value."""
    annotation = plain(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is list:
        return section_in(get_args(annotation)[0])
    return None


def in_array(path: Path) -> bool:
    """Whether a path of tables leads through an array of tables, whose keys the command line can't reach."""
    return any(get_origin(plain(annotation_at(path[: n + 1]))) is list for n in range(len(path)))


def plain(annotation: Any) -> Any:
    """An annotation without its constraints and without None."""
    if get_origin(annotation) is Annotated:
        return plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        some = [a for a in get_args(annotation) if a is not type(None)]
        return plain(some[0]) if len(some) == 1 else annotation
    return annotation


def annotation_at(path: Path) -> Any | None:
    """The type of the value at a path; None where no such key is."""
    here: Any = Config
    for part in path:
        here = plain(here)
        if isinstance(part, int):
            here = get_args(here)[0] if get_origin(here) is list else None
        elif isinstance(here, type) and issubclass(here, BaseModel):
            found = fields_by_key(here).get(part)
            here = found.annotation if found else None
        elif get_origin(here) is dict:
            here = get_args(here)[1]
        else:
            return None
        if here is None:
            return None
    return here


def section_at(path: Path) -> type[BaseModel] | None:
    """The section class at a path (of an array of tables: its element's); None where none is."""
    here: type[BaseModel] | None = Config
    for part in path:
        if isinstance(part, int):
            continue
        found = fields_by_key(here).get(part) if here else None
        here = section_in(found.annotation) if found else None
    return here


def walk(section: type[BaseModel] = Config, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every key that holds a value, tables and arrays of tables opened: a table's own keys, then the tables in it."""
    tables = []
    for key, field in fields_by_key(section).items():
        inner = section_in(field.annotation)
        if inner is None:
            yield (*path, key), field
        else:
            tables.append((inner, (*path, key)))
    for inner, inner_path in tables:
        yield from walk(inner, inner_path)


@lru_cache(maxsize=1)
def all_keys() -> list[str]:
    """Every key, dotted."""
    return [".".join(path) for path, _ in walk()]


def choices(annotation: Any) -> list[Any] | None:
    """The values that a Literal allows (of a list: that its elements may have); None where any value may be."""
    annotation = plain(annotation)
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) is list:
        return choices(get_args(annotation)[0])
    return None


def describe(annotation: Any, *, short: bool = False) -> str:
    """A type in words; `short` is for columns."""
    annotation = plain(annotation)
    words = {bool: ("bool", "true or false"), int: ("int", "an integer"), float: ("float", "a number")}
    if annotation in words:
        return words[annotation][0 if short else 1]
    if annotation is str:
        return "str" if short else "text"
    if get_origin(annotation) is Literal:
        values = [str(v) for v in get_args(annotation)]
        return "|".join(values) if short else "one of " + ", ".join(values)
    if get_origin(annotation) is list:
        inner = describe(get_args(annotation)[0], short=short)
        return f"list[{inner}]" if short else f"a list, each element {inner}"
    return "table" if short else "a table"
