"""Files that people bring from TorchTitan."""

from __future__ import annotations

from pathlib import Path

import pytest

from titanlike.config import load_config
from titanlike.config.keys import annotation_at
from titanlike.config.migrate import DIFFERENCES, import_torchtitan
from titanlike.config.refused import refuse_unbuilt
from titanlike.errors import ConfigError

FOLDER = Path(__file__).parent / "torchtitan"
FILES = sorted(FOLDER.glob("*.toml"))


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return caught.value.problems


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_shipped_presets_load_as_they_are(path):
    load_config([str(path)], world=8)


def test_presets_mean_what_they_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no ./tests/assets/tokenizer is
    config = load_config([str(FOLDER / "llama3_405b.toml")])
    assert config.model.converters == ["quantize.linear.float8"]
    assert (config.data.dataset, config.training.local_batch_size, config.optimizer.lr) == ("c4", 2, 8e-5)
    assert config.compile.enable and config.quantize.linear.float8.enable_fsdp_float8_all_gather
    debug = load_config([str(FOLDER / "debug_model.toml")])
    assert (debug.model.hf_assets_path, debug.data.dataset, debug.checkpoint.enable) == ("debug", "c4_test", False)
    assert refuse_unbuilt(debug) == []


def test_names_of_older_versions():
    config = load_config([str(FOLDER / "v010_8b.toml")])
    assert config.model.hf_assets_path == "./assets/tokenizer/original/tokenizer.model"
    assert config.lr_scheduler.min_lr_factor == 0.1
    assert (config.training.local_batch_size, config.compile.enable) == (1, True)
    assert (config.debug.seed, config.debug.deterministic) == (7, True)
    assert config.activation_checkpoint.selective_ac_option == "2"
    assert config.quantize.linear.float8.filter_fqns == ["output"]


def test_old_names_on_the_command_line():
    config = load_config(["--training.compile", "--training.dataset", "c4", "--float8.filter_fqns", "a,b"])
    assert config.compile.enable is True
    assert config.data.dataset == "c4"
    assert config.quantize.linear.float8.filter_fqns == ["a", "b"]
    assert load_config(["--training.no-compile"]).compile.enable is False
    assert load_config(["--training.dataset_path", "/some/folder"]).data.path == ["/some/folder"]
    assert load_config(["--experimental.custom_import", "json"]).job.imports == ["json"]


def test_an_old_name_overrides_a_new_one_of_an_earlier_layer(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[compile]\nenable = true\n")
    assert load_config([str(path), "--training.compile=false"]).compile.enable is False


def test_old_and_new_name_in_one_file_must_agree(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[compile]\nenable = true\n[training]\ncompile = false\n")
    (problem,) = problems(str(path))
    assert problem.startswith(f"{path}:4: training.compile = False: is an old name of compile.enable")
    path.write_text("[compile]\nenable = true\n[training]\ncompile = true\n")
    assert load_config([str(path)]).compile.enable is True


def test_flavors_named_after_a_kernel():
    config = load_config(["--model.flavor", "debugmodel_flex_attn"])
    assert (config.model.flavor, config.model.attention) == ("debugmodel", "flex")


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("job.custom_config_module=a.b", "job.import"),
        ("experimental.custom_args_module=a.b", "job.import"),
        ("parallelism.pipeline_parallel_split_points=layers.2", "module_fqns_per_model_part"),
        ("memory_estimation.enable", "titanlike plan"),
        ("metrics.rank_0_only=true", "save_for_all_ranks"),
    ],
)
def test_what_cannot_be_honoured_says_what_to_write(override, instead):
    (problem,) = problems(f"--{override}")
    assert override.partition("=")[0] in problem and instead in problem


def test_off_switches_of_what_is_not_supported_pass(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[job]\ncustom_config_module = ""\n[experimental]\n[memory_estimation]\nenable = false\n')
    load_config([str(path)])


# Every key of TorchTitan v0.2.2, section by section.
V022 = {
    "job": "config_file dump_folder description print_config save_config_file custom_config_module",
    "profiling": "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup "
    "enable_memory_snapshot save_memory_snapshot_folder",
    "metrics": "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb",
    "model": "name flavor hf_assets_path tokenizer_path converters print_after_conversion",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation early_step_in_backward",
    "lr_scheduler": "warmup_steps total_steps decay_ratio decay_type min_lr_factor",
    "training": "dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload "
    "dtype mixed_precision_param mixed_precision_reduce gc_freq gc_debug",
    "training.dataloader": "num_workers persistent_workers pin_memory prefetch_factor",
    "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward "
    "tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_degree "
    "module_fqns_per_model_part pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
    "pipeline_parallel_layers_per_stage pipeline_parallel_schedule pipeline_parallel_schedule_csv "
    "pipeline_parallel_microbatch_size pipeline_parallel_expert_parallel_overlap context_parallel_degree "
    "context_parallel_load_balancer context_parallel_rotate_method expert_parallel_degree "
    "expert_tensor_parallel_degree expert_parallel_comm_backend",
    "checkpoint": "enable enable_ft_dataloader_checkpoints folder interval initial_load_path initial_load_model_only "
    "initial_load_in_hf initial_load_in_hf_quantized last_save_model_only last_save_in_hf export_dtype async_mode "
    "keep_latest_k load_step exclude_from_loading enable_first_step_checkpoint create_seed_checkpoint load_only",
    "activation_checkpoint": "mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop "
    "memory_budget visualize_memory_budget_pareto preserve_rng_state determinism_check debug",
    "compile": "enable components backend",
    "quantize.linear.float8": "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name "
    "filter_fqns emulate",
    "quantize.linear.mx": "mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns",
    "quantize.grouped_mm.float8": "fqns",
    "quantize.grouped_mm.mx": "recipe_name fqns",
    "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix mode",
    "memory_estimation": "enable disable_fake_mode",
    "fault_tolerance": "enable process_group process_group_timeout_ms replica_id group_size min_replica_size "
    "semi_sync_method",
    "experimental": "custom_import custom_args_module",
    "validation": "enable dataset dataset_path local_batch_size seq_len freq steps",
    "validation.dataloader": "num_workers persistent_workers pin_memory prefetch_factor",
    "debug": "seed deterministic deterministic_warn_only moe_force_load_balance",
}


@pytest.mark.parametrize("section", V022)
def test_every_key_is_known_or_refused_by_name(section):
    from titanlike.config.aliases import DROPPED, REFUSED, canonical

    for name in V022[section].split():
        key = f"{section}.{name}"
        known = annotation_at(canonical(tuple(key.split(".")))) is not None
        assert known or key in REFUSED or key in DROPPED, key


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_an_imported_file_is_the_same_run(tmp_path, path):
    text, _ = import_torchtitan(str(path))
    new = tmp_path / "new.toml"
    new.write_text(text)
    ours, theirs = load_config([str(new)]).model_dump(), load_config([str(path)]).model_dump()
    ours["job"].pop("config_file"), theirs["job"].pop("config_file")
    assert ours == theirs


def test_import_names_defaults_of_another_meaning():
    _, notes = import_torchtitan(str(FOLDER / "llama3_8b.toml"))
    text = "\n".join(notes)
    for key in ("optimizer.no_decay", "last_save_model_only = true", "data.shuffle", "debug.seed"):
        assert key in text
    assert "activation_checkpoint.mode" not in text, "it is written in the file, so its default doesn't matter"


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda d: d.key)
def test_the_line_that_keeps_the_old_meaning_loads(tmp_path, difference):
    section, name = difference.key.rsplit(".", 1)
    if difference.keep:
        path = tmp_path / "run.toml"
        path.write_text(f"[{section}]\n{name} = {difference.keep}\n")
        load_config([str(path)])
    assert annotation_at((section, name)) is not None
