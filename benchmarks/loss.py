"""The loss alone: linear cross-entropy against full logits and torch's own chunked one, forward and backward.

    python benchmarks/loss.py                      8192 tokens, vocabulary 128,256, dim 512, fp32
    python benchmarks/loss.py --tokens 512 --vocab 4096 --dim 64        to see that it runs

Methods take turns, so that whatever else loads the machine falls on all. Printed are the time by that of full logits,
the peak of what torch hands out beyond the inputs (allocation events; the gradients are among it), and the errors of
loss and gradients on the first tokens against the same in float64; all of it with every token trained on, and with 90%
of them ignored. Full logits take four times [tokens, vocabulary] floats: where these don't fit, they are measured on
fewer tokens, and times are compared by token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
IGNORE = -100


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slice", type=int, default=256, help="tokens that are compared with float64")
    parser.add_argument("--chunk", type=int, default=0, help="loss.chunk_size")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def methods(chosen: argparse.Namespace) -> dict:
    """By name: hidden [n, dim], weight [vocab, dim], labels [n] → the loss summed."""
    import torch.nn.functional as F

    from titanlike.models.linear_cross_entropy import linear_log_probs

    def linear(hidden, weight, labels):
        return -linear_log_probs(hidden, weight, labels, "sum", chunk_size=chosen.chunk)

    def full(hidden, weight, labels):
        return F.cross_entropy(F.linear(hidden, weight), labels, ignore_index=IGNORE, reduction="sum")

    found = {"linear cross-entropy": linear, "full logits": full}
    if hasattr(F, "linear_cross_entropy"):
        from torch.nn import LinearCrossEntropyOptions

        def torchs(hidden, weight, labels):
            options = LinearCrossEntropyOptions()
            return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", ignore_index=IGNORE, options=options)

        found["torch's chunked"] = torchs
    return found


def gradients(method, inputs) -> tuple:
    """Loss and gradients of hidden and weight."""
    hidden, weight, labels = inputs
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = method(hidden, weight, labels)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad


def made_up(chosen: argparse.Namespace, ignored: float) -> tuple:
    import torch

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(chosen.tokens, chosen.dim, generator=generator)
    weight = torch.randn(chosen.vocab, chosen.dim, generator=generator) * chosen.dim**-0.5
    labels = torch.randint(0, chosen.vocab, (chosen.tokens,), generator=generator)
    labels[torch.rand(chosen.tokens, generator=generator) < ignored] = IGNORE
    return hidden, weight, labels


def fitting(chosen: argparse.Namespace) -> int:
    """Tokens whose full logits fit into two thirds of the free memory, four times."""
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    return max(1, min(chosen.tokens, int(free * 2 / 3) // (16 * chosen.vocab)))


def errors(method, inputs, count: int) -> dict[str, float]:
    """Relative errors against float64 on the first `count` tokens."""
    import torch.nn.functional as F

    hidden, weight, labels = (inputs[0][:count], inputs[1], inputs[2][:count])

    def exact(hidden, weight, labels):
        return F.cross_entropy(F.linear(hidden, weight), labels, ignore_index=IGNORE, reduction="sum")

    want = gradients(exact, (hidden.double(), weight.double(), labels))
    got = gradients(method, (hidden, weight, labels))
    names = ("loss", "hidden's gradient", "weight's gradient")
    return {n: ((g.double() - w).norm() / w.norm()).item() for n, g, w in zip(names, got, want, strict=True)}


def measure(chosen: argparse.Namespace, ignored: float) -> list[dict]:
    from allocations import peak_bytes

    inputs = made_up(chosen, ignored)
    few = fitting(chosen)
    parts = {
        name: (inputs[0][:few], inputs[1], inputs[2][:few]) if name == "full logits" else inputs
        for name in methods(chosen)
    }
    found = methods(chosen)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(chosen.rounds):
        for name, method in found.items():
            began = time.perf_counter()
            gradients(method, parts[name])
            seconds[name].append((time.perf_counter() - began) / len(parts[name][2]))
    rows = []
    for name, method in found.items():
        peak = peak_bytes(lambda method=method, name=name: gradients(method, parts[name]))
        rows.append(
            {
                "method": name,
                "ignored": ignored,
                "tokens": len(parts[name][2]),
                "microseconds_a_token": statistics.median(seconds[name]) * 1e6,
                "of_full_logits": statistics.median(
                    mine / full for mine, full in zip(seconds[name], seconds["full logits"], strict=True)
                ),
                "peak_bytes": peak,
                "errors": errors(method, inputs, min(chosen.slice, chosen.tokens)),
            }
        )
    return rows


def main() -> None:
    chosen = arguments()
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
    sys.path.insert(0, str(HERE.parents[1]))
    rows = [row for ignored in (0.0, 0.9) for row in measure(chosen, ignored)]
    heads = f"{'method':<22}{'ignored':>8}{'tokens':>8}{'µs/token':>10}{'ratio':>8}{'peak MiB':>10}"
    print(f"{heads}  errors: loss, hidden, weight")
    for row in rows:
        wrong = ", ".join(f"{error:.1e}" for error in row["errors"].values())
        print(
            f"{row['method']:<22}{row['ignored']:>8.0%}{row['tokens']:>8}{row['microseconds_a_token']:>10.1f}"
            f"{row['of_full_logits']:>8.3f}{row['peak_bytes'] / 2**20:>10.1f}  {wrong}"
        )
    sizes = {name: getattr(chosen, name) for name in ("tokens", "vocab", "dim", "rounds", "threads", "chunk")}
    report = json.dumps({**sizes, "rows": rows}, indent=1)
    print(report)
    if chosen.json:
        chosen.json.write_text(report + "\n")


if __name__ == "__main__":
    main()
