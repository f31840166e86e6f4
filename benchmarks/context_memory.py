"""Peak memory of activations under context parallelism: how far it falls as a sequence is spread over ranks.

    python benchmarks/context_memory.py                 one document a row
    python benchmarks/context_memory.py --packed        documents of odd lengths that cross ranks

Forward and backward through the blocks of a small decoder, in gloo processes on this machine. Counted are the bytes
that torch's allocator hands out meanwhile, from the profiler's allocation events: what the backward waits for, and
every buffer of the moment, those of the exchange among them. Weights and their gradients are there before. (Resident
memory says nothing here: the C library keeps pages that were given back.)
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import tempfile
import time

from allocations import peak_bytes

METHODS = ("alltoall", "allgather", "ulysses")
BOUND = {4: 0.35}  # of one process, by degree


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--degrees", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--packed", action="store_true")
    return parser.parse_args()


def batch_of(chosen: argparse.Namespace):
    import torch

    from titanlike.data.batch import Batch

    starts = torch.arange(0, chosen.seq, 1237) if chosen.packed else torch.zeros(1, dtype=torch.int64)
    documents = torch.bucketize(torch.arange(chosen.seq), starts, right=True) - 1
    return Batch(
        tokens=torch.zeros(1, chosen.seq, dtype=torch.int64),
        labels=torch.zeros(1, chosen.seq, dtype=torch.int64),
        positions=(torch.arange(chosen.seq) - starts[documents])[None],
        documents=documents[None].int(),
        sequences=torch.zeros(1, dtype=torch.int64),
        offsets=torch.cat([starts, torch.tensor([chosen.seq])]).int() if chosen.packed else None,
    )


def measure(rank: int, degree: int, method: str, store: str, chosen: argparse.Namespace, answer) -> None:
    """One rank: its peak in bytes and its seconds, put into `answer`."""
    import torch
    import torch.distributed as dist

    from titanlike.config import Config
    from titanlike.models.decoder import Decoder
    from titanlike.models.initial import initial_values, materialise
    from titanlike.models.spec import DecoderSpec
    from titanlike.parallel.context import apply_context, cut

    torch.set_num_threads(1)
    spec = DecoderSpec(
        dim=chosen.dim,
        n_layers=chosen.layers,
        n_heads=chosen.heads,
        n_kv_heads=chosen.kv_heads,
        head_dim=chosen.dim // chosen.heads,
        ffn_dim=chosen.dim * 11 // 4,
        vocab_size=8,
    )
    model, batch = Decoder(spec, seq_len=chosen.seq), batch_of(chosen)
    materialise(model, "cpu", initial_values(model, 0))
    if degree > 1:
        dist.init_process_group("gloo", store=dist.FileStore(store, degree), rank=rank, world_size=degree)
        settings = Config.model_validate({"parallelism": {"context_parallel_rotate_method": method}}).parallelism
        apply_context(model, dist.group.WORLD, settings)
        batch = cut(batch, rank, degree, settings.context_parallel_load_balancer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(1, batch.tokens.shape[1], chosen.dim, generator=generator, requires_grad=True)
    rope = tuple(model.rope_table[:, batch.positions])

    def work():
        h = hidden
        for block in model.layers.values():
            h = block(h, rope, batch.offsets)
        h.square().sum().backward()

    started = time.perf_counter()
    peak = peak_bytes(work)
    answer.put((peak, time.perf_counter() - started))
    if degree > 1:
        dist.destroy_process_group()


def worst(degree: int, method: str, chosen: argparse.Namespace) -> tuple[int, float]:
    """Peak bytes and seconds of the worst rank."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=measure, args=(r, degree, method, store, chosen, answer)) for r in range(degree)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            sys.exit(f"{method} at {degree}: a rank failed")
        peaks, seconds = zip(*(answer.get() for _ in ranks), strict=True)
    return max(peaks), max(seconds)


def main() -> int:
    chosen = arguments()
    kind = "packed" if chosen.packed else "one document a row"
    print(f"sequence {chosen.seq}, dim {chosen.dim}, {chosen.layers} layers, {chosen.heads} heads, fp32, {kind}")
    print(f"{'degree':>6}  {'method':<10}{'peak MiB':>10}{'of cp 1':>9}{'seconds':>9}")
    whole, seconds = worst(1, "none", chosen)
    print(f"{1:>6}  {'-':<10}{whole / 2**20:>10.1f}{1:>9.3f}{seconds:>9.1f}", flush=True)
    broken = False
    for degree, method in itertools.product(chosen.degrees, METHODS):
        peak, seconds = worst(degree, method, chosen)
        ratio, bound = peak / whole, BOUND.get(degree, 1.0)
        broken |= ratio > bound
        note = f"   over {bound}" if ratio > bound else ""
        print(f"{degree:>6}  {method:<10}{peak / 2**20:>10.1f}{ratio:>9.3f}{seconds:>9.1f}{note}", flush=True)
    return int(broken)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
    sys.exit(main())
