"""How ranks come to know the same thing: JSON over the control group, no pickles.

Every function is a collective of `group`. None stands for this process alone, be it a tool that reads a checkpoint or
one rank of a run, and never for torch's default group.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from titanlike.errors import CheckpointError

T = TypeVar("T")
Group = dist.ProcessGroup | None


def rank_of(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)


def world_of(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def from_first(produce: Callable[[], Any], group: Group) -> Any:
    """What `produce` returns on the group's rank 0 (as JSON), on every rank; so is its CheckpointError raised."""
    value, problem = _attempt(produce) if rank_of(group) == 0 else (None, None)
    value, problem = _gather([value, problem], group)[0] if world_of(group) > 1 else (value, problem)
    if problem is not None:
        raise CheckpointError(problem)
    return value


def together(work: Callable[[], T], group: Group) -> T:
    """Run `work` on every rank; if it raised CheckpointError on any of them, every rank raises the first one's."""
    value, problem = _attempt(work)
    first = next((one for one in _gather(problem, group) if one is not None), None)
    if first is not None:
        raise CheckpointError(first)
    return value  # type: ignore[return-value]


def union(items: list[str], group: Group) -> list[str]:
    """Every rank's strings, in rank order, each once."""
    return list(dict.fromkeys(one for part in _gather(items, group) for one in part))


def _attempt(work: Callable[[], T]) -> tuple[T | None, str | None]:
    try:
        return work(), None
    except CheckpointError as error:
        return None, str(error)


def _gather(value: Any, group: Group) -> list[Any]:
    """Every rank's value, by rank."""
    if world_of(group) == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_of(group))]
    dist.all_gather(sizes, torch.tensor([text.numel()]), group=group)
    longest = max(int(size) for size in sizes)
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - text.numel())), group=group)
    return [json.loads(one[: int(size)].numpy().tobytes()) for one, size in zip(texts, sizes, strict=True)]
