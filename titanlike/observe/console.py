"""What a person sees while the run goes on: a banner at its start, then one line a logged step.

On a terminal in colour (unless NO_COLOR is set or `metrics.disable_color_printing`); in a file or a pipe the same
words, plain. Only what is known is shown: a missing figure leaves no gap and no placeholder. Lines begin with the time
of day, as those of the logger "titanlike" do, among which they stand.
"""

from __future__ import annotations

import io
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from rich.box import ROUNDED
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from titanlike.observe.jsonl import scalar
from titanlike.observe.memory import PARTS

# Keys of a metrics row that a line shows in its own way or leaves to metrics.jsonl.
_SILENT = {
    "step",
    "tokens",
    "trained_tokens",
    "step_seconds",
    "data_seconds",
    "checkpoint_seconds",
    "validation_seconds",
    "memory_reserved_gib",
    "memory_rest_gib",
    *(f"memory_{part}_gib" for part in PARTS),
    "epoch",
}


def number(value: float) -> str:
    """Four significant digits, without an exponent where that is readable: 0.8123, 12.35, 3e-05."""
    return f"{value:.4g}"


def count(value: float) -> str:
    """A size as people say it: 950, 12.3K, 8.03B."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:g}"


def duration(seconds: float) -> str:
    """The two largest units: 42s, 3m 05s, 2h 13m, 4d 06h."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}h"
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {rest:02}s" if minutes else f"{rest}s"


# In the order of the line: key, label, style, how the value is written.
_COLUMNS: list[tuple[str, str, str, Callable[[float], str]]] = [
    ("loss", "loss", "bold green", lambda v: f"{v:.4f}"),
    ("grad_norm", "grad norm", "yellow", number),
    ("learning_rate", "lr", "cyan", lambda v: f"{v:.3g}"),
    ("tokens_per_second", "tok/s", "blue", lambda v: f"{v:,.0f}" if v >= 100 else number(v)),
    ("mfu", "MFU", "magenta", lambda v: f"{v:.1%}"),
    ("memory_gib", "mem", "bright_black", lambda v: f"{v:.2f} GiB"),
]
_SHOWN = {key for key, *_ in _COLUMNS}


class ConsoleSink:
    """Prints metrics rows to `file` (default: standard output)."""

    def __init__(
        self,
        *,
        last_step: int,
        plain: bool = False,
        seconds_left: Callable[[int], float | None] = lambda step: None,
        file: IO[str] | None = None,
    ):
        self._last_step = last_step
        self._seconds_left = seconds_left
        file = file or sys.stdout
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" rather than nothing at all
        # rich alone would keep bold and dim under NO_COLOR; without a colour system it writes no escape codes at all.
        colours = None if plain or os.environ.get("NO_COLOR") else "auto"
        self._console = Console(file=file, color_system=colours, highlight=False, soft_wrap=True)

    def banner(self, title: str, rows: Mapping[str, str]) -> None:
        """Says what is about to run: a name and its meaning a line."""
        if self._console.is_terminal and self._console.color_system:
            grid = Table.grid(padding=(0, 2))
            grid.add_column(style="bright_black")
            grid.add_column(overflow="fold")
            for name, value in rows.items():
                grid.add_row(name, Text(value))
            self._console.print(
                Panel(grid, title=Text(title, "bold"), title_align="left", box=ROUNDED, expand=False), soft_wrap=False
            )
            return
        width = max((len(name) for name in rows), default=0)
        self._print(Text(title))
        for name, value in rows.items():
            self._print(Text(f"  {name:<{width}}  {value}"))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """One line of the training figures in `values`, and one of the validation's if it has any."""
        known = {key: scalar(value) for key, value in values.items() if scalar(value) is not None}
        validation = {key: value for key, value in known.items() if key.startswith("validation_")}
        training = {key: value for key, value in known.items() if key not in validation}
        if training.keys() - _SILENT:
            self._print(self._training_line(step, training))
        if validation.keys() - _SILENT:
            self._print(self._validation_line(step, validation))

    def close(self) -> None:
        self._console.file.flush()

    def _training_line(self, step: int, values: Mapping[str, Any]) -> Text:
        line = self._step(step)
        for key, label, style, write in _COLUMNS:
            if key in values:
                self._add(line, label, values[key], style, write)
        for key in values.keys() - _SHOWN - _SILENT:
            self._add(line, key.replace("_", " "), values[key], "", number)
        left = self._seconds_left(step)
        if left is not None and left >= 1:
            line.append("  left ", "bright_black").append(duration(left))
        return line

    def _validation_line(self, step: int, values: Mapping[str, Any]) -> Text:
        line = self._step(step)
        for key, value in values.items():
            if key not in _SILENT:
                self._add(line, key.replace("_", " "), value, "bold cyan", lambda v: f"{v:.4f}")
        if (seconds := values.get("validation_seconds")) is not None:
            line.append(f"  in {seconds:.1f}s", "bright_black")
        return line

    def _step(self, step: int) -> Text:
        width = len(str(self._last_step))
        return Text("step ", "bright_black").append(f"{step:>{width}}/{self._last_step}", "bold")

    @staticmethod
    def _add(line: Text, label: str, value: Any, style: str, write: Callable[[float], str]) -> None:
        line.append(f"  {label} ", "bright_black")
        if not isinstance(value, (int, float)):
            line.append(str(value), style)
        elif math.isfinite(value):
            line.append(write(value), style)
        else:
            line.append(str(value), "bold red")

    def _print(self, line: Text) -> None:
        self._console.print(Text(time.strftime("%H:%M:%S "), "bright_black").append_text(line))
