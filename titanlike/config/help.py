"""`--help`: every key with its type, default and meaning, read off the section classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from titanlike.config.dump import toml_value
from titanlike.config.keys import all_keys, describe, in_array, section_in, walk
from titanlike.config.nearest import nearest_word
from titanlike.config.schema import Config
from titanlike.config.sections.base import fields_by_key

FORMS = """\
Keys are set in the TOML or on the command line, where the last one wins:
  --section.key value   --section.key=value   --section.flag   --section.no-flag
  --section.list a,b    --job.config_file base.toml mine.toml"""


def print_help(usage: str, topic: str | None = None, stream: TextIO | None = None) -> int:
    """Print usage and keys; of one section or key with `topic`. Returns the exit code (2 for an unknown topic)."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream, highlight=False, soft_wrap=True)
    wanted = topic.strip("[]").replace("-", "_") if topic else ""
    if wanted and not list(_entries(wanted)):
        near = nearest_word(wanted, [*fields_by_key(Config), *all_keys()])
        console.print(Text(f"no section or key is called {topic}" + (f"; did you mean {near}?" if near else "")))
        return 2
    if not wanted:
        console.print(Text(f"{usage}\n\n{FORMS}"))
    section = ""
    for path, field, doc in _entries(wanted):
        table = ".".join(path[:-1])
        if table != section:
            section = table
            head = f"[[{table}]]" if in_array(path[:-1]) else f"[{table}]"
            console.print(Text.assemble("\n", (head, "bold cyan"), "  ", (doc, "dim")))
        console.print(_line(path, field, Text))
    return 0


def _entries(wanted: str) -> Iterator[tuple[tuple[str, ...], FieldInfo, str]]:
    """Keys under a section or key (all for ""), each with what its table is for."""
    for path, field in walk():
        key = ".".join(path)
        if not wanted or key == wanted or key.startswith(wanted + "."):
            yield path, field, table_doc(path[:-1])


def table_doc(path: tuple[str, ...]) -> str:
    """What a table is for, on one line."""
    section: type[BaseModel] | None = Config
    for part in path:
        assert section is not None, "a path of tables"
        section = section_in(fields_by_key(section)[part].annotation)
    assert section is not None, "a path of tables"
    text = " ".join((section.__doc__ or "").split())
    return text.removeprefix(f"[{'.'.join(path)}]: ").removeprefix(f"[[{'.'.join(path)}]]: ")


def default_of(field: FieldInfo) -> str:
    """A default as a TOML would have it."""
    if field.is_required():
        return "required"
    return "none" if field.default is None else toml_value(field.default)


def _line(path: tuple[str, ...], field: FieldInfo, text_class):
    kind = describe(field.annotation, short=True)
    meaning = " ".join((field.description or "").split())
    name = path[-1] if in_array(path[:-1]) else "--" + ".".join(path)
    return text_class.assemble(
        "  ",
        (name, "bold"),
        "  ",
        (kind, "green"),
        "  ",
        (f"= {default_of(field)}", "yellow"),
        f"\n      {meaning}",
    )
