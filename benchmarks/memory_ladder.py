"""What each memory technique saves: one model, one more technique a rung, peak memory and losses of each.

    python benchmarks/memory_ladder.py                 a model of 96 M parameters, 1024 tokens a step, 20 steps a rung
    python benchmarks/memory_ladder.py --tiny          one of 1 M, to see that it runs
    python benchmarks/memory_ladder.py --json F        writes the figures to a file, too

Every rung is the product's own trainer, in a fresh process for the peak and in another for the losses. Peak: the most
that torch has handed out at once from the start of that process to the end of the third step (weights, gradients,
optimizer state, all of which is there by then, and everything of the moment), by the profiler's allocation events; it
keeps each of them, which over twenty steps takes gigabytes. A rung whose technique isn't built, or is refused, is left
out and said so; those after it do without it. Exit code 1 if all rungs ran and the last needs more than 0.35 of the
first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
BASE = HERE.parents[1] / "train_configs" / "debug_model.toml"
BOUND = 0.35
PROFILED = 3  # steps

COMMON = {
    "model.overrides": "{dim = 640, n_layers = 12, n_heads = 10, n_kv_heads = 5, ffn_dim = 1760, vocab_size = 32000}",
    "training.seq_len": "256",
    "training.local_batch_size": "4",
    "training.max_norm": "0",  # an update in the backward comes before the norm is known
    "training.mixed_precision_param": "float32",
    "optimizer.lr": "3e-4",
    "lr_scheduler.warmup_steps": "5",
    "metrics.log_freq": "1",
    "validation.enable": "false",
    "checkpoint.enable": "false",
    "loss.implementation": "logits",
}
TINY = {"model.overrides": "{n_layers = 2, vocab_size = 4096}", "training.seq_len": "64"}
RUNGS = (
    ("fp32, AdamW, full logits", {}),
    ("+ linear cross-entropy", {"loss.implementation": "linear"}),
    (
        "+ selective checkpointing",
        {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"},
    ),
    ("+ full checkpointing", {"activation_checkpoint.mode": "full"}),
    ("+ optimizer in backward", {"optimizer.in_backward": "true"}),
    ("+ AdamW8bit", {"optimizer.name": "AdamW8bit"}),
    (
        "+ bf16, stochastic rounding",
        {
            "training.dtype": "bfloat16",
            "training.mixed_precision_param": "bfloat16",
            "optimizer.stochastic_rounding": "true",
        },
    ),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--measure", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser.parse_args()


def argv(keys: dict[str, str]) -> list[str]:
    return [str(BASE), *(f"--{key}={value}" for key, value in keys.items())]


def measure(command: list[str], profiled: bool) -> None:
    """A run of one rung in this process: prints its peak, or its losses, as JSON."""
    sys.path.insert(0, str(HERE.parents[1]))
    from allocations import peak_bytes

    from titanlike.train import load
    from titanlike.trainer import Trainer

    stdout, sys.stdout = sys.stdout, sys.stderr  # the console's lines are not the result
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = load([*command, f"--job.dump_folder={folder}"], world=1)
        result = peak_bytes(lambda: Trainer(config).run()) if profiled else Trainer(config).run()
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    sys.stdout = stdout
    if profiled:
        parts = {
            key: None if value is None else round(value, 4)  # what checkpointing by operator keeps can't be told
            for key, value in rows[-1].items()
            if key.startswith("memory_") and key != "memory_gib"
        }
        print(json.dumps({"peak_bytes": result, "parts_gib": parts}))
    else:
        losses = [round(row["loss"], 4) for row in rows]
        print(json.dumps({"losses": losses, "seconds": round(time.perf_counter() - began, 1)}))


def refusal(keys: dict[str, str]) -> str:
    """Why the config is refused; empty if it isn't."""
    from titanlike.errors import ConfigError
    from titanlike.train import load

    try:
        load(argv(keys), world=1)
    except ConfigError as error:
        return "; ".join(error.problems)
    return ""


def climb(chosen: argparse.Namespace) -> list[dict]:
    keys = COMMON | (TINY if chosen.tiny else {})
    rungs = []
    for name, added in RUNGS:
        if why := refusal(keys | added):
            rungs.append({"rung": name, "refused": why})
            continue
        keys |= added
        figures = {}
        for options, steps in ((["--profile"], min(PROFILED, chosen.steps)), ([], chosen.steps)):
            run = argv(keys | {"training.steps": str(steps), "lr_scheduler.total_steps": str(chosen.steps)})
            command = [sys.executable, str(HERE), *options, "--measure", *run]
            environment = os.environ | {"OMP_NUM_THREADS": str(chosen.threads)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{name} failed with {done.returncode}:\n{done.stderr[-3000:]}")
            figures |= json.loads(done.stdout.splitlines()[-1])
        rungs.append({"rung": name, **figures})
        print(line(rungs[-1], rungs[0]), file=sys.stderr, flush=True)
    return rungs


def line(rung: dict, first: dict) -> str:
    if "refused" in rung:
        return f"{rung['rung']:<28} left out: {rung['refused']}"
    share = rung["peak_bytes"] / first["peak_bytes"]
    losses = rung["losses"]
    return (
        f"{rung['rung']:<28}{rung['peak_bytes'] / 2**20:>10.1f}{share:>8.3f}"
        f"{losses[0]:>9.4f}{losses[-1]:>9.4f}{rung['seconds']:>9.1f}"
    )


def main() -> int:
    chosen = arguments()
    if chosen.measure:
        measure(chosen.measure, chosen.profile)
        return 0
    sys.path.insert(0, str(HERE.parents[1]))
    rungs = climb(chosen)
    print(f"{'rung':<28}{'peak MiB':>10}{'share':>8}{'loss 1':>9}{'last':>9}{'seconds':>9}")
    for rung in rungs:
        print(line(rung, rungs[0]))
    report = json.dumps({"steps": chosen.steps, "tiny": chosen.tiny, "rungs": rungs}, indent=1)
    print(report)
    if chosen.json:
        chosen.json.write_text(report + "\n")
    whole = not any("refused" in rung for rung in rungs)
    return int(whole and not chosen.tiny and rungs[-1]["peak_bytes"] > BOUND * rungs[0]["peak_bytes"])


if __name__ == "__main__":
    sys.exit(main())
