"""Progress of a long job: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

logger = logging.getLogger("titanlike")

LOG_SECONDS = 30.0


class Progress:
    """Context manager. `total` is in bytes; 0 if it isn't known."""

    def __init__(self, title: str, total: int):
        self.title = title
        self.total = total
        self._begun = self._logged = time.monotonic()
        self._bar = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[line]}"))
            self._bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.total or None, line="")
        return self

    def update(self, read: int, tokens: int) -> str:
        """Report bytes read and tokens made so far; returns the line that says so."""
        seconds = max(time.monotonic() - self._begun, 1e-3)
        share = f"{read / 1e6:,.0f} of {self.total / 1e6:,.0f} MB, " if self.total else ""
        line = f"{share}{tokens / 1e6:,.1f} M tokens, {tokens / seconds / 1e6:.2f} M a second"
        if self._bar is not None:
            self._bar.update(self._task, completed=read, line=line)
        elif time.monotonic() - self._logged > LOG_SECONDS:
            self._logged = time.monotonic()
            logger.info("%s: %s", self.title, line)
        return f"{self.title}: {line}"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
