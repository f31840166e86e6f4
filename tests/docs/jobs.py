"""What the pool's ranks do for the pages."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def _in(folder: str):
    """As if the process had been started in a folder."""
    before, path, cache = Path.cwd(), list(sys.path), os.environ.get("XDG_CACHE_HOME")
    os.chdir(folder)
    sys.path.append(folder)
    os.environ["XDG_CACHE_HOME"] = folder
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
        os.environ.pop("XDG_CACHE_HOME")
        if cache is not None:
            os.environ["XDG_CACHE_HOME"] = cache


def train(rank: int, world: int, *, folder: str, argv: list[str]) -> str:
    """A run from its command line. Returns the outcome."""
    from titanlike.config import load_config
    from titanlike.trainer import Trainer

    with _in(folder):
        return Trainer(load_config(argv, world=world)).run()


def generate(rank: int, world: int, *, folder: str, argv: list[str]) -> int:
    """`titanlike generate`. Returns the exit code."""
    from titanlike.rollout.generate import main

    with _in(folder):
        return main(argv)
