"""A trainer that trains nothing, but starts, steps, stops and fails as the real one does.

Each step is an all-reduce over gloo that also agrees on the stop flag. A "save" is a file in the run's folder.
STUB_OUTCOME: what run() returns at the end; or "data-error": rank 1 raises one at step 2; "early-data-error": before
it joins the group; "config-error": every rank raises one at step 2; "vanish": every process ends without a word.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from titanlike import device as devices
from titanlike.errors import ConfigError, DataError
from titanlike.launch import worker
from titanlike.launch.faults import fault
from titanlike.launch.logging import logger
from titanlike.launch.signals import StopFlag
from titanlike.launch.status import progress


class Trainer:
    def __init__(self, config):
        self.folder = Path(config.job.dump_folder)
        self.steps = config.training.steps
        self.outcome = os.environ.get("STUB_OUTCOME", "done")
        self.several = worker.world_size() > 1
        if self.outcome == "vanish":
            os._exit(0)
        if self.outcome == "early-data-error" and worker.rank() == 1:
            raise DataError("train.jsonl:7: no such column")
        if self.several:
            devices.start_process_group(torch.device("cpu"), 60)

    def run(self):
        with StopFlag() as stop:
            while progress.step < self.steps:
                progress.step += 1
                if self._step(stop.raised):
                    self._save()
                    return "stopped"
        return self.outcome

    def _step(self, stop):
        fault("data", progress.step)
        if self.outcome == "data-error" and worker.rank() == 1 and progress.step == 2:
            raise DataError("train.jsonl:7: no such column")
        if self.outcome == "config-error" and progress.step == 2:
            raise ConfigError("training.seq_len: too long")
        fault("forward", progress.step)
        flag = torch.tensor(float(stop))
        if self.several:
            dist.all_reduce(flag)
        (self.folder / f"rank-{worker.rank()}-step").write_text(str(progress.step))
        logger.info("step %d", progress.step)
        time.sleep(0.05)
        return flag.item() > 0

    def _save(self):
        if self.several:
            dist.barrier()
        fault("save", progress.step)
        (self.folder / f"saved-{progress.step}-by-{worker.rank()}").touch()
