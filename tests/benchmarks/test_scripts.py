"""The benchmarks run, on sizes that say nothing about speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command, **variables):
    environment = {**os.environ, **variables}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_gpu_report_on_a_cpu(tmp_path):
    """One case that trains and one that needs an accelerator, which the report says."""
    out = run(
        *(ROOT / "benchmarks" / "gpu.sh", "--tiny", "--cases", "1B, compiled$|offloaded", "--out", tmp_path),
        TITANLIKE_PYTHON=sys.executable,
    )
    (report,) = tmp_path.glob("*.json")
    cases = json.loads(report.read_text())["cases"]
    assert cases["Llama 1B, compiled"]["tokens_per_second"] > 0
    assert cases["Llama 1B, compiled"]["memory_weights_gib"] > 0
    assert (
        "training.activation_offload = true: needs an accelerator"
        in cases["Llama 1B, eager, activations offloaded"]["failed"]
    )
    assert report.with_suffix(".md").read_text() in out


def test_the_loss(tmp_path):
    sizes = ("--tokens", "256", "--vocab", "3000", "--dim", "16", "--rounds", "1", "--threads", "1", "--slice", "64")
    run(sys.executable, ROOT / "benchmarks" / "loss.py", *sizes, "--json", tmp_path / "loss.json")
    rows = json.loads((tmp_path / "loss.json").read_text())["rows"]
    by = {(row["method"], row["ignored"]): row for row in rows}
    assert max(error for row in rows for error in row["errors"].values()) < 1e-5
    linear, full = by["linear cross-entropy", 0.0], by["full logits", 0.0]
    assert linear["of_full_logits"] > 0 and full["of_full_logits"] == 1
    assert full["peak_bytes"] > 2 * 256 * 3000 * 4, "logits and their gradient at once"
    assert by["linear cross-entropy", 0.9]["peak_bytes"] < full["peak_bytes"]


@pytest.mark.slow
def test_the_memory_ladder(tmp_path):
    ladder = (ROOT / "benchmarks" / "memory_ladder.py", "--tiny", "--steps", "2", "--threads", "1")
    run(sys.executable, *ladder, "--json", tmp_path / "ladder.json")
    rungs = json.loads((tmp_path / "ladder.json").read_text())["rungs"]
    assert len(rungs) == 7 and not any("refused" in rung for rung in rungs)
    full, linear, selective, recomputed = rungs[:4]
    assert linear["peak_bytes"] < full["peak_bytes"] and recomputed["peak_bytes"] <= selective["peak_bytes"]
    assert {len(rung["losses"]) for rung in rungs} == {2}
    for rung in rungs[1:4]:
        assert abs(rung["losses"][0] - full["losses"][0]) < 1e-3
