"""However rows are dealt to microbatches and ranks, the update is that of one big batch: sums, then one division."""

import pytest
import torch

from tests.parity.test_data_parallel import config

TRAIN = "tests.parity.accumulation:train"
# Ranks, and the trained tokens of each rank's rows: one or two of them a rank.
LAYOUTS = {
    "shard 2": (2, {}, [3, 29]),
    "shard 2, accumulation 2": (2, {}, [3, 0, 20, 9]),
    "replicate 2 × shard 2": (4, {"data_parallel_replicate_degree": 2}, [3, 20, 0, 9]),
    "replicate 2 × shard 2, accumulation 2": (4, {"data_parallel_replicate_degree": 2}, [3, 0, 20, 9, 0, 0, 0, 0]),
}


def settings(rows: int, local: int, name: str = "SGD", **sections):
    training = {"seq_len": 32, "local_batch_size": local, "global_batch_size": rows, "max_norm": 0.0}
    # AdamW divides by the root of what it squares: a large eps keeps rounding where it was.
    sections.setdefault("optimizer", {"name": name, "lr": 1e-3, "eps": 1e-3})
    return config(training={**config()["training"], **training}, **sections)


def same(got, want, bound=1e-6):
    assert got["losses"] == pytest.approx(want["losses"], rel=bound)
    assert got["norms"] == pytest.approx(want["norms"], rel=bound)
    for part in ("gradients", "weights"):
        for name, value in want[part].items():
            assert (got[part][name] - value).norm() <= bound * value.norm(), f"{part} of {name}"


def test_a_mean_is_of_tokens_and_not_of_microbatches(pool):
    """One microbatch of 1 token with loss 2, one of 9 tokens with losses that add up to 3."""
    for world in (1, 2):
        for losses in pool.run("tests.parity.accumulation:mean_of_sums", world=world):
            assert losses == {"loss": pytest.approx(0.5), "gradient": pytest.approx(0.5)}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_four_rows_in_one_two_or_four_microbatches(pool, optimizer):
    """With 1, 7, 19 and 24 trained tokens in the rows."""
    arguments = {"steps": 3, "targets": [1, 7, 19, 24]}
    runs = [pool.run(TRAIN, world=1, config=settings(4, n, optimizer), **arguments)[0] for n in (4, 2, 1)]
    for run in runs[1:]:
        same(run, runs[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_with_unequal_targets(pool, layout):
    """3 trained tokens on the first rank, 29 on the others together, against one process with all 32."""
    world, parallelism, targets = LAYOUTS[layout]
    rows, arguments = len(targets), {"steps": 3, "targets": targets}
    want = pool.run(TRAIN, world=1, config=settings(rows, rows), **arguments)[0]
    for got in pool.run(TRAIN, world=world, config=settings(rows, 1, parallelism=parallelism), **arguments):
        same(got, want)


@pytest.mark.parametrize("world", [1, 2])
def test_a_microbatch_without_targets_counts_nothing(pool, world):
    """Rows 1, 3 and 4 alone give the same; nothing becomes NaN, not even where a whole step has nothing to learn."""
    with_empty = pool.run(TRAIN, world=world, config=settings(4, 1), steps=2, targets=[5, 0, 24, 11])
    arguments = {"steps": 2, "targets": [5, 24, 11], "rows": [0, 2, 3]}
    without = pool.run(TRAIN, world=1, config=settings(3, 3), **arguments)[0]
    for result in with_empty:
        same(result, without)
    nothing = pool.run(TRAIN, world=world, config=settings(4, 1), steps=2, targets=[0, 0, 0, 0])[0]
    assert nothing["losses"] == [None, None] and nothing["norms"] == [0, 0]
    assert all(torch.isfinite(value).all() for value in nothing["weights"].values())
    assert all(torch.equal(nothing["gradients"][n], torch.zeros_like(g)) for n, g in nothing["gradients"].items())


def test_clipping_is_of_the_whole_step(pool):
    """Accumulation 4 at max_norm 0.1: the big batch's update, and one norm a step, from before clipping."""
    sgd = {"optimizer": {"name": "SGD", "lr": 1.0}}

    def clipped(local):
        made = settings(4, local, **sgd)
        return {**made, "training": {**made["training"], "max_norm": 0.1}}

    small, big = (pool.run(TRAIN, world=1, config=clipped(n), steps=3, targets=[1, 7, 19, 24])[0] for n in (1, 4))
    same(small, big)
    assert len(small["norms"]) == 3 and min(small["norms"]) > 0.2
    free = pool.run(TRAIN, world=1, config=settings(4, 4, **sgd), steps=1, targets=[1, 7, 19, 24])[0]
    assert free["norms"][0] == small["norms"][0]
