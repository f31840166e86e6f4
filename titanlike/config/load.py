"""From a command line to a checked Config, or to one error with everything that is wrong."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from titanlike.config.aliases import translate
from titanlike.config.checks import find_problems
from titanlike.config.files import read_file
from titanlike.config.imports import import_modules
from titanlike.config.layers import Layer, Path
from titanlike.config.messages import explain, place
from titanlike.config.overrides import read_command_line
from titanlike.config.schema import Config
from titanlike.errors import ConfigError


def load_config(
    argv: Sequence[str] = (), *, world: int | None = None, restart: bool = False, imports: bool = True
) -> Config:
    """The config that a command line asks for: defaults, then files from left to right, then overrides.

    `argv` holds `--job.config_file F...` (or files as plain words) and overrides. With `world`, the number of
    processes, layout and batch are checked against it too; a `restart` may leave a remainder of the batch, which the
    loader fills up. Modules of `job.import` are imported before the checks that may need their names, unless `imports`
    is false. Raises ConfigError with every problem found.
    """
    loaded = load_layers(argv)
    config, problems = build(loaded.layer, world=world, restart=restart, imports=imports)
    if loaded.problems or problems or config is None:
        raise ConfigError(loaded.problems + problems)
    return config


@dataclass
class Loaded:
    """All layers merged, before validation."""

    layer: Layer
    problems: list[str]


def load_layers(argv: Sequence[str]) -> Loaded:
    """Read files and overrides into one layer."""
    line = read_command_line(argv)
    problems = list(line.problems)
    files = [*line.positional, *line.config_files]
    merged = Layer()
    for name in files:
        merged.lay(read_file(name, problems))
    problems += translate(line.overrides)
    merged.lay(line.overrides)
    if files:
        merged.put(("job", "config_file"), files, None)
    return Loaded(merged, problems)


def build(
    layer: Layer, *, world: int | None = None, restart: bool = False, imports: bool = False
) -> tuple[Config | None, list[str]]:
    """Validate a layer. Where keys are wrong, what doesn't depend on their sections is still checked."""
    problems: list[str] = []
    bad_sections: set[str | int] = set()
    try:
        config = Config.model_validate(layer.values)
    except ValidationError as error:
        problems = explain(error, layer)
        bad_sections = {detail["loc"][0] for detail in error.errors()}
        config = _without(layer, bad_sections)
    if imports:
        problems += import_modules(config.job.imports, layer)
    for problem in find_problems(config, world, restart=restart):
        if not bad_sections & {key.split(".")[0] for key in problem.keys}:
            first: Path = tuple(problem.keys[0].split("."))
            problems.append(f"{place(layer, first)}{problem.text}")
    return (None if bad_sections else config), problems


def _without(layer: Layer, sections: set[str | int]) -> Config:
    """The config with those sections at their defaults."""
    return Config.model_validate({k: copy.deepcopy(v) for k, v in layer.values.items() if k not in sections})
