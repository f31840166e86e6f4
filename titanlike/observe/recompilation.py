"""Says when something is compiled again in the midst of a run, and why: what silently costs minutes."""

from __future__ import annotations

import logging

logger = logging.getLogger("titanlike")


class Recompilations:
    """Looks into torch's record of compilations after each step. `report` says each new one, once."""

    def __init__(self) -> None:
        self._until = 0.0
        self._said: set[tuple] = set()

    def report(self) -> list[str]:
        """Logs, and returns, a line for each function that was compiled again since the last call."""
        from torch._dynamo.utils import get_compilation_metrics

        lines = []
        for record in get_compilation_metrics():
            began = record.start_time or 0.0
            if began <= self._until:
                continue
            self._until = began
            what = (record.co_name, record.co_filename, record.co_firstlineno, record.recompile_reason)
            if record.recompile_reason and what not in self._said:
                self._said.add(what)
                lines.append(_line(record))
        for line in lines:
            logger.info("%s", line)
        return lines


def _line(record) -> str:
    # A compile id is "frame/compilation of it", counted from 0.
    times = int(record.compile_id.split("/")[1]) + 1 if record.compile_id else "another"
    place = "/".join((record.co_filename or "?").split("/")[-2:])
    seconds = record.entire_frame_compile_time_s or 0.0
    reason = " ".join(record.recompile_reason.split())
    return (
        f"compiled again: {record.co_name} ({place}:{record.co_firstlineno}), graph {times}, {seconds:.1f} s: {reason}"
    )
