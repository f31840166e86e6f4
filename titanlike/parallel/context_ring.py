"""Attention over sequences that are spread over ranks: keys and values travel, queries stay.

    alltoall    a ring: each rank passes the keys and values that it holds on to the next one while it works on them;
                in the backward their gradients travel along, and come home with the last step
    allgather   keys and values are gathered at once, and again in the backward, so that none are kept in between;
                their gradients are reduced and scattered

Both visit the keys of every rank in the same order, their own first, and merge what each visit gives through the
log-sum-exp (Liu, Zaharia and Abbeel 2023, arXiv 2310.01889). One operator each way, communication inside: a compiled
block stays one graph, and selective checkpointing can keep the result. Keys and values are sent as they are, not
repeated for grouped queries. Sums are float32, in a fixed order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.flop_counter import register_flop_formula

from titanlike.models import kernels
from titanlike.parallel import collectives
from titanlike.parallel.context_pieces import Deal, Piece

# Operators take strings, not groups. torch keeps a group alive until it is destroyed; here it must not live longer.
_GROUPS: weakref.WeakValueDictionary[str, dist.ProcessGroup] = weakref.WeakValueDictionary()


def register_group(group: dist.ProcessGroup) -> str:
    """The name by which this module's operators know a group."""
    _GROUPS[group.group_name] = group
    return group.group_name


def group_named(name: str) -> dist.ProcessGroup:
    """The group of a name that `register_group` gave."""
    return _GROUPS[name]


def _pass_on(outgoing: torch.Tensor, incoming: torch.Tensor, group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    """Starts sending to the next rank and receiving from the one before. Neither buffer may be written until waited."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    to, source = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    return dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, outgoing, to, group, tag),
            dist.P2POp(dist.irecv, incoming, source, group, tag),
        ]
    )


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _around(kv: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """(rank, its keys and values) of every rank, own first. The next ones travel while the caller works on these.

    kv [2, B, L, K, D] contiguous, and the caller's no longer: two buffers take turns, one of them is kv.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    spare = torch.empty_like(kv)
    for step in range(size):
        works = _pass_on(kv, spare, group, 0) if step < size - 1 else []
        yield (rank - step) % size, kv
        _wait(works)
        kv, spare = spare, kv


def _gathered(kv: torch.Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, torch.Tensor]]:
    """The same, after one gather."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    everyone = collectives.stack(kv, size, group.group_name)
    for step in range(size):
        source = (rank - step) % size
        yield source, everyone[source]


_TRAVEL = {"alltoall": _around, "allgather": _gathered}


class _Visits:
    """The kernel calls of one rank: its queries with the keys of one rank at a time.

    All tensors of a visit are laid out alike: [B, L, …] if the rows are one document each, else the flattened
    [1, B * L, …] (`lay`), of which pieces are slices along dimension 1.
    """

    def __init__(self, q: torch.Tensor, offsets: torch.Tensor | None, deal: Deal, rank: int, scale: float, kernel: str):
        self._deal, self._rank, self._scale = deal, rank, scale
        self._varlen = kernel in ("auto", "varlen") and kernels.varlen_works(q.device, q.dtype)
        self._kernel = kernels.row_kernel(kernel, q.device)
        if offsets is not None:
            offsets = offsets.to("cpu", torch.int64)
        elif self._varlen:
            offsets = torch.arange(0, q.shape[0] * deal.length + 1, deal.length)
        self._offsets = offsets

    def lay(self, t: torch.Tensor) -> torch.Tensor:
        return t if self._offsets is None else t.flatten(0, 1)[None]

    def _pieces(self, source: int) -> list[Piece]:
        if self._offsets is None:
            return self._deal.whole_rows(self._rank, source)
        return self._deal.pieces(self._rank, source, self._offsets)

    def forward(self, source: int, q, k, v) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """(queries, out, lse) of each piece; lse [·, queries, H]."""
        pieces, causal = self._pieces(source), source == self._rank
        if not self._varlen:
            for piece in pieces:
                part = q[:, piece.queries], k[:, piece.keys], v[:, piece.keys]
                out, lse = self._kernel.forward(*part, self._scale, causal)
                yield piece.queries, out, lse.transpose(1, 2)
        elif pieces:
            queries, keys = _joined(piece.queries for piece in pieces), _joined(piece.keys for piece in pieces)
            parts = _pick(q, queries), _pick(k, keys), _pick(v, keys)
            out, lse = kernels.varlen_forward(*parts, *_spans(pieces, q.device), self._scale, causal)
            yield from _dealt_back(queries, out, lse.t())

    def backward(self, source: int, grad, q, k, v, out, lse) -> Iterator[tuple[str, slice, torch.Tensor]]:
        """("q", "k" or "v", where, a piece's share of that gradient)."""
        pieces, causal = self._pieces(source), source == self._rank
        if not self._varlen:
            for queries, keys in pieces:
                part = grad[:, queries], q[:, queries], k[:, keys], v[:, keys], out[:, queries]
                part_lse = lse[:, queries].transpose(1, 2).contiguous()
                grads = self._kernel.backward(*part, part_lse, self._scale, causal)
                yield from zip("qkv", (queries, keys, keys), grads, strict=True)
        elif pieces:
            queries, keys = _joined(piece.queries for piece in pieces), _joined(piece.keys for piece in pieces)
            parts = _pick(grad, queries), _pick(q, queries), _pick(k, keys), _pick(v, keys), _pick(out, queries)
            part_lse = _pick(lse, queries).t().contiguous()
            grads = kernels.varlen_backward(*parts, part_lse, *_spans(pieces, q.device), self._scale, causal)
            for name, where, whole in zip("qkv", (queries, keys, keys), grads, strict=True):
                for run, part in _dealt_back(where, whole):
                    yield name, run, part


def _joined(runs) -> list[slice]:
    """Neighbouring runs made one."""
    joined: list[slice] = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            joined[-1] = slice(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return joined


def _pick(t: torch.Tensor, runs: list[slice]) -> torch.Tensor:
    """These runs of a flattened tensor [1, T, …], without the leading 1."""
    return t[0, runs[0]] if len(runs) == 1 else torch.cat([t[0, run] for run in runs])


def _dealt_back(runs: list[slice], *parts: torch.Tensor) -> Iterator[tuple]:
    """(run, its part of each tensor [1, …]): `_pick` undone."""
    sizes = [run.stop - run.start for run in runs]
    for run, *split in zip(runs, *(part[None].split(sizes, 1) for part in parts), strict=True):
        yield run, *split


def _spans(pieces: list[Piece], device: torch.device) -> tuple[kernels.Spans, kernels.Spans]:
    def spans(runs):
        sizes = torch.tensor([0, *(run.stop - run.start for run in runs)])
        return kernels.Spans(sizes.cumsum(0).to(device, torch.int32), int(sizes.max()))

    return spans(piece.queries for piece in pieces), spans(piece.keys for piece in pieces)


def _merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Takes in attention over further keys; in place. out, part [·, L, H, D]; lse, part_lse [·, L, H]; sums float32."""
    out.lerp_(part.float(), (part_lse - lse).sigmoid()[..., None])
    lse.copy_(torch.logaddexp(lse, part_lse))


def _prepare(q, offsets, scale, kernel, balancer, group) -> tuple[dist.ProcessGroup, _Visits]:
    members = group_named(group)
    size = dist.get_world_size(members)
    deal = Deal(size, balancer, q.shape[1] * size)
    return members, _Visits(q, offsets, deal, dist.get_rank(members), scale, kernel)


@torch.library.custom_op("titanlike::context_attention", mutates_args=())
def context_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor | None,
    scale: float,
    kernel: str,
    method: str,
    balancer: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention inside each document of rows that are spread over `group` as `balancer` deals them.

    q [B, L, H, D]; k, v [B, L, K, D]: this rank's columns; offsets int32 [n + 1] over the tokens of the *whole* rows,
    or None if every row is one document; kernel as `model.attention`; method "alltoall" or "allgather"; group by its
    registered name. Returns out [B, L, H, D], lse float32 [B, L, H].
    """
    members, visits = _prepare(q, offsets, scale, kernel, balancer, group)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = out.new_empty(q.shape[:3])
    laid_q, laid_out, laid_lse = (visits.lay(t) for t in (q, out, lse))
    for step, (source, kv) in enumerate(_TRAVEL[method](torch.stack((k, v)), members)):
        for queries, part, part_lse in visits.forward(source, laid_q, *(visits.lay(t) for t in kv)):
            if step == 0:  # a rank's own keys: each query sees at least itself, so this fills out and lse
                laid_out[:, queries], laid_lse[:, queries] = part, part_lse
            else:
                _merge(laid_out[:, queries], laid_lse[:, queries], part, part_lse)
    return out.to(q.dtype), lse


@context_attention.register_fake
def _(q, k, v, offsets, scale, kernel, method, balancer, group):
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@register_flop_formula([torch.ops.titanlike.context_attention])
def _flops(q: torch.Size, k: torch.Size, v, offsets, scale, kernel, method, balancer, group: str, **kwargs) -> int:
    """As that of attention on one rank: this rank's queries by the keys of all ranks."""
    rows, length, heads, size = q
    return 4 * rows * heads * size * length * k[1] * dist.get_world_size(group_named(group))


@torch.library.custom_op("titanlike::context_attention_backward", mutates_args=())
def context_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    offsets: torch.Tensor | None,
    scale: float,
    kernel: str,
    method: str,
    balancer: str,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v from that of `context_attention`'s output."""
    members, visits = _prepare(q, offsets, scale, kernel, balancer, group)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    grad, laid_q, out, lse, laid_dq = (visits.lay(t) for t in (grad.contiguous(), q, out, lse, dq))

    def visit(source: int, kv: torch.Tensor) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Adds to q's gradient; what is left are (0 = k or 1 = v, where, share of the gradient)."""
        for name, where, part in visits.backward(source, grad, laid_q, *(visits.lay(t) for t in kv), out, lse):
            if name == "q":
                laid_dq[:, where] += part
            else:
                yield "kv".index(name), where, part

    collect = _gradients_around if method == "alltoall" else _gradients_gathered
    dk, dv = collect(torch.stack((k, v)), visit, visits.lay, members)
    return dq.to(q.dtype), dk.to(k.dtype, copy=True), dv.to(v.dtype, copy=True)  # results must not share memory


@context_attention_backward.register_fake
def _(grad, q, k, v, out, lse, offsets, scale, kernel, method, balancer, group):
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))


def _gradients_around(kv, visit, lay, group) -> torch.Tensor:
    """Float32 gradients of k and v, which follow them around the ring, one step behind, and come home at the end."""
    sums, incoming = (torch.zeros(kv.shape, dtype=torch.float32, device=kv.device) for _ in range(2))
    works: list[dist.Work] = []
    for step, (source, held) in enumerate(_around(kv, group)):
        parts = list(visit(source, held))
        _wait(works)  # sums has been sent, incoming is what the ranks before this one added up for `source`
        if step:
            sums, incoming = incoming, sums
        for which, where, part in parts:
            lay(sums[which])[:, where] += part
        works = _pass_on(sums, incoming, group, 1)
    _wait(works)
    return incoming


def _gradients_gathered(kv, visit, lay, group) -> torch.Tensor:
    """Float32 gradients of k and v from those of all ranks' keys and values here."""
    size = dist.get_world_size(group)
    everyone = torch.zeros((size, *kv.shape), dtype=torch.float32, device=kv.device)
    for source, held in _gathered(kv, group):
        for which, where, part in visit(source, held):
            lay(everyone[source, which])[:, where] += part
    return collectives.reduce_scatter(everyone, 0, size, group.group_name)[0]


def _save(ctx, inputs, output):
    q, k, v, offsets, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, offsets)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    grads = torch.ops.titanlike.context_attention_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return *grads, *(None,) * 6


context_attention.register_autograd(_backward, setup_context=_save)
