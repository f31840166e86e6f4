"""Logs: the logger "titanlike", on the console for the ranks of LOG_RANK, in logs/rank-N.log for every rank.

With several processes, those that LOG_RANK (default "0"; "0,3" or "all") doesn't name write everything to their file
alone, what C++ and native libraries print included. Failures reach the console from any rank (`say`).
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from titanlike.errors import ConfigError
from titanlike.launch import worker

logger = logging.getLogger("titanlike")

# What torch warns of through its loggers and nobody who trains can do anything about: logger → words of the message.
_NOISE = {
    "torch._higher_order_ops.wrap": "Detected that context_fn is passed",  # recomputed blocks that are compiled
    "torch.utils._pytree": "is an Enum subclass",  # how torchao registers some of its own
}
_console_fd: int | None = None  # the real stderr of a process whose output goes to its file


def setup_logging(rank: int | None = None, folder: str | Path | None = None) -> None:
    """Set up this process's logs; `folder` is the run's, where logs/ belongs. May be called again."""
    rank = worker.rank() if rank is None else rank
    shown = shown_ranks()
    several = worker.world_size() > 1
    file = None
    if several and folder is not None:
        file = Path(folder) / "logs" / f"rank-{rank}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
    on_console = not several or shown is None or rank in shown
    if file is not None and not on_console:
        _send_output_to(file)
    prefix = f"[rank {rank}] " if several and shown != {0} else ""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if file is not None and on_console:
        handlers.append(logging.FileHandler(file))
    if file is None and not on_console:
        handlers = [logging.NullHandler()]
    for handler in handlers:
        handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    for name in ("titanlike", "py.warnings"):
        target = logging.getLogger(name)
        target.handlers[:] = handlers
        target.propagate = False
    logger.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for name in _NOISE:
        logging.getLogger(name).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return _NOISE[record.name] not in record.getMessage()


def shown_ranks() -> set[int] | None:
    """The ranks that LOG_RANK names, None for all of them; raises ConfigError."""
    text = os.environ.get("LOG_RANK", "0")
    if text.strip() == "all":
        return None
    try:
        return {int(part) for part in text.split(",") if part.strip()}
    except ValueError:
        raise ConfigError(f'LOG_RANK: {text!r} is neither "all" nor ranks separated by commas') from None


def say(text: str) -> None:
    """Write to the standard error that the person sees, in one piece, and to this rank's own log if that is another."""
    line = (text.rstrip("\n") + "\n").encode()
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(2, line)
    if _console_fd is not None:
        os.write(_console_fd, line)


def _send_output_to(file: Path) -> None:
    global _console_fd
    if _console_fd is None:
        _console_fd = os.dup(2)
    log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
