"""Context parallelism: who holds what, who sees whom, and attention over ranks against one process."""

import dataclasses

import pytest
import torch

from tests.parallel import context_jobs as jobs
from titanlike.config import Config
from titanlike.errors import ConfigError
from titanlike.parallel.context import Ulysses, apply_context, cut
from titanlike.parallel.context_pieces import Deal

METHODS = ["alltoall", "allgather", "ulysses"]
JOBS = "tests.parallel.context_jobs"


def _whole(deal: Deal, rank: int) -> torch.Tensor:
    """Where each of a rank's flattened tokens lies among the tokens of whole rows."""
    return jobs.columns(torch.arange(jobs.B * jobs.S).view(jobs.B, jobs.S), rank, deal.degree, deal.balancer).flatten()


@pytest.mark.parametrize("documents", jobs.DOCUMENTS)
@pytest.mark.parametrize("balancer", ["headtail", "none"])
@pytest.mark.parametrize("degree", [2, 4])
def test_pieces_are_the_mask(degree, balancer, documents):
    """Each pair of a query and a key that may see each other is in one piece of one visit, and no other pair is."""
    deal, offsets = Deal(degree, balancer, jobs.S), jobs.offsets_of(documents)
    bounds = torch.arange(0, jobs.B * jobs.S + 1, jobs.S) if offsets is None else offsets.long()
    tokens = torch.arange(jobs.B * jobs.S)
    numbers = torch.bucketize(tokens, bounds[1:], right=True)
    want = (numbers[:, None] == numbers) & (tokens[:, None] >= tokens)
    seen = torch.zeros(len(tokens), len(tokens), dtype=torch.int64)
    for rank in range(degree):
        for source in range(degree):
            for queries, keys in deal.pieces(rank, source, bounds):
                q, k = _whole(deal, rank)[queries], _whole(deal, source)[keys]
                # Kernels differ in which corner they align a causal rectangle to; of a square there is only one.
                assert len(q) and len(k) and (rank != source or len(q) == len(k))
                square = torch.ones(len(q), len(k), dtype=torch.int64)
                seen[q[:, None], k] += square.tril() if rank == source else square
    assert torch.equal(seen, want.long())


def test_headtail_costs_each_rank_the_same():
    """And in order the last rank has almost all to do."""
    bounds = torch.tensor([0, jobs.S])

    def work(balancer, rank):
        size = 0
        for source in range(4):
            for queries, keys in Deal(4, balancer, jobs.S).pieces(rank, source, bounds):
                size += (queries.stop - queries.start) * (keys.stop - keys.start) / (1 + (source == rank))
        return size

    assert len({work("headtail", rank) for rank in range(4)}) == 1
    assert work("none", 3) == 7 * work("none", 0)


@dataclasses.dataclass(kw_only=True)
class Scored(jobs.Batch):
    """A batch of an objective that isn't there yet: fields by token, with and without more dimensions, and by row."""

    advantages: torch.Tensor
    vectors: torch.Tensor
    weights: torch.Tensor
    note: str


@pytest.mark.parametrize("balancer", ["headtail", None])
def test_cut(balancer):
    plain = jobs.made_up(50, "packed")
    fields = {f.name: getattr(plain, f.name) for f in dataclasses.fields(plain)}
    vectors = torch.rand(jobs.B, jobs.S, 3)
    batch = Scored(**fields, advantages=vectors[..., 0], vectors=vectors, weights=torch.rand(jobs.B), note="kept")
    parts = [cut(batch, rank, 4, balancer) for rank in range(4)]
    order = torch.cat([part.positions + 1000 * part.documents for part in parts], 1).argsort(1)
    for name in ("tokens", "labels", "positions", "documents", "advantages", "vectors"):
        whole = torch.cat([getattr(part, name) for part in parts], 1)
        want = getattr(batch, name)
        assert all(getattr(part, name).shape[1] == jobs.S // 4 for part in parts)
        for row in range(jobs.B):
            assert torch.equal(whole[row, order[row]], want[row]), name
    for name in ("sequences", "offsets", "weights", "note"):
        assert all(getattr(part, name) is getattr(batch, name) for part in parts)


def test_headtail_order():
    """Rank 1 of 2 holds the two middle quarters, rank 0 the outer ones."""
    batch = dataclasses.replace(jobs.made_up(50, "rows"), tokens=torch.arange(jobs.S).repeat(jobs.B, 1))
    c = jobs.S // 4
    for rank, columns in enumerate(([*range(c), *range(3 * c, 4 * c)], list(range(c, 3 * c)))):
        assert cut(batch, rank, 2, "headtail").tokens[0].tolist() == columns


def test_a_length_that_cannot_be_split_is_refused():
    with pytest.raises(ConfigError, match=r"training\.seq_len = 48: must be a multiple of 10 .* = 5"):
        cut(jobs.made_up(50, "rows"), 0, 5, "headtail")


def test_ptrr_is_refused_by_name():
    settings = Config.model_validate({"parallelism": {"context_parallel_load_balancer": "ptrr"}}).parallelism
    with pytest.raises(ConfigError, match=r'parallelism\.context_parallel_load_balancer = "ptrr".*"headtail"'):
        apply_context(torch.nn.Module(), None, settings)


def test_ulysses_refuses_heads_that_it_cannot_deal_out():
    q, k, v, _ = jobs.inputs(1, torch.float32)
    with pytest.raises(ConfigError, match=r"ulysses.* 8 attention heads .*context_parallel_degree = 3"):
        Ulysses("none", "unused", 3)(q, k, v, None, 1.0, "auto")


EVERY, SOME = list(jobs.DOCUMENTS), ["rows", "packed"]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_equals_one_process(pool, method, world):
    """Output and gradients of both balancers, all kinds of documents and of heads: float32 tight, bfloat16 loose."""
    cases = [("float32", "sdpa", EVERY, 2e-6), ("float32", "math", SOME, 2e-6), ("bfloat16", "sdpa", SOME, 2e-2)]
    for dtype, kernel, documents, bound in cases:
        arguments = {"method": method, "dtype": dtype, "kernel": kernel, "documents": documents}
        for rank, results in enumerate(pool.run(f"{JOBS}:compare", world=world, **arguments)):
            wrong = {name: errors for name, errors in results.items() if not max(errors) <= bound}
            assert len(results) == 2 * 3 * len(documents) and not wrong, f"rank {rank}, {dtype}, {kernel}"


def test_ranks_of_unequal_speed(pool):
    assert max(pool.run(f"{JOBS}:skewed", world=4)) < 2e-6


@pytest.mark.parametrize("method", METHODS)
def test_same_bits_each_time(pool, method):
    assert all(pool.run(f"{JOBS}:repeated", world=4, method=method))


@pytest.mark.parametrize("method", METHODS)
def test_variable_length_kernel(pool, method):
    assert max(pool.run(f"{JOBS}:varlen", world=2, method=method)) < 2e-6


def test_operator_registration(pool):
    pool.run(f"{JOBS}:registered", world=2)


CHECKPOINTING = {
    "none": ({}, 2),
    "full": ({"activation_checkpoint": {"mode": "full"}}, 3),
    "by operator": ({"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}, 2),
}


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("method", METHODS)
def test_decoder(pool, method, checkpointing):
    """Cut batches through a decoder; by operator, the backward runs no ring again."""
    sections, runs = CHECKPOINTING[checkpointing]
    for worst, count in pool.run(f"{JOBS}:decoder", world=2, method=method, sections=sections):
        assert worst < 2e-6
        assert count == (0 if method == "ulysses" else runs * jobs.SPEC.n_layers)


COMPILED = [*((method, "none") for method in METHODS), ("alltoall", "by operator")]


@pytest.mark.parametrize(("method", "checkpointing"), COMPILED)
def test_compiled_blocks_stay_whole(pool, method, checkpointing):
    """fullgraph: the backend sees each block as one graph."""
    sections = {"compile": {"enable": True, "backend": "aot_eager", "components": ["model"]}}
    sections.update(CHECKPOINTING[checkpointing][0])
    for worst, _ in pool.run(f"{JOBS}:decoder", world=2, method=method, sections=sections):
        assert worst < 2e-6
