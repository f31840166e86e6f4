"""Which optimizer, precision, memory technique and layout go together. docs/performance.md's table is made from this.

    python -m tests.parity.compositions        writes the table into the page

Every pair of choices is in some row of a covering array, or is refused by name when the config is read. Rows are found
greedily (Cohen et al. 1997, "The AETG system"): each takes the candidate that covers most of what is left.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.parity import jobs
from tests.parity.layouts import BY_OPERATOR, FULL, between_marks, config
from titanlike.config import Config
from titanlike.config.checks import find_problems

STEPS = 3
Sections = dict[str, dict[str, Any]]


def _optimizer(name: str, **others: Any) -> Sections:
    return {"optimizer": {"name": name, **others}}


def _float8(recipe: str) -> Sections:
    return {
        "model": {"converters": ["quantize.linear.float8"]},
        "quantize": {"linear": {"float8": {"recipe_name": recipe, "emulate": True}}},
        "training": {"mixed_precision_param": "bfloat16"},
    }


OPTIMIZERS: dict[str, Sections] = {
    "AdamW": {},
    "AdamW, bf16 state": _optimizer("AdamW", state_dtype="bfloat16"),
    "AdamW, compiled": {"compile": {"enable": True, "components": ["optimizer"], "backend": "aot_eager"}},
    "SGD": _optimizer("SGD", momentum=0.9),
    "Muon": _optimizer("Muon"),
    "AdamW8bit": _optimizer("AdamW8bit"),
    "AdamW4bit": _optimizer("AdamW4bit"),
    "AdamWFp8": _optimizer("AdamWFp8"),
}
PRECISIONS: dict[str, Sections] = {
    "fp32": {},
    "bf16": {"training": {"mixed_precision_param": "bfloat16"}},
    "bf16 weights, stochastic rounding": {
        "training": {"dtype": "bfloat16", "mixed_precision_param": "bfloat16"},
        "optimizer": {"stochastic_rounding": True},
    },
    "float8 tensorwise": _float8("tensorwise"),
    "float8 rowwise": _float8("rowwise"),
    "MXFP8": {
        "model": {"converters": ["quantize.linear.mx"]},
        "quantize": {"linear": {"mx": {"recipe_name": "mxfp8_emulated", "filter_fqns": []}}},
        "training": {"mixed_precision_param": "bfloat16"},
    },
}
MEMORY: dict[str, Sections] = {
    "all kept": {},
    "full logits": {"loss": {"implementation": "logits"}},
    "full checkpointing": FULL,
    "every second block": {"activation_checkpoint": {"mode": "selective"}},
    "by operator": BY_OPERATOR,
    "memory budget": {
        "activation_checkpoint": {"mode": "memory_budget"},
        "compile": {"enable": True, "components": ["model"], "backend": "aot_eager_decomp_partition"},
    },
    "update in backward": {"optimizer": {"in_backward": True}},
}
LAYOUTS: dict[str, Sections] = {
    "one process": {},
    "dp 2": {"parallelism": {"data_parallel_shard_degree": 2}},
    "tp 2": {"parallelism": {"tensor_parallel_degree": 2}},
    "pp 2": {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 4}},
    "cp 2": {"parallelism": {"context_parallel_degree": 2}},
}
AXES = (OPTIMIZERS, PRECISIONS, MEMORY, LAYOUTS)


def _merged(into: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Tables key by key; of lists, the union."""
    result = dict(into)
    for key, value in over.items():
        if isinstance(value, dict):
            value = _merged(result.get(key, {}), value)
        elif isinstance(value, list):
            value = [*result.get(key, []), *value]
        result[key] = value
    return result


class Row(NamedTuple):
    """One choice of each axis."""

    optimizer: str
    precision: str
    memory: str
    layout: str

    def __str__(self) -> str:
        return " | ".join(self)

    @property
    def world(self) -> int:
        return 1 if self.layout == "one process" else 2

    @property
    def slow(self) -> int:
        """How many of its choices take the compiler long."""
        return len({"AdamW, compiled", "memory budget", "MXFP8"} & set(self))

    @property
    def settings(self) -> dict[str, Any]:
        settings = config(
            model={"n_layers": 2},  # compiled updates take a while for each parameter
            training={"steps": STEPS, "max_norm": 0.0, "local_batch_size": jobs.ROWS},
            optimizer={"eps": 1e-3},  # about a gradient's size: else the signs of tiny ones are most of a first update
        )
        settings["parallelism"] = {"data_parallel_shard_degree": 1}
        if self.layout == "dp 2":
            settings["training"]["local_batch_size"] //= 2
        for choices, chosen in zip(AXES, self, strict=True):
            settings = _merged(settings, choices[chosen])
        return settings

    @property
    def yardstick(self) -> Row:
        """The same numbers on one process, with nothing done for memory."""
        return self._replace(memory="all kept", layout="one process")


@cache
def refusal(row: Row) -> str:
    """What is said of it when the config is read; empty if it goes together."""
    return "; ".join(problem.text for problem in find_problems(Config.model_validate(row.settings), row.world))


def pairs(row: Row) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    """The pairs of choices in a row, each choice with its axis."""
    return set(itertools.combinations(enumerate(row), 2))


def everything() -> list[Row]:
    return [Row(*choices) for choices in itertools.product(*AXES)]


@cache
def covering() -> tuple[Row, ...]:
    """Rows that go together, with every pair that any of them has."""
    possible = [row for row in everything() if not refusal(row)]
    left = set().union(*(pairs(row) for row in possible))
    chosen = []
    while left:
        best = max(possible, key=lambda row: (len(pairs(row) & left), row != row.yardstick, -row.slow, row.world))
        chosen.append(best)
        left -= pairs(best)
    return tuple(chosen)


def refused() -> dict[tuple[str, str], str]:
    """Pairs that no row has, and what is said of them with the plainest of all else."""
    covered = set().union(*(pairs(row) for row in covering()))
    plainest = Row(*(next(iter(choices)) for choices in AXES))
    found = {}
    for (i, one), (j, other) in sorted(set().union(*(pairs(row) for row in everything())) - covered):
        fields = {Row._fields[i]: one, Row._fields[j]: other}
        found[one, other] = refusal(plainest._replace(**fields))
    return found


# ---- the table in the documentation --------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def table() -> str:
    """How often each choice meets each other one in the tests, then what is refused."""
    met: dict[tuple[str, str], int] = {}
    for row in covering():
        for (_, one), (_, other) in pairs(row):
            met[one, other] = met[other, one] = met.get((one, other), 0) + 1
    rows = [name for choices in AXES[:-1] for name in choices]
    columns = [name for choices in AXES[1:] for name in choices]
    lines = ["| |" + "".join(f" {name} |" for name in columns), "|---|" + "---|" * len(columns)]
    axis = {name: i for i, choices in enumerate(AXES) for name in choices}
    for one in rows:
        cells = ("" if axis[other] <= axis[one] else met.get((one, other), "refused") for other in columns)
        lines.append(f"| {one} |" + "".join(f" {cell} |" for cell in cells))
    if refused():
        lines += ["", "Refused when the config is read:", ""]
        lines += [f"- {one} with {other}: `{text}`" for (one, other), text in refused().items()]
    return "\n".join(lines)


def page_with_table(page: str) -> str:
    return between_marks(page, table())


if __name__ == "__main__":
    PAGE.write_text(page_with_table(PAGE.read_text()))
