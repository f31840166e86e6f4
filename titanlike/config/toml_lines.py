"""Where each key of a TOML stands. tomllib gives values without lines; messages need both.

This is a walk over text that tomllib has accepted (or is about to refuse: then `KeyLines.last_line` says where the
statement begins that was never closed). It knows strings, arrays and tables, and no values.
"""

from __future__ import annotations

import contextlib
import json
import re

KeyPath = tuple[str | int, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BLANK = re.compile(r"[ \t]*")
_SCALAR = re.compile(r"[^,\]}\n#]*")
_STRINGS = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|' r"'''.*?'{3,5}|" r'"(?:\\.|[^"\\\n])*"|' r"'[^'\n]*'",
    re.DOTALL,
)


class UnreadableToml(Exception):
    """The walk met something that is no TOML."""


class KeyLines:
    """Line numbers (from 1) by path of keys; elements of an array are paths with their index."""

    def __init__(self, text: str):
        self.lines: dict[KeyPath, int] = {}
        self.last_line = 1
        self._text = text
        self._at = 0
        self._arrays: dict[KeyPath, int] = {}
        # tomllib refuses an unreadable text with its own message; last_line is all that is wanted then.
        with contextlib.suppress(UnreadableToml, ValueError):
            self._document()

    def _document(self) -> None:
        table: KeyPath = ()
        while True:
            self._skip(_SPACE)
            if self._at >= len(self._text):
                return
            self.last_line = self._line()
            table = self._header() if self._peek("[") else self._pair(table)

    def _header(self) -> KeyPath:
        """A `[table]` or `[[array of tables]]` line; returns the path that its keys belong to."""
        many = self._peek("[[")
        line = self._line()
        self._at += 2 if many else 1
        path: KeyPath = ()
        *parents, last = self._key()
        for part in parents:
            path = self._newest((*path, part))
        path = (*path, last)
        if many:
            self.lines.setdefault(path, line)
            self._arrays[path] = self._arrays.get(path, -1) + 1
        path = self._newest(path)
        self._expect("]]" if many else "]")
        self.lines.setdefault(path, line)
        return path

    def _newest(self, path: KeyPath) -> KeyPath:
        """An array of tables stands for its newest element."""
        return (*path, self._arrays[path]) if path in self._arrays else path

    def _pair(self, table: KeyPath) -> KeyPath:
        line = self._line()
        path = table
        for part in self._key():
            path = (*path, part)
            self.lines.setdefault(path, line)
        self._expect("=")
        self._value(path)
        return table

    def _value(self, path: KeyPath) -> None:
        self._skip(_BLANK)
        if string := _STRINGS.match(self._text, self._at):
            self._at = string.end()
        elif self._peek("["):
            self._items("]", lambda n: self._element((*path, n)))
        elif self._peek("{"):
            self._items("}", lambda n: self._pair(path))
        elif self._peek('"') or self._peek("'"):
            raise UnreadableToml
        else:
            self._skip(_SCALAR)

    def _element(self, path: KeyPath) -> None:
        self.lines.setdefault(path, self._line())
        self._value(path)

    def _items(self, close: str, read) -> None:
        self._at += 1
        for n in range(len(self._text)):
            self._skip(_SPACE)
            if self._peek(close):
                break
            read(n)
            self._skip(_SPACE)
            if not self._peek(close):
                self._expect(",")
        self._expect(close)

    def _key(self) -> list[str]:
        parts: list[str] = []
        while True:
            self._skip(_BLANK)
            if bare := _BARE.match(self._text, self._at):
                parts.append(bare.group())
                self._at = bare.end()
            elif quoted := _STRINGS.match(self._text, self._at):
                text = quoted.group()
                parts.append(json.loads(text) if text[0] == '"' else text[1:-1])
                self._at = quoted.end()
            else:
                raise UnreadableToml
            self._skip(_BLANK)
            if not self._peek("."):
                return parts
            self._at += 1

    def _line(self) -> int:
        return self._text.count("\n", 0, self._at) + 1

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        assert match is not None, "patterns of blanks match the empty text"
        self._at = match.end()

    def _expect(self, text: str) -> None:
        self._skip(_BLANK)
        if not self._peek(text):
            raise UnreadableToml
        self._at += len(text)
