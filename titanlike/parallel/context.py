"""Context parallelism: each rank holds some columns of every row, and attention reaches over all of them.

Everything but attention works on single tokens, so only two things know of it: the batch is cut (`cut`), and each
block's attention gets an operator that talks to the other ranks (`apply_context`). Three of them, by
`parallelism.context_parallel_rotate_method`: a ring and a gather of keys and values (context_ring.py), and "ulysses",
which exchanges heads for tokens: each rank then has whole rows of some heads, for the plain operator.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from titanlike.config.sections.parallelism import Parallelism
from titanlike.data.batch import Batch
from titanlike.errors import ConfigError
from titanlike.models.decoder import Decoder
from titanlike.models.document_attention import attend
from titanlike.parallel.context_pieces import Deal
from titanlike.parallel.context_ring import context_attention, group_named, register_group


def cut(batch: Batch, rank: int, degree: int, balancer: str | None) -> Batch:
    """This rank's columns of every [B, S, …] field; what is not by token, and `offsets`, stay those of whole rows."""
    shape = batch.tokens.shape
    deal = Deal(degree, balancer or "none", shape[1])
    if shape[1] % deal.chunks:
        raise ConfigError(
            f"training.seq_len = {shape[1]}: must be a multiple of {deal.chunks} for "
            f"parallelism.context_parallel_degree = {degree}"
        )

    def mine(value):
        if not isinstance(value, torch.Tensor) or value.shape[:2] != shape:
            return value
        return torch.cat([value[:, columns] for columns in deal.columns(rank)], 1)

    fields = dataclasses.fields(batch)
    return dataclasses.replace(batch, **{f.name: mine(getattr(batch, f.name)) for f in fields})


@dataclass(frozen=True)
class ContextAttention:
    """`models.attention.attend` over rows that are spread over a group: q [B, L, H, D], k and v [B, L, K, D]."""

    method: str
    balancer: str
    group: str

    def __call__(self, q, k, v, offsets, scale, kernel, window=0, softcap=0.0):
        assert not window and not softcap, "refused when the config is read"
        return context_attention(q, k, v, offsets, scale, kernel, self.method, self.balancer, self.group)[0]


@torch.library.custom_op("titanlike::exchange", mutates_args=())
def exchange(parts: torch.Tensor, group: str) -> torch.Tensor:
    """Part i of parts [n, …] goes to rank i of the group; part i of the result came from there."""
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group_named(group))
    return received


@exchange.register_fake
def _(parts, group):
    return torch.empty_like(parts, memory_format=torch.contiguous_format)


def _save_group(ctx, inputs, output):
    ctx.group = inputs[1]


def _exchange_back(ctx, grad):
    return exchange(grad, ctx.group), None


exchange.register_autograd(_exchange_back, setup_context=_save_group)


@dataclass(frozen=True)
class Ulysses:
    """The same by heads for tokens (Jacobs et al. 2023, arXiv 2309.14509); the group's size must divide H.

    Keys and values are repeated until the size divides their heads too.
    """

    balancer: str
    group: str
    degree: int

    def __call__(self, q, k, v, offsets, scale, kernel, window=0, softcap=0.0):
        heads, kv_heads = q.shape[2], k.shape[2]
        if heads % self.degree:
            raise ConfigError(
                f'parallelism.context_parallel_rotate_method = "ulysses": each rank\'s {heads} attention heads must be '
                f"a multiple of parallelism.context_parallel_degree = {self.degree}"
            )
        repeats = math.lcm(kv_heads, self.degree) // kv_heads
        if repeats > 1:
            k, v = (t.repeat_interleave(repeats, 2) for t in (k, v))
        return self._columns(attend(*(self._rows(t) for t in (q, k, v)), offsets, scale, kernel, window, softcap))

    def _order(self, length: int) -> list[int]:
        """The chunks of a row in the order in which the ranks hold them."""
        deal = Deal(self.degree, self.balancer, length)
        return [chunk for rank in range(self.degree) for chunk in deal.held(rank)]

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """[B, L, H, D] of this rank's columns → [B, S, H / n, D]."""
        parts = x.unflatten(2, (self.degree, -1)).permute(2, 0, 1, 3, 4)
        order = self._order(x.shape[1] * self.degree)
        held = exchange(parts, self.group).unflatten(2, (len(order) // self.degree, -1))  # [n, B, chunks, c, h, D]
        chunks = held.transpose(1, 2).flatten(0, 1)
        place = sorted(range(len(order)), key=order.__getitem__)
        return torch.stack([chunks[i] for i in place], 1).flatten(1, 2)

    def _columns(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H / n, D] → [B, L, H, D] of this rank's columns."""
        order = self._order(x.shape[1])
        chunks = x.unflatten(1, (len(order), -1))  # [B, chunks, c, h, D]
        parts = torch.stack([chunks[:, i] for i in order]).unflatten(0, (self.degree, -1))
        parts = parts.transpose(1, 2).flatten(2, 3)  # [n, B, L, h, D]
        return exchange(parts, self.group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def apply_context(model: Decoder, group: dist.ProcessGroup, settings: Parallelism) -> None:
    """Makes every block's attention reach over the group, whose ranks each hold what `cut` gives them; in place."""
    method, balancer = settings.context_parallel_rotate_method, settings.context_parallel_load_balancer or "none"
    if balancer == "ptrr":
        raise ConfigError(
            'parallelism.context_parallel_load_balancer = "ptrr": it deals out the blocks of a FlexAttention mask, '
            'which this attention does without; "headtail" balances causal attention'
        )
    name = register_group(group)
    if method == "ulysses":
        operator = Ulysses(balancer, name, dist.get_world_size(group))
    else:
        operator = ContextAttention(method, balancer, name)
    for block in model.layers.values():
        block.attention.attend = operator
