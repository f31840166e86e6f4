"""How much memory this process has needed at its worst moment, from its start until now.

On an accelerator: the peak of what torch's allocator handed out (what a plan of the model predicts) and of what it
took from the device (what runs out). On a CPU torch counts nothing, so the figure is the process's peak resident set,
which also holds the interpreter, libraries and the mapped files that were touched.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

GIB = 1 << 30


def peak_memory(device_type: str) -> dict[str, float | None]:
    """`memory_gib`, and on an accelerator `memory_reserved_gib`; None where it can't be told."""
    if device_type == "cpu":
        return {"memory_gib": _peak_resident_gib()}
    import torch

    if device_type == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    elif device_type == "xpu":
        peak, reserved = torch.xpu.max_memory_allocated(), torch.xpu.max_memory_reserved()
    else:
        return {"memory_gib": None}
    return {"memory_gib": peak / GIB, "memory_reserved_gib": reserved / GIB}


def _peak_resident_gib(status: Path = Path("/proc/self/status")) -> float:
    # getrusage's figure is inherited from the parent over fork and exec, so a small process started by a big one
    # would look big; the kernel's own high-water mark starts anew.
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB
