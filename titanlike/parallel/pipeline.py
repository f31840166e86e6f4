"""Pipeline parallelism: a microbatch's hidden states travel from stage to stage, its gradients back.

The trainer hands over its local batch; it is cut by rows into the schedule's microbatches. torch's schedules split
tensors, but a microbatch has document offsets too, whose number differs; so a schedule is given nothing but the
microbatches' numbers, by which each stage looks up what it needs:

    schedule.step(numbers)   →   stage 0: tokens, positions, offsets   →  hidden  →   stage 1: positions, offsets  → …
                                                                          → last stage: positions, offsets, labels

The last stage's head turns hidden states into log-probabilities, so that no logits travel or stay. Gradients are summed
over microbatches: each loss is already divided by the weight of the whole global batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor

from titanlike import device as devices
from titanlike.config import Config
from titanlike.data.batch import Batch
from titanlike.errors import ConfigError
from titanlike.models.decoder import Decoder
from titanlike.objectives.base import Objective
from titanlike.parallel.fully_shard import DTYPES
from titanlike.parallel.mesh import Mesh
from titanlike.parallel.stages import StagePlan


class Pipeline:
    """One rank's stages of a pipeline: `parts` are the modules of `plan.of_rank(this rank)`, in the same order.

    `cut` takes a microbatch of whole rows to what this rank computes of it (with context parallelism, some columns);
    it must leave positions right for that.
    """

    def __init__(
        self,
        parts: list[Decoder],
        plan: StagePlan,
        mesh: Mesh,
        config: Config,
        *,
        cut: Callable[[Batch], Batch] | None = None,
    ):
        assert mesh.pipeline is not None
        self._parts, self._plan, self._mesh, self._config = parts, plan, mesh, config
        self._group = mesh.pipeline
        self._stages = plan.of_rank(mesh.place.pipeline)
        self._cut = cut or (lambda batch: batch)
        self._device = devices.local_device()
        self._dtype = DTYPES[config.training.mixed_precision_param]
        self._schedules: dict[tuple[int, int], schedules.PipelineScheduleSingle | schedules.PipelineScheduleMulti] = {}
        self._call: _Call | None = None
        for part in parts:
            # Before full sharding's own hook, which would move the microbatch's number to the device.
            part.register_forward_pre_hook(self._look_up, prepend=True, with_kwargs=True)

    # ---- training

    def forward_backward(self, batch: Batch, objective: Objective, weight: float) -> torch.Tensor:
        """Adds up the gradients of loss / weight over all rows of a local batch.

        Returns the loss sum on the rank of the last stage, zero on the others; float64, a scalar on the device.
        """
        call = self._call = _Call(self._microbatches(batch), objective, weight, self._device)
        numbers = torch.arange(len(call.microbatches))
        first = (numbers,) if self._stages[0].part.first else ()
        self._schedule(batch).step(*first, target=numbers, return_outputs=False, microbatch=numbers)
        self._call = None
        return call.loss_sum

    def _microbatches(self, batch: Batch) -> list[Batch]:
        rows = self._config.parallelism.pipeline_parallel_microbatch_size
        starts = range(0, len(batch.tokens), rows)
        return [self._cut(batch.rows(start, rows).to(self._device)) for start in starts]

    def _look_up(self, part: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Forward pre-hook: in place of a microbatch's number, what the part takes of it."""
        if "microbatch" not in kwargs:
            return None
        assert self._call is not None and isinstance(part, Decoder)
        batch = self._call.microbatches[int(kwargs["microbatch"])]
        inputs = (batch.tokens,) if part.part.first else args
        return inputs, _arguments(part, batch, self._call.objective)

    def _loss(self, log_probs: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        assert self._call is not None
        return self._call.loss(log_probs, int(number))

    def _schedule(self, batch: Batch):
        rows, length = batch.tokens.shape
        if (rows, length) not in self._schedules:
            self._schedules[rows, length] = self._build_schedule(rows, length)
        return self._schedules[rows, length]

    def _build_schedule(self, rows: int, length: int):
        """Torch's schedule over this rank's stages. All shapes are given, so that it needs to try nothing out."""
        micro = self._config.parallelism.pipeline_parallel_microbatch_size
        hidden = torch.empty(self._hidden_shape(micro, length), dtype=self._dtype, device="meta", requires_grad=True)
        number = torch.empty(1, dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = [
            PipelineStage(
                part,
                stage.index,
                len(self._plan.stages),
                self._device,
                input_args=number if part.part.first else hidden,
                output_args=loss if part.part.last else hidden,
                group=self._group,
            )
            for part, stage in zip(self._parts, self._stages, strict=True)
        ]
        options = {"loss_fn": self._loss, "scale_grads": False}
        if self._plan.table:
            schedule = _table_class()(stages, rows // micro, **options)
            schedule._load_csv(self._plan.table.path)
            return schedule
        kind = schedules.get_schedule_class(self._plan.schedule)
        of_one = issubclass(kind, schedules.PipelineScheduleSingle)
        return kind(stages[0] if of_one else stages, rows // micro, **options)

    def _hidden_shape(self, rows: int, length: int) -> tuple[int, int, int]:
        """What travels between stages of microbatches with rows of `length` tokens."""
        degrees = self._mesh.degrees
        length //= degrees.context
        if self._config.parallelism.enable_sequence_parallel:
            length = -(-length // degrees.tensor)
        return rows, length, self._parts[0].spec.dim

    # ---- evaluation

    @torch.no_grad()
    def loss_sum(self, batch: Batch, objective: Objective) -> torch.Tensor:
        """The loss sum of a batch of any size, without gradients; zero where the last stage isn't.

        A loop of its own: torch's evaluation fails where two neighbouring stages are on one rank. Each rank takes all
        microbatches through one stage before the next one.
        """
        call = _Call(self._microbatches(batch), objective, 1.0, self._device)
        handed: dict[int, torch.Tensor] = {}
        sends: list[tuple[dist.Work | None, torch.Tensor]] = []
        for part, stage in zip(self._parts, self._stages, strict=True):
            before, after = self._rank_of(stage.index - 1), self._rank_of(stage.index + 1)
            held = []
            for number, microbatch in enumerate(call.microbatches):
                if before is None:
                    inputs = microbatch.tokens
                elif before == stage.rank:
                    inputs = handed.pop(number)
                else:
                    inputs = self._receive(before, len(microbatch.tokens), batch.tokens.shape[1])
                output = part(inputs, **_arguments(part, microbatch, objective))
                if after is None:
                    call.loss(output, number)
                elif after == stage.rank:
                    handed[number] = output
                elif after == before:
                    # One channel both ways: its two ends must use it in one order, and the other end receives only
                    # when it has sent everything.
                    held.append(output)
                else:
                    sends.append(self._send(output, after))
            sends += [self._send(output, after) for output in held if after is not None]
        for work, _ in sends:
            if work is not None:
                work.wait()
        return call.loss_sum

    def _rank_of(self, stage: int) -> int | None:
        return self._plan.stages[stage].rank if 0 <= stage < len(self._plan.stages) else None

    def _receive(self, rank: int, rows: int, length: int) -> torch.Tensor:
        hidden = torch.empty(self._hidden_shape(rows, length), dtype=self._dtype, device=self._device)
        dist.recv(hidden, group=self._group, group_src=rank)
        return hidden

    def _send(self, hidden: torch.Tensor, rank: int) -> tuple[dist.Work | None, torch.Tensor]:
        """Starts sending; the tensor must live until the work is done."""
        hidden = hidden.contiguous()
        return dist.isend(hidden, group=self._group, group_dst=rank), hidden

    # ---- gradients and weights of a step

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Once all local batches of a step are through: adds up the gradients of what two stages hold."""
        missing = [
            f"{name} (stage {stage.index})"
            for part, stage in zip(self._parts, self._stages, strict=True)
            for name, parameter in part.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ]
        assert not missing, f"the pipeline's schedule left these without a gradient: {missing}"
        if not self._is_tied:
            return
        if followers := self.followers:
            (follower,) = followers
            _local(self._embeddings[0].grad).add_(_local(follower.grad))
            follower.grad = None
        elif self._embeddings:
            self._add_other_end(_local(self._embeddings[0].grad))

    def _add_other_end(self, grad: torch.Tensor) -> None:
        """grad += the same of the other end of the pipeline. A sum of two: bit-equal at both ends."""
        if not grad.numel():
            return
        ends = {self._plan.stages[0].rank, self._plan.stages[-1].rank}
        (other,) = ends - {self._stages[0].rank}
        theirs = torch.empty_like(grad)
        exchange = [
            dist.P2POp(dist.isend, grad.clone(), group=self._group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        grad.add_(theirs)

    @torch.no_grad()
    def after_update(self) -> None:
        """Once the weights have changed, by an update or by loading: followers are set to what they follow."""
        for follower in self.followers:
            _local(follower).copy_(_local(self._embeddings[0]))

    @property
    def _is_tied(self) -> bool:
        return self._parts[0].spec.tied_head

    @property
    def _embeddings(self) -> list[nn.Parameter]:
        """This rank's embeddings, the first stage's before the last's. Asked for anew: materialising replaces them."""
        spec = self._parts[0].spec
        return [part.get_parameter("tok_embeddings.weight") for part in self._parts if part.part.holds_embedding(spec)]

    @property
    def copies(self) -> set[nn.Parameter]:
        """Parameters that the first stage holds too: the last one's tied embedding. Norms count them there."""
        tied = self._is_tied and self._stages[-1].part.last
        return {self._embeddings[-1]} if tied else set()

    @property
    def followers(self) -> set[nn.Parameter]:
        """Copies on the same rank as what they are copies of: they have no optimizer and aren't saved."""
        return self.copies if self._stages[0].part.first else set()


class _Call:
    """One local batch on its way: its microbatches, and what is known of the loss so far."""

    def __init__(self, microbatches: list[Batch], objective: Objective, weight: float, device: torch.device):
        self.microbatches, self.objective, self.weight = microbatches, objective, weight
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)

    def loss(self, log_probs: torch.Tensor, number: int) -> torch.Tensor:
        """What microbatch `number` adds to the loss of the whole global batch."""
        loss = self.objective.loss(log_probs, self.microbatches[number])
        self.loss_sum += loss.detach()
        return loss / self.weight


def _arguments(part: Decoder, batch: Batch, objective: Objective) -> dict:
    """What a stage takes besides its inputs."""
    # Positions always: where sequences are split, a stage can't see from hidden states how long its rows are.
    arguments = {"positions": batch.positions, "offsets": batch.offsets, "dropout_keys": batch.dropout_keys}
    if part.part.last:
        arguments |= {"labels": batch.labels, "reduction": objective.reduction}
    return arguments


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _table_class():
    """Torch's runner of schedules of one's own, which has no public name."""
    if found := getattr(schedules, "_PipelineScheduleRuntime", None):
        return found
    raise ConfigError(
        f"parallelism.pipeline_parallel_schedule_csv: torch {torch.__version__} has lost what runs a schedule from a "
        "file; take one of its own schedules"
    )
