"""consumed.jsonl: which sequences and documents each step trained on, for those who want to prove it.

One line a step, `{"step": 3, "sequences": [8, 9, …], "documents": [[17, 4], [4], …]}`: numbers in the run's one list,
and for each of them the documents (numbers in the token store) that it has tokens of. A step appears once: a run that
goes on from step s drops the lines after s, which are about to be written again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from titanlike.data.plan import Plan

NAME = "consumed.jsonl"


class ConsumedLog:
    """Writes the file in the run's folder. One process of a run has one."""

    def __init__(self, folder: Path, plan: Plan, *, resume_step: int = 0):
        self.path = folder / NAME
        self._plan = plan
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _keep_until(self.path, resume_step)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, step: int, first: int, count: int) -> None:
        """Note that `step` trained on sequences `first` … `first + count - 1`."""
        line = {
            "step": step,
            "sequences": list(range(first, first + count)),
            "documents": self._plan.documents(first, count),
        }
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._file.flush()  # a killed run has written what it trained on

    def close(self) -> None:
        self._file.close()


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines of later steps, and a last line that was cut short; the file is whole at every moment."""
    beside = path.with_name(f"{path.name}.tmp")
    with open(path, encoding="utf-8") as old, open(beside, "w", encoding="utf-8") as new:
        for line in old:
            if _step_of(line) <= step:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(beside, path)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"] if line.endswith("\n") else float("inf")
    except ValueError:
        return float("inf")
