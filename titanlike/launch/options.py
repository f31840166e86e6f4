"""How many processes, where they meet and how often they are started again: the launcher's own options.

Each is an environment variable and a flag of the same name; a flag wins. Imports no torch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shutil import which

from titanlike.errors import ConfigError

_HELP = {
    "NGPU": "processes on this node (default: its GPUs, or one process on the CPU)",
    "NNODES": "nodes, or MIN:MAX if their number may change while the job runs (default 1)",
    "RDZV_ENDPOINT": "host:port where the nodes meet (default for one node: a free port)",
    "RDZV_ID": "name of the job, the same on all nodes (default: Slurm's job number)",
    "MAX_RESTARTS": "how often the processes are started again after a failure (default 0)",
}


@dataclass(frozen=True)
class Options:
    """The processes of a job."""

    processes: int
    """On each node."""
    min_nodes: int
    max_nodes: int
    endpoint: str
    """host:port; port 0: a free one."""
    run_id: str
    max_restarts: int

    @property
    def world(self) -> int:
        """Processes of the job when all nodes are there."""
        return self.processes * self.max_nodes

    @property
    def elastic(self) -> bool:
        """Whether torch's elastic launcher is needed; else this very process trains."""
        return self.world > 1 or self.max_restarts > 0


def flags() -> argparse.ArgumentParser:
    """The parser of the launcher's flags."""
    parser = argparse.ArgumentParser("titanlike train", add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("processes (flags, or environment variables of the same name)")
    for name, text in _HELP.items():
        group.add_argument("--" + name.lower().replace("_", "-"), dest=name, help=text, metavar="X")
    return parser


def read_options(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> tuple[Options, list[str]]:
    """The options, and what of the command line is the config's. Raises ConfigError naming all that is wrong."""
    given, rest = flags().parse_known_args(list(argv))
    values = {name: getattr(given, name) or environ.get(name, "") for name in _HELP}
    problems: list[str] = []

    def number(name: str, text: str, least: int) -> int:
        if text.isascii() and text.isdigit() and int(text) >= least:
            return int(text)
        problems.append(f"{name} = {values[name]!r}: must be a number of at least {least}")
        return least

    low, colon, high = (values["NNODES"] or "1").partition(":")
    min_nodes = number("NNODES", low, 1)
    max_nodes = number("NNODES", high, min_nodes) if colon else min_nodes
    endpoint, run_id = values["RDZV_ENDPOINT"], values["RDZV_ID"] or environ.get("SLURM_JOB_ID", "")
    if endpoint and not endpoint.rpartition(":")[2].isdigit():
        problems.append(f"RDZV_ENDPOINT = {endpoint!r}: must be host:port")
    if max_nodes > 1 and not endpoint:
        problems.append(f"NNODES = {values['NNODES']!r}: several nodes need RDZV_ENDPOINT = host:port to meet at")
    options = Options(
        processes=number("NGPU", values["NGPU"], 1) if values["NGPU"] else max(count_gpus(environ), 1),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        endpoint=endpoint or "localhost:0",
        run_id=run_id or ("titanlike" if max_nodes > 1 else uuid.uuid4().hex),
        max_restarts=number("MAX_RESTARTS", values["MAX_RESTARTS"] or "0", 0),
    )
    if problems:
        raise ConfigError(problems)
    return options, rest


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """GPUs that processes started from here see, by CUDA_VISIBLE_DEVICES or the driver's own tool."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        hidden_from = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))  # as CUDA reads it
        return hidden_from
    if which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
