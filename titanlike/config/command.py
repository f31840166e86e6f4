"""`titanlike config list | copy | show | check | schema | import`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from titanlike.config.derive import batch_layout, degrees, implied_world
from titanlike.config.dump import dump_toml
from titanlike.config.load import load_config
from titanlike.config.overrides import read_command_line
from titanlike.config.schema import Config
from titanlike.config.shipped import find_config, shipped_configs, summary
from titanlike.errors import ConfigError

USAGE = """\
titanlike config: what a run is

  list                              the configs that come with titanlike
  copy NAME [OUT.toml]              copy one, to change it
  show FILE [--section.key ...]     the resolved config, every key, as TOML
  check FILE... [--world N] [--section.key ...]
                                    check each file, against N processes if given
  schema [OUT.json]                 JSON Schema of the TOML, for editors
  import OLD.toml NEW.toml          translate a file of TorchTitan

--json prints for programs. --help SECTION explains the keys of a section."""


def main(argv: list[str]) -> int:
    """Run `titanlike config ...`; returns the exit code. Raises ConfigError for the user's mistakes."""
    if not argv or argv[0] in ("-h", "--help"):
        from titanlike.config.help import print_help

        return print_help(USAGE, argv[1] if len(argv) > 1 else None)
    name, rest = argv[0], argv[1:]
    if name not in COMMANDS:
        raise ConfigError(f"titanlike config {name}: no such command (there are: {', '.join(COMMANDS)})")
    if "-h" in rest or "--help" in rest:
        print(USAGE)
        return 0
    as_json = "--json" in rest
    return COMMANDS[name]([word for word in rest if word != "--json"], as_json)


def list_configs(argv: list[str], as_json: bool) -> int:
    """The shipped files with their first line."""
    _only_words(argv, "list", 0, 0)
    rows = [{"name": n, "path": str(p), "summary": summary(p)} for n, p in shipped_configs().items()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        print(f"{row['name']:{width}}  {row['summary']}")
    return 0


def copy_config(argv: list[str], as_json: bool) -> int:
    """Copy a shipped file; refuses to overwrite one."""
    name, *out = _only_words(argv, "copy", 1, 2)
    source = find_config(name)
    if source is None:
        raise ConfigError(f"{name}: no such config (shipped: {', '.join(shipped_configs())})")
    target = Path(out[0]) if out else Path(source.name)
    if target.is_dir():
        target = target / source.name
    _refuse_overwrite(target)
    shutil.copyfile(source, target)
    print(json.dumps({"path": str(target)}) if as_json else f"wrote {target}")
    return 0


def show_config(argv: list[str], as_json: bool) -> int:
    """The resolved config."""
    argv, world = _take_world(argv)
    config = load_config(argv, world=world)
    if as_json:
        print(json.dumps(config.model_dump(by_alias=True), indent=2))
    else:
        print(dump_toml(config, f"resolved from {', '.join(config.job.config_file) or 'defaults'}"), end="")
    return 0


def check_configs(argv: list[str], as_json: bool) -> int:
    """Check each file by itself with the same overrides; all problems of all files are printed."""
    argv, world = _take_world(argv)
    line = read_command_line(argv)
    files = [*line.positional, *line.config_files]
    overrides = _without_files(argv, files)
    if not files:
        raise ConfigError("titanlike config check: needs the name of a TOML file")
    results = [(name, *_check(name, overrides, world)) for name in files]
    failed = any(problems for _, problems, _ in results)
    if as_json:
        rows = [{"file": n, "ok": not p, "problems": p, **facts} for n, p, facts in results]
        print(json.dumps(rows, indent=2))
        return ConfigError.exit_code if failed else 0
    for name, problems, facts in results:
        if problems:
            print("\n".join(f"error: {problem}" for problem in problems), file=sys.stderr)
        else:
            said = ", ".join(f"{key} {value}" for key, value in facts.items())
            print(f"{name}: ok" + (f" ({said})" if said else ""))
    return ConfigError.exit_code if failed else 0


def _check(name: str, overrides: list[str], world: int | None) -> tuple[list[str], dict[str, int]]:
    try:
        config = load_config(["--job.config_file", name, *overrides], world=world)
    except ConfigError as error:
        return error.problems, {}
    return [], resolved_facts(config, world)


def resolved_facts(config: Config, world: int | None) -> dict[str, int]:
    """Degrees, batch and accumulation, where the number of processes is known."""
    world = world or implied_world(config)
    if world is None:
        return {}
    mesh, batch = degrees(config, world), batch_layout(config, world)
    return {
        "processes": mesh.world,
        "pipeline": mesh.pipeline,
        "replicate": mesh.replicate,
        "shard": mesh.shard,
        "context": mesh.context,
        "tensor": mesh.tensor,
        "global_batch": batch.global_batch,
        "accumulation": batch.accumulation,
        "tokens_per_step": batch.global_batch * config.training.seq_len,
    }


def write_schema(argv: list[str], as_json: bool) -> int:
    """The JSON Schema, to a file or to the terminal."""
    from titanlike.config.json_schema import json_schema

    text = json.dumps(json_schema(), indent=2)
    out = _only_words(argv, "schema", 0, 1)
    if not out:
        print(text)
        return 0
    Path(out[0]).write_text(text + "\n", encoding="utf-8")
    print(json.dumps({"path": out[0]}) if as_json else f"wrote {out[0]}")
    return 0


def import_config(argv: list[str], as_json: bool) -> int:
    """Translate a TorchTitan file and say what means something else."""
    from titanlike.config.migrate import import_torchtitan

    old, new = _only_words(argv, "import", 2, 2)
    text, notes = import_torchtitan(old)
    _refuse_overwrite(Path(new))
    Path(new).write_text(text, encoding="utf-8")
    if as_json:
        print(json.dumps({"path": new, "notes": notes}, indent=2))
        return 0
    print(f"wrote {new}. What means something else here:")
    print("\n".join(f"- {note}" for note in notes))
    return 0


COMMANDS: dict[str, Callable[[list[str], bool], int]] = {
    "list": list_configs,
    "copy": copy_config,
    "show": show_config,
    "check": check_configs,
    "schema": write_schema,
    "import": import_config,
}


def _only_words(argv: list[str], command: str, fewest: int, most: int) -> list[str]:
    """Arguments of a command that takes names and no options."""
    if options := [word for word in argv if word.startswith("-")]:
        raise ConfigError(f"titanlike config {command}: {options[0]}: no such option")
    if not fewest <= len(argv) <= most:
        wanted = str(most) if fewest == most else f"{fewest} to {most}"
        raise ConfigError(f"titanlike config {command}: takes {wanted} names, not {len(argv)}")
    return argv


def _take_world(argv: list[str]) -> tuple[list[str], int | None]:
    """Take `--world N` or `--world=N` out."""
    rest, world = [], None
    words = iter(argv)
    for word in words:
        if word != "--world" and not word.startswith("--world="):
            rest.append(word)
            continue
        value = word.partition("=")[2] or next(words, "")
        if not value.isdecimal() or int(value) < 1:
            raise ConfigError(f"--world {value}: must be a number of processes, at least 1")
        world = int(value)
    return rest, world


def _without_files(argv: list[str], files: list[str]) -> list[str]:
    """The overrides alone."""
    gone = {*files, "--job.config_file", "--job.config-file"}
    return [word for word in argv if word not in gone and not word.startswith("--job.config_file=")]


def _refuse_overwrite(path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{path}: is there already; name another file or remove it")
