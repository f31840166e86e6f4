"""Rules on low precision."""

import pytest

from titanlike.config import load_config
from titanlike.errors import ConfigError

FLOAT8 = "--model.converters=quantize.linear.float8"
MX = ["--model.converters=quantize.linear.mx", "--quantize.linear.mx.recipe_name=mxfp8_emulated"]
# 5 rows of 8 tokens
FORTY = ["--training.local_batch_size=5", "--training.seq_len=8"]


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return caught.value.problems


def option(name: str) -> str:
    return f"--quantize.linear.float8.{name}"


def test_the_number_of_tokens():
    (problem,) = problems(FLOAT8, *FORTY)
    assert "training.local_batch_size = 5 x training.seq_len = 8 makes 40 tokens" in problem
    assert "quantize.linear.float8 needs a multiple of 16" in problem
    assert "40 tokens" in problems(FLOAT8, option("recipe_name=rowwise"), *FORTY)[0]
    assert "40 tokens: quantize.linear.mx needs a multiple of 32" in problems(*MX, *FORTY)[0]
    assert "48 tokens" in problems(*MX, "--training.local_batch_size=6", "--training.seq_len=8")[0]
    for argv in (
        [FLOAT8, option("emulate"), *FORTY],
        [FLOAT8, option("recipe_name=rowwise_with_gw_hp"), *FORTY],
        [FLOAT8, "--training.local_batch_size=6", "--training.seq_len=8"],
        [*MX, "--training.local_batch_size=8", "--training.seq_len=8"],
        FORTY,
    ):
        load_config(argv)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (
            ["--parallelism.context_parallel_degree=2", "--training.local_batch_size=1", "--training.seq_len=48"],
            "local_batch_size = 1 x training.seq_len = 48 / parallelism.context_parallel_degree = 2 makes 24 tokens",
        ),
        (
            ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2", "--training.seq_len=40"],
            "parallelism.pipeline_parallel_microbatch_size = 1 x training.seq_len = 40 makes 40 tokens",
        ),
    ],
)
def test_what_a_rank_sees_of_the_tokens_counts(argv, part):
    (problem,) = problems(FLOAT8, *argv)
    assert part in problem


def test_padding_for_tensor_ranks_counts():
    """8 rows of 62 tokens are a multiple of 16, 8 of 63 are not: what three ranks see between layers."""
    heads = [f"--model.overrides.{name}" for name in ("n_heads=6", "n_kv_heads=6", "head_dim=16")]
    argv = [FLOAT8, "--parallelism.tensor_parallel_degree=3", *heads]
    argv += ["--training.local_batch_size=8", "--training.seq_len=62"]
    (problem,) = problems(*argv)
    assert "seq_len = 62 (padded for parallelism.tensor_parallel_degree = 3) makes 504 tokens" in problem
    load_config([*argv, "--parallelism.enable_sequence_parallel=false"])


def test_an_unknown_degree_is_given_the_benefit_of_the_doubt():
    argv = [FLOAT8, "--parallelism.data_parallel_shard_degree=1", "--parallelism.context_parallel_degree=-1"]
    load_config([*argv, "--training.seq_len=24", "--training.local_batch_size=1"])


def test_converters_that_clash():
    (problem,) = problems("--model.converters=quantize.linear.float8,quantize.linear.mx")
    assert "quantize.linear.float8 and quantize.linear.mx are for the same layers" in problem


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        ([option("recipe_name=rowwise"), option("enable_fsdp_float8_all_gather")], "recipe_name = 'tensorwise' only"),
        ([option("precompute_float8_dynamic_scale_for_fsdp")], "needs quantize.linear.float8.enable_fsdp_float8_all"),
        (
            [
                option("enable_fsdp_float8_all_gather"),
                option("precompute_float8_dynamic_scale_for_fsdp"),
                "--training.enable_cpu_offload",
            ],
            "does not go with training.enable_cpu_offload = true",
        ),
        (
            [option("filter_fqns=auto_filter_small_kn"), option("recipe_name=rowwise_with_gw_hp")],
            "name the layers to leave out",
        ),
    ],
)
def test_options_that_do_not_go_together(argv, part):
    (problem,) = problems(FLOAT8, *argv)
    assert part in problem


def test_recipes_of_mx():
    problem = problems("--model.converters=quantize.linear.mx", "--quantize.linear.mx.recipe_name=mxfp8_cublass")[0]
    assert "did you mean mxfp8_cublas?" in problem
    load_config(["--quantize.linear.mx.recipe_name=nvfp4"])  # not used
    assert "must be one of mxfp8" in problems(MX[0], "--quantize.linear.mx.recipe_name=nvfp4")[0]
