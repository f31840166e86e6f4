import re
import subprocess
import sys

import pytest
import torch

from titanlike.observe.devices import _PEAKS, measure_cpu_peak, peak_flops

# Names as the drivers give them.
KNOWN = {
    "NVIDIA A100-SXM4-40GB": (312e12, 19.5e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 19.5e12),
    "A100-SXM4-40GB": (312e12, 19.5e12),
    "NVIDIA A100-PCIE-40GB": (312e12, 19.5e12),
    "NVIDIA A100 80GB PCIe": (312e12, 19.5e12),
    "NVIDIA H100 80GB HBM3": (989.4e12, 67e12),
    "NVIDIA H100 PCIe": (756e12, 51e12),
    "NVIDIA H100 NVL": (835.5e12, 60e12),
    "NVIDIA H200": (989.4e12, 67e12),
    "NVIDIA H200 NVL": (835.5e12, 60e12),
    "NVIDIA GH200 480GB": (989.4e12, 67e12),
    "NVIDIA H20": (148e12, 44e12),
    "NVIDIA B200": (2250e12, 75e12),
    "NVIDIA GB200": (2500e12, 80e12),
    "NVIDIA A10": (125e12, 31.2e12),
    "NVIDIA A10G": (70e12, 35e12),
    "NVIDIA L4": (121e12, 30.3e12),
    "NVIDIA L40": (181.05e12, 90.5e12),
    "NVIDIA L40S": (362.05e12, 91.6e12),
    "NVIDIA GeForce RTX 4090": (165.2e12, 82.6e12),
    "AMD Instinct MI250X": (191.5e12, 47.85e12),
    "AMD Instinct MI300X": (1307.4e12, 163.4e12),
    "AMD Instinct MI325X": (1307.4e12, 163.4e12),
}


@pytest.mark.parametrize("name", KNOWN)
def test_published_figures(name):
    half, full = KNOWN[name]
    assert peak_flops(name, torch.bfloat16) == pytest.approx(half)
    assert peak_flops(name, "float16") == pytest.approx(half)
    assert peak_flops(name, "float32") == pytest.approx(full)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "cpu",
        "NVIDIA Z999",
        "NVIDIA A100-SXM-64GB",  # one centre's own part, with more cores and another clock
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "GRID A100-10C",
        "NVIDIA H1000",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "Intel(R) Data Center GPU Max 1550",
    ],
)
def test_unknown_devices_have_no_peak(name):
    assert peak_flops(name, "bfloat16") is None


def test_no_peak_for_a_dtype_that_the_device_or_the_table_lacks():
    assert peak_flops("Tesla V100-SXM2-32GB", "bfloat16") is None
    assert peak_flops("Tesla V100-SXM2-32GB", "float16") == pytest.approx(125e12)
    assert peak_flops("NVIDIA H100 80GB HBM3", "float8_e4m3fn") is None


def test_no_name_fits_two_entries():
    names = [*KNOWN, "Tesla T4", "NVIDIA RTX A6000", "AMD Instinct MI250", "NVIDIA A800-SXM4-80GB"]
    for name in names:
        bare = re.sub(r"^(NVIDIA|Tesla|AMD)\s+|[ -]\d+\s?GB\b", "", name)
        assert sum(bool(re.fullmatch(pattern, bare)) for pattern, _ in _PEAKS) == 1, name


@pytest.mark.parametrize("seconds", [0.05, 0.0])
def test_measured_cpu_peak_is_a_rate_of_this_machine(seconds):
    """Not an exact figure: above what a scalar loop does and below what any CPU can."""
    assert 1e8 < measure_cpu_peak(torch.float32, size=256, seconds=seconds) < 1e15


def test_the_table_and_the_formula_are_read_without_torch():
    code = "import sys, titanlike.observe.devices, titanlike.observe.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
