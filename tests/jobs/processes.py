"""Whole runs as a person starts them: `./run_train.sh`, in a process group of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlike.config import Config, dump_toml
from titanlike.launch import status

ROOT = Path(__file__).parents[2]
PATIENCE = 100  # seconds; far more than anything here takes on a quiet machine


def logged_step(folder: Path) -> int:
    """The step of the last whole line in metrics.jsonl, 0 without one. Lines of an earlier start count, too."""
    with suppress(OSError):
        text = (folder / "metrics.jsonl").read_text()
        if rows := text[: text.rfind("\n") + 1].splitlines():
            return json.loads(rows[-1])["step"]
    return 0


def write_config(config: dict[str, Any], path: Path) -> Path:
    path.write_text(dump_toml(Config.model_validate(config)))
    return path


@dataclass
class Job:
    """A started run and what it leaves."""

    process: subprocess.Popen
    folder: Path
    console: Path
    began: float = field(default_factory=time.monotonic)

    @property
    def out(self) -> str:
        return self.console.with_suffix(".out").read_text()

    @property
    def err(self) -> str:
        return self.console.with_suffix(".err").read_text()

    @property
    def status(self) -> status.Status:
        found = status.read(self.folder)
        assert found is not None
        return found

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def wait_for_step(self, step: int) -> None:
        """Until that step is in metrics.jsonl."""
        self.wait_until(lambda: self.logged_step() >= step)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not happened():
            assert self.process.poll() is None, self.out + self.err
            assert time.monotonic() < deadline, self.out + self.err
            time.sleep(0.01)

    def logged_step(self) -> int:
        return logged_step(self.folder)

    def members(self) -> dict[int, int | None]:
        """Process ids → rank of all that runs for this folder: launcher (rank None), workers and their loaders."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                environment = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except (OSError, ValueError):
                continue
            if str(self.folder) in words:
                ranks = [int(line[5:]) for line in environment if line.startswith("RANK=")]
                found[int(entry.name)] = ranks[0] if ranks else None
        return found

    def workers(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: pid for pid, rank in self.members().items() if rank is not None}

    def end(self) -> None:
        """Whatever is left of it is killed."""
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def start(config: dict[str, Any], console: Path, *argv: str, **environment: str) -> Job:
    """`./run_train.sh` with this config and more words; keywords are environment variables."""
    folder = Path(config["job"]["dump_folder"])
    everything = {
        **os.environ,
        "CONFIG_FILE": str(write_config(config, console.with_suffix(".toml"))),
        "TITANLIKE_PYTHON": sys.executable,  # no environment is made
        "CUDA_VISIBLE_DEVICES": "",
        **environment,
    }
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX", "TITANLIKE_VENV"):
        everything.pop(name, None)
    with open(console.with_suffix(".out"), "w") as out, open(console.with_suffix(".err"), "w") as err:
        line = [str(ROOT / "run_train.sh"), "--job.dump_folder", str(folder), *argv]
        process = subprocess.Popen(line, env=everything, stdout=out, stderr=err, start_new_session=True)
    return Job(process, folder, console)
