"""Whole runs by the product's own trainer, in the pool's processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

from titanlike.config import Config
from titanlike.launch.status import progress


class StopAt:
    """Stands in for the stop flag: raised on one rank while it works on a step, as a signal would."""

    def __init__(self, step: int | None, rank: int, on_rank: int):
        self._step = step if rank == on_rank else None

    @property
    def raised(self) -> bool:
        return self._step is not None and progress.step >= self._step

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def run(rank: int, world: int, *, config: dict[str, Any], stop_at: int | None = None, stop_rank: int = 0) -> str:
    """Trains to the end, or until a stop at a step that only `stop_rank` hears of. Returns the outcome."""
    from titanlike import trainer

    with mock.patch.object(trainer, "StopFlag", lambda: StopAt(stop_at, rank, stop_rank)):
        return trainer.Trainer(Config.model_validate(config)).run()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step in metrics.jsonl; a step must appear once."""
    rows = lines(folder / "metrics.jsonl")
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps)), "a step appears once, in order"
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows}


def consumed(folder: Path) -> list[int]:
    """The numbers of all consumed sequences, in order."""
    return [n for line in lines(folder / "consumed.jsonl") for n in line["sequences"]]
