"""The `titanlike` command: picks the room that a sub-command lives in, and turns errors into exit codes.

Rooms are imported when they are asked for, so that `titanlike config check` needs no torch.
"""

from __future__ import annotations

import importlib
import sys

from titanlike.errors import ConfigError, TitanlikeError

# Sub-command -> where its `main(argv) -> exit code` is, and what it does.
COMMANDS = {
    "train": ("titanlike.launch.launcher", "train what a TOML describes, on this machine or several"),
    "config": ("titanlike.config.command", "list, copy, show, check and import configs"),
    "data": ("titanlike.data.preview", "look at the data as training sees it: preview, stats"),
    "tokenize": ("titanlike.data.tokenize", "make a token store beforehand"),
    "checkpoint": ("titanlike.checkpoint.command", "list, verify, export and import checkpoints"),
    "generate": ("titanlike.rollout.generate", "text from a run, a checkpoint or a model of the Hub"),
    "evaluate": ("titanlike.evaluate.command", "perplexity on files, and tasks of lm-evaluation-harness"),
}

NOT_BUILT = ("plan", "report")

USAGE = """\
titanlike: train language models from one TOML

{commands}

titanlike train --help lists every key of the TOML; titanlike train --help optimizer those of a section.
Exit codes: 0 done, 1 fault, 2 config, 3 data, 4 checkpoint, 75 stopped by a signal with everything saved."""

TRAIN_USAGE = """\
titanlike train FILE.toml [--section.key value ...]

FILE.toml is a path, or the name of a shipped config (titanlike config list)."""


def main(argv: list[str] | None = None) -> int:
    """Run a sub-command; returns the exit code. The user's mistakes end in a message, without a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(argv)
    except TitanlikeError as error:
        print_error(error)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output, such as `head`, has had enough
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if argv[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"titanlike {version('titanlike')}")
        return 0
    name, rest = argv[0], argv[1:]
    if name == "train" and (topic := _help_asked(rest)) is not None:
        from titanlike.config.help import print_help

        return print_help(_train_usage(), topic or None)
    if name in NOT_BUILT:
        raise ConfigError(f"titanlike {name}: not built yet")
    if name not in COMMANDS:
        raise ConfigError(f"titanlike {name}: no such command (there are: {', '.join(COMMANDS)})")
    return importlib.import_module(COMMANDS[name][0]).main(rest)


def _train_usage() -> str:
    from titanlike.launch.options import flags

    return f"{TRAIN_USAGE}\n\n{flags().format_help().partition(chr(10) * 2)[2].rstrip()}"


def usage() -> str:
    """Every sub-command with what it does."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    lines.append(f"  not built yet: {', '.join(NOT_BUILT)}")
    return USAGE.format(commands="\n".join(lines))


def print_error(error: TitanlikeError) -> None:
    """An error for a person: every problem on its own line, on stderr."""
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    if len(problems) > 1:
        print(f"{len(problems)} problems:", file=sys.stderr)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)


def _help_asked(argv: list[str]) -> str | None:
    """The topic after `--help` ("" for all); None where no help is asked for."""
    for n, word in enumerate(argv):
        if word in ("-h", "--help"):
            return argv[n + 1] if n + 1 < len(argv) and not argv[n + 1].startswith("-") else ""
    return None


if __name__ == "__main__":
    sys.exit(main())
