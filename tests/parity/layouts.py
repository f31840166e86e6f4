"""Which layouts are held against one plain process. docs/parallelism.md's table is made from this list.

    python -m tests.parity.layouts        writes the table into the page

Every layout trains on global batches with several documents a row, unequal numbers of trained tokens and a whole
microbatch without any, with a tied head and SGD; under --slow also with AdamW and a head of its own, on plain rows, and
in pairs of axes all combinations of these. Where there is more than one microbatch a rank, it accumulates.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.parity import jobs

STEPS = 5
TINY: dict[str, Any] = {
    "model": {
        "overrides": {
            "dim": 64,
            "n_layers": 3,
            "n_heads": 4,
            "n_kv_heads": 2,
            "head_dim": 16,
            "ffn_dim": 128,
            "vocab_size": 323,  # divides by no number of ranks
        }
    },
    "training": {
        "seq_len": 24,
        "local_batch_size": 2,
        "global_batch_size": jobs.ROWS,
        "steps": STEPS,
        "mixed_precision_param": "float32",
    },
    "optimizer": {"lr": 1e-3},
    "lr_scheduler": {"warmup_steps": 2},
}


def config(**sections: dict[str, Any]) -> dict[str, Any]:
    """TINY with sections laid over; model takes overrides."""
    merged = {name: dict(values) for name, values in TINY.items()}
    for name, values in sections.items():
        if name == "model":
            values = {"overrides": {**TINY["model"]["overrides"], **values}}
        merged.setdefault(name, {}).update(values)
    return merged


def tied(settings: dict[str, Any]) -> dict[str, Any]:
    overrides = {**settings["model"].get("overrides", {}), "tied_head": True}
    return {**settings, "model": {**settings["model"], "overrides": overrides}}


@dataclass(frozen=True)
class Variant:
    """What is trained; the layouts must not change it."""

    masks: str
    tied: bool
    optimizer: str
    weights: float  # bound on the last weights: summation order alone moves AdamW's this far at lr 1e-3


HARD, PLAIN = Variant("uneven", True, "SGD", 1e-5), Variant("even", False, "AdamW", 1e-4)
ALL_VARIANTS = tuple(
    Variant(masks, head, optimizer, 1e-4 if optimizer == "AdamW" else 1e-5)
    for masks, head, optimizer in itertools.product(("even", "uneven"), (False, True), ("AdamW", "SGD"))
)

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
_KEYS = {
    "pipeline": "pipeline_parallel_degree",
    "replicate": "data_parallel_replicate_degree",
    "shard": "data_parallel_shard_degree",
    "context": "context_parallel_degree",
    "tensor": "tensor_parallel_degree",
}
RING, GATHER, ULYSSES = ({"context_parallel_rotate_method": m} for m in ("alltoall", "allgather", "ulysses"))
IN_ORDER = {"context_parallel_load_balancer": None}
FULL = {"activation_checkpoint": {"mode": "full"}}
BY_OPERATOR = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}
COMPILED = {"compile": {"enable": True, "backend": "aot_eager", "components": ["model"]}}
INDUCTOR = {"compile": {"enable": True, "backend": "inductor"}}
WIDE = {"training": {"local_batch_size": 4}}  # all rows of a rank in one microbatch
DEEP = {"model": {"n_layers": 6}}  # enough layers for eight stages


@dataclass(frozen=True)
class Layout:
    """Degrees by axis, and what else is switched on."""

    degrees: dict[str, int]
    parallelism: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    slow: bool = False

    @property
    def world(self) -> int:
        product = 1
        for degree in self.degrees.values():
            product *= degree
        return product

    @property
    def extras(self) -> list[str]:
        """What is switched on besides the degrees, for people."""
        shown = {key: value for key, value in self.parallelism.items() if not key.endswith("microbatch_size")}
        words = [_WORDS.get((key, value), _NAMED.get(key, "{}").format(value)) for key, value in shown.items()]
        if checkpointing := self.sections.get("activation_checkpoint"):
            words.append(
                "checkpointing by operator" if "selective_ac_option" in checkpointing else "full checkpointing"
            )
        if compiled := self.sections.get("compile"):
            words.append(f"compiled ({compiled['backend']})")
        if self.sections.get("training", {}).get("seq_len"):
            words.append("a sequence that doesn't divide")
        return words

    def __str__(self) -> str:
        axes = " × ".join(f"{axis} {self.degrees[axis]}" for axis in AXES if axis in self.degrees)
        return ", ".join([axes, *self.extras])

    def config(self) -> dict[str, Any]:
        degrees = {_KEYS[axis]: degree for axis, degree in self.degrees.items()}
        degrees.setdefault("data_parallel_shard_degree", 1)
        data = self.degrees.get("replicate", 1) * self.degrees.get("shard", 1)
        # Two microbatches a rank; a pipeline cuts each into as many as it has ranks, so it may need all rows at once.
        stages = self.degrees.get("pipeline", 1)
        local = max(stages, jobs.ROWS // data // 2)
        rows = local // stages
        settings = config(parallelism={**degrees, "pipeline_parallel_microbatch_size": rows, **self.parallelism})
        settings["training"]["local_batch_size"] = local
        for name, values in config(**self.sections).items():
            settings.setdefault(name, {}).update({k: v for k, v in values.items() if v != TINY.get(name, {}).get(k)})
        return settings


_WORDS = {
    ("context_parallel_rotate_method", "alltoall"): "ring",
    ("context_parallel_rotate_method", "allgather"): "all-gather",
    ("context_parallel_rotate_method", "ulysses"): "Ulysses",
    ("context_parallel_load_balancer", None): "in order",
    ("enable_sequence_parallel", False): "whole sequences",
    ("disable_loss_parallel", True): "gathered head",
    ("fsdp_reshard_after_forward", "always"): "always resharded",
    ("fsdp_reshard_after_forward", "never"): "never resharded",
}
# Where the value alone doesn't say it.
_NAMED = {
    "expert_parallel_degree": "experts over {}",
    "expert_tensor_parallel_degree": "each over {}",
}


def _of(*, parallelism=None, slow=False, sections=None, **degrees: int) -> Layout:
    return Layout(degrees, parallelism or {}, sections or {}, slow)


def _schedule(name: str) -> dict[str, Any]:
    # One row a microbatch: enough of them for four stages.
    return {"pipeline_parallel_schedule": name, "pipeline_parallel_microbatch_size": 1}


QUICK = (
    # each axis alone
    _of(shard=2),
    _of(replicate=2),
    _of(tensor=2),
    _of(pipeline=2),
    *(_of(context=2, parallelism=method) for method in (RING, GATHER, ULYSSES)),
    # every pair
    _of(replicate=2, shard=2),
    _of(shard=2, tensor=2),
    _of(shard=2, pipeline=2),
    _of(shard=2, context=2, parallelism=RING),
    _of(replicate=2, tensor=2),
    _of(replicate=2, pipeline=2),
    _of(replicate=2, context=2, parallelism=ULYSSES),
    _of(pipeline=2, tensor=2),
    _of(context=2, tensor=2, parallelism=RING),
    _of(pipeline=2, context=2, parallelism=GATHER),
    # three at once
    _of(pipeline=2, context=2, tensor=2, parallelism=RING),
    _of(pipeline=2, shard=2, tensor=2),
    # what else goes with them
    _of(tensor=2, parallelism={"enable_sequence_parallel": False}),
    _of(tensor=2, parallelism={"disable_loss_parallel": True}),
    _of(tensor=4, sections={"training": {"seq_len": 33}}),
    _of(context=2, tensor=2, parallelism=GATHER, sections=FULL),
    # compiled by block
    _of(tensor=2, sections=COMPILED),
    _of(shard=2, tensor=2, sections=COMPILED),
    _of(pipeline=2, tensor=2, sections=COMPILED),
    _of(context=2, tensor=2, parallelism=RING, sections=COMPILED),
    _of(shard=2, context=2, parallelism=GATHER, sections={**COMPILED, **BY_OPERATOR}),
    _of(pipeline=2, context=2, parallelism=ULYSSES, sections=COMPILED),
)
SLOW = (
    *(
        _of(context=4, parallelism={**method, **order})
        for method in (RING, GATHER, ULYSSES)
        for order in ({}, IN_ORDER)
    ),
    _of(shard=4),
    _of(pipeline=4),
    _of(tensor=4),
    _of(pipeline=2, shard=2, context=2, parallelism=RING),
    _of(shard=2, context=2, tensor=2, parallelism=GATHER),
    _of(replicate=2, shard=2, tensor=2),
    _of(replicate=2, shard=2, pipeline=2),
    _of(context=4, tensor=2, parallelism=RING),
    _of(shard=4, tensor=2, parallelism={"fsdp_reshard_after_forward": "never"}),
    _of(pipeline=2, shard=2, tensor=2, parallelism={"fsdp_reshard_after_forward": "always"}),
    _of(pipeline=2, tensor=4),
    _of(pipeline=2, shard=2, context=2, tensor=2, parallelism=RING),
    _of(pipeline=2, replicate=2, shard=2, tensor=2, sections=FULL),
    _of(pipeline=2, context=2, tensor=4, parallelism=GATHER, sections=BY_OPERATOR),
    _of(replicate=2, shard=2, context=2, tensor=2, parallelism=ULYSSES),
    *(
        _of(pipeline=2, shard=2, tensor=2, parallelism=_schedule(name), sections={**DEEP, **FULL, **WIDE})
        for name in ("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    ),
    *(
        _of(pipeline=2, context=2, parallelism={**RING, **_schedule(name)}, sections=DEEP)
        for name in ("GPipe", "Interleaved1F1B", "ZBVZeroBubble")
    ),
    _of(tensor=2, sections=INDUCTOR),
    _of(shard=2, tensor=2, sections=INDUCTOR),
    _of(pipeline=2, tensor=2, sections=INDUCTOR),
    _of(context=2, tensor=2, parallelism=RING, sections=INDUCTOR),
    _of(shard=2, context=2, parallelism=GATHER, sections={**INDUCTOR, **BY_OPERATOR}),
    _of(pipeline=2, context=2, parallelism=ULYSSES, sections=INDUCTOR),
)


# ---- the table in the documentation --------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
BEGIN, END = "<!-- compositions:begin -->", "<!-- compositions:end -->"


def table() -> str:
    """Every layout and when it is tested, then which axes were tested together."""
    lines = ["| layout | processes | with | tested |", "|---|---|---|---|"]
    for layout, when in [*((one, "always") for one in QUICK), *((one, "with `--slow`") for one in SLOW)]:
        axes = " × ".join(f"{axis} {layout.degrees[axis]}" for axis in AXES if axis in layout.degrees)
        lines.append(f"| {axes} | {layout.world} | {', '.join(layout.extras) or '–'} | {when} |")
    lines += ["", "Layouts of that list in which two axes meet:", ""]
    lines += ["| |" + "".join(f" {axis} |" for axis in AXES), "|---|" + "---|" * len(AXES)]
    for one in AXES:
        counts = (sum({one, other} <= set(layout.degrees) for layout in (*QUICK, *SLOW)) for other in AXES)
        lines.append(f"| {one} |" + "".join(f" {count} |" for count in counts))
    return "\n".join(lines)


def between_marks(page: str, text: str) -> str:
    """The page with the text between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def page_with_table(page: str) -> str:
    return between_marks(page, table())


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
