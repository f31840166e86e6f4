"""How a run is seen: one object that the loop tells of its steps.

    metrics = Metrics(config, folder, rank=rank, resume_step=step, world_size=world, flops_per_token=…, device=…)
    metrics.banner({"model": …})
    metrics.meter.start(step, tokens)
    for step in …:
        with metrics.meter.waiting_for_data(): …
        with metrics.meter.paused("validation"): …
        if metrics.due(step):
            metrics.log(step, {"loss": …, "tokens": …, "validation_loss": …})   # the step's one row
        with metrics.meter.paused("checkpoint"): …
    metrics.close()

Every rank makes one and calls it alike; the logging rank alone writes (with `metrics.save_for_all_ranks` the others
write their own TensorBoard and W&B as well). A step has one row, so what is found out about it, its validation too, is
logged together. When steps run again after a resume, what metrics.jsonl and TensorBoard held of them is dropped first.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titanlike.observe.devices import measure_cpu_peak, peak_flops
from titanlike.observe.jsonl import JsonLines, drop_after, scalar
from titanlike.observe.memory import peak_memory
from titanlike.observe.sinks import JsonLinesSink, Sink, Spared, TensorBoardSink, WandbSink, check_installed
from titanlike.observe.throughput import Throughput

if TYPE_CHECKING:
    import torch

    from titanlike.config import Config
    from titanlike.observe.console import ConsoleSink

logger = logging.getLogger("titanlike")


class Metrics:
    """Sends each logged step to the console, metrics.jsonl, TensorBoard and W&B, and events to events.jsonl.

    `resume_step`: steps trained before this process, 0 at a fresh start. `device`: the model's (None: CPU).
    Raises ConfigError when `[metrics]` asks for a package that isn't installed.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        rank: int,
        resume_step: int,
        logging_rank: int = 0,
        world_size: int = 1,
        flops_per_token: int | None = None,
        device: torch.device | None = None,
        last_step: int | None = None,
    ):
        check_installed(config.metrics)
        self._config = config
        self._last_step = last_step or config.training.steps
        self._device_type = device.type if device is not None else "cpu"
        self._console: Spared[ConsoleSink] | None = None
        self._events: JsonLines | None = None
        self._sinks: list[Sink] = []
        self.meter = Throughput(
            world_size=world_size,
            flops_per_token=flops_per_token,
            peak_flops=device_peak(config, device),
            synchronize=_synchronize(device),
        )
        writes = rank == logging_rank
        logged_step = 0
        if writes:
            folder.mkdir(parents=True, exist_ok=True)
            self._events = JsonLines(folder / "events.jsonl")
            logged_step = self._forget_replayed(folder / "metrics.jsonl", resume_step)
            self._sinks.append(JsonLinesSink(folder / "metrics.jsonl"))
            self._console = Spared("the console", self._make_console)
            self._sinks.append(self._console)
        if writes or config.metrics.save_for_all_ranks:
            self._add_views(folder, rank, resume_step, logged_step)

    def due(self, step: int) -> bool:
        """Whether `step` is to be logged: the first, the last, every `log_freq`-th and those with a validation."""
        validation = self._config.validation
        return (
            step in (1, self._last_step)
            or step % self._config.metrics.log_freq == 0
            or (validation.enable and step % validation.freq == 0)
        )

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the row of `step`. Speed, MFU and memory are added here, unless `values` brings its own.

        `values["tokens"]`, the run's count over all ranks, is what speed is told from.
        """
        tokens = scalar(values["tokens"])
        row = {**self.meter.read(step, tokens), **peak_memory(self._device_type), **values}
        for sink in self._sinks:
            sink.log(step, row)

    def event(self, kind: str, **fields: Any) -> None:
        """Appends to events.jsonl: what happened (start, restart, replayed, skip, save, validate, stop, …) and when."""
        if self._events is not None:
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
            self._events.write({"time": now, "kind": kind, **fields})

    def banner(self, rows: Mapping[str, str], *, title: str = "titanlike") -> None:
        """Tells the person at the console what is about to run."""
        if self._console is not None:
            self._console.call(lambda console: console.banner(title, rows))

    def close(self) -> None:
        """Writes out what is held back. May be called twice."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close()
        if self._events is not None:
            self._events.close()
            self._events = None

    def _make_console(self) -> ConsoleSink:
        from titanlike.observe.console import ConsoleSink

        last = self._last_step
        return ConsoleSink(
            last_step=last,
            plain=self._config.metrics.disable_color_printing,
            seconds_left=lambda step: self.meter.seconds_left(step, last),
        )

    def _add_views(self, folder: Path, rank: int, resume_step: int, logged_step: int) -> None:
        settings = self._config.metrics
        mine = f"rank-{rank}" if settings.save_for_all_ranks else ""
        if settings.enable_tensorboard:
            board = folder / settings.save_tb_folder / mine
            self._sinks.append(Spared("TensorBoard", partial(TensorBoardSink, board, resume_step=resume_step)))
        if settings.enable_wandb:
            home = folder / "wandb"
            home.mkdir(parents=True, exist_ok=True)
            make = partial(
                WandbSink,
                folder,
                home / f"run_id{mine and '.' + mine}.txt",
                config=self._config.model_dump(mode="json"),
                resume_step=resume_step,
                logged_step=logged_step,
            )
            self._sinks.append(Spared("W&B", make))

    def _forget_replayed(self, path: Path, resume_step: int) -> int:
        """Drops the rows of steps that will run again; returns the last step that had one.

        At a fresh start there is nothing to go on from: a file of another run is kept under another name.
        """
        if resume_step == 0:
            if path.exists() and path.stat().st_size:
                stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
                aside = path.with_name(f"metrics-until-{stamp}.jsonl")
                os.replace(path, aside)
                logger.info("the metrics of an earlier run in this folder are now in %s", aside)
                self.event("set_aside", file=aside.name)
            return 0
        dropped = drop_after(path, resume_step)
        if dropped.lines or dropped.damaged:
            self.event(
                "replayed",
                step=resume_step,
                last_logged_step=dropped.last_step,
                dropped_lines=dropped.lines,
                damaged_lines=dropped.damaged,
            )
            logger.info(
                "steps %d to %d run again; their rows were dropped from %s",
                resume_step + 1,
                dropped.last_step,
                path.name,
            )
        return dropped.last_step


def device_peak(config: Config, device: torch.device | None) -> float | None:
    """Peak FLOP/s of `device` in the dtype that the model multiplies in; None where it isn't known.

    On a CPU it is measured, if `metrics.measure_cpu_peak` asks for it.
    """
    dtype = config.training.mixed_precision_param
    if device is None or device.type == "cpu":
        if not config.metrics.measure_cpu_peak:
            return None
        import torch

        return measure_cpu_peak(getattr(torch, dtype))
    if device.type == "cuda":
        import torch

        return peak_flops(torch.cuda.get_device_name(device), dtype)
    return None


def _synchronize(device: torch.device | None):
    if device is None or device.type == "cpu":
        return None
    import torch

    return partial(torch.accelerator.synchronize, device)
