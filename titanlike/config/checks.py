"""Rules that hold between keys. Ranges of single keys are in the sections.

A rule is a generator of problems, with the keys that it speaks of (the first is where the message points). Rules see
a config whose single values are valid; they import no torch.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator

from titanlike.config import assets
from titanlike.config.checks_parallel import split
from titanlike.config.checks_precision import precision
from titanlike.config.derive import batch_layout, batch_problem, degree_problem, degrees, implied_world, written_degrees
from titanlike.config.problem import Problem, Rule, not_among
from titanlike.config.schema import Config
from titanlike.errors import ConfigError

RECIPES = ("pretrain", "sft", "dpo", "reward", "distill", "grpo", "ppo")
QUANTISED = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
OPTIMIZERS = ("AdamW", "Adam", "SGD", "Muon", *QUANTISED)
COMPILED = ("AdamW", "Adam", "SGD")


def find_problems(config: Config, world: int | None = None, *, restart: bool = False) -> list[Problem]:
    """All rules over a config, with the number of processes if it is known.

    At a restart the batch may leave a remainder, which is filled up with empty rows.
    """
    found = [problem for rule in RULES for problem in rule(config)]
    found += layout(config, world, restart=restart)
    found += split(config, world)
    found += one_microbatch(config, world)
    found += precision(config, world)
    return found


def one_microbatch(config: Config, world: int | None) -> Iterator[Problem]:
    """An update in backward can't wait for a second microbatch."""
    world = world or implied_world(config)
    if not config.optimizer.in_backward or not world or degree_problem(config, world):
        return
    accumulation = batch_layout(config, world, allow_filler=True).accumulation
    if accumulation > 1:
        keys = ("training.global_batch_size", "optimizer.in_backward")
        text = (
            f"optimizer.in_backward = true: does not go with accumulation; training.global_batch_size = "
            f"{config.training.global_batch_size} takes {accumulation} microbatches a rank. Raise "
            f"training.local_batch_size = {config.training.local_batch_size} or the number of data-parallel ranks"
        )
        yield Problem(keys, text)


def layout(config: Config, world: int | None, *, restart: bool) -> Iterator[Problem]:
    """Degrees against the processes, batch against the degrees."""
    keys = tuple(written_degrees(config))
    if text := degree_problem(config, world):
        named = tuple(key for key in keys if text.startswith(key)) or keys
        yield Problem(named, text)
        return
    world = world or implied_world(config)
    # Without the number of processes the shards count for one: what fails then fails for any number.
    known = degrees(config, world).data if world else max(1, config.parallelism.data_parallel_replicate_degree)
    if not restart and (text := batch_problem(config, known)):
        yield Problem(("training.global_batch_size", "training.local_batch_size"), text)


def decoder(config: Config) -> Iterator[Problem]:
    """The family and flavor exist, sizes fit together, and sequences are not longer than the model allows."""
    from titanlike.models.spec import decoder_spec

    try:
        spec = decoder_spec(config)
    except ConfigError as error:
        if not config.job.imports:  # else an imported module may know the name
            yield from (Problem((text.split(" ")[0].rstrip(":"),), text) for text in error.problems)
        return
    for key, seq_len in (
        ("training.seq_len", config.training.seq_len),
        ("validation.seq_len", config.validation.seq_len),
    ):
        if seq_len and seq_len > spec.max_seq_len:
            yield Problem(
                (key, "model.flavor"),
                f"{key} = {seq_len}: is longer than the {spec.max_seq_len} of model.flavor = {config.model.flavor!r}"
                " (model.overrides.max_seq_len changes that)",
            )


def hub(config: Config) -> Iterator[Problem]:
    """The model that a run starts from is the one that it trains; one that is to be exported can be."""
    chosen, key = config.checkpoint, "checkpoint.initial_load_in_hf"
    if chosen.initial_load_in_hf_quantized and not chosen.initial_load_in_hf:
        quantised = f"{key}_quantized"
        yield Problem((quantised,), f"{quantised} = true: needs {key} = true")
    if chosen.initial_load_in_hf:
        yield from _starting_model(config)
    if chosen.last_save_in_hf:
        yield from _export(config)


def _starting_model(config: Config) -> Iterator[Problem]:
    from titanlike.models.hub.start import place_and_key, starting_model

    place, key = place_and_key(config)
    if assets.is_hub_id(place) or config.job.imports:
        return  # not fetched for a check; its family may come by an import
    folder = assets.local_folder(place)
    if not folder.is_dir():
        return  # on the machines that train it may be there, and a run that resumes needs none
    try:
        starting_model(config, folder)
    except ConfigError as error:
        yield from (Problem((key, "checkpoint.initial_load_in_hf"), text) for text in error.problems)


def _export(config: Config) -> Iterator[Problem]:
    from titanlike.models.spec import decoder_spec, form_of

    key = "checkpoint.last_save_in_hf"
    if not config.checkpoint.enable or config.checkpoint.load_only:
        other = "checkpoint.load_only" if config.checkpoint.enable else "checkpoint.enable"
        text = f"{key} = true: an export is made of the last checkpoint, and none is saved; change {other}"
        yield Problem((key, other), text)
    if config.job.imports:
        return
    try:
        form_of(config, decoder_spec(config))
    except ConfigError as error:
        yield from (Problem((key, "model.overrides"), f"{key} = true: {text}") for text in error.problems)


def data(config: Config) -> Iterator[Problem]:
    """Data sets by name exist; held-out text is there when it is asked for; loader options go together."""
    if not config.data.path and not config.data.sources:
        yield from _dataset("data.dataset", config.data.dataset, config)
    check = config.validation
    if check.dataset and not check.path:
        yield from _dataset("validation.dataset", check.dataset, config)
    if check.enable and not (check.dataset or check.path or config.data.validation_fraction):
        text = (
            "validation.enable = true: there is nothing to validate on; "
            "set data.validation_fraction, validation.path or validation.dataset"
        )
        yield Problem(("validation.enable", "data.validation_fraction"), text)
    for key, loader in (("training", config.training.dataloader), ("validation", check.dataloader)):
        if loader.prefetch_factor and not loader.num_workers:
            name = f"{key}.dataloader.prefetch_factor"
            text = f"{name} = {loader.prefetch_factor}: needs {key}.dataloader.num_workers of at least 1"
            yield Problem((name,), text)


def _dataset(key: str, name: str, config: Config) -> Iterator[Problem]:
    from titanlike.data.registry import datasets

    if "/" in name or name in datasets.names() or config.job.imports:
        return
    yield not_among(key, name, datasets.names(), "a Hub id such as org/name")


def recipe(config: Config) -> Iterator[Problem]:
    """The recipe is known."""
    if config.job.recipe not in RECIPES and not config.job.imports:
        yield not_among("job.recipe", config.job.recipe, RECIPES)


def optimizer(config: Config) -> Iterator[Problem]:
    """The optimizer is known, and so is what each parameter group asks for."""
    if config.optimizer.name not in OPTIMIZERS and not config.job.imports:
        yield not_among("optimizer.name", config.optimizer.name, OPTIMIZERS)
    seen: set[str] = set()
    for n, group in enumerate(config.optimizer.param_groups):
        key = f"optimizer.param_groups[{n}]"
        try:
            re.compile(group.pattern)
        except re.error as error:
            text = f"{key}.pattern = {group.pattern!r}: is no regular expression: {error}"
            yield Problem(("optimizer.param_groups",), text)
        if group.lr is not None and group.lr_factor is not None:
            yield Problem(("optimizer.param_groups",), f"{key}: has both lr and lr_factor; leave one of them")
        if group.pattern in seen:
            text = f"{key}.pattern = {group.pattern!r}: an earlier group has the same pattern and wins"
            yield Problem(("optimizer.param_groups",), text)
        seen.add(group.pattern)


def optimizer_state(config: Config) -> Iterator[Problem]:
    """What state rests in and how it is rounded fits the optimizer and the weights' type."""
    chosen, name = config.optimizer, f"optimizer.name = {config.optimizer.name!r}"
    key = "optimizer.state_dtype"
    if chosen.state_dtype and chosen.name in QUANTISED:
        text = f"{key} = {chosen.state_dtype!r}: does not go with {name}, which quantises its state"
        yield Problem((key, "optimizer.name"), text)
    if chosen.stochastic_rounding and "bfloat16" not in (config.training.dtype, chosen.state_dtype):
        rounding = "optimizer.stochastic_rounding"
        text = f'{rounding} = true: nothing is rounded; needs training.dtype or {key} = "bfloat16"'
        yield Problem((rounding, "training.dtype", key), text)


def in_backward(config: Config) -> Iterator[Problem]:
    """An update in backward comes before the whole gradient is known."""
    if not config.optimizer.in_backward:
        if config.optimizer.in_backward_clip:
            key = "optimizer.in_backward_clip"
            yield Problem((key,), f"{key} = {config.optimizer.in_backward_clip!r}: needs optimizer.in_backward = true")
        return
    key = "optimizer.in_backward"
    clash = f"{key} = true: does not go with"
    if config.training.max_norm and not config.optimizer.in_backward_clip:
        text = (
            f"{clash} training.max_norm = {config.training.max_norm}; write training.max_norm = 0, "
            'or say with optimizer.in_backward_clip = "parameter" or "previous" what is clipped'
        )
        yield Problem((key, "training.max_norm"), text)
    if config.compile.enable and "optimizer" in config.compile.components:
        yield Problem((key, "compile.components"), f'{clash} "optimizer" in compile.components')
    if config.optimizer.name == "Muon":
        text = f"{clash} optimizer.name = 'Muon', which puts whole matrices together once all gradients are there"
        yield Problem((key, "optimizer.name"), text)
    if config.parallelism.pipeline_parallel_degree > 1:
        yield Problem(
            (key, "parallelism.pipeline_parallel_degree"),
            f"{clash} parallelism.pipeline_parallel_degree = {config.parallelism.pipeline_parallel_degree}",
        )


def compiled_update(config: Config) -> Iterator[Problem]:
    """Optimizers whose update can be compiled, with a learning rate that changes."""
    chosen = config.optimizer
    if not (config.compile.enable and "optimizer" in config.compile.components) or chosen.name in QUANTISED:
        return
    clash = 'compile.components: "optimizer" does not go with'
    if chosen.name not in COMPILED:
        text = f"{clash} optimizer.name = {chosen.name!r}; it does with {', '.join((*COMPILED, *QUANTISED))}"
        yield Problem(("compile.components", "optimizer.name"), text)
        return
    narrow = {"state_dtype": chosen.state_dtype, "stochastic_rounding": chosen.stochastic_rounding}
    for key, value in narrow.items():
        if value and value != config.training.dtype:
            text = f"{clash} optimizer.{key} = {json.dumps(value)}, which updates one parameter at a time"
            yield Problem(("compile.components", f"optimizer.{key}"), text)


def recomputation(config: Config) -> Iterator[Problem]:
    """The options of activation checkpointing fit its mode."""
    section = config.activation_checkpoint
    option = section.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option) > 0):
        key = "activation_checkpoint.selective_ac_option"
        yield Problem((key,), f'{key} = {option!r}: must be "op" or a number of blocks of at least 1')
    if section.determinism_check not in ("default", "none"):
        yield not_among("activation_checkpoint.determinism_check", section.determinism_check, ("default", "none"))
    if section.mode == "memory_budget" and not (config.compile.enable and "model" in config.compile.components):
        key = "activation_checkpoint.mode"
        text = f'{key} = "memory_budget": needs compile.enable = true with "model" in compile.components'
        yield Problem((key, "compile.enable"), text)
    yield from _picture(config)


def _picture(config: Config) -> Iterator[Problem]:
    """The compiler draws its trade-off with a package that nothing else here needs."""
    section, key = config.activation_checkpoint, "activation_checkpoint.visualize_memory_budget_pareto"
    if not section.visualize_memory_budget_pareto:
        return
    if section.mode != "memory_budget":
        yield Problem((key,), f'{key} = true: needs activation_checkpoint.mode = "memory_budget"')
    elif importlib.util.find_spec("matplotlib") is None:
        yield Problem((key,), f"{key} = true: needs matplotlib, which is not installed")


def counts(config: Config) -> Iterator[Problem]:
    """Numbers of which -1 alone is special."""
    if config.validation.steps != -1 and config.validation.steps < 1:
        text = f"validation.steps = {config.validation.steps}: must be at least 1, or -1 for all that is held out"
        yield Problem(("validation.steps",), text)
    step = config.checkpoint.load_step
    if step < -1:
        text = f"checkpoint.load_step = {step}: must be a step, or -1 for the newest checkpoint"
        yield Problem(("checkpoint.load_step",), text)
    if step >= 0 and not config.checkpoint.enable:
        yield Problem(("checkpoint.load_step",), f"checkpoint.load_step = {step}: needs checkpoint.enable = true")


def profiler(config: Config) -> Iterator[Problem]:
    """A cycle is long enough for what is in it."""
    section = config.profiling
    busy = section.profiler_warmup + section.profiler_active
    if section.enable_profiling and section.profile_freq < busy:
        text = (
            f"profiling.profile_freq = {section.profile_freq}: must be at least {busy} "
            f"(profiler_warmup = {section.profiler_warmup} + profiler_active = {section.profiler_active})"
        )
        yield Problem(("profiling.profile_freq",), text)


RULES: tuple[Rule, ...] = (
    decoder,
    hub,
    data,
    recipe,
    optimizer,
    optimizer_state,
    in_backward,
    compiled_update,
    recomputation,
    counts,
    profiler,
)
