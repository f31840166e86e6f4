"""Every layout of the list against one plain process; the bounds are those of `against_plain`."""

from __future__ import annotations

import pytest

from tests.parity.against_plain import check, of_variant, run, yardstick
from tests.parity.layouts import (
    ALL_VARIANTS,
    AXES,
    HARD,
    PAGE,
    PLAIN,
    QUICK,
    SLOW,
    Layout,
    page_with_table,
    tied,
)


@pytest.mark.parametrize("layout", QUICK, ids=str)
def test_equals_one_plain_process(pool, layout):
    ranks = run(pool, layout.world, layout.config(), (HARD,))
    if "compile" in layout.sections:
        assert {result["graphs"] for (result,) in ranks} == {1}, "one graph serves all blocks"


@pytest.mark.slow
@pytest.mark.parametrize("layout", SLOW, ids=str)
def test_larger_layouts_equal_one_plain_process(pool, layout):
    run(pool, layout.world, layout.config(), (HARD, PLAIN))


@pytest.mark.slow
@pytest.mark.parametrize("layout", QUICK, ids=str)
def test_every_variant(pool, layout):
    run(pool, layout.world, layout.config(), ALL_VARIANTS)


@pytest.mark.parametrize("layout", [Layout({"shard": 1}), *(Layout({axis: 2}) for axis in AXES)], ids=str)
def test_an_evaluation_leaves_the_master_weights_in_place(pool, layout):
    """A save comes right after it: gathered weights in the compute type must not have taken their place."""
    for settings in (layout.config(), tied(layout.config())):
        settings["training"]["mixed_precision_param"] = "bfloat16"
        for kinds in pool.run("tests.parity.jobs:after_evaluation", world=layout.world, config=settings):
            assert set(kinds.values()) == {(True, "torch.float32", True)}


def test_the_documentation_shows_these_layouts():
    page = PAGE.read_text()
    assert page_with_table(page) == page, "run python -m tests.parity.layouts"


def test_a_wrong_layout_would_be_seen():
    """The bounds are worth something: a gradient that is off by one part in ten thousand fails."""
    variant = HARD
    want = yardstick(of_variant(QUICK[0].config(), variant), variant)
    for part in ("gradients", "weights"):
        for name, value in want[part].items():
            wrong = {**want, part: {**want[part], name: value * (1 + 1e-4)}}
            with pytest.raises(AssertionError, match=part):
                check([wrong], want, variant)
    with pytest.raises(AssertionError):
        check([{**want, "norms": [n * (1 + 1e-4) for n in want["norms"]]}], want, variant)
