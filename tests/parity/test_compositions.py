"""Every pair of optimizer, precision, memory technique and layout against one process with nothing done for memory.

Three steps on packed rows with unequal masks. Losses and gradient norms are relative; weights are relative to how far
the three steps move them.
"""

from __future__ import annotations

import pytest
import torch

from tests.parity.compositions import (
    OPTIMIZERS,
    PAGE,
    PRECISIONS,
    STEPS,
    Row,
    covering,
    everything,
    page_with_table,
    pairs,
    refusal,
    refused,
)

# Of losses, of norms, of weights.
FP32 = {
    "AdamW": (1e-6, 2e-6, 1e-5),
    "AdamW, compiled": (1e-6, 2e-6, 1e-5),
    "SGD": (1e-6, 2e-6, 1e-5),
    "AdamW, bf16 state": (1e-6, 2e-6, 1e-4),
    "Muon": (1e-6, 2e-6, 2e-2),  # its iteration is in bf16
    # A tensor rank's blocks are shorter, so that other numbers share a scale.
    "AdamW8bit": (5e-6, 2e-6, 1e-2),
    "AdamWFp8": (5e-6, 2e-6, 1e-2),
    "AdamW4bit": (5e-6, 2e-6, 5e-2),
}
NARROW = {
    "bf16": (5e-5, 2e-3, 5e-2),
    "bf16 weights, stochastic rounding": (5e-5, 5e-3, 1e-1),
    "float8 tensorwise": (1e-4, 2e-3, 2e-1),
    "float8 rowwise": (1e-4, 2e-3, 1e-1),
    "MXFP8": (1e-4, 2e-3, 1e-1),
}
# Muon makes all directions of an update count the same, those of noise too: 1.0e-1 at two tensor ranks.
TOGETHER = {("Muon", "MXFP8"): (1e-4, 2e-3, 1.2e-1)}


def distances(results: list[dict], want: dict) -> tuple[float, float, float]:
    """Largest relative distance of a loss and of a norm, and that of all weights relative to their movement."""
    weights = {name: value for result in results for name, value in result["weights"].items()}
    assert weights.keys() == want["weights"].keys()

    def squares(one, other):
        return sum((one[name].double() - other[name].double()).square().sum() for name in one)

    moved = squares(want["weights"], want["initial"])
    assert moved > 0
    loss, norm = (
        max(abs(a / b - 1) for result in results for a, b in zip(result[part], want[part], strict=True))
        for part in ("losses", "norms")
    )
    return loss, norm, (squares(weights, want["weights"]) / moved).sqrt().item()


def complaint(row: Row, results: list[dict], want: dict) -> str:
    """What is too far off; empty if nothing is."""
    bounds = FP32[row.optimizer] if row.precision == "fp32" else NARROW[row.precision]
    bounds = TOGETHER.get((row.optimizer, row.precision), bounds)
    found = zip(("loss", "norm", "weights"), distances(results, want), bounds, strict=True)
    return ", ".join(f"{name} {off:.1e} > {bound:.0e}" for name, off, bound in found if not off <= bound)


def train(pool, rows: list[Row]) -> list[list[dict]]:
    """What each rank returns, for rows of one world."""
    runs = [{"config": row.settings, "masks": "uneven"} for row in rows]
    ranks = pool.run("tests.parity.jobs:train_each", world=rows[0].world, runs=runs, steps=STEPS, timeout=1500)
    return [list(results) for results in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def yardsticks() -> dict[Row, dict]:
    """One-process runs, each made once."""
    return {}


def yardstick(pool, yardsticks: dict[Row, dict], row: Row) -> dict:
    if row.yardstick not in yardsticks:
        yardsticks[row.yardstick] = train(pool, [row.yardstick])[0][0]
    return yardsticks[row.yardstick]


@pytest.mark.parametrize("row", covering(), ids=str)
def test_pairs(pool, yardsticks, row):
    want = yardstick(pool, yardsticks, row)
    assert complaint(row, train(pool, [row])[0], want) == ""


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_everything(pool, yardsticks, optimizer, precision):
    """Every memory technique at every layout, with one optimizer and precision."""
    rows = [row for row in everything() if row[:2] == (optimizer, precision) and not refusal(row)]
    bad = {}
    for world in (1, 2):
        if here := [row for row in rows if row.world == world]:
            want = yardstick(pool, yardsticks, here[0])
            for row, results in zip(here, train(pool, here), strict=True):
                if found := complaint(row, results, want):
                    bad[str(row)] = found
    assert not bad


def test_every_pair_is_tested_or_refused():
    """By pairs that go together nowhere, and nothing is left out for the company that it keeps."""
    tested = set().union(*(pairs(row) for row in covering()))
    for row in everything():
        reasons = refusal(row)
        assert not reasons or any((one, other) in refused() for (_, one), (_, other) in pairs(row)), row
        assert reasons or pairs(row) <= tested
    assert all(refused().values())


def test_the_documentation_shows_these_pairs():
    page = PAGE.read_text()
    assert page_with_table(page) == page, "run python -m tests.parity.compositions"


def test_a_wrong_update_would_be_seen(pool, yardsticks):
    """The loosest bounds are worth something: a rate that is off by a half, one step too many, an update left out."""
    row = Row("AdamW", "float8 tensorwise", "all kept", "one process")
    want = yardstick(pool, yardsticks, row)
    start = want["initial"]
    for factor in (0.0, 0.5, 1.5):
        off = {name: start[name] + factor * (value - start[name]) for name, value in want["weights"].items()}
        assert "weights" in complaint(row, [{**want, "weights": off}], want)
    assert "norm" in complaint(row, [{**want, "norms": [1.01 * n for n in want["norms"]]}], want)
    assert torch.equal(*(yardstick(pool, yardsticks, row)["weights"]["tok_embeddings.weight"] for _ in range(2)))
