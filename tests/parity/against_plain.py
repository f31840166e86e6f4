"""What a layout's ranks found, held against one plain process with torch's own loss, clipping and optimizer; fp32.

Loss and gradient norm 1e-5 at each of five steps, every parameter's gradient at the first 1e-5, every weight after five
steps 1e-5 with SGD and 1e-4 with AdamW. Errors are relative.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch

from tests.parity import jobs
from tests.parity.layouts import STEPS, Variant, tied


def of_variant(settings: dict, variant: Variant) -> dict:
    settings = {**settings, "optimizer": {**settings["optimizer"], "name": variant.optimizer}}
    return tied(settings) if variant.tied else settings


@functools.cache
def plain(settings: str, masks: str) -> dict:
    return jobs.plain(json.loads(settings), STEPS, masks)


def yardstick(settings: dict, variant: Variant) -> dict:
    """The plain run of the same model, data and optimizer; one for all layouts that share them."""
    wanted = {name: settings[name] for name in ("model", "training", "optimizer", "lr_scheduler")}
    wanted["training"] = {**wanted["training"], "local_batch_size": 1}
    return plain(json.dumps(wanted, sort_keys=True), variant.masks)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).norm() / max(want.norm().item(), 1e-12)).item()


def union(results: list[dict], part: str) -> dict[str, torch.Tensor]:
    """What the ranks hold together; where several hold one tensor, they hold the same bits."""
    found: dict[str, torch.Tensor] = {}
    for result in results:
        for name, value in result[part].items():
            assert torch.equal(found.setdefault(name, value), value), f"{part}: {name} differs between ranks"
    return found


def check(results: list[dict], want: dict, variant: Variant) -> None:
    for result in results:
        assert result["losses"] == pytest.approx(want["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(want["norms"], rel=1e-5)
    start = union(results, "initial")
    assert all(torch.equal(start[name], value) for name, value in want["initial"].items()), "another start"
    for part, bound in (("gradients", 1e-5), ("weights", variant.weights)):
        got = union(results, part)
        assert got.keys() == want[part].keys()
        bad = {name: error(got[name], value) for name, value in want[part].items() if error(got[name], value) > bound}
        assert not bad, f"{part} of {variant}: {bad}"


def run(pool, world: int, config: dict[str, Any], variants: tuple[Variant, ...]) -> list[list[dict]]:
    """What each rank found of each variant, after it was held against the plain process."""
    settings = [of_variant(config, variant) for variant in variants]
    runs = [{"config": one, "masks": variant.masks} for one, variant in zip(settings, variants, strict=True)]
    ranks = pool.run("tests.parity.jobs:train_each", world=world, runs=runs, steps=STEPS, timeout=900)
    for i, variant in enumerate(variants):
        check([results[i] for results in ranks], yardstick(settings[i], variant), variant)
    return ranks
