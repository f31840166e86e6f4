"""The one training loop.

Every method is this loop with another batch source and another objective. One step:

    take the step's microbatches → add up their weights over all ranks → forward and backward of each → clip by the
    global norm → update → metrics → checkpoint

Losses and gradients are sums; the one division is by the weight of the whole global batch, known before the first
backward. So accumulation, uneven masks and any number of ranks give the update of one process with one big batch.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from titanlike import device as devices
from titanlike.checkpoint.manager import CheckpointManager
from titanlike.config import Config, dump_toml
from titanlike.data.build import build_data
from titanlike.data.tokenizers import load_tokenizer
from titanlike.launch.faults import fault
from titanlike.launch.signals import StopFlag
from titanlike.launch.status import progress
from titanlike.models.initial import initial_values, materialise
from titanlike.objectives.base import objectives
from titanlike.observe.metrics import Metrics
from titanlike.optim.clip import clip_gradients
from titanlike.optim.optimizers import build_optimizer, optimizer_tensors
from titanlike.optim.schedule import Schedule
from titanlike.parallel.build import build_model
from titanlike.parallel.mesh import build_mesh

logger = logging.getLogger("titanlike")

Outcome = Literal["done", "stopped", "data_ended"]


@dataclass
class Counters:
    """What the run has done since it began; saved with each checkpoint, the same on every rank."""

    step: int = 0
    tokens: int = 0
    trained_tokens: int = 0


@dataclass
class Totals:
    """Sums over all ranks' microbatches of one step, taken before the first backward."""

    weight: float
    tokens: int
    trained_tokens: int
    stop: bool


class Trainer:
    """A run from its config: builds everything, resumes if there is something to resume, trains to the end."""

    def __init__(self, config: Config):
        self.config = config
        self.folder = Path(config.job.dump_folder)
        self.counters = Counters()
        # Text and tokenizer first: what is wrong with them is said before any process group or model exists.
        self.tokenizer = load_tokenizer(
            config.model.hf_assets_path, bos_token=config.data.bos_token, eos_token=config.data.eos_token
        )
        self.data = build_data(config, self.tokenizer, rank=worker.rank(), world=worker.world_size())
        if config.debug.deterministic:
            devices.make_deterministic(config.debug.deterministic_warn_only)
        self.device = devices.local_device()
        devices.start_process_group(self.device, config.comm.init_timeout_seconds)
        self.mesh = build_mesh(config, self.device.type)
        self.objective = objectives.get(config.job.recipe, "job.recipe")()
        self.model = build_model(config, self.mesh, self.device)
        self.checkpoints = CheckpointManager(config.checkpoint, self.folder / config.checkpoint.folder)
        self._give_values()
