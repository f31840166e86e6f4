"""The entry point of a process that trains: config in, trainer out, exit code.

    python -m titanlike.train --job.config_file F [--section.key value …]           one process
    torchrun … -m titanlike.train --job.config_file F [--section.key value …]       a worker

`titanlike train` starts the same, in its own process where one is enough, otherwise as workers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from titanlike.config import Config, load_config
from titanlike.config.refused import refuse_unbuilt
from titanlike.errors import ConfigError, TitanlikeError
from titanlike.launch import ownership, signals, status, worker
from titanlike.launch.faults import read_faults
from titanlike.launch.logging import logger, say, setup_logging, shown_ranks

EXIT_CODES = {"done": status.DONE, "data_ended": status.DONE, "stopped": status.STOPPED}


def main(argv: Sequence[str] | None = None) -> int:
    """Train what the command line describes; returns the exit code."""
    try:
        config = load(sys.argv[1:] if argv is None else argv)
    except TitanlikeError as error:
        if worker.rank() == 0:  # the others would say the same
            say(_in_words(error))
        return error.exit_code
    return run(config)


def load(argv: Sequence[str], world: int | None = None) -> Config:
    """The config of a command line, if it is right, fits `world` processes (those of this job) and all that it asks
    for is built; else ConfigError.
    """
    # Whether this is a restart is not known yet: the loader refuses a batch with a remainder at a fresh start.
    config = load_config(argv, world=worker.world_size() if world is None else world, restart=True)
    if not config.job.config_file:
        raise ConfigError(
            "no config file: titanlike train FILE.toml, or python -m titanlike.train --job.config_file FILE.toml "
            "(titanlike config list shows those that ship; debug_model.toml is the one to begin with)"
        )
    if problems := refuse_unbuilt(config):
        raise ConfigError(problems)
    read_faults()
    shown_ranks()
    return config


def run(config: Config) -> int:
    """Train; returns the exit code and leaves status.json. After a clean stop torchrun's workers return 0, not 75."""
    folder = Path(config.job.dump_folder)
    try:
        if worker.rank() == 0:
            ownership.hold(folder)
    except ConfigError as error:  # what stands in that folder is not ours to change, its status least of all
        say(_in_words(error))
        return error.exit_code
    try:
        outcome = _train(config, folder)
    except TitanlikeError as error:
        return _failed(folder, error.exit_code, _in_words(error), worker.rank())
    except Exception as error:
        # Some failures reach every rank at the same moment: they say whose they are.
        return _failed(folder, status.FAULT, traceback.format_exc(), getattr(error, "failed_rank", worker.rank()))
    finally:
        ownership.release()
    _leave_status(folder, outcome)
    signals.install(signal.SIG_IGN)  # the interpreter's own way out takes a while, and a late signal must not spoil it
    return 0 if worker.under_torchrun() else EXIT_CODES[outcome]


def _leave_status(folder: Path, outcome: str) -> None:
    if worker.local_rank() == 0:  # of every node: their disks need not be the same
        status.write(folder, outcome, EXIT_CODES[outcome])


def _give_up_the_start(folder: Path) -> None:
    _leave_status(folder, "stopped")
    _kill_children()


def _has_begun() -> bool:
    return status.progress.step > 0


def _train(config: Config, folder: Path) -> str:
    try:
        setup_logging(folder=folder)
        if worker.rank() == 0:
            status.write(folder, "running")
    except OSError as error:
        raise ConfigError(f"job.dump_folder = {str(folder)!r}: can't be written to ({error.strerror})") from error
    if worker.under_torchrun():
        worker.die_with_parent()
        signals.end_with_the_job(partial(status.has_failed, folder), _has_begun, partial(_give_up_the_start, folder))
        if worker.restarts() > 0:
            logger.info("started again after a failure or a change of nodes (%d)", worker.restarts())
    # Read when torch is loaded.
    for name, value in wait_shortly(os.environ).items():
        os.environ[name] = value
    try:
        # Until the trainer has its stop flag there is nothing to save, and a signal ends the start at once.
        with signals.interruptible(over=_has_begun):
            from titanlike.trainer import Trainer

            outcome = Trainer(config).run()
    except KeyboardInterrupt:
        logger.info("stopped by a signal, not in a step (the last one was %d)", status.progress.step)
        return "stopped"
    _destroy_process_group()
    return outcome


def wait_shortly(environment: Mapping[str, str]) -> dict[str, str]:
    """What makes OpenMP's threads wait for each other by spinning for a moment only, where nothing is said of it.

    Long spinning takes the cores from whatever else runs here, and from the thread that is waited for: on a busy
    machine a step took three to five times as long. Without any, waking up costs 9% of a step of small operations.
    """
    if environment.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
        return {}
    return {
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "20000",
    }  # GNU's runtime, which torch ships, takes the second


def _in_words(error: TitanlikeError) -> str:
    problems = error.problems if isinstance(error, ConfigError) else [str(error)]
    return "\n".join(f"error: {problem}" for problem in problems)


def _failed(folder: Path, code: int, text: str, rank: int) -> int:
    """Report an error of `rank`, in full if this is the first: the others mostly fail because that one is gone."""
    first = True
    with suppress(OSError):  # a full disk must not hide the error
        first = status.write(folder, "failed", code, text, rank)
    step = status.progress.step
    when = f"at step {step}" if step else "before its first step"
    if code != status.FAULT:
        if first:
            say(text)
    elif first:
        say(f"rank {rank} failed {when}:\n{text}")
    else:
        say(f"rank {worker.rank()} failed {when} too: {_exception(text)[:200]}")
    return code


def _exception(trace: str) -> str:
    """The exception at the end of a traceback as one line, whatever the lines of its message."""
    lines = trace.splitlines()
    starts = [n for n, line in enumerate(lines) if line[:1].strip()]
    return " ".join(" ".join(lines[starts[-1] :]).split())


def _process_group_is_there() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _destroy_process_group() -> None:
    if _process_group_is_there():
        sys.modules["torch.distributed"].destroy_process_group()


def leave(code: int) -> None:
    """End this process. With a process group left, other ranks may be gone: then without the clean-up that waits."""
    sys.stdout.flush()
    sys.stderr.flush()
    if _process_group_is_there():
        _kill_children()
        os._exit(code)
    sys.exit(code)


def _kill_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()


if __name__ == "__main__":
    leave(main())
