"""The learning rate as a function of the step: warm-up, stable phase, decay.

Stateless, so that a resumed run can't differ: nothing is saved, nothing is read back from parameter groups. Steps count
from 1. Warm-up climbs by an equal part each step and reaches the peak exactly; the decay starts at the peak and takes
its last step before it would reach the minimum, so that no step of the run is wasted at zero.

    steps 10, warm-up 4, decay_ratio 0.4, linear:  .25 .5 .75 1 1 1 1 .75 .5 .25
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from titanlike.config import Config
from titanlike.optim.sharded import ShardedOptimizer, set_rate

_CURVES = {
    "linear": lambda x: 1 - x,
    "sqrt": lambda x: 1 - math.sqrt(x),
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
}


@dataclass(frozen=True)
class Schedule:
    """Factor on each group's peak learning rate, by step."""

    warmup: int
    decay: int
    total: int
    curve: str
    minimum: float

    @staticmethod
    def of(config: Config, last_step: int | None = None) -> Schedule:
        """The schedule of `[lr_scheduler]`; `last_step` where the run ends before training.steps, as the data does."""
        settings = config.lr_scheduler
        total = settings.total_steps or last_step or config.training.steps
        warmup = min(settings.warmup_steps, total)
        share = settings.decay_ratio
        decay = total - warmup if share is None else min(round(total * share), total - warmup)
        return Schedule(warmup, decay, total, settings.decay_type, settings.min_lr_factor)

    def factor(self, step: int) -> float:
        """Factor for a step (from 1): within [minimum, 1] after the warm-up, the minimum beyond the total."""
        if step <= self.warmup:
            return step / self.warmup
        if step > self.total:
            return self.minimum if self.decay else 1.0
        into = step - (self.total - self.decay) - 1
        if into <= 0 or self.decay == 0:
            return 1.0
        return self.minimum + (1 - self.minimum) * _CURVES[self.curve](into / self.decay)

    def apply(self, optimizer: ShardedOptimizer, step: int) -> float:
        """Sets the rates that the step uses; returns that of the first group."""
        factor = self.factor(step)
        for group in optimizer.param_groups:
            set_rate(group, group["peak_lr"] * factor)
        return optimizer.param_groups[0]["peak_lr"] * factor
