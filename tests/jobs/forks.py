"""Processes of the product that start at once: forked from a process that has imported everything already.

For tests that need many real processes to kill and no launcher. A fork runs `python -m titanlike.train` with torchrun's
environment variables, as a worker of torchrun would.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVER = """
import json, os, signal, sys
import titanlike.trainer
from titanlike import train

for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        os.environ.update(request["environment"])
        for descriptor, path in enumerate((os.devnull, request["output"], request["output"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
        train.leave(train.main(request["argv"]))
    print(pid, flush=True)
"""


def _quiet_port() -> int:
    """A free port below those that outgoing connections take: it is still free when it is used, seconds later."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", port))
            return port


class Forks:
    """The process that forks; a context manager that leaves nothing behind."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._running: set[int] = set()

    def start(self, *argv: str, world: int, output: Path, **environment: str) -> list[int]:
        """Start `python -m titanlike.train` with these words, `world` times; the process ids by rank."""
        environment |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(_quiet_port())}
        pids = []
        for rank in map(str, range(world)):
            own = {**environment, "RANK": rank, "LOCAL_RANK": rank}
            pids.append(self._ask(argv=argv, output=str(output), environment=own))
        self._running.update(pids)
        return pids

    def wait(self, pid: int) -> int:
        """The exit code of a process, negative if a signal ended it."""
        code = self._ask(wait=pid)
        self._running.discard(pid)
        return code

    def running(self, pid: int) -> bool:
        """Whether it has not ended yet."""
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    def _ask(self, **request: object) -> int:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *exception: object) -> None:
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._server.communicate()  # end of its input
