"""Worker processes that serve many checks: starting ranks costs more than most of what they are asked.

    pool = Pool()
        results = pool.run("tests.parity.jobs:losses", world=2, config={...})   # what each of the 2 ranks returned

A job is a function by its dotted name, called with rank and world and the arguments, inside a fresh gloo group of that
size, or with torchrun's environment variables alone if it starts its group itself (`group=False`). Arguments and
results travel by pickle between these test processes only.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from multiprocessing import connection
from typing import Any

_AFTER_A_FAILURE = 30.0  # seconds


class Pool:
    """Spawned processes with one thread each, alive until `close`; as many as the largest world that was asked for."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._ends: list[Any] = []
        self._processes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._jobs = itertools.count()

    def _path(self, name: str) -> str:
        """In a folder that lives as long as the ranks: a store without its folder holds up who lets go of it."""
        self._folder = self._folder or tempfile.TemporaryDirectory()
        return os.path.join(self._folder.name, name)

    def _stacks(self, rank: int) -> str:
        return self._path(f"{rank}.stacks")

    def _grow(self, size: int) -> None:
        for rank in range(len(self._ends), size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, theirs, self._stacks(rank)))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, job: str, *, world: int, group: bool = True, timeout: float = 300, **arguments: Any) -> list[Any]:
        """Runs the job on ranks 0 … world-1; returns their results in order, or raises the first rank's failure."""
        self._grow(world)
        port, store = _free_port(), self._path(f"{next(self._jobs)}.store")
        for end in self._ends[:world]:
            end.send((job, world, store if group else None, port, arguments))
        try:
            answers = self._collect(world, timeout)
        except BaseException:  # a test's own timeout: the next job must not read this one's answers
            self._show_stacks(world)
            self.close()
            raise
        failures = [f"rank {rank}:\n{text}" for rank, (fine, text) in answers.items() if not fine]
        if missing := [rank for rank in range(world) if rank not in answers]:
            self._show_stacks(world)
            self.close()
            kind = AssertionError if failures else TimeoutError
            silent = f"{job}: ranks {missing} of {world} did not answer within {timeout} s"
            raise kind("\n".join([silent, *failures]))
        if failures:
            raise AssertionError(f"{job} failed on {len(failures)} of {world} ranks\n" + "\n".join(failures))
        return [answers[rank][1] for rank in range(world)]

    def _collect(self, world: int, timeout: float) -> dict[int, tuple[bool, Any]]:
        """The ranks' answers. When one has failed the others, which may wait for it, get little time to."""
        answers: dict[int, tuple[bool, Any]] = {}
        until = time.monotonic() + timeout
        waited_for = dict(zip(self._ends[:world], range(world), strict=True))
        while waited_for and (ready := connection.wait(list(waited_for), max(0.0, until - time.monotonic()))):
            for end in ready:
                rank = waited_for.pop(end)
                answers[rank] = end.recv()
                if not answers[rank][0]:
                    until = min(until, time.monotonic() + _AFTER_A_FAILURE)
        return answers

    def _show_stacks(self, world: int) -> None:
        """Prints where each rank is, so that a test that hangs says why."""
        for process in self._processes[:world]:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)  # it is written by the ranks' signal handlers
        for rank in range(world):
            with open(self._stacks(rank)) as file:
                print(f"rank {rank} is at:\n{file.read()}")

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        if self._folder:
            self._folder.cleanup()
        self._ends, self._processes, self._folder = [], [], None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def _serve(rank: int, end: Any, stacks: str) -> None:
    faulthandler.register(signal.SIGUSR1, open(stacks, "w"))  # noqa: SIM115 (as long as the process lives)

    import torch
    import torch.distributed as dist

    import titanlike.trainer  # noqa: F401 (what all jobs need)

    torch.set_num_threads(1)
    # Collections walk what jobs leave, not what was imported. A trainer's own objects must not be frozen beside it.
    gc.collect()
    gc.freeze()
    gc.freeze = lambda: None
    while True:
        try:
            job, world, store, port, arguments = end.recv()
        except EOFError:
            return
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        try:
            if store is not None:
                dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
            module, name = job.split(":")
            end.send((True, getattr(importlib.import_module(module), name)(rank, world, **arguments)))
        except Exception:
            end.send((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            if dynamo := sys.modules.get("torch._dynamo"):
                dynamo.reset()  # what one job compiled counts towards the next one's limit of recompilations
            _forget_meshes()
            # A trainer stops Python's own collections. Groups that live on in cycles keep their threads and sockets.
            gc.enable()
            gc.collect()


def _forget_meshes() -> None:
    """What torch has planned for a mesh names its groups, and it takes an equal mesh of the next world for the same."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import _redistribute, debug

        debug._clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()
        if clear_plans := getattr(_redistribute, "clear_redistribute_planner_cache", None):
            clear_plans()  # torch 2.11 has none
        # Guards of compiled code outlive its reset, with the meshes that they compare to; groups have threads.
        for mesh in [thing for thing in gc.get_objects() if type(thing) is DeviceMesh]:
            getattr(mesh, "_pg_registry", {}).clear()
