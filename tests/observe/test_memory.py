import subprocess
import sys

import pytest

from titanlike.observe.memory import peak_memory

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
