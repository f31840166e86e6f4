"""Something done to whole matrices of which each rank holds a piece.

The matrices are dealt out: each rank gets whole ones of its own, does its work, and sends the pieces back, in one
exchange there and one back. A rank's work and memory are those of its share; what travels is each matrix once, and the
result once for each rank that holds a piece. Ranks that hold the same piece take it from the same result: they stay
bit-equal.

    pieces of A B C D on every rank ──> rank 0: A C, rank 1: B D ──> work ──> pieces on every rank
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titanlike.models.initial import shard_of

Box = tuple[tuple[int, int], ...]  # first index and length, by dimension


class WholeMatrices:
    """The deal of some parameters over the ranks that hold them; making it is a collective of those ranks."""

    def __init__(self, parameters: list[torch.Tensor], cost: Callable[[torch.Size], float]):
        self.group = _group(parameters)
        self._shapes = [parameter.shape for parameter in parameters]
        self._me, self._world = (dist.get_rank(self.group), dist.get_world_size(self.group)) if self.group else (0, 1)
        boxes = [_box(parameter) for parameter in parameters]
        everyone = [boxes]
        if self.group:
            everyone = [boxes] * self._world
            dist.all_gather_object(everyone, boxes, group=self.group)
        self._boxes = everyone  # by rank, then by matrix
        self._owner = deal([cost(shape) for shape in self._shapes], self._world)
        self._owned = [[i for i, owner in enumerate(self._owner) if owner == rank] for rank in range(self._world)]
        self._senders = [self._nearest(i) for i in range(len(parameters))]

    def map(self, pieces: list[torch.Tensor], work: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        """`work` on each whole matrix, of which `pieces` are this rank's (one dtype); its own pieces of the results."""
        if not self.group:
            return [work(piece) for piece in pieces]
        ranks, mine = range(self._world), self._owned[self._me]
        there = [[pieces[i].flatten() for i in self._owned[o] if self._sends(i, self._me)] for o in ranks]
        sizes = [[self._size(i, r) for i in mine if self._sends(i, r)] for r in ranks]
        arrived = self._exchange(there, sizes, pieces[0])
        results = {i: work(whole) for i, whole in self._joined(mine, arrived, pieces[0]).items()}
        back = [[results[i][_slices(self._boxes[r][i])].flatten() for i in mine] for r in ranks]
        sizes = [[self._size(i, self._me) for i in self._owned[o]] for o in ranks]
        arrived = self._exchange(back, sizes, pieces[0])
        found = {i: flat for o in ranks for i, flat in zip(self._owned[o], arrived[o], strict=True)}
        return [found[i].view(piece.shape) for i, piece in enumerate(pieces)]

    def _joined(
        self, mine: list[int], arrived: list[list[torch.Tensor]], example: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        """This rank's whole matrices from what the ranks sent."""
        whole = {i: example.new_empty(self._shapes[i]) for i in mine}
        for rank, sent in enumerate(arrived):
            for i, piece in zip([i for i in mine if self._sends(i, rank)], sent, strict=True):
                box = self._boxes[rank][i]
                whole[i][_slices(box)] = piece.view([length for _, length in box])
        return whole

    def _size(self, i: int, rank: int) -> int:
        return math.prod(length for _, length in self._boxes[rank][i])

    def _nearest(self, i: int) -> dict[Box, int]:
        """For each piece of matrix i, which of the ranks that hold it sends it: the owner's nearest."""
        chosen: dict[Box, int] = {}
        for rank in sorted(range(self._world), key=lambda rank: (abs(rank - self._owner[i]), rank)):
            chosen.setdefault(self._boxes[rank][i], rank)
        return chosen

    def _sends(self, i: int, rank: int) -> bool:
        return self._senders[i][self._boxes[rank][i]] == rank

    def _exchange(
        self, sent: list[list[torch.Tensor]], sizes: list[list[int]], example: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        """All ranks' lists to all ranks; `sizes` of what arrives."""
        outgoing = torch.cat([example.new_empty(0), *(one for to in sent for one in to)])
        incoming = example.new_empty(sum(map(sum, sizes)))
        splits = [sum(one.numel() for one in to) for to in sent]
        dist.all_to_all_single(incoming, outgoing, [*map(sum, sizes)], splits, group=self.group)
        return [list(part.split(size)) for part, size in zip(incoming.split([*map(sum, sizes)]), sizes, strict=True)]


def deal(costs: list[float], ranks: int) -> list[int]:
    """The rank of each piece of work: the dearest first, each to whoever has least."""
    load, owner = [0.0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner[i] = min(range(ranks), key=lambda r: (load[r], r))
        load[owner[i]] += costs[i]
    return owner


def _group(parameters: list[torch.Tensor]) -> dist.ProcessGroup | None:
    """The ranks of the mesh that all of them lie on; None for one rank alone."""
    meshes = {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
    if not meshes:
        return None
    assert len(meshes) == 1, "matrices on different meshes"
    ranks = meshes.pop().mesh.flatten().tolist()
    if len(ranks) == 1:
        return None
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return dist.new_group(ranks, use_local_synchronization=True)


def _box(parameter: torch.Tensor) -> Box:
    shard = shard_of("", parameter)
    return tuple(zip(shard.start, shard.local.shape, strict=True))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, first + length) for first, length in box)
