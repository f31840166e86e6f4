"""Runs training programs side by side, one step each in turn, and prints every one's ratio to the first.

    python benchmarks/compare.py                                       plain loop and product, fp32, eager
    python benchmarks/compare.py --dtype bf16 --compile 1 --steps 30
    python benchmarks/compare.py --all                                 the four combinations, as a table
    python benchmarks/compare.py --all --peer torchtitan=VENV/bin/python --peer litgpt=VENV/bin/python

A peer runs in an environment of its own (see README.md). While one program steps the others sleep in a pipe read, so
whatever else loads the machine falls on all of them alike. The ratio is the median over the rounds after the warm-up of
(first's step time / the other's step time); that of the product over each other one is printed too.
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

import common

HERE = Path(__file__).parent
OURS = {"plain": "plain_loop.py", "titanlike": "product.py"}
PEERS = ("torchtitan", "torchtune", "transformers", "litgpt")


class Ended(Exception):
    """A program left before its turn."""


class Driver:
    """One process that waits for its turns."""

    def __init__(self, name: str, python: str, script: str, arguments: list[str], logs: Path):
        go_read, self._go = os.pipe()
        self._done, done_write = os.pipe()
        self.name, self.log = name, logs / f"{name}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [python, str(HERE / script), *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "BENCHMARK_TURN": f"{go_read},{done_write}", "PYTHONPATH": _path_for(name)},
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
            raise Ended(f"{self.name} ended early:\n{self.log.read_text()[-3000:]}")

    def result(self) -> dict:
        os.write(self._go, b"G")
        out, _ = self.process.communicate()
        return json.loads(next(line for line in reversed(out.splitlines()) if line.startswith('{"driver"')))


def _path_for(name: str) -> str:
    # A peer must not see our packages.
    return os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]) if name in OURS else ""


def start(programs: dict[str, tuple[str, str]], arguments: list[str], logs: Path) -> list[Driver]:
    """Those that come up; a peer that doesn't is said and left out."""
    drivers = []
    for name, (python, script) in programs.items():
        try:
            drivers.append(Driver(name, python, script, arguments, logs))
        except Ended as error:
            if name in OURS:
                raise SystemExit(str(error)) from None
            print(f"left out: {error}", file=sys.stderr, flush=True)
    return drivers


def compare(programs: dict[str, tuple[str, str]], dtype: str, compiled: int, a: argparse.Namespace) -> list[dict]:
    arguments = ["--dtype", dtype, "--compile", str(compiled), "--steps", str(a.steps), "--warmup", str(a.warmup)]
    arguments += ["--threads", str(a.threads), "--size", a.size]
    with tempfile.TemporaryDirectory() as logs:
        drivers = start(programs, arguments, Path(logs))
        for round_ in range(a.steps):
            # Who goes first changes, so that nobody always follows the same one's cache.
            for driver in drivers if round_ % 2 else reversed(drivers):
                driver.turn()
        results = [driver.result() for driver in drivers]
    product = next(r for r in results if r["driver"] == "titanlike")
    for result in results:
        result["ratio_to_plain"] = _ratio(results[0], result, "step_seconds", a.warmup)
        result["ratio_of_cpu_time"] = _ratio(results[0], result, "cpu_seconds", a.warmup)
        result["titanlike_over_it"] = _ratio(result, product, "step_seconds", a.warmup)
        result.update(dtype=dtype, compile=bool(compiled), size=a.size)
    for result in results:
        result.pop("step_seconds"), result.pop("cpu_seconds")
    return results


def _ratio(first: dict, other: dict, kind: str, warmup: int) -> float:
    pairs = zip(first[kind][warmup:], other[kind][warmup:], strict=True)
    return round(statistics.median(a / b for a, b in pairs), 3)


def table(rows: list[dict]) -> str:
    lines = [
        "| | program | tokens/s | over plain | by CPU time | titanlike over it | peak RSS MiB | loss first → last |",
        "|---|---|---|---|---|---|---|---|",
    ]
    columns = ("tokens_per_second", "ratio_to_plain", "ratio_of_cpu_time", "titanlike_over_it", "peak_rss_mib")
    for r in rows:
        kind = f"{r['dtype']} {'compiled' if r['compile'] else 'eager'}"
        cells = [kind, r["driver"], *(r[k] for k in columns), f"{r['loss_first']} → {r['loss_last']}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--compile", type=int, choices=[0, 1], default=0)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--size", choices=list(common.SIZES), default="head")
    parser.add_argument("--all", action="store_true", help="fp32 and bf16, eager and compiled")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help=", ".join(PEERS))
    a = parser.parse_args()
    programs = {name: (sys.executable, script) for name, script in OURS.items()}
    for peer in a.peer:
        name, _, python = peer.partition("=")
        if name not in PEERS or not python:
            parser.error(f"--peer {peer}: must be NAME=PYTHON with a name of {', '.join(PEERS)}")
        programs[name] = (python, f"peer_{name}.py")
    kinds = [(d, k) for d in ("fp32", "bf16") for k in (0, 1)] if a.all else [(a.dtype, a.compile)]
    rows = []
    for dtype, compiled in kinds:
        for result in compare(programs, dtype, compiled, a):
            print(json.dumps(result), flush=True)
            rows.append(result)
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
