"""Degrees, batch and accumulation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlike.config import load_config
from titanlike.config.derive import batch_layout, degrees
from titanlike.errors import ConfigError


def test_what_is_left_goes_to_the_shards():
    config = load_config(
        ["--parallelism.data_parallel_replicate_degree=2", "--parallelism.tensor_parallel_degree=2"], world=16
    )
    mesh = degrees(config, 16)
    assert (mesh.replicate, mesh.shard, mesh.tensor, mesh.data, mesh.world) == (2, 4, 2, 8, 16)


def test_accumulation():
    layout = batch_layout(load_config(["--training.local_batch_size=4", "--training.global_batch_size=24"]), 2)
    assert (layout.dp_degree, layout.global_batch, layout.accumulation) == (2, 24, 3)


def test_by_default_one_microbatch_a_rank():
    layout = batch_layout(load_config(["--training.local_batch_size=4"]), 3)
    assert (layout.global_batch, layout.accumulation) == (12, 1)


def test_a_remainder_is_refused_or_filled_up():
    config = load_config(["--training.local_batch_size=4", "--training.global_batch_size=20"])
    with pytest.raises(ConfigError, match="multiple of 8"):
        batch_layout(config, 2)
    assert batch_layout(config, 2, allow_filler=True).accumulation == 3


def test_degrees_raise_by_name():
    with pytest.raises(ConfigError, match="data_parallel_shard_degree = 3"):
        degrees(load_config(["--parallelism.data_parallel_shard_degree=3"]), 4)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 64))
def test_microbatches_hold_the_batch_and_not_one_more(world, local, total):
    config = load_config(["--training.local_batch_size=1"])
    training = config.training.model_copy(update={"local_batch_size": local, "global_batch_size": total})
    layout = batch_layout(config.model_copy(update={"training": training}), world, allow_filler=True)
    rows = layout.dp_degree * local
    assert rows * (layout.accumulation - 1) < total <= rows * layout.accumulation
