"""What the schema has and the trainer has not, yet. Checked when a run starts, not by `config check`.

Each capability takes its keys out of these tables when it is built.
"""

from __future__ import annotations

import functools

from titanlike.config.keys import walk
from titanlike.config.schema import Config
from titanlike.config.sections.base import fields_by_key

# Sections of which nothing is built: any key that is not at its default is refused.
SECTIONS = (
    "guard",
    "elastic",
    "sft",
    "lora",
    "dpo",
    "reward",
    "distill",
    "qat",
    "rl",
    "ppo",
    "rollout",
    "weight_sync",
    "environment",
    "fault_tolerance",
)

# Keys of which some values are built; of a list, the elements that are.
BUILT: dict[str, tuple[object, ...]] = {
    "job.recipe": ("pretrain",),
    "model.attention": ("auto", "sdpa", "math", "varlen"),
    "model.converters": ("quantize.linear.float8", "quantize.linear.mx"),
    # The learning rate is a function of the step: it has no state that could be left out.
    "checkpoint.exclude_from_loading": ("model", "optimizer", "dataloader", "train_state"),
    "parallelism.expert_parallel_comm_backend": ("standard",),
}

# Keys of which the default alone is built.
DEFAULT_ONLY = (
    "model.freeze",
    "loss.z_loss",
    "data.sources",
    "data.stages",
    "data.stream",
    "checkpoint.keep_every_n",
    "checkpoint.keep_best_metric",
    "checkpoint.create_seed_checkpoint",
    "checkpoint.fast_folder",
    "checkpoint.fast_interval",
    "checkpoint.fast_peer_copy",
    "checkpoint.on_save_error",
    "comm.mode",
    "debug.check_replicas_freq",
)


def refuse_unbuilt(config: Config) -> list[str]:
    """Every key whose value asks for something that is not built yet, in words."""
    problems = [_line(key, value, _built_words(key)) for key, value in _partly_built(config)]
    for key in DEFAULT_ONLY:
        value = _value(config, key)
        if value != _value(Config(), key):
            problems.append(_line(key, value, ""))
    return problems + _unbuilt_sections(config)


def _partly_built(config: Config) -> list[tuple[str, object]]:
    found = []
    for key, built in BUILT.items():
        value = _value(config, key)
        if key == "job.recipe" and config.job.imports:
            continue  # an imported module may register it
        if isinstance(value, list):
            found += [(key, v) for v in value if v not in built]
        elif value not in built:
            found.append((key, value))
    return found


def _unbuilt_sections(config: Config) -> list[str]:
    problems = []
    default = Config()
    for name in SECTIONS:
        section = getattr(config, name)
        if isinstance(section, list):
            problems += [f"[[{name}]]: not built yet"] if section else []
            continue
        for path, _ in walk(type(section), (name,)):
            key = ".".join(path)
            if _value(config, key) != _value(default, key):
                problems.append(_line(key, _value(config, key), ""))
    return problems


def _value(config: Config, key: str) -> object:
    # No key of these tables has another name in Python.
    return functools.reduce(getattr, key.split("."), config)


def _built_words(key: str) -> str:
    return f" (built: {', '.join(str(v) for v in BUILT[key])})"


def _line(key: str, value: object, built: str) -> str:
    return f"{key} = {value!r}: not built yet{built}"


assert set(SECTIONS) <= set(fields_by_key(Config)), "a section that is not in the schema"
