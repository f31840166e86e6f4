"""Linear layers that multiply in low precision: which ones, and their change of class.

A layer is chosen by its name in the whole model, whatever this rank holds of it, and by the sizes that a rank
multiplies with. Only its product changes: parameters keep names and type, so checkpoints know nothing of it.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from titanlike.config import Config
from titanlike.config.checks_precision import SMALL
from titanlike.errors import ConfigError
from titanlike.models.decoder import Decoder
from titanlike.models.linear import Linear
from titanlike.parallel.tensor import local_features

logger = logging.getLogger("titanlike")

HEAD = "output"  # no linear layer here, and never converted; TorchTitan's configs leave it out by name


class Method(Protocol):
    """A way to multiply; `key` is its table in the config."""

    key: str
    words: str
    multiple: int
    """What both features of a layer must be multiples of."""

    def convert(self, linear: Linear) -> None:
        """Changes the module, which is on the meta device and whole."""

    def check_shards(self, part: Decoder, shards: int) -> None:
        """Refuses what can't be spread over that many shards; the part is split over its other axes."""

    def is_small(self, features: tuple[int, int]) -> bool:
        """Whether a layer with these inputs and outputs would rather lose time."""
        ...


@dataclass(frozen=True)
class LowPrecision:
    """A method, and the names of the layers that it is for; the others by the reason why not."""

    method: Method
    chosen: frozenset[str]
    left: Mapping[str, list[str]]

    def apply(self, part: Decoder) -> None:
        """Converts those of the chosen layers that the part holds; in place, before anything is split."""
        for name, module in part.named_modules():
            if name in self.chosen:
                assert isinstance(module, Linear)
                self.method.convert(module)

    def lines(self) -> list[str]:
        """What is converted and what is not, in words."""
        lines = [f"{self.method.words}: {len(self.chosen)} linear layers: {_in_short(self.chosen)}"]
        return lines + [f"not in {self.method.words}, {why}: {_in_short(names)}" for why, names in self.left.items()]


def low_precision(config: Config, tensor: int) -> LowPrecision | None:
    """What `model.converters` asks for on a tensor axis of that size; None for nothing.

    Raises ConfigError for a filter that matches no layer, and where no layer is left to convert.
    """
    for name in config.model.converters:
        if name == "quantize.linear.float8":
            from titanlike.converters.float8 import Float8

            settings = config.quantize.linear.float8
            return choose(Float8(config), settings.filter_fqns, _whole_model(config), tensor)
        if name == "quantize.linear.mx":
            from titanlike.converters.mx import MX

            settings = config.quantize.linear.mx
            return choose(MX(config), settings.filter_fqns, _whole_model(config), tensor)
    return None


def _whole_model(config: Config) -> Decoder:
    from titanlike.models.spec import decoder_spec

    with torch.device("meta"):
        return Decoder(decoder_spec(config))


def choose(method: Method, filters: Iterable[str], model: Decoder, tensor: int) -> LowPrecision:
    """The method's layers of the whole model, which isn't split yet, on a tensor axis of that size."""
    filters, features = list(filters), local_features(model, tensor)
    _check_filters(method, [f for f in filters if f != SMALL], [*features, HEAD])
    chosen, left = [], defaultdict(list)
    for name, (inputs, outputs) in features.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, Linear)
        if any(part in name for part in filters):
            left[f"by {method.key}.filter_fqns"].append(name)
        elif any(n % method.multiple for n in (inputs, outputs, linear.in_features, linear.out_features)):
            left[f"a size that is no multiple of {method.multiple}"].append(f"{name} ({inputs} → {outputs})")
        elif SMALL in filters and method.is_small((inputs, outputs)):
            left["too small to gain"].append(f"{name} ({inputs} → {outputs})")
        else:
            chosen.append(name)
    if not chosen:
        reasons = "; ".join(f"{why}: {_in_short(names)}" for why, names in left.items())
        raise ConfigError(f"model.converters: {method.key} converts no layer ({reasons})")
    return LowPrecision(method, frozenset(chosen), dict(left))


def _check_filters(method: Method, filters: list[str], names: list[str]) -> None:
    unmatched = [f for f in filters if not any(f in name for name in names)]
    if unmatched:
        there = ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name in names))
        raise ConfigError([f"{method.key}.filter_fqns: {f!r} matches no linear layer ({there})" for f in unmatched])


def _in_short(names: Iterable[str]) -> str:
    """Names with the numbers of layers that are alike put together: layers.0-3,7.attention.wq."""
    numbers: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name in names:
        match = re.fullmatch(r"(.*?\.)(\d+)(\..*)", name)
        if match:
            numbers[match[1], match[3]].append(int(match[2]))
        else:
            numbers[name, ""] = []
    return ", ".join(f"{head}{_runs(found)}{tail}" for (head, tail), found in sorted(numbers.items()))


def _runs(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
