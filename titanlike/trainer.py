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
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from titanlike import device as devices
from titanlike.checkpoint.loading import Found
from titanlike.checkpoint.manager import CheckpointManager
from titanlike.checkpoint.origin import check_origin
from titanlike.config import Config, dump_toml
from titanlike.config.derive import batch_layout
from titanlike.converters.activation_checkpoint import autograd_sees_activations
from titanlike.converters.compile import keep_kernels
from titanlike.data.batch import Batch
from titanlike.data.build import build_data
from titanlike.data.consumed import ConsumedLog
from titanlike.data.loader import StepBatch
from titanlike.data.tokenizers import load_tokenizer
from titanlike.launch import worker
from titanlike.launch.faults import fault
from titanlike.launch.signals import StopFlag
from titanlike.launch.status import progress
from titanlike.models import kernels
from titanlike.models.hub.reading import configured_source
from titanlike.models.initial import initial_values
from titanlike.models.spec import title
from titanlike.objectives.base import Objective, objectives
from titanlike.observe.flops import flops_per_token
from titanlike.observe.memory import MemoryParts, peak_memory
from titanlike.observe.metrics import Metrics
from titanlike.observe.profiler import profiling
from titanlike.observe.recompilation import Recompilations
from titanlike.optim.optimizers import build_optimizer
from titanlike.optim.schedule import Schedule
from titanlike.optim.update import build_update
from titanlike.parallel.build import build_model
from titanlike.parallel.fully_shard import DTYPES, check_device
from titanlike.parallel.mesh import Mesh, build_mesh
from titanlike.parallel.model import DistributedModel

logger = logging.getLogger("titanlike")

Outcome = Literal["done", "stopped", "data_ended"]


@dataclass
class Counters:
    """What the run has done since it began; saved with each checkpoint, the same on every rank."""

    step: int = 0
    tokens: int = 0
    trained_tokens: int = 0


@dataclass(frozen=True)
class Totals:
    """Sums over the microbatches of all ranks in one step, known before the first backward."""

    weight: float
    tokens: int
    trained_tokens: int
    stop: bool


def add_up(objective: Objective, microbatches: Iterable[Batch], mesh: Mesh, stop: bool = False) -> Totals:
    """Adds the weights and counts of this rank's microbatches (on the host) up over all ranks, each row once.

    The wish to stop travels along: all ranks learn of a signal to one of them in the same step. It runs on the host's
    own process group, so an accelerator's queue is never waited for.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    for batch in microbatches:
        sums += torch.tensor([objective.weight(batch), batch.token_count(), batch.trained_count(), 0.0])
    sums *= mesh.speaks_for_rows
    sums[3] = stop
    dist.all_reduce(sums)
    weight, tokens, trained, stops = sums.tolist()
    return Totals(weight, int(tokens), int(trained), stops > 0)


def loss_and_gradients(
    model: DistributedModel,
    objective: Objective,
    microbatches: Iterable[Batch],
    weight: float,
    device: torch.device,
    step: int = 0,
) -> torch.Tensor:
    """Forward and backward of a step's microbatches; gradients add up in the parameters.

    `weight` is that of the whole global batch. Returns this rank's loss sum, a float64 scalar on the device.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for batch in microbatches:
        fault("forward", step)
        total += model.forward_backward(batch.to(device), objective, weight, step)
    fault("backward", step)
    model.finish_gradients()
    return total


def mean_loss(loss_sum: torch.Tensor, weight: float, mesh: Mesh) -> float | None:
    """The loss of a whole global batch from the ranks' sums; None if nothing in it is trained on."""
    loss_sum = loss_sum * mesh.speaks_for_loss
    dist.all_reduce(loss_sum)
    return loss_sum.item() / weight if weight else None


def worst(figures: dict[str, float | None]) -> dict[str, float | None]:
    """The largest of each figure over all ranks; None stays None."""
    known = [name for name, value in figures.items() if value is not None]
    largest = torch.tensor([figures[name] for name in known], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return {**figures, **dict(zip(known, largest.tolist(), strict=True))}


class Trainer:
    """A run from its config: builds everything, goes on where a checkpoint left off, trains to the end."""

    def __init__(self, config: Config):
        self.config = config
        self.folder = Path(config.job.dump_folder)
        # Tokenizer and text first: what is wrong with them is said before any process group or model exists.
        tokenizer = load_tokenizer(
            config.model.hf_assets_path,
            revision=config.model.hf_revision,
            bos_token=config.data.bos_token,
            eos_token=config.data.eos_token,
        )
        # A run that goes on at another world keeps its batch and may have to fill it up; the loader refuses that at a
        # fresh start.
        layout = batch_layout(config, worker.world_size(), allow_filler=True)
        self.data = build_data(
            config,
            tokenizer,
            rank=layout.degrees.place(worker.rank()).data,
            degree=layout.dp_degree,
            global_batch=layout.global_batch,
        )
        if config.debug.deterministic:
            devices.make_deterministic(config.debug.deterministic_warn_only)
        self.device = devices.local_device()
        kernels.check(config.model.attention, self.device, DTYPES[config.training.mixed_precision_param])
        check_device(config, self.device)
        keep_kernels(config)
        traces = self.folder / config.comm.save_traces_folder
        devices.record_collectives(config.comm.trace_buf_size, traces / config.comm.save_traces_file_prefix)
        devices.start_process_group(self.device, config.comm.init_timeout_seconds)
        self.mesh = build_mesh(layout, self.device.type)
        self.objective = objectives.get(config.job.recipe, "job.recipe")()
        self.model = build_model(config, self.mesh)
        self.checkpoints = CheckpointManager(
            config.checkpoint,
            self.folder / config.checkpoint.folder,
            config_text=dump_toml(config),
            topology=asdict(layout.degrees) | {"world": dist.get_world_size(), "global_batch": layout.global_batch},
        )
        self.counters = Counters()
        self._warned = False
        found = self.checkpoints.find(config.checkpoint.load_step) if config.checkpoint.enable else None
        self._give_values(found)
        self.last_step = self._last_step()
        self.schedule = Schedule.of(config, self.last_step)
        self.metrics = self._metrics(found)
        self.memory = MemoryParts(
            self.model.parameters,
            lambda: self.optimizer.tensors().values(),
            sees_activations=autograd_sees_activations(config),
        )
        self.recompilations = Recompilations() if config.compile.enable and worker.rank() == 0 else None
        self.consumed = None
        if config.data.log_consumed and worker.rank() == 0:
            self.consumed = ConsumedLog(self.folder, self.data.plan, resume_step=self.counters.step)

    # ---- starting

    def _give_values(self, found: Found | None) -> None:
        """Weights, optimizer state, counters and data position: from a checkpoint, or those of a new run."""
        settings = self.config.checkpoint
        excluded = set(settings.exclude_from_loading)
        weights_come = "model" not in excluded and (found or settings.initial_load_path)
        if settings.initial_load_in_hf and not found:
            source = configured_source(self.config)
        elif weights_come:
            source = None
        else:
            source = initial_values(self.model, self.config.debug.seed)
        self.model.materialise(self.device, source)
        self.optimizer = build_optimizer(self.model, self.config)
        self.update = build_update(self.config, self.model, self.optimizer, self.checkpoints.before_update)
        if found:
            check_origin(found.path, self.config, excluded)
            self._fill(found.path, excluded, lambda tensors: self.checkpoints.load(found, tensors))
            if "train_state" not in excluded:
                self.counters = Counters(**found.state["counters"])
            if "optimizer" not in excluded:
                self.update.load(found.state.get("update", {}))
            if "dataloader" not in excluded:
                self.data.loader.load(found.state["data"], allow_changed=self.config.data.allow_changed)
        elif settings.initial_load_path and not settings.initial_load_in_hf:
            path = settings.initial_load_path
            left = {"optimizer"} if settings.initial_load_model_only else set()
            self._fill(path, left, lambda tensors: self.checkpoints.load_foreign(path, tensors))
        self.model.after_update()
        devices.check_materialised(self.model)

    def _fill(self, path: Path | str, excluded: set[str], load: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Has `load` fill the weights and the optimizer's state, but for what is excluded."""
        weights = {} if "model" in excluded else self.model.tensors()
        if "optimizer" in excluded:
            load(weights)
            return
        with self.optimizer.arriving(lambda: self.checkpoints.shapes(path)) as state:
            load({**weights, **state})

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint holds, by name: weights at the root, as TorchTitan's, and the optimizer's state."""
        return {**self.model.tensors(), **self.optimizer.tensors()}

    def _last_step(self) -> int:
        """training.steps, or the step at which the data ends if that comes first: the schedule ends there too."""
        left = self.data.plan.steps(self.data.loader.position)
        steps = self.config.training.steps
        return steps if left is None else min(steps, self.counters.step + left)

    def _metrics(self, found: Found | None) -> Metrics:
        config, counters, layout = self.config, self.counters, self.mesh.layout
        if worker.rank() == 0:
            self._write_config()
        metrics = Metrics(
            config,
            self.folder,
            rank=worker.rank(),
            resume_step=counters.step,
            world_size=dist.get_world_size(),
            flops_per_token=flops_per_token(self.model.spec, config.training.seq_len),
            device=self.device,
            last_step=self.last_step,
        )
        metrics.banner(
            {
                "run": config.job.description,
                "model": f"{title(config)}, {self.model.spec.parameters():,} parameters",
                "device": f"{dist.get_world_size()} × {devices.device_name(self.device)}",
                "layout": str(layout.degrees),
                "batch": f"{layout.global_batch} sequences of {config.training.seq_len} tokens, "
                f"microbatches a rank: {layout.accumulation}",
                "precision": f"{config.training.mixed_precision_param} over {config.training.dtype}"
                + "".join(f", {name}" for name in config.model.converters),
                "data": self._data_summary(),
                "from": str(found.path) if found else config.checkpoint.initial_load_path or "new weights",
                "output": str(self.folder),
            }
        )
        metrics.event(
            "restart" if found else "start",
            step=counters.step,
            world=dist.get_world_size(),
            position=self.data.loader.position,
            checkpoint=str(found.path) if found else None,
        )
        return metrics

    def _write_config(self) -> None:
        job = self.config.job
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.toml").write_text(dump_toml(self.config))
        if job.save_config_file:
            (self.folder / job.save_config_file).write_text(self.config.model_dump_json(indent=2, by_alias=True))
        if job.print_config:
            logger.info("the resolved config:\n%s", dump_toml(self.config))

    def _data_summary(self) -> str:
        plan, store = self.data.plan, self.data.store
        return (
            f"{store.n_tokens:,} tokens in {store.n_documents:,} documents; {plan.n_sequences_per_epoch:,} sequences "
            f"an epoch, at sequence {self.data.loader.position:,}"
        )

    # ---- training

    def run(self) -> Outcome:
        """Trains until the last step, the end of the data or a stop signal; saves at the end in every case."""
        config, counters = self.config, self.counters
        self._prepare_process()
        first = counters.step + 1
        outcome: Outcome = "done" if self.last_step == config.training.steps else "data_ended"
        with (
            StopFlag() as stop,
            profiling(
                config.profiling,
                self.folder,
                rank=worker.rank(),
                device_type=self.device.type,
                resume_step=counters.step,
            ) as profiler,
        ):
            progress.step = counters.step
            self.metrics.meter.start(counters.step, counters.tokens)
            while counters.step < self.last_step:
                step = progress.step = counters.step + 1
                batch = self._next_batch(step)
                totals = add_up(self.objective, batch.microbatches, self.mesh, stop.raised)
                row = self._train_step(step, batch, totals)
                self._count(step, totals)
                self._report(step, batch, row)
                self._save_when_due(step)
                self._collect_garbage(step)
                profiler.step()
                if step == first:
                    groups = [*self.mesh.groups(), *self.optimizer.groups()]
                    devices.set_timeout(config.comm.train_timeout_seconds, groups)
                if totals.stop:
                    outcome = "stopped"
                    break
            self._finish(outcome)
        return outcome

    def _prepare_process(self) -> None:
        # Collections at moments of their own choosing make ranks wait for each other.
        gc.disable()
        gc.collect()
        gc.freeze()
        torch.autograd.set_detect_anomaly(self.config.debug.detect_anomaly)
        self.model.train()

    def _next_batch(self, step: int) -> StepBatch:
        with self.metrics.meter.waiting_for_data():
            fault("data", step)
            batch = self.data.loader.next_step()
        assert batch is not None, "the data ends after the last step"
        return batch

    def _train_step(self, step: int, batch: StepBatch, totals: Totals) -> dict[str, Any] | None:
        """One update. Returns what the step's row says of it, or None where no row is due."""
        devices.seed_everything(self.config.debug.seed, step)
        rate = self.schedule.apply(self.optimizer, step)
        self.update.before_backward(step)
        with self.memory.forward_backward():
            loss_sum = loss_and_gradients(
                self.model, self.objective, batch.microbatches, max(totals.weight, 1.0), self.device, step
            )
        fault("optimizer", step)
        grad_norm = self.update.after_backward()
        self.model.after_update()
        self.memory.after_update()
        if self.recompilations is not None:
            self.recompilations.report()
        if not self.metrics.due(step):
            return None
        loss = mean_loss(loss_sum, totals.weight, self.mesh)
        return {"loss": loss, "grad_norm": grad_norm.item(), "learning_rate": rate}

    def _count(self, step: int, totals: Totals) -> None:
        self.counters.step = step
        self.counters.tokens += totals.tokens
        self.counters.trained_tokens += totals.trained_tokens

    def _report(self, step: int, batch: StepBatch, row: dict[str, Any] | None) -> None:
        if self.consumed is not None:
            self.consumed.write(step, batch.first, batch.count)
        if row is not None and self.data.validation is not None and self._validates(step):
            with self.metrics.meter.paused("validation"):
                row["validation_loss"] = self.validate(step)
        if row is not None:
            counts = {"tokens": self.counters.tokens, "trained_tokens": self.counters.trained_tokens}
            memory = peak_memory(self.device.type)
            memory = worst({**memory, **self.memory.figures(memory)})
            routing = self.model.routing.figures() if self.model.spec.experts else {}
            self.metrics.log(step, {**row, **counts, **routing, **memory, "epoch": batch.epoch})
            self.memory.say(memory)
            self._warn_of_bad_numbers(step, row)

    def _warn_of_bad_numbers(self, step: int, row: dict[str, Any]) -> None:
        bad = [name for name, value in row.items() if value is not None and not math.isfinite(value)]
        if bad and not self._warned:
            self._warned = True
            logger.warning(
                "step %d: %s not finite. The run goes on, but what it saves from here on is of no use: stop it, and go "
                "on from an earlier checkpoint (checkpoint.load_step) with a lower optimizer.lr or another data order",
                step,
                " and ".join(bad),
            )
            self.metrics.event("nonfinite", step=step, values=bad)

    def _validates(self, step: int) -> bool:
        return step in (1, self.last_step) or step % self.config.validation.freq == 0

    def validate(self, step: int) -> float | None:
        """Mean loss over the trained tokens of the held-out sequences."""
        assert self.data.validation is not None
        fault("validate", step)
        self.model.eval()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        weight = torch.zeros((), dtype=torch.float64)
        for batch in self.data.validation:
            weight += self.objective.weight(batch) * self.mesh.speaks_for_rows
            loss_sum += self.model.loss_sum(batch.to(self.device), self.objective)
        dist.all_reduce(weight)
        self.model.train()
        return mean_loss(loss_sum, weight.item(), self.mesh)

    def _collect_garbage(self, step: int) -> None:
        settings = self.config.training
        if settings.gc_debug or step % settings.gc_freq == 0:
            found = gc.collect() if settings.gc_debug else gc.collect(1)
            if settings.gc_debug:
                logger.info("step %d: garbage collection found %d unreachable objects", step, found)

    # ---- saving

    def _save_when_due(self, step: int) -> None:
        settings = self.config.checkpoint
        if step % settings.interval == 0 or (step == 1 and settings.enable_first_step_checkpoint):
            self._save(final=False)

    def _save(self, *, final: bool) -> None:
        settings = self.config.checkpoint
        if not settings.enable or settings.load_only:
            return
        state = {
            "counters": asdict(self.counters),
            "data": self.data.loader.state(),
            "update": self.update.state(),
        }
        with self.metrics.meter.paused("checkpoint"):
            written = self.checkpoints.save(self.counters.step, self._tensors(), state, final=final)
        if written:
            self.metrics.event("save", step=self.counters.step)

    def _finish(self, outcome: Outcome) -> None:
        """The last save and, if asked for, the export of the weights alone; then everything is closed."""
        if self.counters.step:
            self._save(final=True)
        if outcome != "stopped":
            self._export()
        self.checkpoints.close()
        self.data.close()
        if self.consumed is not None:
            self.consumed.close()
        self.metrics.event("stop", outcome=outcome, step=self.counters.step)
        self.metrics.close()
        logger.info("%s at step %d", {"data_ended": "the data has ended"}.get(outcome, outcome), self.counters.step)

    def _export(self) -> None:
        """What is asked for beside the checkpoints, under exports/."""
        settings, exports, step = self.config.checkpoint, self.folder / "exports", self.counters.step
        dtype = DTYPES[settings.export_dtype]
        if settings.last_save_model_only:
            kept = CheckpointManager(settings, exports, config_text=dump_toml(self.config))
            weights = {name: tensor.to(dtype) for name, tensor in self.model.tensors().items()}
            kept.save(step, weights, {"counters": asdict(self.counters)}, final=True)
            kept.close()
        if settings.last_save_in_hf:
            self.checkpoints.export(step, exports / f"hf-step-{step}", self.config, dtype)
