"""Measures peak memory and time of head and loss at a large vocabulary, on a CPU.

    python -m benchmarks.speed.loss_memory --tp 2 --chunks 2048 null 128

It runs forward and backward. Each row runs in a process of its own. Memory is the most that the
allocator handed out, beyond table, bucket and hidden states, over the bytes of one rank's fp32
logits of the micro-batch. Time is the CPU time of rank 0 in the best round, which says little about
the wall time of a busy machine. The row "apart" is the usual form with PyTorch's own operators:
linear layer, then cross_entropy on fp32 logits.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """Returns the peak of bytes that PyTorch's CPU allocator handed out during `work`, beyond those
    handed out before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    alive = peak = 0
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def worker(rank: int, args: argparse.Namespace, chunk: str, dtype: str) -> None:
    """Prints one row of the table, on rank 0."""
    from parallel3d.blueprint.layout import Layout
    from parallel3d.comm.process_groups import ProcessGroups
    from parallel3d.parameters.state import state_of
    from parallel3d.tensor_parallel.loss import HeadLoss, Objective

    torch.set_num_threads(1)
    store = torch.distributed.FileStore(args.store, args.tp)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=args.tp)
    groups = ProcessGroups.create(Layout(tp=args.tp), "cpu")
    kind = getattr(torch, dtype)
    rows = args.vocab // args.tp
    generator = torch.Generator().manual_seed(rank)
    table = nn.Parameter((torch.randn(rows, args.hidden, generator=generator) * 0.02).to(kind))
    state_of(table).main_grad = main_grad = torch.zeros(rows, args.hidden)
    x = torch.randn(1, args.tokens, args.hidden, generator=torch.Generator().manual_seed(9))
    x = x.to(kind).requires_grad_()
    labels = torch.arange(args.tokens).view(1, -1) * 61 % args.vocab
    mask = torch.ones(1, args.tokens, dtype=torch.bool)
    scale = torch.tensor(1.0 / args.tokens)

    def fused() -> None:
        size = None if chunk == "null" else int(chunk)
        head = HeadLoss(Objective(args.vocab), groups.tp, chunk_tokens=size)
        head.train(x, table, labels, mask, scale).backward(scale)
        x.grad = None

    def apart() -> None:
        logits = F.linear(x, table).float().flatten(0, 1)
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none")
        (losses * mask.flatten()).sum().backward(scale)
        assert table.grad is not None
        main_grad.add_(table.grad)
        x.grad = table.grad = None

    step = apart if chunk == "apart" else fused
    step()
    seconds = []
    for _ in range(args.rounds):
        start = time.process_time()
        step()
        seconds.append(time.process_time() - start)
    peak = peak_bytes(step)
    shard = 4 * args.tokens * rows
    if rank == 0:
        name = {"null": "default", "apart": "apart (PyTorch)"}.get(chunk, chunk)
        print(
            f"| {args.tp} | {dtype} | {name} | {peak / 2**20:.0f} | {peak / shard:.2f} "
            f"| {1e3 * min(seconds):.0f} |",
            flush=True,
        )
    groups.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--chunks", nargs="+", default=["apart", "2048", "null", "512", "128"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    args = parser.parse_args()
    if args.rank is not None:
        worker(args.rank, args, args.chunks[0], args.dtypes[0])
        return
    shard = 4 * args.tokens * args.vocab // args.tp
    print(f"one rank's fp32 logits: {shard / 2**20:.0f} MiB")
    print("| tp | compute | chunk_tokens | peak MiB | over the logits | CPU ms |")
    print("|---|---|---|---|---|---|")
    for dtype in args.dtypes:
        for chunk in args.chunks:
            if chunk == "apart" and args.tp > 1:
                continue
            run_row(args, chunk, dtype)


def run_row(args: argparse.Namespace, chunk: str, dtype: str) -> None:
    """Runs one row in processes of its own."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        fixed = [sys.executable, str(Path(__file__).resolve()), "--store", f"{folder}/store"]
        for name in ("vocab", "tokens", "hidden", "tp", "rounds"):
            fixed += [f"--{name}", str(getattr(args, name))]
        ranks = [
            subprocess.Popen([*fixed, "--rank", str(rank), "--chunks", chunk, "--dtypes", dtype])
            for rank in range(args.tp)
        ]
        codes = [rank.wait() for rank in ranks]
    if any(codes):
        sys.exit(f"a rank of chunk_tokens={chunk} ended with {codes}")


if __name__ == "__main__":
    main()
