"""Shared by the drivers of a comparison: the model, made-up data, arguments, and the meter that takes turns."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
import statistics
import sys
import time
from pathlib import Path

# One model for every driver: 26.8 M parameters, most of them in embedding and head.
DIM, LAYERS, HEADS, KV_HEADS, FFN = 256, 8, 8, 4, 704
VOCAB, SEQ, ROWS = 32000, 512, 4
ROPE_THETA, NORM_EPS = 10000.0, 1e-5
SIZES = {
    "head": {},  # as above: more than half of a step is the head and the loss
    "deep": {"DIM": 512, "LAYERS": 16, "FFN": 1408, "VOCAB": 8192},
    # For a CPU without bf16 instructions, where a product in bf16 takes fifty times that in fp32.
    "small": {"LAYERS": 4, "VOCAB": 4000, "SEQ": 128, "ROWS": 1},
}
SEED = 1234
PAD, BOS, EOS, UNKNOWN, FIRST_WORD = 0, 1, 2, 3, 8


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: over fp32 weights")
    parser.add_argument("--compile", type=int, choices=[0, 1], default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", choices=list(SIZES), default="head")
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)
    globals().update(SIZES[chosen.size])
    return chosen


def words(n: int, seed: int = SEED) -> list[int]:
    """Token ids whose frequencies fall off as 1/rank, so that there is something to learn."""
    rng = random.Random(seed)
    span = math.log(VOCAB - FIRST_WORD)
    return [min(VOCAB - 1, FIRST_WORD + int(math.exp(rng.random() * span)) - 1) for _ in range(n)]


def rows(n: int, length: int) -> list[list[int]]:
    """n rows of words."""
    ids = words(n * length)
    return [ids[a : a + length] for a in range(0, len(ids), length)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def text(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer.json of VOCAB whole words, as Hub-style programs read it."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<unk>", "<r0>", "<r1>", "<r2>", "<r3>"]
    vocabulary = {t: i for i, t in enumerate(special)} | {f"w{i}": i for i in range(FIRST_WORD, VOCAB)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(t, special=True) for t in special])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


class Meter:
    """start() before the first step, step(tokens, loss) after each; under compare.py one driver steps at a time."""

    def __init__(self, name: str, settings: argparse.Namespace):
        self.name, self.settings = name, settings
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.tokens: list[int] = []
        self.losses: list[float] = []
        turn = os.environ.get("BENCHMARK_TURN")
        self._turn = [int(fd) for fd in turn.split(",")] if turn else None

    def start(self) -> None:
        self._hand_over(b"R")

    def step(self, tokens: int, loss: float | None) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        self.cpu_seconds.append(time.process_time() - self._cpu_began)
        self.tokens.append(tokens)
        if loss is not None:  # else the driver adds it when it learns of it
            self.losses.append(loss)
        self._hand_over(b"D")

    def _hand_over(self, word: bytes) -> None:
        if self._turn:
            os.write(self._turn[1], word)
            if os.read(self._turn[0], 1) != b"G":
                raise SystemExit("compare.py went away")
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def report(self) -> None:
        warm = min(self.settings.warmup, len(self.seconds) - 1)
        speeds = [n / s for n, s in zip(self.tokens[warm:], self.seconds[warm:], strict=True)]
        result = {
            "driver": self.name,
            "tokens_per_second": round(statistics.median(speeds), 1),
            "step_seconds": [round(s, 4) for s in self.seconds],
            "cpu_seconds": [round(s, 4) for s in self.cpu_seconds],
            "peak_rss_mib": round(_peak_rss_mib()),
            "loss_first": round(self.losses[0], 4),
            "loss_last": round(self.losses[-1], 4),
        }
        print(json.dumps(result), file=sys.stdout, flush=True)


def _peak_rss_mib() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
