"""Measures the bytes that gloo really sends for each collective, on the loopback of a namespace.

    python -m benchmarks.network.gloo_bytes [--ranks 4] [--mib 16]      needs root, unshare and ip

Prints, for each collective, the bytes of all ranks over those of the whole buffer N, next to the
formulas of parallel3d/estimate/network.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from parallel3d.blueprint.collectives import bus_factor


def sent_on_loopback() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = [x for x in lines if x.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def calls(rank: int, n: int, elements: int) -> dict[str, Callable[[], object]]:
    whole, part = torch.ones(elements), torch.ones(elements // n)
    parts = [torch.ones(elements // n) for _ in range(n)] if rank == 0 else None

    def send_recv() -> None:
        if rank < 2:
            (dist.send, dist.recv)[rank](whole, 1 - rank)

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 0),
        "scatter": lambda: dist.scatter(part, parts, 0),
        "gather": lambda: dist.gather(part, parts, 0),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "send_recv": send_recv,
    }


def expected(op: str, n: int) -> float:
    """Returns the bytes of all ranks over N: one rank's ring share times n, except for collectives
    with a root."""
    if op in ("broadcast", "reduce"):
        return n - 1
    return bus_factor(op, n) * (1 if op in ("scatter", "gather", "send_recv") else n)


def run(rank: int, n: int, mib: int) -> None:
    torch.set_num_threads(1)
    address = "tcp://127.0.0.1:29500"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=n)
    nbytes = mib << 20
    for op, call in calls(rank, n, nbytes // 4).items():
        call()  # the first call also connects
        dist.barrier()
        time.sleep(0.5)  # waits until no rank sends any more
        before = sent_on_loopback()
        time.sleep(0.3)  # waits until every rank has read the counter
        call()
        time.sleep(1.0)
        sent = sent_on_loopback() - before
        dist.barrier()
        if rank == 0:
            print(f"{op:16s}{sent / nbytes:6.2f} N    by the formula {expected(op, n):.2f} N")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside:
        again = [sys.executable, *sys.argv, "--inside"]
        raise SystemExit(subprocess.run(["unshare", "--net", *again], check=False).returncode)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    mp.spawn(run, (options.ranks, options.mib), nprocs=options.ranks)


if __name__ == "__main__":
    main()
