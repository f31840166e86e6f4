"""A model's values from the Hub's form: each rank reads the bytes of its own shards and no others.

Before anything is read every tensor is accounted for: one that is missing, not known, or of another shape is an error
by its name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from titanlike.config import Config, assets
from titanlike.errors import CheckpointError
from titanlike.models.decoder import parameter_shapes
from titanlike.models.hub.config_json import HubConfig
from titanlike.models.hub.form import HubForm
from titanlike.models.hub.names import Origin, Turn, origins
from titanlike.models.hub.quantised import blocks_of
from titanlike.models.hub.start import place_and_key, starting_model
from titanlike.models.hub.tensors import Box, HubTensors, some
from titanlike.models.initial import Shard, Source
from titanlike.models.spec import DecoderSpec

logger = logging.getLogger("titanlike")

# Tables that older files hold although they follow from config.json.
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")


def hub_source(folder: Path, form: HubForm, spec: DecoderSpec, shapes: Mapping[str, torch.Size]) -> Source:
    """What reads a model's shards from a folder; `shapes` are those of all parameters of the whole model.

    Raises CheckpointError unless the folder holds exactly this model.
    """
    config = HubConfig.of_folder(folder)
    tensors = HubTensors(folder, blocks_of(config))
    wanted = origins(form, spec, shapes)
    _check(tensors, spec, wanted, shapes, further=config.get("num_nextn_predict_layers", 0))

    return lambda shard: read_origin(tensors, wanted[shard.name], shard)


def read_origin(tensors: HubTensors, origin: Origin, shard: Shard) -> torch.Tensor:
    """A parameter's shard from what it is made of."""
    box = tuple(slice(a, a + n) for a, n in zip(shard.start, shard.local.shape, strict=True))
    if len(origin.names) > 1:
        return _read_stacked(tensors, origin, box)
    return read_turned(lambda box: tensors.read(origin.names[0], box), shard.shape, box, origin.turn)


def configured_source(config: Config) -> Source:
    """What a run with checkpoint.initial_load_in_hf starts from.

    Raises ConfigError as `starting_model`, CheckpointError as `hub_source`.
    """
    place, key = place_and_key(config)
    folder = assets.local_folder(place, config.model.hf_revision, weights=True, key=key)
    assets.say_what_is_never_run(folder)
    form, spec = starting_model(config, folder)
    return hub_source(folder, form, spec, parameter_shapes(spec))


def _read_stacked(tensors: HubTensors, origin: Origin, box: Box) -> torch.Tensor:
    entries, *inner = box
    if origin.names[0] in tensors.names():
        return torch.stack([tensors.read(name, tuple(inner)) for name in origin.names[entries]])
    part = origin.stacked
    assert part is not None
    share = tensors.shape(part.name)[1] // part.count
    rows = slice(inner[0].start + part.index * share, inner[0].stop + part.index * share)
    return tensors.read(part.name, (entries, rows, *inner[1:]))


def read_turned(read: Callable[[Box], torch.Tensor], shape: torch.Size, box: Box, turn: Turn | None) -> torch.Tensor:
    """A box of rows whose order is the decoder's, read from where it is the Hub's; whole units are read."""
    if turn is None:
        return read(box)
    rows, *columns = box
    unit = turn.unit
    first, last = rows.start // unit * unit, min(-(-rows.stop // unit) * unit, shape[0])
    whole = read((slice(first, last), *columns))
    return pairs_from_halves(whole, turn)[rows.start - first : rows.stop - first]


def pairs_from_halves(x: torch.Tensor, turn: Turn) -> torch.Tensor:
    """Rows of each unit from the Hub's order to the decoder's: i and i + turned/2 become neighbours."""
    return _reorder(x, turn, (2, -1))


def halves_from_pairs(x: torch.Tensor, turn: Turn) -> torch.Tensor:
    """The reverse of `pairs_from_halves`."""
    return _reorder(x, turn, (-1, 2))


def _reorder(x: torch.Tensor, turn: Turn, sides: tuple[int, int]) -> torch.Tensor:
    units = x.unflatten(0, (-1, turn.unit))
    kept, turned = units.split([turn.unit - turn.turned, turn.turned], 1)
    turned = turned.unflatten(1, sides).transpose(1, 2).flatten(1, 2)
    return torch.cat([kept, turned], 1).flatten(0, 1)


def _check(
    tensors: HubTensors,
    spec: DecoderSpec,
    wanted: Mapping[str, Origin],
    shapes: Mapping[str, torch.Size],
    *,
    further: int,
) -> None:
    """`further` layers behind the decoder's are left aside: they predict tokens beyond the next."""
    there = tensors.names()
    problems, used, missing = [], set(), []
    for name, origin in wanted.items():
        for hub_name, shape in _expected(tensors, origin, shapes[name]):
            used.add(hub_name)
            if hub_name not in there:
                missing.append(hub_name)
            elif tensors.shape(hub_name) != tuple(shape):
                problems.append(f"{hub_name} is {tensors.shape(hub_name)}, should be {tuple(shape)}")
    if missing:
        problems.insert(0, f"lacks {some(missing)}")
    left = {name for name in there - used if not _DERIVED.fullmatch(name)}
    if spec.tied_head and "lm_head.weight" in left:
        logger.info("%s: holds a head although config.json ties it to the embedding; left aside", tensors.folder)
        left.discard("lm_head.weight")
    layers = {f"model.layers.{spec.n_layers + n}." for n in range(further)}
    if beyond := {name for name in left if name.startswith(tuple(layers))}:
        logger.info("%s: %d layers that predict further tokens are left aside", tensors.folder, further)
        left -= beyond
    if left:
        problems.append(f"holds what this model has no place for: {some(sorted(left))}")
    if problems:
        raise CheckpointError(f"{tensors.folder}: is not this model: {'; '.join(problems[:12])}")


def _expected(tensors: HubTensors, origin: Origin, shape: torch.Size) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each tensor that a parameter is made of, in the form in which the folder has it, and its shape."""
    if len(origin.names) == 1:
        yield origin.names[0], tuple(shape)
    elif origin.stacked and origin.names[0] not in tensors.names() and origin.stacked.name in tensors.names():
        yield origin.stacked.name, (shape[0], shape[1] * origin.stacked.count, *shape[2:])
    else:
        yield from ((name, tuple(shape[1:])) for name in origin.names)
