"""Layouts of whole runs, and what a person sees of such a run."""

from __future__ import annotations

import contextlib
import io
import math
from typing import Any

from tests.jobs.jobs import run


def layout(schedule: str | None = None, **degrees: int) -> dict[str, Any]:
    """[parallelism] from degrees: pp, replicate, shard, cp, tp; ep and etp of the experts, over the same ranks."""
    keys = {
        "pp": "pipeline_parallel_degree",
        "replicate": "data_parallel_replicate_degree",
        "shard": "data_parallel_shard_degree",
        "cp": "context_parallel_degree",
        "tp": "tensor_parallel_degree",
        "ep": "expert_parallel_degree",
        "etp": "expert_tensor_parallel_degree",
    }
    of_pipeline = {"pipeline_parallel_schedule": schedule} if schedule else {}
    return {"data_parallel_shard_degree": 1, **{keys[axis]: n for axis, n in degrees.items()}, **of_pipeline}


def world_of(parallelism: dict[str, Any]) -> int:
    """The number of processes that the degrees make."""
    return math.prod(n for key, n in parallelism.items() if key.endswith("degree") and not key.startswith("expert"))


def shown(rank: int, world: int, **options: Any) -> str:
    """Train as `jobs.run` does; returns what this rank prints."""
    console = io.StringIO()
    with contextlib.redirect_stdout(console):
        run(rank, world, **options)
    return console.getvalue()
