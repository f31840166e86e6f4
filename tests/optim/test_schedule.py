import itertools

import pytest
import torch

from titanlike.optim.schedule import Schedule


def _curve(schedule, steps):
    return [schedule.factor(s) for s in range(1, steps + 1)]


def test_published_table():
    """Steps 10, warm-up 4, linear decay over 4, minimum 0, peak 1."""
    got = _curve(Schedule(warmup=4, decay=4, total=10, curve="linear", minimum=0.0), 10)
    assert got == [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75, 0.5, 0.25]


CASES = list(itertools.product([1, 2, 3, 10, 17], [0, 1, 4, 10], [None, 0.0, 0.3, 1.0], ["linear", "cosine", "sqrt"]))


@pytest.mark.parametrize(("total", "warmup", "ratio", "curve"), CASES)
@pytest.mark.parametrize("minimum", [0.0, 0.1])
def test_properties(total, warmup, ratio, curve, minimum, make_config):
    config = make_config(
        training={"steps": total},
        lr_scheduler={"warmup_steps": warmup, "decay_ratio": ratio, "decay_type": curve, "min_lr_factor": minimum},
    )
    schedule = Schedule.of(config)
    rates = _curve(schedule, total)
    assert all(0 < r <= 1 for r in rates), "every step of the run trains"
    peak = max(rates)
    if warmup <= total:
        assert peak == 1, "the peak is reached exactly"
    top = rates.index(peak)
    climb = rates[: top + 1]
    assert all(abs(b - a - climb[0]) < 1e-12 for a, b in itertools.pairwise(climb) if a < peak)
    assert all(a >= b for a, b in itertools.pairwise(rates[top:])), "never up again"
    assert min(rates[top:]) >= minimum
    assert schedule.factor(total + 5) >= minimum


def test_groups_keep_their_own_peaks():
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "peak_lr": lr, "lr": 0.0} for lr in (1.0, 0.1)]
    optimizer = torch.optim.SGD(groups)
    shown = Schedule(4, 4, 10, "linear", 0.0).apply(optimizer, 8)
    assert [g["lr"] for g in optimizer.param_groups] == [0.75, pytest.approx(0.075)]
    assert shown == 0.75
