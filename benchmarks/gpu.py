"""What benchmarks/gpu.sh runs: the product on one device, case by case, each in a process of its own.

A case is the model and some keys. Speed and MFU are medians of the steps after the warm-up, memory is the allocator's
peak. A case that is refused or fails is in the report with the reason; those that the time doesn't suffice for, too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "train_configs" / "debug_model.toml"
SECONDS = 560

COMMON = {
    "training.mixed_precision_param": "bfloat16",
    "training.steps": "14",
    "data.document_mask": "false",
    "lr_scheduler.warmup_steps": "5",
    "optimizer.lr": "3e-4",
    "validation.enable": "false",
    "checkpoint.enable": "false",
    "metrics.log_freq": "1",
}
TINY = {
    "model.flavor": "debugmodel",
    "model.overrides": "{n_layers = 2, dim = 64}",
    "training.seq_len": "32",
    "training.local_batch_size": "2",
    "training.steps": "3",
    "compile.backend": "eager",
}
LLAMA_1B = {"model.flavor": "1B", "training.seq_len": "4096", "training.local_batch_size": "4"}
# The shapes of Qwen3-0.6B, of which speed depends; its norms of queries and keys cost next to nothing.
QWEN3_06B = {
    "model.flavor": "1B",
    "model.overrides": "{dim = 1024, n_layers = 28, n_heads = 16, n_kv_heads = 8, head_dim = 128, ffn_dim = 3072, "
    "vocab_size = 151936, tied_head = true}",
    "training.seq_len": "4096",
    "training.local_batch_size": "8",
}
COMPILED = {"compile.enable": "true"}
SELECTIVE = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
FULL = {"activation_checkpoint.mode": "full"}
BUDGET = {"activation_checkpoint.mode": "memory_budget", "activation_checkpoint.memory_budget": "0.5"}
FLOAT8 = {"model.converters": "quantize.linear.float8", "quantize.linear.float8.recipe_name": "rowwise"}
PACKED = {"data.document_mask": "true"}
# In the order of interest: the time may not suffice for the last ones.
CASES = {
    "Llama 1B, compiled": LLAMA_1B | COMPILED,
    "Llama 1B, eager": LLAMA_1B,
    "Qwen3 0.6B shapes, compiled": QWEN3_06B | COMPILED,
    "Llama 1B, compiled, packed documents": LLAMA_1B | COMPILED | PACKED,
    "Llama 1B, compiled, float8": LLAMA_1B | COMPILED | FLOAT8,
    "Llama 1B, compiled, full checkpointing": LLAMA_1B | COMPILED | FULL,
    "Llama 1B, compiled, selective checkpointing": LLAMA_1B | COMPILED | SELECTIVE,
    "Qwen3 0.6B shapes, eager": QWEN3_06B,
    "Llama 1B, compiled, memory budget 0.5": LLAMA_1B | COMPILED | BUDGET,
    "Llama 1B, compiled with the optimizer": LLAMA_1B | COMPILED | {"compile.components": "model,loss,optimizer"},
    "Llama 1B, eager, activations offloaded": LLAMA_1B | {"training.activation_offload": "true"},
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    parser.add_argument("--cases", default="", help="only those whose name matches this regular expression")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "benchmarks", help="folder of the reports")
    return parser.parse_args()


def train(keys: dict[str, str], folder: Path, seconds: float) -> dict:
    """One case: its figures, or why there are none."""
    command = [f"--{key}={value}" for key, value in keys.items()] + [f"--job.dump_folder={folder}"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "titanlike.train", "--job.config_file", str(BASE), *command],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {seconds:.0f} s"}
    if done.returncode:
        words = (done.stdout + done.stderr).strip().splitlines()
        return {"failed": (words or [f"exit code {done.returncode}"])[-1][:300]}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return figures(rows)


def figures(rows: list[dict]) -> dict:
    """Medians over the later half of the steps: the earlier ones compile and warm up."""
    late = rows[len(rows) // 2 :]
    found = {
        key: statistics.median(row[key] for row in late)
        for key in ("tokens_per_second", "step_seconds", "mfu")
        if all(row.get(key) is not None for row in late)
    }
    memory = {key: value for key, value in rows[-1].items() if key.startswith("memory_")}
    return {**found, **memory, "loss_first": rows[0]["loss"], "loss_last": rows[-1]["loss"]}


def run(chosen: argparse.Namespace) -> dict[str, dict]:
    ends, results = time.monotonic() + SECONDS, {}
    with tempfile.TemporaryDirectory() as scratch:
        common = COMMON | {"compile.cache_folder": f"{scratch}/kernels"}
        for number, (name, case) in enumerate(CASES.items()):
            if not re.search(chosen.cases, name):
                continue
            keys = common | case | (TINY if chosen.tiny else {})
            left = ends - time.monotonic()
            if left < 30:
                results[name] = {"failed": "no time left"}
            else:
                results[name] = train(keys, Path(scratch) / str(number), left)
            results[name]["keys"] = keys
            print(f"{name}: {shown(results[name])}", file=sys.stderr, flush=True)
    return results


def shown(result: dict) -> str:
    if "failed" in result:
        return result["failed"]
    return f"{result['tokens_per_second']:,.0f} tokens/s, {result['memory_gib']:.2f} GiB"


def device() -> dict[str, str]:
    import torch

    from titanlike import device as devices

    return {"device": devices.device_name(devices.local_device()), "torch": torch.__version__}


def markdown(about: dict[str, str], results: dict[str, dict]) -> str:
    lines = [f"# {about['device']}, {about['date']}", "", f"torch {about['torch']}, titanlike {about['commit']}", ""]
    lines += ["| case | tokens/s | MFU | peak GiB | loss, first → last |", "|---|---|---|---|---|"]
    for name, result in results.items():
        if "failed" in result:
            lines.append(f"| {name} | {result['failed'].replace('|', '/')} | | | |")
            continue
        mfu = f"{result['mfu']:.1%}" if "mfu" in result else ""
        losses = f"{result['loss_first']:.3f} → {result['loss_last']:.3f}"
        speed, memory = f"{result['tokens_per_second']:,.0f}", f"{result['memory_gib']:.2f}"
        lines.append(f"| {name} | {speed} | {mfu} | {memory} | {losses} |")
    lines += ["", "Each case is `titanlike train debug_model` with:", ""]
    for name, result in results.items():
        keys = " ".join(f"--{key}={value!r}" for key, value in result["keys"].items() if "cache_folder" not in key)
        lines.append(f"- {name}: `{keys}`")
    return "\n".join(lines) + "\n"


def main() -> int:
    chosen = arguments()
    if chosen.tiny:
        os.environ["TITANLIKE_DEVICE"] = "cpu"
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    now = datetime.datetime.now()
    about = {**device(), "date": now.strftime("%Y-%m-%d"), "commit": commit.stdout.strip() or "of unknown commit"}
    results = run(chosen)
    chosen.out.mkdir(parents=True, exist_ok=True)
    stem = chosen.out / f"{now.strftime('%Y-%m-%d-%H%M%S')}-{re.sub(r'[^A-Za-z0-9]+', '-', about['device'])}"
    stem.with_suffix(".json").write_text(json.dumps({**about, "cases": results}, indent=1) + "\n")
    stem.with_suffix(".md").write_text(text := markdown(about, results))
    print(text + f"\n{stem.with_suffix('.md')}")
    return int(all("failed" in result for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
