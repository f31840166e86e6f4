"""`[job] import`: modules of the user's, whose decorators add names to the registries.

They are looked for as `python -m` looks: on Python's path, and in the current folder, so that a module beside the TOML
works whichever way the run is started. Only what the config of a run names is imported; a config that was found inside
a checkpoint is data, and nothing that it names is imported.
"""

from __future__ import annotations

import importlib
import os
import sys

from titanlike.config.layers import Layer
from titanlike.config.messages import place

KEY = ("job", "import")


def import_modules(names: list[str], layer: Layer) -> list[str]:
    """Import the modules in order. Returns the problems: those that aren't there, with the place that names them.

    What a module raises by itself, a package that it lacks included, is passed on as it is.
    """
    if names and not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # the `titanlike` command runs without it
    problems = []
    for number, name in enumerate(names):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            where = place(layer, (*KEY, number))
            problems.append(
                f"{where}job.import = {name!r}: there is no module {error.name!r} in {os.getcwd()} or on Python's path"
            )
    return problems
