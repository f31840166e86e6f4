"""Experts on other ranks: whoever gets tokens, whoever has none, all is as in one process, gradients too."""

from __future__ import annotations

import pytest
import torch

from tests.parallel import expert_jobs as jobs
from titanlike.models.moe import Router

# Of each rank's tokens, the two experts; a rank of three holds experts 0-1, 2-3 or 4-5.
ROUTES = {
    "all ranks get some": [[[0, 5], [2, 1], [4, 3]], [[3, 0], [1, 4]], [[5, 2], [0, 1], [2, 3], [4, 5]]],
    "one rank gets them all": [[[2, 3]] * 3, [[3, 2]] * 2, [[2, 3], [3, 2]]],
    "one rank gets none": [[[0, 4], [1, 5]], [[5, 0], [4, 1], [0, 5]], [[1, 4]]],
    "a rank has no tokens": [[[0, 2], [3, 5]], [], [[4, 1]]],
    "a rank has none and gets none": [[[0, 4]], [], [[5, 1], [1, 0]]],
    "nobody has tokens": [[], [], []],
}


@pytest.mark.parametrize("route", ROUTES)
def test_as_in_one_process(pool, route):
    chosen = ROUTES[route]
    together = torch.tensor([pair for one in chosen for pair in one], dtype=torch.int64).view(-1, jobs.K)
    x, weights, grad = jobs.tokens(len(together))
    want = jobs.through(jobs.experts(), x, weights, together, grad)
    ranks = pool.run("tests.parallel.expert_jobs:dispatched", world=3, chosen=chosen)
    for name in ("out", "x", "weights"):
        torch.testing.assert_close(torch.cat([rank[name] for rank in ranks]), want[name], rtol=1e-5, atol=1e-5)
    for name, matrix in want["matrices"].items():
        found = torch.cat([rank["matrices"][name] for rank in ranks])  # a gradient for every matrix, also of zeros
        torch.testing.assert_close(found, matrix, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_in_turn_each_expert_gets_the_same():
    """Whatever the scores say; the weights are still those of the experts that are chosen."""
    router = Router(jobs.SPEC, jobs.RULE)
    torch.nn.init.normal_(router.gate.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    free = router(x, None)[1]
    assert free.flatten().bincount(minlength=6).unique().numel() > 1, "left alone it would not be even"
    router.in_turn = True
    weights, chosen, scores, _ = router(x, None)
    assert chosen.flatten().bincount(minlength=6).tolist() == [4] * 6
    assert all(len(set(pair)) == 2 for pair in chosen.tolist())
    assert torch.equal(weights, scores.gather(1, chosen))
