"""The config: the table of contents of a run."""

# ruff: noqa: RUF012 (pydantic copies a mutable default)

from __future__ import annotations

from titanlike.config.sections.base import Section
from titanlike.config.sections.checkpoint import Checkpoint
from titanlike.config.sections.data import Data, Validation
from titanlike.config.sections.job import Debug, Job
from titanlike.config.sections.memory import ActivationCheckpoint, Compile, Quantize
from titanlike.config.sections.model import Loss, Model
from titanlike.config.sections.observe import Metrics, Profiling
from titanlike.config.sections.parallelism import Comm, Elastic, FaultTolerance, Parallelism
from titanlike.config.sections.rl import Environment, Ppo, Rl, Rollout, WeightSync
from titanlike.config.sections.training import Guard, LRScheduler, Optimizer, Training
from titanlike.config.sections.tuning import Distill, Dpo, Lora, Qat, Reward, Sft


class Config(Section):
    """One run, as its TOML describes it. Frozen; every key has a default."""

    job: Job = Job()
    model: Model = Model()
    data: Data = Data()
    loss: Loss = Loss()
    training: Training = Training()
    optimizer: Optimizer = Optimizer()
    lr_scheduler: LRScheduler = LRScheduler()
    guard: Guard = Guard()
    parallelism: Parallelism = Parallelism()
    elastic: Elastic = Elastic()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    compile: Compile = Compile()
    quantize: Quantize = Quantize()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    metrics: Metrics = Metrics()
    profiling: Profiling = Profiling()
    comm: Comm = Comm()
    debug: Debug = Debug()
    sft: Sft = Sft()
    lora: Lora = Lora()
    dpo: Dpo = Dpo()
    reward: Reward = Reward()
    distill: Distill = Distill()
    qat: Qat = Qat()
    rl: Rl = Rl()
    ppo: Ppo = Ppo()
    rollout: Rollout = Rollout()
    weight_sync: WeightSync = WeightSync()
    environment: list[Environment] = []
    fault_tolerance: FaultTolerance = FaultTolerance()
