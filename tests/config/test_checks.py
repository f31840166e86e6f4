"""Rules between keys."""

from __future__ import annotations

import pytest

from titanlike.config import load_config
from titanlike.errors import ConfigError
from titanlike.models.spec import decoder_spec


def problems(*argv: str, world: int | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv, world=world)
    return [p.removeprefix("command line: ") for p in caught.value.problems]


def test_degrees_that_do_not_make_the_world():
    (problem,) = problems(
        "--parallelism.data_parallel_shard_degree=3", "--parallelism.tensor_parallel_degree=2", world=4
    )
    for part in (
        "data_parallel_shard_degree = 3",
        "tensor_parallel_degree = 2",
        "pipeline_parallel_degree = 1",
        "data_parallel_replicate_degree = 1",
        "context_parallel_degree = 1",
        "make 6",
        "4 processes",
    ):
        assert part in problem


def test_what_is_left_must_be_whole():
    load_config(["--parallelism.tensor_parallel_degree=2"], world=4)
    (problem,) = problems("--parallelism.tensor_parallel_degree=4", world=6)
    assert "does not divide the 6 processes" in problem


def test_one_degree_only_can_be_what_is_left():
    (problem,) = problems("--parallelism.data_parallel_replicate_degree=-1", world=4)
    assert "data_parallel_replicate_degree and parallelism.data_parallel_shard_degree are both -1" in problem


@pytest.mark.parametrize("value", [0, -2])
def test_degrees_are_at_least_one(value):
    (problem,) = problems(f"--parallelism.tensor_parallel_degree={value}")
    assert problem.startswith(f"parallelism.tensor_parallel_degree = {value}: must be at least 1")


def test_the_global_batch_is_dealt_in_whole_microbatches():
    (problem,) = problems("--training.local_batch_size=4", "--training.global_batch_size=20", world=2)
    for part in ("training.global_batch_size = 20", "training.local_batch_size = 4", "degree 2", "multiple of 8"):
        assert part in problem
    (problem,) = problems("--training.local_batch_size=4", "--training.global_batch_size=4", world=2)
    assert "is smaller than 8" in problem
    load_config(["--training.local_batch_size=4", "--training.global_batch_size=24"], world=2)


def test_a_restart_may_leave_a_remainder_of_the_batch():
    argv = ["--training.local_batch_size=4", "--training.global_batch_size=20"]
    load_config(argv, world=3, restart=True)


def test_what_fits_no_world_is_found_without_one():
    (problem,) = problems("--training.local_batch_size=4", "--training.global_batch_size=6")
    assert "multiple of 4" in problem
    # All degrees written: the world is their product.
    batch = ["--training.local_batch_size=4", "--training.global_batch_size=12"]
    (problem,) = problems(*batch, "--parallelism.data_parallel_shard_degree=2")
    assert "multiple of 8" in problem


def test_heads_divide_by_the_tensor_degree_and_key_value_heads_need_not():
    base = ["--model.overrides.n_heads=4", "--model.overrides.n_kv_heads=2", "--model.overrides.head_dim=16"]
    load_config([*base, "--parallelism.tensor_parallel_degree=4"])
    (problem,) = problems(*base, "--parallelism.tensor_parallel_degree=3")
    assert "parallelism.tensor_parallel_degree = 3" in problem and "4 query heads" in problem


def test_sizes_that_do_not_fit_together():
    (problem,) = problems("--model.overrides.n_heads=4", "--model.overrides.n_kv_heads=3")
    assert problem == "model.overrides.n_kv_heads = 3: must divide n_heads = 4"


def test_unknown_family_and_flavor():
    assert "did you mean 'llama3'?" in problems("--model.name=lama3")[0]
    assert "there are:" in problems("--model.flavor=9B")[0]


def test_names_that_an_imported_module_may_know_are_left_to_it():
    argv = ["--job.import=my.module", "--model.name=mine", "--optimizer.name=Mine", "--data.dataset=mine"]
    load_config(argv, imports=False)


def test_sequences_fit_the_model():
    (problem,) = problems("--model.flavor=3.0-8B", "--training.seq_len=16384")
    assert "training.seq_len = 16384: is longer than the 8192" in problem
    load_config(["--model.flavor=3.0-8B", "--training.seq_len=16384", "--model.overrides.max_seq_len=16384"])


def test_pipeline_microbatches_divide_the_local_batch():
    argv = ["--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=6"]
    (problem,) = problems(*argv, "--parallelism.pipeline_parallel_microbatch_size=4")
    assert "pipeline_parallel_microbatch_size = 4" in problem and "local_batch_size = 6 (remainder 2)" in problem
    load_config([*argv, "--parallelism.pipeline_parallel_microbatch_size=3"])


def test_more_stages_than_layers():
    (problem,) = problems("--parallelism.pipeline_parallel_degree=100")
    assert "layers" in problem


@pytest.mark.parametrize(
    ("family", "flavor", "overrides", "head_dim"),
    [
        ("llama3", "debugmodel", ["dim=64"], 16),
        ("llama3", "debugmodel", ["dim=64", "head_dim=24"], 24),
        ("qwen3", "0.6B", ["dim=512"], 128),
        ("deepseek_v3", "debugmodel", ["dim=64"], 48),
    ],
)
def test_a_width_changes_heads_only_where_they_make_it_up(family, flavor, overrides, head_dim):
    words = [f"--model.name={family}", f"--model.flavor={flavor}", *(f"--model.overrides.{word}" for word in overrides)]
    assert decoder_spec(load_config(words)).head_dim == head_dim


def test_heads_of_latent_attention_are_two_parts():
    (problem,) = problems("--model.name=deepseek_v3", "--model.flavor=debugmodel", "--model.overrides.head_dim=40")
    assert "model.overrides.head_dim = 40: latent attention has heads of 32 + 16" in problem


def test_experts_are_asked_for_where_there_are_some():
    (problem,) = problems("--model.overrides.experts.top_k=2")
    assert "model.overrides.experts: llama3 debugmodel has no experts" in problem
    (problem,) = problems("--debug.moe_force_load_balance")
    assert "debug.moe_force_load_balance = true: the model has no experts" in problem


def test_starting_from_the_hubs_form_and_exporting(tmp_path):
    (problem,) = problems("--checkpoint.initial_load_in_hf_quantized")
    assert "needs checkpoint.initial_load_in_hf = true" in problem
    (problem,) = problems("--checkpoint.initial_load_in_hf", f"--model.hf_assets_path={tmp_path}")
    assert "has no config.json" in problem
    load_config(["--checkpoint.initial_load_in_hf", f"--model.hf_assets_path={tmp_path / 'elsewhere'}"])
    for other in ("--checkpoint.enable=false", "--checkpoint.load_only"):
        (problem,) = problems("--checkpoint.last_save_in_hf", other)
        assert "checkpoint.last_save_in_hf = true" in problem and other[2:].split("=")[0] in problem
    (problem,) = problems("--checkpoint.last_save_in_hf", "--model.overrides.logit_softcap=30")
    assert "config.json of llama can't say all of this model: logit_softcap" in problem


def test_update_in_backward_and_clipping():
    (problem,) = problems("--optimizer.in_backward")
    assert "training.max_norm = 1.0" in problem and "in_backward_clip" in problem
    load_config(["--optimizer.in_backward", "--training.max_norm=0"])
    load_config(["--optimizer.early_step_in_backward", "--optimizer.in_backward_clip=parameter"])


@pytest.mark.parametrize(
    ("overrides", "other"),
    [
        (["--training.max_norm=1"], "training.max_norm = 1"),
        (["--training.global_batch_size=16"], "training.global_batch_size = 16"),
        (["--compile.enable", "--compile.components=model,optimizer"], "compile.components"),
        (["--parallelism.pipeline_parallel_degree=2"], "parallelism.pipeline_parallel_degree = 2"),
    ],
)
def test_update_in_backward_is_refused_with_both_keys(overrides, other):
    base = ["--optimizer.in_backward", "--training.max_norm=0", "--training.local_batch_size=8"]
    shards = "--parallelism.data_parallel_shard_degree=1"
    load_config([*base, shards])
    (problem,) = problems(*base, shards, *overrides)
    assert "optimizer.in_backward = true" in problem and other in problem


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("data.dataset=c5", "did you mean c4?"),
        ("validation.dataset=c4_valid", "did you mean c4_validation?"),
        ("validation.enable=true", "nothing to validate on"),
        ("optimizer.name=adamw", "did you mean AdamW?"),
        ("model.converters=quantize.linear.float", "did you mean quantize.linear.float8?"),
        ("compile.components=modle", "did you mean model?"),
        ("parallelism.pipeline_parallel_schedule=2F2B", "did you mean 1F1B?"),
        ("activation_checkpoint.selective_ac_option=0", 'must be "op" or a number'),
        ("activation_checkpoint.selective_ac_option=ops", 'must be "op" or a number'),
        ("activation_checkpoint.mode=memory_budget", "needs compile.enable"),
        ("checkpoint.load_step=-2", "must be a step, or -1"),
        ("training.dataloader.prefetch_factor=2", "num_workers"),
        ("optimizer.in_backward_clip=parameter", "needs optimizer.in_backward"),
        ("parallelism.expert_tensor_parallel_degree=2", "must be 1 or"),
        ('optimizer.param_groups=[{pattern = "("}]', "regular expression"),
        ('optimizer.param_groups=[{pattern = "a", lr = 1, lr_factor = 1}]', "both lr and lr_factor"),
        ('optimizer.param_groups=[{pattern = "a"}, {pattern = "a"}]', "same pattern"),
    ],
)
def test_rules(override, part):
    (problem,) = problems(f"--{override}")
    assert override.partition("=")[0] in problem
    assert part in problem


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--optimizer.stochastic_rounding"], ["needs training.dtype or optimizer.state_dtype"]),
        (
            ["--compile.components=optimizer", "--compile.enable", "--optimizer.name=Muon"],
            ["compile.components", "name = 'Muon'", "AdamW8bit"],
        ),
        (
            ["--compile.components=optimizer", "--compile.enable", "--optimizer.state_dtype=bfloat16"],
            ["compile.components", 'optimizer.state_dtype = "bfloat16"'],
        ),
        (["--optimizer.state_dtype=bfloat16", "--optimizer.name=AdamW8bit"], ["state_dtype", "quantises its state"]),
        (["--optimizer.in_backward", "--training.max_norm=0", "--optimizer.name=Muon"], ["in_backward", "'Muon'"]),
    ],
)
def test_optimizers_refuse_what_does_not_go_with_them(argv, parts):
    (problem,) = problems(*argv)
    assert all(part in problem for part in parts)


def test_optimizers_take_what_goes_with_them():
    load_config(["--optimizer.stochastic_rounding", "--training.dtype=bfloat16"])
    load_config(["--optimizer.stochastic_rounding", "--optimizer.state_dtype=bfloat16", "--optimizer.name=Muon"])
    load_config(["--compile.enable", "--compile.components=model,optimizer", "--optimizer.name=AdamWFp8"])


def test_rules_of_several_keys():
    assert (
        "profile_freq = 3: must be at least 4"
        in problems("--profiling.enable_profiling", "--profiling.profile_freq=3")[0]
    )
    assert "needs checkpoint.enable" in problems("--checkpoint.enable=false", "--checkpoint.load_step=3")[0]
    assert "multiple of 8" in problems("--parallelism.context_parallel_degree=4", "--training.seq_len=100")[0]


def test_a_hub_id_is_taken_as_one():
    load_config(["--data.dataset=my-org/texts"])
