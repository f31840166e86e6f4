"""How long pipeline ranks stand idle, by schedule: measured beside the schedule's formula.

    python benchmarks/pipeline_bubble.py
    python benchmarks/pipeline_bubble.py --microbatches 16 --milliseconds 200 --repeat 5

Stages sleep instead of computing, so four ranks run at the same time on any machine with a core or two. A rank's whole
model share takes one unit of time for the forward of a microbatch, one for the gradients of its inputs and one for
those of its weights; where a rank holds two stages, each takes half of that. The bubble is the share of a step in which
a rank has nothing to do:

    bubble = 1 - microbatches * 3 units / (time from the first rank's start to the last one's end)
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from titanlike.parallel.schedules import SCHEDULES

RANKS = 4


def formula(microbatches: int, units: float) -> float:
    """The bubble where each rank but the first makes a step that many units longer."""
    waiting = (RANKS - 1) * units
    return waiting / (3 * microbatches + waiting)


# Units by which each rank more makes a step longer. GPipe and 1F1B: forward and backward of a rank's share (Narayanan
# et al. 2021, arXiv 2104.04473); with two stages a rank, of half of it. Zero-bubble schedules fill everything with the
# weights' gradients but the way of the first microbatch to the last rank: the forward of half a share (Qi et al. 2024,
# arXiv 2401.10241, for units of equal length).
FORMULAS = {
    "GPipe": 3.0,
    "1F1B": 3.0,
    "Interleaved1F1B": 1.5,
    "LoopedBFS": 1.5,
    "InterleavedZeroBubble": 0.5,
    "ZBVZeroBubble": 0.5,
    "DualPipeV": 0.5,
}


class _Sleep(torch.autograd.Function):
    """The identity, slow in the forward and in the backward."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None, None


class SleepingStage(nn.Module):
    """Takes [1, 1] and gives it on; its first weight makes the very first stage ask for gradients of inputs too."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds
        self.inner, self.weight = (nn.Parameter(torch.ones(())) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Two nodes: a schedule may ask for the gradient of the input alone, and for that of the weight later.
        return _Sleep.apply(x * self.inner, self.seconds, self.seconds) * _Sleep.apply(self.weight, 0, self.seconds)


def _schedule(name: str, rank: int, microbatches: int, unit: float):
    kind = SCHEDULES[name]
    count = RANKS * kind.stages_a_rank
    hidden = torch.empty(1, 1, device="meta", requires_grad=True)
    stages = [
        PipelineStage(
            SleepingStage(unit / kind.stages_a_rank),
            i,
            count,
            torch.device("cpu"),
            input_args=hidden if i else hidden.detach(),
            output_args=hidden,
        )
        for i in range(count)
        if kind.rank_of(i, RANKS) == rank
    ]
    options = {"loss_fn": lambda output, _: output.sum(), "scale_grads": False}
    return get_schedule_class(name)(stages[0] if kind.placement == "single" else stages, microbatches, **options)


def _measure(rank: int, store: str, chosen: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    if rank == 0:
        print(f"{RANKS} ranks, {chosen.microbatches} microbatches, {chosen.milliseconds:g} ms a unit\n")
        print(f"{'schedule':<22} {'stages a rank':>13} {'step, ms':>9} {'bubble':>7} {'formula':>8}")
    for name, units in FORMULAS.items():
        kind = SCHEDULES[name]
        if kind.microbatch_problem(chosen.microbatches, RANKS, RANKS * kind.stages_a_rank):
            continue
        schedule = _schedule(name, rank, chosen.microbatches, chosen.milliseconds / 1000)
        seconds = [_step(schedule, rank, chosen.microbatches) for _ in range(chosen.repeat + 1)][1:]
        if rank == 0:
            step = min(seconds)  # whatever else the machine does only adds
            bubble = 1 - 3 * chosen.microbatches * chosen.milliseconds / 1000 / step
            print(
                f"{name:<22} {kind.stages_a_rank:>13} {1000 * step:>9.0f} {bubble:>7.1%} "
                f"{formula(chosen.microbatches, units):>8.1%}",
                flush=True,
            )
    dist.destroy_process_group()


def _step(schedule, rank: int, microbatches: int) -> float:
    """Seconds from when all ranks are ready to when the last one is done."""
    rows = torch.ones(microbatches, 1)
    dist.barrier()
    start = time.perf_counter()
    schedule.step(*((rows,) if rank == 0 else ()), target=rows, return_outputs=False)
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument(
        "--milliseconds", type=float, default=100, help="one unit; longer hides the machine's own delays"
    )
    parser.add_argument("--repeat", type=int, default=3, help="steps, of which the fastest counts")
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_measure, (os.path.join(folder, "store"), chosen), nprocs=RANKS)


if __name__ == "__main__":
    main()
