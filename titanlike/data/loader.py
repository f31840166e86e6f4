"""The loader: from the plan's list of sequences to the microbatches of one rank, step by step.

The global batch of a step is the next B sequences of the list. Rank r of D takes the r-th of D even slices and cuts it
in microbatches of `local_batch` rows; every rank has the same number of them. Where B doesn't divide, rows that count
nowhere (`sequences` -1, no labels) fill the last microbatch up. At a fresh start that is refused, since it wastes work
at every step; a run that goes on with another number of ranks keeps its global batch and accepts the waste.

Steps per epoch: the list has no seams, so a step may take the end of one pass and the start of the next. Ten
microbatches a pass, four a step, `data.epochs = 2` make five steps, not two times two; only the very last step of a
list that ends may be smaller. `Plan.steps` says how many there will be.

The state is `position`, the first sequence of the next step. Worker processes are prefetchers and nothing else: the
parent says which sequences it wants, in order, and gets them back in that order, so there is nothing in a worker to
save and no worker count that shows. That is why torch's own DataLoader over "sequence numbers → batch" is enough here;
torchdata's stateful one, whose gift is to gather the workers' states, would have nothing to gather.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from titanlike.data.batch import Batch
from titanlike.data.plan import Cut, Plan, Tokens
from titanlike.data.rows import fill_rows
from titanlike.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One rank's part of one step: sequences `first` … `first + count - 1` of the list over all ranks.

    `epoch`: passes over the data that are done once this step is.
    """

    microbatches: list[Batch]
    first: int
    count: int
    epoch: float


def deal(first: int, count: int, *, rank: int, degree: int, local_batch: int) -> np.ndarray:
    """Sequence numbers of a rank's microbatches, int64 [microbatches, local_batch]; -1 = filler row.

    Slices differ by one row at most, and the number of microbatches is the same on every rank.
    """
    share = -(-count // degree)
    rows = np.full(-(-share // local_batch) * local_batch, -1, np.int64)
    mine = np.arange(first + count * rank // degree, first + count * (rank + 1) // degree)
    rows[: len(mine)] = mine
    return rows.reshape(-1, local_batch)


class Loader:
    """The training batches of one rank. `workers` processes prepare microbatches ahead; 0 makes them when asked."""

    def __init__(
        self,
        plan: Plan,
        store: Tokens,
        *,
        rank: int,
        degree: int,
        local_batch: int,
        position: int = 0,
        document_mask: bool = True,
        pad_id: int = 0,
        workers: int = 0,
        prefetch: int | None = None,
        pin_memory: bool = False,
    ):
        assert 0 <= rank < degree
        self.plan, self.position = plan, position
        self._deal = {"rank": rank, "degree": degree, "local_batch": local_batch}
        self._rows = _Rows(plan, store, document_mask, pad_id)
        self._workers, self._prefetch = workers, prefetch
        self._pin_memory = pin_memory and torch.accelerator.is_available()
        self._prepared: Iterator[Batch | _Failure] | None = None

    def next_step(self) -> StepBatch | None:
        """The next step's microbatches, or None when the data has ended. Moves `position` on.

        Raises ConfigError at a fresh start if the global batch doesn't divide; DataError if the data can't be read.
        """
        first, count = self.position, self.plan.step_size(self.position)
        if count == 0:
            return None
        if first == 0:
            self._check_division()
        if self._prepared is None:
            self._prepared = self._start(first)
        microbatches = [self._take() for _ in deal(first, count, **self._deal)]
        self.position = first + count
        return StepBatch(microbatches=microbatches, first=first, count=count, epoch=self.plan.epoch(self.position))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON: the same on every rank."""
        return {"position": self.position, "plan": self.plan.identity}

    def load(self, state: dict[str, Any], *, allow_changed: bool = False) -> None:
        """Go on where `state` was taken, whatever the ranks, workers and batch sizes were then.

        Raises DataError if the state is incomplete, or, unless `allow_changed`, if it is of another list of sequences.
        """
        if missing := {"position", "plan"} - state.keys():
            raise DataError(f"the checkpoint's data state lacks {', '.join(sorted(missing))}; it can't be continued")
        if not allow_changed and (changes := self.plan.differences(state["plan"])):
            raise DataError(
                f"the data is not what the checkpoint was trained on: {'; '.join(changes)}. Put it back as it was, or "
                "set data.allow_changed to go on at the same place of the new list, or "
                'checkpoint.exclude_from_loading = ["dataloader"] to begin the new list from its start'
            )
        self.close()
        self.position = int(state["position"])

    def close(self) -> None:
        """End the workers. The loader can be used again: new ones start where it stands."""
        self._prepared = None  # the last reference: torch's iterator ends its processes as it goes

    def _check_division(self) -> None:
        batch = self.plan.stage(0).global_batch
        degree, local = self._deal["degree"], self._deal["local_batch"]
        if batch % (degree * local):
            raise ConfigError(
                f"training.global_batch_size = {batch}: must be a multiple of data-parallel ranks × "
                f"training.local_batch_size = {degree} × {local} = {degree * local}"
            )

    def _start(self, position: int) -> Iterator[Batch | _Failure]:
        with warnings.catch_warnings():
            # Workers wait for the disk and for us more than they compute: more of them than cores are fine.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            # Forked workers share the plan and the maps; they touch neither threads nor devices of the parent.
            warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
            loader = DataLoader(
                self._rows,
                batch_size=None,  # an item is a microbatch already
                sampler=_Upcoming(self.plan, position, self._deal),
                collate_fn=_as_it_is,
                num_workers=self._workers,
                prefetch_factor=(self._prefetch or 2) if self._workers else None,
                pin_memory=self._pin_memory,
                worker_init_fn=_ignore_signals,
                generator=torch.Generator(),  # torch draws a seed for the workers: not from the run's own generator
            )
            return iter(loader)

    def _take(self) -> Batch:
        assert self._prepared is not None
        batch = next(self._prepared)
        if isinstance(batch, _Failure):
            raise DataError(batch.message)
        return batch


class ValidationData:
    """The held-out sequences of one rank, each once. `len` is the number of microbatches, the same on every rank.

    Every iteration starts anew. The last microbatch, and the last row, are filled up with what counts nowhere. `steps`
    ends it after so many microbatches; -1 takes all.
    """

    def __init__(
        self,
        cut: Cut,
        store: Tokens,
        *,
        rank: int,
        degree: int,
        local_batch: int,
        steps: int = -1,
        document_mask: bool = True,
        pad_id: int = 0,
    ):
        together = degree * local_batch
        self.cut, self._store = cut, store
        self._last = cut.n_rows if steps < 0 else min(cut.n_rows, steps * together)
        self._deal = {"rank": rank, "degree": degree, "local_batch": local_batch}
        self._options = {"document_mask": document_mask, "pad_id": pad_id}

    def __len__(self) -> int:
        return -(-self._last // (self._deal["degree"] * self._deal["local_batch"]))

    def __iter__(self) -> Iterator[Batch]:
        together = self._deal["degree"] * self._deal["local_batch"]
        for first in range(0, self._last, together):
            (numbers,) = deal(first, min(together, self._last - first), **self._deal)
            yield fill_rows(self._store, self.cut.pieces(numbers), numbers, self.cut.seq_len, **self._options)


@dataclass(frozen=True)
class _Failure:
    """A DataError on its way from a worker: as a value, since torch would wrap the exception in its traceback."""

    message: str


class _Rows(Dataset):
    """Sequence numbers of a microbatch → the microbatch."""

    def __init__(self, plan: Plan, store: Tokens, document_mask: bool, pad_id: int):
        self.plan, self.store = plan, store
        self.document_mask, self.pad_id = document_mask, pad_id

    def __getitem__(self, numbers: np.ndarray) -> Batch | _Failure:
        try:
            return fill_rows(
                self.store,
                self.plan.sequences(numbers),
                numbers,
                self.plan.seq_len,
                document_mask=self.document_mask,
                pad_id=self.pad_id,
            )
        except DataError as error:
            return _Failure(str(error))


class _Upcoming:
    """The microbatches of one rank from a position on, as sequence numbers, until the data ends."""

    def __init__(self, plan: Plan, position: int, dealing: dict[str, int]):
        self.plan, self.position, self.dealing = plan, position, dealing

    def __iter__(self) -> Iterator[np.ndarray]:
        position = self.position
        while count := self.plan.step_size(position):
            yield from deal(position, count, **self.dealing)
            position += count


def _as_it_is(item: Any) -> Any:
    return item


def _ignore_signals(worker: int) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach the whole process group; whether to stop is the parent's decision."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
