import subprocess
import sys

import pytest
import torch

from titanlike.observe.memory import GIB, MemoryParts, peak_memory

GROW = """
from titanlike.observe.memory import peak_memory
before = peak_memory("cpu")["memory_gib"]
block = bytearray(b"x" * (256 << 20))
grown = peak_memory("cpu")["memory_gib"]
del block
print(before, grown, peak_memory("cpu")["memory_gib"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cpu_peak_rises_with_use_and_stays():
    out = subprocess.run([sys.executable, "-c", GROW], capture_output=True, text=True, check=True).stdout
    before, grown, after = map(float, out.split())
    assert before < 0.1, "a small process started by this big one is small"
    assert 0.25 <= grown - before < 0.6
    assert after >= grown


def test_a_device_that_tells_nothing_has_no_figure():
    assert peak_memory("mps") == {"memory_gib": None}


def test_parts_are_counted_from_the_tensors():
    linear, x = torch.nn.Linear(8, 4, bias=False), torch.ones(16, 8)
    optimizer = torch.optim.AdamW(linear.parameters())
    parts = MemoryParts(linear.parameters, lambda: [v for state in optimizer.state.values() for v in state.values()])
    assert parts.figures({"memory_gib": 1.0}) == {}, "nothing before the first step"
    with parts.forward_backward():
        linear(x).square().sum().backward()
    optimizer.step()
    parts.after_update()
    # Kept for the backward: what enters the product, and the square; float32.
    sizes = {"weights": 128, "gradients": 128, "optimizer": 2 * 128 + 4, "activations": 16 * 8 * 4 + 16 * 4 * 4}
    want = {f"memory_{name}_gib": size / GIB for name, size in sizes.items()}
    assert parts.figures({"memory_gib": 1.0}) == want
    rest = 1.0 - (128 + 260 + 768) / GIB
    peak = {"memory_gib": 1.0, "memory_reserved_gib": 2.0}
    assert parts.figures(peak) == {**want, "memory_rest_gib": pytest.approx(rest)}
