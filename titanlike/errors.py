"""The user's mistakes, by exit code.

An error of this module ends a run with a message and without a traceback; whatever else is raised is a fault of ours
(exit code 1, with traceback). `titanlike.train` turns them into exit codes; nothing else catches them.
"""

from __future__ import annotations

from collections.abc import Sequence


class TitanlikeError(Exception):
    """Something that the person who started the run can put right."""

    exit_code = 1


class ConfigError(TitanlikeError):
    """The config or the command line is wrong. Carries every problem found, so that one run reports them all."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataError(TitanlikeError):
    """Data that can't be read or doesn't fit the config."""

    exit_code = 3


class CheckpointError(TitanlikeError):
    """A checkpoint that can't be used."""

    exit_code = 4
