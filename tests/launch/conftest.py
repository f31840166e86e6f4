"""Starts the launcher with the stub trainer, as a person would: a process of its own, in a session of its own."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from titanlike.launch import status

ROOT = Path(__file__).parents[2]
STUB = Path(__file__).parent / "stub"


@dataclass
class Job:
    """A launcher that runs, and how it ended."""

    process: subprocess.Popen
    folder: Path
    began: float = field(default_factory=time.monotonic)
    out: str = ""
    err: str = ""

    def wait(self, timeout: float = 90) -> int:
        self.out, self.err = self.process.communicate(timeout=timeout)
        return self.process.returncode

    def wait_for_step(self, step: int, ranks: int) -> None:
        """Until every rank has done that step."""
        deadline = time.monotonic() + 90
        while not all(self._step(rank) >= step for rank in range(ranks)):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def _step(self, rank: int) -> int:
        try:
            return int((self.folder / f"rank-{rank}-step").read_text() or 0)
        except FileNotFoundError:
            return 0

    def workers(self) -> dict[int, int]:
        """Process ids by rank, of the workers that run for this folder."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except (OSError, ValueError):
                continue
            if "titanlike.train" in words and str(self.folder) in words:
                found.update({int(line[5:]): int(entry.name) for line in environment if line.startswith("RANK=")})
        return found

    @property
    def status(self) -> status.Status:
        found = status.read(self.folder)
        assert found is not None
        return found


@pytest.fixture
def start(tmp_path):
    """Start `titanlike train` with the stub: `start("--training.steps", "3", NGPU="2")`; more keywords: environment."""
    jobs = []

    def start(
        *argv: str, command: tuple[str, ...] = ("-m", "titanlike.cli", "train"), folder="run", **environment
    ) -> Job:
        path = tmp_path / folder
        everything = {**os.environ, "PYTHONPATH": f"{STUB}:{ROOT}", "CUDA_VISIBLE_DEVICES": "", **environment}
        config = tmp_path / "empty.toml"
        config.touch()
        line = [sys.executable, *command, "--job.config_file", str(config), "--job.dump_folder", str(path), *argv]
        pipe = subprocess.PIPE
        process = subprocess.Popen(line, env=everything, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        jobs.append(Job(process, path))
        return jobs[-1]

    yield start
    for job in jobs:
        for pid in (job.process.pid, *job.workers().values()):
            if pid != job.process.pid or job.process.poll() is None:
                os.kill(pid, signal.SIGKILL)
        job.process.communicate()
