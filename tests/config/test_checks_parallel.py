"""What doesn't fit on the axes of the mesh is refused when the config is read, by key and value."""

from __future__ import annotations

import pytest

from titanlike.config.checks import find_problems

MODEL = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "dim": 64, "vocab_size": 320, "n_layers": 4}


def problems(make_config, world=None, model=None, **sections):
    sections.setdefault("model", {"overrides": {**MODEL, **(model or {})}})
    return [problem.text for problem in find_problems(make_config(**sections), world)]


def tensor(degree, **others):
    return {"parallelism": {"tensor_parallel_degree": degree, **others}}


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_fewer_key_value_heads_than_ranks_are_fine(make_config, degree):
    assert problems(make_config, **tensor(degree)) == []


def test_query_heads_divide(make_config):
    (text,) = problems(make_config, **tensor(3))
    assert text == "parallelism.tensor_parallel_degree = 3: must divide the model's 4 query heads"


def test_key_value_heads_divide_or_are_shared_evenly(make_config):
    (text,) = problems(make_config, model={"n_heads": 12, "n_kv_heads": 3}, **tensor(2))
    assert "tensor_parallel_degree = 2" in text and "3 key/value heads" in text
    assert problems(make_config, model={"n_heads": 12, "n_kv_heads": 3}, **tensor(6)) == []


def test_every_tensor_rank_has_rows_of_the_vocabulary(make_config):
    (text,) = problems(make_config, model={"vocab_size": 5}, **tensor(4))
    assert "tensor_parallel_degree = 4" in text and "vocabulary's 5 rows" in text
    assert problems(make_config, model={"vocab_size": 7}, **tensor(4)) == [], "uneven is fine"


@pytest.mark.parametrize(
    ("balancer", "length", "fits"), [("headtail", 36, False), (None, 36, True), ("headtail", 40, True)]
)
def test_context_ranks_share_a_sequence_evenly(make_config, balancer, length, fits):
    parallelism = {"context_parallel_degree": 4, "context_parallel_load_balancer": balancer}
    found = problems(make_config, parallelism=parallelism, training={"seq_len": length})
    assert (found == []) == fits
    if not fits:
        assert found[0].startswith("training.seq_len = 36: must be a multiple of 8")
        assert "context_parallel_degree = 4" in found[0]


def test_so_does_the_validation_length(make_config):
    found = problems(
        make_config,
        parallelism={"context_parallel_degree": 2},
        validation={"enable": True, "seq_len": 30},
        data={"validation_fraction": 0.1},
    )
    assert found == [
        "validation.seq_len = 30: must be a multiple of 4 for parallelism.context_parallel_degree = 2",
    ]


def test_ulysses_needs_heads_for_every_context_rank(make_config):
    method = {"context_parallel_degree": 4, "context_parallel_rotate_method": "ulysses"}
    assert problems(make_config, parallelism=method) == []
    (text,) = problems(make_config, **tensor(2, **method))
    assert "'ulysses'" in text and "context_parallel_degree = 4" in text and "2 query heads" in text


def test_ptrr_is_refused_by_name(make_config):
    parallelism = {"context_parallel_degree": 2, "context_parallel_load_balancer": "ptrr"}
    (text,) = problems(make_config, parallelism=parallelism)
    assert "'ptrr'" in text and "headtail" in text


def test_asynchronous_tensor_parallelism_needs_compiled_blocks_and_split_sequences(make_config):
    asked = tensor(2, enable_async_tensor_parallel=True)
    (text,) = problems(make_config, **asked)
    assert "compile.enable" in text
    assert problems(make_config, compile={"enable": True}, **asked) == []
    whole = tensor(2, enable_async_tensor_parallel=True, enable_sequence_parallel=False)
    (text,) = problems(make_config, compile={"enable": True}, **whole)
    assert "enable_sequence_parallel" in text


def test_a_degree_that_is_left_over_is_held_to_the_same_rules(make_config):
    parallelism = {"tensor_parallel_degree": -1, "data_parallel_shard_degree": 1}
    assert problems(make_config, 4, parallelism=parallelism) == []
    (text,) = problems(make_config, 3, parallelism=parallelism)
    assert "tensor_parallel_degree = 3" in text
