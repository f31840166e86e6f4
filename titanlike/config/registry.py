"""Registries: names that a TOML may use, and what they stand for.

A module of the user's, named in `[job] import`, adds to them by decorator. Builtins are imported when they are first
asked for, so that reading a config imports nothing heavy.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Generic, TypeVar

from titanlike.config.nearest import nearest_word
from titanlike.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Entries of one kind by name. `builtins` maps a name to the module that registers it when imported."""

    def __init__(self, kind: str, builtins: dict[str, str] | None = None):
        self.kind = kind
        self._builtins = builtins or {}
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds an entry. Raises ValueError if another entry has the name."""

        def add(entry: T) -> T:
            if self._entries.get(name, entry) is not entry:
                raise ValueError(f"two entries want the name {name!r} in the registry of {self.kind} names")
            self._entries[name] = entry
            return entry

        return add

    def names(self) -> list[str]:
        return sorted({*self._entries, *self._builtins})

    def get(self, name: str, key: str | None = None) -> T:
        """The entry of that name. Raises ConfigError, naming `key` and the nearest name, if there is none."""
        if name not in self._entries and name in self._builtins:
            importlib.import_module(self._builtins[name])
        if name in self._entries:
            return self._entries[name]
        near = nearest_word(name, self.names())
        hint = f"; did you mean {near!r}?" if near else ""
        where = f"{key} = {name!r}: " if key else f"{name!r}: "
        raise ConfigError(f"{where}no such {self.kind}{hint} (there are: {', '.join(self.names())})")
