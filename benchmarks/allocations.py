"""Peak of the memory that torch hands out, on a CPU too: from the profiler's allocation events.

Resident memory says nothing here: the C library keeps pages that were given back.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that is allocated at once while `work` runs, beyond what was there before."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            events = [e for e in json.load(file)["traceEvents"] if e["name"] == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    held: dict[int, int] = {}
    total = most = 0
    for event in events:
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        # What a communication thread frees has no event: it is gone once its address is given out again, at the latest.
        total += size - held.pop(address, 0) if size > 0 else -held.pop(address, -size)
        if size > 0:
            held[address] = size
        most = max(most, total)
    return most
