"""Which of the Hub's tensors a parameter of the decoder is made of. Imports no torch.

Two things differ besides names. The decoder rotates neighbouring elements of a head, the Hub's models element i with
i + D/2: rows of query and key projections are reordered (`Turn`). Experts are one stacked tensor here, and on the Hub
one matrix each, or, as transformers 5 may write them, stacked with gate and up projection in one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from titanlike.models.hub.form import STACKED, HubForm
from titanlike.models.spec import DecoderSpec

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Turn:
    """Rows come in units of `unit`, of which the last `turned` are rotated in pairs."""

    unit: int
    turned: int


@dataclass(frozen=True)
class Part:
    """Share `index` of `count` equal ones along dimension 1 of a stacked tensor."""

    name: str
    index: int = 0
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a parameter is made of: one tensor of the Hub, or one for each of its entries along dimension 0.

    `stacked` is the other form of the latter.
    """

    names: tuple[str, ...]
    turn: Turn | None = None
    stacked: Part | None = None


def origins(form: HubForm, spec: DecoderSpec, parameters: Iterable[str]) -> dict[str, Origin]:
    """Of each of these parameters, by its name."""
    names = form.all_names()
    return {name: _origin(names, spec, name) for name in parameters}


def _origin(names: dict[str, str], spec: DecoderSpec, parameter: str) -> Origin:
    layer = _NUMBER.search(parameter)
    number = layer[0] if layer else ""
    pattern = _NUMBER.sub("{}", parameter, count=1)
    if pattern in names:  # without ".weight": stacked experts, or a tensor of its own
        name = names[pattern]
        if name.count("{}") < 2:
            return Origin(names=(name.format(number),))
        assert spec.experts is not None
        stacked, index, count = STACKED[parameter.rpartition(".")[2]]
        each = tuple(name.format(number, expert) for expert in range(spec.experts.n_experts))
        return Origin(names=each, stacked=Part(stacked.format(number), index, count))
    prefix, _, kind = pattern.rpartition(".")
    assert prefix in names, f"{parameter} has no name on the Hub"
    return Origin(names=(f"{names[prefix].format(number)}.{kind}",), turn=_turn(spec, prefix))


def _turn(spec: DecoderSpec, pattern: str) -> Turn | None:
    """Latent attention's published weights pair neighbours already."""
    if spec.latent is None and pattern.endswith((".wq", ".wk", ".q_norm", ".k_norm")):
        return Turn(spec.head_dim, spec.head_dim)
    return None
