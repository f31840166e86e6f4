"""One process with a gloo group of its own, and managers on it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from titanlike.checkpoint.manager import CheckpointManager


@dataclass(frozen=True)
class Settings:
    async_mode: str = "disabled"
    keep_latest_k: int = 0
    verify_checksums: bool = True


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def manager(group: None, tmp_path: Path) -> Iterator[Callable[..., CheckpointManager]]:
    """Makes managers of `tmp_path / "checkpoints"`, and closes them."""
    made: list[CheckpointManager] = []

    def make(folder: Path = tmp_path / "checkpoints", **settings) -> CheckpointManager:
        made.append(CheckpointManager(Settings(**settings), folder, config_text="a = 1\n", topology={"dp": 1}))
        return made[-1]

    yield make
    for one in made:
        one.close()
