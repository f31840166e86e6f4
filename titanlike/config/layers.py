"""Layers of a config: nested values, and where each came from. Files and the command line are layers alike.

A path is a tuple of keys (and of indices inside arrays). An origin is text for messages: `run.toml:12` or
`command line`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Path = tuple[str | int, ...]
MISSING = object()


@dataclass
class Layer:
    """Values of one source, or of several merged."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)

    def origin(self, path: Path) -> str | None:
        """Where the key was written; where its nearest parent was, if the key itself has no place."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return None

    def get(self, path: Path) -> Any:
        """The value at a path, or MISSING."""
        here: Any = self.values
        key: Any
        for key in path:
            inside = key in here if isinstance(here, dict) else isinstance(here, list) and key in range(len(here))
            if not inside:
                return MISSING
            here = here[key]
        return here

    def put(self, path: Path, value: Any, origin: str | None) -> None:
        """Set a value, making tables on the way; whatever stood there goes."""
        self._forget(path)
        here: Any = self.values
        for part in path[:-1]:
            if not isinstance(here.get(part), dict):
                here[part] = {}
            here = here[part]
        here[path[-1]] = value
        if origin:
            self.origins[path] = origin

    def pop(self, path: Path) -> Any:
        """Take a value out. Tables that this empties go too, so that an alias leaves no trace."""
        key: Any = path[-1]
        parent: Any = self.get(path[:-1])
        if not isinstance(parent, dict) or key not in parent:
            return MISSING
        value = parent.pop(key)
        self._forget(path)
        if not parent and len(path) > 1:
            self.pop(path[:-1])
        return value

    def lay(self, top: Layer) -> None:
        """Lay another layer over this one: tables merge key by key, everything else is replaced."""
        for path, value in leaves(top.values):
            if value == {} and isinstance(self.get(path), dict):
                continue
            self.put(path, value, None)
        self.origins.update(top.origins)

    def _forget(self, path: Path) -> None:
        for old in [p for p in self.origins if p[: len(path)] == path]:
            del self.origins[old]


def leaves(table: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is no table (or an empty one), with its path."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def dotted(path: Path) -> str:
    """A path as people write it: `optimizer.param_groups[0].lr`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
