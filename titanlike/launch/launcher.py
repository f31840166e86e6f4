"""`titanlike train F [overrides]`: one command line in, one exit code out, whatever the number of processes.

The config is checked here, once, before torch is imported. One process then trains in this very process. Several are
workers of torch's elastic launcher, which runs here as a library:

    launcher ── starts, watches, restarts ──▶ worker 0 … N-1     python -m titanlike.train, each in a session of its own
        │ ◀──────────── status.json ─────────────┘               with the exit code, which torch would turn into 1

A signal to the launcher is handed to the workers once, as SIGTERM; they save and leave with 0. A launcher that is
killed takes its workers with it (`worker.die_with_parent`).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from titanlike import train
from titanlike.config import Config
from titanlike.config.derive import batch_layout, degrees
from titanlike.errors import ConfigError
from titanlike.launch import ownership, signals, status
from titanlike.launch.logging import say
from titanlike.launch.options import Options, read_options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Raises ConfigError before anything is started."""
    options, rest = read_options(sys.argv[1:] if argv is None else argv)
    config = train.load(rest, options.world)
    _check_world(config, options)
    if not options.elastic:
        return train.run(config)
    return _run_workers(config, options, rest)


def _check_world(config: Config, options: Options) -> None:
    """Whether the config fits the processes, and a given port is free; raises ConfigError."""
    # A run that goes on on another number of processes fills its batch up with empty rows; only a fresh one must fit.
    goes_on = any((Path(config.job.dump_folder) / config.checkpoint.folder).glob("step-*/manifest.json"))
    (degrees if goes_on else batch_layout)(config, options.world)
    host, _, port = options.endpoint.rpartition(":")
    if options.max_nodes == 1 and port != "0" and not _is_free(host, int(port)):
        raise ConfigError(
            f"RDZV_ENDPOINT = {options.endpoint!r}: port {port} is in use (without RDZV_ENDPOINT a free one is taken)"
        )


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class _Stop:
    """Turns the first stop signal into torch's SignalException, which makes the agent end its workers by SIGTERM.

    Later ones are ignored, since torch would abandon the workers in the middle of their save; but the third Ctrl-C
    ends everything.
    """

    def __init__(self, exception: type[Exception]):
        self._exception = exception
        self._signals: list[int] = []
        signals.install(self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if self._signals.count(signal.SIGINT) >= signals.FORCING_INTERRUPTS:
            os._exit(status.FAULT)
        if len(self._signals) == 1:
            say("stopping: the workers finish their step and save (Ctrl-C twice more ends them at once)")
            raise self._exception(f"signal {number}", signal.SIGTERM)  # type: ignore[call-arg]


def _run_workers(config: Config, options: Options, argv: Sequence[str]) -> int:
    """Start the workers of this node, wait for their end, and say how it was as an exit code."""
    if options.max_nodes == 1:
        ownership.hold_for_workers(Path(config.job.dump_folder))
    _set_environment(config, options)
    if options.max_nodes == 1:
        logging.disable(logging.ERROR)  # our own words say it; of several nodes torch's tell which one is missing
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    launch = LaunchConfig(
        min_nodes=options.min_nodes,
        max_nodes=options.max_nodes,
        nproc_per_node=options.processes,
        run_id=options.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=options.endpoint,
        max_restarts=options.max_restarts,
        monitor_interval=0.1,
        local_addr="localhost" if options.max_nodes == 1 else None,
        signals_to_handle="SIGURG",  # torch wants a name; ours are in place for those that matter
    )
    folder = Path(config.job.dump_folder)
    before = status.read(folder)
    failures: Mapping[int, Any] = {}
    stopped = False
    try:
        _Stop(SignalException)
        elastic_launch(launch, sys.executable)("-m", "titanlike.train", *argv)
    except SignalException:
        stopped = True
    except ChildFailedError as error:
        failures = error.failures
    after = status.read(folder)
    return _exit_code(folder, None if after == before else after, failures, stopped, config.checkpoint.grace_seconds)


def _set_environment(config: Config, options: Options) -> None:
    """What torch's launcher and the workers read from the environment; what the user set stays."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
        "OMP_NUM_THREADS": str(max(cores // options.processes, 1)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(round(config.checkpoint.grace_seconds)),
    }
    if options.max_nodes > 1:
        # In a store kept by the launcher, a node that joins later doesn't find the others. The workers' own has a port
        # that is chosen seconds before it is used: somebody else may take it meanwhile.
        defaults["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _exit_code(
    folder: Path, left: status.Status | None, failures: Mapping[int, Any], stopped: bool, grace: float
) -> int:
    """The exit code from what the workers left in status.json (None: nothing), how they ended and whether by signal."""
    _name_the_killed(failures, folder)
    if left is not None and left.state == "failed":
        return left.exit_code or status.FAULT
    if failures:
        problem = "; ".join(f"rank {rank} ended with code {failure.exitcode}" for rank, failure in failures.items())
    elif left is not None and left.exit_code is not None:
        return left.exit_code
    elif stopped and left is not None:
        problem = f"the workers did not end within checkpoint.grace_seconds = {grace:g} s and were killed"
    else:
        return status.STOPPED if stopped else status.DONE
    say(problem)
    with suppress(OSError):
        status.write(folder, "failed", status.FAULT, problem)
    return status.FAULT


def _name_the_killed(failures: Mapping[int, Any], folder: Path) -> None:
    """Say which workers died of a signal: they could not say anything themselves."""
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # by which torch ends those that are left
            name = signal.Signals(-failure.exitcode).name
            hint = " (out of memory, or killed from outside)" if name == "SIGKILL" else ""
            say(f"rank {rank} was ended by {name}{hint}; its log: {folder / 'logs' / f'rank-{rank}.log'}")
