"""[activation_checkpoint], [compile], [quantize.*]: what makes a step fit and fly."""

# ruff: noqa: RUF012 (pydantic copies a mutable default)

from __future__ import annotations

from typing import Literal

from titanlike.config.sections.base import Fraction, Names, Section, Word


class ActivationCheckpoint(Section):
    """Recomputing activations in backward instead of keeping them."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "none"
    """none keeps all; full recomputes each block; selective some; memory_budget lets the compiler choose."""

    selective_ac_option: Word = "2"
    """For selective: "op" keeps the results of costly operators, a number n recomputes every n-th block."""

    per_op_sac_force_recompute_mm_shapes_by_fqns: Names = ["moe.router.gate"]
    """For selective by op: linear layers, by part of the name, whose products (all of that shape) are recomputed."""

    early_stop: bool = False
    """Stop the recomputation once all that backward needs is there."""

    memory_budget: Fraction = 0.5
    """For memory_budget: share of the activations to keep."""

    visualize_memory_budget_pareto: bool = False
    """For memory_budget: write a picture of the trade-off to memory_budget/ in dump_folder (needs matplotlib)."""

    preserve_rng_state: bool = True
    """Give the recomputation the random state of the first forward."""

    determinism_check: str = "default"
    """How torch compares the recomputed tensors' shapes with the first ones: default or none."""

    debug: bool = False
    """Log what the recomputation does differently."""


class Compile(Section):
    """torch.compile, block by block."""

    enable: bool = False
    """Compile the components."""

    components: list[Literal["model", "loss", "optimizer"]] = ["model", "loss"]
    """What is compiled. optimizer: the 8-bit, 4-bit and float8 AdamW's, on the CPU too (elsewhere they always are)."""

    backend: str = "inductor"
    """torch.compile's backend."""

    cache_folder: str | None = None
    """Folder of compiled kernels for restarts; none takes TORCHINDUCTOR_CACHE_DIR, else one in dump_folder."""


class Float8Linear(Section):
    """[quantize.linear.float8]: linear layers in 8-bit floating point (torchao)."""

    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """How values are scaled; none is tensorwise."""

    enable_fsdp_float8_all_gather: bool = False
    """Gather weights in 8 bits (tensorwise); the shards must divide each weight's rows."""

    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Take the scales of weights that are gathered in 8 bits at once after the update, not one by one."""

    filter_fqns: Names = []
    """Linear layers to leave out, by part of the name; auto_filter_small_kn leaves out those too small to gain."""

    emulate: bool = False
    """Compute in higher precision with rounded values, on hardware without float8."""


class MXLinear(Section):
    """[quantize.linear.mx]: linear layers in microscaled formats (torchao)."""

    recipe_name: str = "mxfp8_cublas"
    """Format and kernel: mxfp8_cublas, mxfp8_cublas_rceil (scales rounded up) or mxfp8_emulated (any device)."""

    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = "triton"
    """Kernel of the cast along the inner dimension."""

    filter_fqns: Names = ["output"]
    """Linear layers to leave out, by part of the name."""


class LinearQuantize(Section):
    """[quantize.linear]: linear layers in low precision."""

    float8: Float8Linear = Float8Linear()
    """8-bit floating point; used where model.converters names quantize.linear.float8."""

    mx: MXLinear = MXLinear()
    """Microscaled formats; used where model.converters names quantize.linear.mx."""


class Float8GroupedMM(Section):
    """[quantize.grouped_mm.float8]: experts in 8-bit floating point."""

    fqns: Names = []
    """Expert layers to convert, by part of the name."""


class MXGroupedMM(Section):
    """[quantize.grouped_mm.mx]: experts in microscaled formats."""

    recipe_name: Literal["mxfp8"] = "mxfp8"
    """Format."""

    fqns: Names = []
    """Expert layers to convert, by part of the name."""


class GroupedQuantize(Section):
    """[quantize.grouped_mm]: grouped products of experts in low precision."""

    float8: Float8GroupedMM = Float8GroupedMM()
    """8-bit floating point; used where model.converters names quantize.grouped_mm.float8."""

    mx: MXGroupedMM = MXGroupedMM()
    """Microscaled formats; used where model.converters names quantize.grouped_mm.mx."""


class Quantize(Section):
    """[quantize]: low precision by converter."""

    linear: LinearQuantize = LinearQuantize()
    """Linear layers."""

    grouped_mm: GroupedQuantize = GroupedQuantize()
    """Grouped products of experts."""
