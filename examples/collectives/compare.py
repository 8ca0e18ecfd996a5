"""Times every collective in all its textbook forms on your own ranks, and compares their prices.

    torchrun --nproc-per-node 4 -m examples.collectives.compare [--bytes 262144] [--calls 5]

Each form is checked first. Its line has messages and bytes of the busiest rank, the median time of
the slowest rank, and the price of that list of messages on a link of --gb-per-s and --latency-us
(`parallel3d bench comm` measures them). The last line says how often the cheaper of two forms was
the faster one. CPU ranks use gloo, GPUs use NCCL.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from itertools import combinations
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from examples.collectives.forms import FORMS, own_block, price_of, rounds_of, segments_of
from examples.collectives.messages import sent
from examples.collectives.run import run
from parallel3d.blueprint.cluster import Link

ITEM = 4  # bytes of an fp32
APART = 1.2  # forms whose prices differ by less need not be in order


class WrongResult(RuntimeError):
    """A form left wrong numbers on a rank."""


class Row(NamedTuple):
    """One form of a collective; messages and bytes are the busiest rank's."""

    collective: str
    form: str
    messages: int
    nbytes: int
    seconds: float
    priced: float


def is_right(collective: str, buffer: Tensor, rank: int, n: int) -> bool:
    """Returns whether a rank that began with `rank + 1` everywhere has the right result."""
    every = torch.arange(1.0, n + 1)
    blocks = [own_block(r, n, buffer.numel()) for r in range(n)]
    held, mine = buffer.cpu(), blocks[rank]
    if collective == "barrier" or (collective in ("reduce", "gather") and rank > 0):
        return True
    if collective in ("scatter", "broadcast"):
        return bool(((held[mine] if collective == "scatter" else held) == 1).all())
    if collective in ("gather", "all_gather"):
        return all(bool((held[block] == r + 1).all()) for r, block in enumerate(blocks))
    return bool(((held[mine] if collective == "reduce_scatter" else held) == every.sum()).all())


def check(collective: str, form: str, count: int, link: Link, device: torch.device) -> None:
    """Runs a form once. Raises WrongResult on a rank that holds a wrong number."""
    rank, n = dist.get_rank(), dist.get_world_size()
    buffer = torch.full((count,), rank + 1.0, device=device)
    run(collective, form, buffer, link=link)
    if not is_right(collective, buffer, rank, n):
        raise WrongResult(f"{collective} as {form}: rank {rank} of {n} holds {buffer}")


def median_seconds(collective: str, form: str, buffer: Tensor, link: Link, calls: int) -> float:
    """Returns the median over calls of each call's slowest rank; the same on every rank."""
    seconds = []
    for _ in range(calls):
        dist.barrier()
        start = time.perf_counter()
        run(collective, form, buffer, link=link)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(seconds, device=buffer.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def compare(count: int, calls: int, link: Link, device: torch.device) -> list[Row]:
    """Checks, times and prices every form of every collective on `count` elements."""
    n, rows = dist.get_world_size(), []
    for collective, forms in FORMS.items():
        for form in forms:
            size = 0 if collective == "barrier" else count
            check(collective, form, size, link, device)
            buffer = torch.zeros(size, device=device)
            seconds = median_seconds(collective, form, buffer, link, calls)
            segments = segments_of(form, n, size, ITEM, link)
            ranks = sent(rounds_of(collective, form, n, size, segments), n)
            priced = price_of(collective, form, n, size, ITEM, link)
            messages = max(each.messages for each in ranks)
            nbytes = ITEM * max(each.elements for each in ranks)
            rows.append(Row(collective, form, messages, nbytes, seconds, priced))
    return rows


def orders(rows: list[Row]) -> tuple[int, int]:
    """Counts pairs of forms priced `APART` or more, and those whose cheaper form was faster."""
    apart = kept = 0
    for pair in combinations(rows, 2):
        low, high = sorted(pair, key=lambda row: row.priced)
        if low.collective == high.collective and high.priced > APART * low.priced:
            apart += 1
            kept += low.seconds < high.seconds
    return apart, kept


def table(rows: list[Row]) -> str:
    """Returns the rows as text, one a line."""
    heads = f"{'messages':>8} {'bytes':>12} {'time, µs':>10} {'priced':>9}"
    lines = [f"{'collective':15} {'form':19} {heads}"]
    for row in rows:
        times = f"{row.seconds * 1e6:10.1f} {row.priced * 1e6:9.1f}"
        lines.append(f"{row.collective:15} {row.form:19} {row.messages:8} {row.nbytes:12,} {times}")
    apart, kept = orders(rows)
    said = f"Of {apart} pairs of forms priced {APART - 1:.0%} apart or more"
    lines.append(f"{said} the cheaper was the faster in {kept}.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, default=262144, help="of the buffer, in fp32")
    parser.add_argument("--calls", type=int, default=5, help="timed calls of each form")
    parser.add_argument("--gb-per-s", type=float, default=0.8, help="of a link, 1e9 B/s")
    parser.add_argument("--latency-us", type=float, default=50.0, help="of a message")
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    link = Link(given.gb_per_s, given.latency_us)
    rows = compare(given.bytes // ITEM, given.calls, link, device)
    if dist.get_rank() == 0:
        print(table(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
