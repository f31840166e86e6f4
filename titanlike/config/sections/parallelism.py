"""[parallelism], [comm], [elastic], [fault_tolerance]: how the model is spread and what holds the ranks together."""

# ruff: noqa: RUF012 (pydantic copies a mutable default)

from __future__ import annotations

from typing import Literal

from titanlike.config.sections.base import Degree, Names, NonNegative, Positive, Section


class Parallelism(Section):
    """Degrees of the mesh, outer to inner: pipeline, replicate, shard, context, tensor."""

    data_parallel_replicate_degree: int = 1
    """Copies of the (sharded) model that see different data."""

    data_parallel_shard_degree: int = -1
    """Ranks over which parameters, gradients and optimizer state are sharded; -1 takes all that are left."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters between forward and backward; default does so without pipelining."""

    tensor_parallel_degree: int = 1
    """Ranks over which each layer's matrices are split."""

    enable_sequence_parallel: bool = True
    """With tensor parallelism: split the sequence between the layers' matrices."""

    disable_loss_parallel: bool = False
    """With tensor parallelism: gather logits before the loss."""

    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with the products (needs compile and a GPU)."""

    pipeline_parallel_degree: int = 1
    """Ranks over which the layers are split."""

    module_fqns_per_model_part: list[list[str]] | None = None
    """Modules of each pipeline stage by name; none splits by cost."""

    pipeline_parallel_first_stage_less_layers: NonNegative = 1
    """Layers that the embedding counts for when the split is by cost."""

    pipeline_parallel_last_stage_less_layers: NonNegative = 1
    """Layers that the head counts for when the split is by cost."""

    pipeline_parallel_layers_per_stage: Positive | None = None
    """Layers a stage; gives the number of stages a rank."""

    pipeline_parallel_schedule: str = "1F1B"
    """Order of forwards and backwards: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble,
    DualPipeV."""

    pipeline_parallel_schedule_csv: str | None = ""
    """File with a schedule of one's own."""

    pipeline_parallel_microbatch_size: Positive = 1
    """Sequences of a pipeline microbatch; divides training.local_batch_size."""

    pipeline_parallel_expert_parallel_overlap: bool = True
    """Overlap expert communication with compute (DualPipeV)."""

    context_parallel_degree: int = 1
    """Ranks over which each sequence is split."""

    context_parallel_load_balancer: Literal["headtail", "ptrr"] | None = "headtail"
    """How tokens are dealt so that causal attention costs each rank the same; none deals them in order."""

    context_parallel_rotate_method: Literal["allgather", "alltoall", "ulysses"] = "allgather"
    """How keys and values travel: gathered, around a ring (alltoall), or heads exchanged for tokens (ulysses)."""

    expert_parallel_degree: Degree = 1
    """Ranks over which experts are spread, taken from the shard, context and tensor axes."""

    expert_tensor_parallel_degree: Degree = 1
    """Ranks over which each expert is split: 1 or tensor_parallel_degree."""

    expert_parallel_comm_backend: Literal["standard", "deepep"] = "standard"
    """Kernels that exchange tokens between experts."""


class Comm(Section):
    """Process groups: timeouts and the record of collectives."""

    init_timeout_seconds: Positive = 300
    """Timeout of collectives until the first step of this process is done, seconds."""

    train_timeout_seconds: Positive = 100
    """Timeout afterwards, seconds."""

    trace_buf_size: NonNegative = 20000
    """Collectives that the flight recorder keeps; 0 is off."""

    save_traces_folder: str = "comm_traces"
    """Folder of the flight recorder's dumps, under dump_folder."""

    save_traces_file_prefix: str = "rank_"
    """Beginning of the dumps' file names."""

    mode: Literal["default", "fake_backend", "local_tensor"] = "default"
    """default talks; the others are TorchTitan's dry runs."""


class Elastic(Section):
    """What gives way when the number of ranks changes."""

    enable: bool = False
    """Fit the data-parallel degree to the ranks there are at a restart."""

    min_world: Degree = 1
    """Fewest ranks to go on with."""


class FaultTolerance(Section):
    """TorchTitan's hooks for torchft; replica groups are not built here, restarts are (see [elastic])."""

    enable: bool = False
    """Train with torchft's replica groups."""

    process_group: str = "gloo"
    """Backend between replica groups."""

    process_group_timeout_ms: Positive = 10000
    """Timeout between replica groups, milliseconds."""

    replica_id: NonNegative = 0
    """Number of this replica group."""

    group_size: NonNegative = 0
    """Number of replica groups."""

    min_replica_size: Degree = 1
    """Fewest replica groups to go on with."""

    semi_sync_method: str | None = None
    """local_sgd or diloco."""

    sync_steps: Positive = 5
    """Steps between synchronisations of semi_sync_method."""

    should_quantize: bool = False
    """Quantise what is exchanged."""

    fragment_sync_delay: NonNegative = 0
    """Steps by which a fragment's exchange is delayed."""

    fragment_update_alpha: float = 0.0
    """Weight of the local parameters when a fragment is merged."""

    module_fqns_per_model_fragment: list[Names] = []
    """Modules of each fragment."""

    num_fragments: Positive = 1
    """Fragments that the model is cut into."""
