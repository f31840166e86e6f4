"""Runs drivers side by side, one training step each in turn, and prints every one's ratio to the first.

    python benchmarks/compare.py                                       plain loop and product, fp32, eager
    python benchmarks/compare.py --dtype bf16 --compile 1 --steps 30
    python benchmarks/compare.py --all                                 the four combinations, as a table

While one driver steps the others sleep in a pipe read, so whatever else loads the machine falls on all of them alike.
The ratio is the median over the rounds after the warm-up of (first's step time / the other's step time).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
DRIVERS = ("plain_loop.py", "product.py")


class Driver:
    """One process that waits for its turns."""

    def __init__(self, script: str, arguments: list[str], logs: Path):
        go_read, self._go = os.pipe()
        self._done, done_write = os.pipe()
        self.log = logs / f"{script}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / script), *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "BENCHMARK_TURN": f"{go_read},{done_write}"},
                pass_fds=(go_read, done_write),
                text=True,
            )
        os.close(go_read)
        os.close(done_write)
        self._expect(b"R")

    def turn(self) -> None:
        os.write(self._go, b"G")
        self._expect(b"D")

    def _expect(self, word: bytes) -> None:
        if os.read(self._done, 1) != word:
            raise SystemExit(f"{self.process.args[1]} ended early:\n{self.log.read_text()[-3000:]}")

    def result(self) -> dict:
        os.write(self._go, b"G")
        out, _ = self.process.communicate()
        return json.loads(out.strip().splitlines()[-1])


def compare(dtype: str, compiled: int, steps: int, warmup: int, threads: int, small: int) -> list[dict]:
    arguments = ["--dtype", dtype, "--compile", str(compiled), "--steps", str(steps), "--warmup", str(warmup)]
    arguments += ["--threads", str(threads), "--small", str(small)]
    with tempfile.TemporaryDirectory() as logs:
        drivers = [Driver(d, arguments, Path(logs)) for d in DRIVERS]
        for round_ in range(steps):
            # Who goes first changes, so that neither always follows the other's cache.
            for driver in drivers if round_ % 2 else reversed(drivers):
                driver.turn()
        results = [driver.result() for driver in drivers]
    for result in results:
        for kind in ("step_seconds", "cpu_seconds"):
            pairs = zip(results[0][kind][warmup:], result[kind][warmup:], strict=True)
            result[f"ratio_{kind}"] = round(statistics.median(a / b for a, b in pairs), 3)
    for result in results:
        result.pop("step_seconds"), result.pop("cpu_seconds")
        result.update(dtype=dtype, compile=bool(compiled))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", type=int, choices=[0, 1], default=0)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--small", type=int, choices=[0, 1], default=0, help="a smaller model and batch")
    parser.add_argument("--all", action="store_true", help="fp32 and bf16, eager and compiled")
    a = parser.parse_args()
    kinds = [(d, k) for d in ("fp32", "bf16") for k in (0, 1)] if a.all else [(a.dtype, a.compile)]
    rows = []
    for dtype, compiled in kinds:
        for result in compare(dtype, compiled, a.steps, a.warmup, a.threads, a.small):
            print(json.dumps(result), flush=True)
            rows.append(result)
    print("\n| | driver | tokens/s | ratio | ratio of CPU time | peak RSS MiB | loss first → last |")
    print("|---|---|---|---|---|---|---|")
    for r in rows:
        kind = f"{r['dtype']} {'compiled' if r['compile'] else 'eager'}"
        cells = [
            r[k] for k in ("driver", "tokens_per_second", "ratio_step_seconds", "ratio_cpu_seconds", "peak_rss_mib")
        ]
        print(f"| {' | '.join(map(str, [kind, *cells]))} | {r['loss_first']} → {r['loss_last']} |")


if __name__ == "__main__":
    main()
