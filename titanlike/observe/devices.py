"""What a device can do at best, as its vendor publishes it. Imports no torch until something is measured.

Figures are dense (no 2:4 sparsity) with fp32 accumulation, in FLOP/s of one device as torch sees it: one GPU of a
superchip, one of the two dies of an MI250X. fp32 is plain fp32, since TF32 is off unless one asks for it: the vector
figure on NVIDIA, the matrix figure on AMD, whose matrix cores take true fp32. A device that isn't here, a MIG slice, a
virtual GPU or a laptop part of the same name has no figure: an invented one would make MFU a lie.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Peak(NamedTuple):
    """TFLOP/s by dtype; None where the device has no fast path for it."""

    bfloat16: float | None
    float16: float | None
    float32: float


def _same(half: float, float32: float) -> Peak:
    return Peak(half, half, float32)


# A pattern must match the whole name that the driver gives, vendor prefix and memory size taken off (see `_bare`).
# Sources: the vendors' data sheets and architecture white papers of each product.
_PEAKS: list[tuple[str, Peak]] = [
    # NVIDIA data centre
    (r"V100-SXM2", Peak(None, 125.0, 15.7)),
    (r"V100-PCIE", Peak(None, 112.0, 14.0)),
    (r"T4", Peak(None, 65.0, 8.1)),
    (r"A100(-SXM4|-PCIE| PCIe)?|A800(-SXM4| PCIe)?", _same(312.0, 19.5)),
    (r"A30", _same(165.0, 10.3)),
    (r"A40", _same(149.7, 37.4)),
    (r"A10", _same(125.0, 31.2)),
    (r"A10G", _same(70.0, 35.0)),
    (r"L4", _same(121.0, 30.3)),
    (r"L40", _same(181.05, 90.5)),
    (r"L40S", _same(362.05, 91.6)),
    (r"H100 PCIe", _same(756.0, 51.0)),
    (r"H100 NVL", _same(835.5, 60.0)),
    (r"H100( HBM3)?|H800( HBM3)?", _same(989.4, 67.0)),
    (r"H200 NVL", _same(835.5, 60.0)),
    (r"H200|GH200", _same(989.4, 67.0)),
    (r"H20", _same(148.0, 44.0)),
    (r"B200", _same(2250.0, 75.0)),
    (r"GB200", _same(2500.0, 80.0)),
    (r"B300( SXM6 AC)?", _same(2250.0, 75.0)),
    (r"GB300", _same(2500.0, 80.0)),
    # NVIDIA workstation and desktop; their tensor cores run at half rate when they accumulate in fp32, as torch does.
    (r"RTX A6000", _same(154.8, 38.7)),
    (r"RTX 6000 Ada Generation", _same(364.2, 91.1)),
    (r"GeForce RTX 3090", _same(71.0, 35.6)),
    (r"GeForce RTX 3090 Ti", _same(80.0, 40.0)),
    (r"GeForce RTX 4080", _same(97.5, 48.7)),
    (r"GeForce RTX 4090", _same(165.2, 82.6)),
    (r"GeForce RTX 5090", _same(209.5, 104.8)),
    # AMD
    (r"Instinct MI210", _same(181.0, 45.3)),
    (r"Instinct MI250", _same(181.05, 45.25)),
    (r"Instinct MI250X", _same(191.5, 47.85)),
    (r"Instinct MI300A", _same(980.6, 122.6)),
    (r"Instinct MI300X", _same(1307.4, 163.4)),
    (r"Instinct MI325X", _same(1307.4, 163.4)),
    (r"Instinct MI350X", _same(2306.9, 144.2)),
    (r"Instinct MI355X", _same(2516.6, 157.3)),
]


def peak_flops(device_name: str, dtype: torch.dtype | str) -> float | None:
    """Peak dense FLOP/s of matrix products in `dtype` ("bfloat16", torch.float16, …), or None where it isn't known."""
    field = str(dtype).removeprefix("torch.")
    if field not in Peak._fields:
        return None
    name = _bare(device_name)
    for pattern, peak in _PEAKS:
        if re.fullmatch(pattern, name, re.IGNORECASE):
            tera = getattr(peak, field)
            return None if tera is None else tera * 1e12
    return None


def _bare(device_name: str) -> str:
    """'NVIDIA A100-SXM4-80GB' → 'A100-SXM4', 'NVIDIA H100 80GB HBM3' → 'H100 HBM3'."""
    name = re.sub(r"^(NVIDIA|Tesla|AMD)\s+", "", device_name.strip(), flags=re.IGNORECASE)
    return re.sub(r"[ -]\d+\s?GB\b", "", name)


def measure_cpu_peak(dtype: torch.dtype, *, size: int = 1024, seconds: float = 0.3) -> float:
    """FLOP/s of the fastest of several `size` × `size` products in `dtype` with this process's threads.

    A yardstick for MFU where no vendor's figure exists. Processes that share a machine measure at the same time and so
    share it here too.
    """
    import torch

    with torch.no_grad():
        left, right = torch.randn(2, size, size).to(dtype)
        best = float("inf")
        torch.mm(left, right)  # the first call sets up threads and packs kernels
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            torch.mm(left, right)
            best = min(best, time.perf_counter() - start)
        if best == float("inf"):  # one product took longer than all the time there was
            start = time.perf_counter()
            torch.mm(left, right)
            best = time.perf_counter() - start
    return 2 * size**3 / best
