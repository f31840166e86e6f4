"""Weights in float8 with one scale a block, as DeepSeek publishes them (arXiv 2412.19437, section 3.3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from titanlike.models.hub.config_json import HubConfig

if TYPE_CHECKING:
    import torch

KEY = "quantization_config"
SCALE = "_scale_inv"  # after a tensor's name; one float32 a block, by which its values are multiplied

Blocks = tuple[int, int]


def blocks_of(config: HubConfig) -> Blocks | None:
    """Rows and columns of a block, or None if the weights aren't quantised.

    Raises ConfigError for any other way of quantising.
    """
    found = config.get(KEY)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found
    if method != "fp8":
        raise config.error(f"{KEY}.quant_method", "only blocks of fp8 can be read; save the model unquantised", method)
    block: Any = found.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise config.error(f"{KEY}.weight_block_size", "must be the rows and columns of a block", block)
    return block[0], block[1]


def scale_shape(shape: tuple[int, ...], blocks: Blocks) -> tuple[int, ...]:
    """That of the scales of a matrix."""
    return tuple(-(-n // block) for n, block in zip(shape, blocks, strict=True))


def dequantised(part: torch.Tensor, box: tuple[slice, slice], scales: Any, blocks: Blocks) -> torch.Tensor:
    """A box of a quantised matrix in float32; `scales` are those of the whole matrix, of which some are read."""
    values = part.float()
    rows, columns = box
    if not values.numel():
        return values
    (height, width), first = blocks, columns.start // blocks[1]
    near = scales[rows.start // height : -(-rows.stop // height), first : -(-columns.stop // width)].float()
    across = near.repeat_interleave(width, 1)[:, columns.start - first * width :][:, : values.shape[1]]
    offset = rows.start % height
    for n, scale in enumerate(across):  # block by block, so that the scales never take a matrix
        values[max(0, n * height - offset) : (n + 1) * height - offset] *= scale
    return values
