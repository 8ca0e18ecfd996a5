"""Compares textbook collectives on rails of a set latency and bandwidth with their prices.

Eight hosts are network namespaces (tests/tools/railnet) whose rail takes α for a message and 1/B
for each byte. Each case is a number of ranks and of bytes, drawn at random, and one collective in
all its forms; the result of each form is checked. A call starts behind a barrier on another network
and ends when its last rank does. All forms are called in turn, repeatedly, and the fastest call of
each counts, because the machine has other work to do. Ranks run with real-time priority; otherwise
they would wait longer for a core than for a message. Needs root and iproute2.

    python -m benchmarks.network.textbook [--cases 100] [--rail-mbit 40] [--latency-us 20000]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from examples.collectives.compare import is_right
from examples.collectives.forms import FORMS, price_of
from examples.collectives.run import run
from parallel3d.blueprint.cluster import Link
from tests.e2e.rails import Rails, why_not

RANKS = 8
ITEM = 4
CLONE_NEWNET = 0x40000000
SMALLEST, LARGEST = 256, 65536  # elements


class Case(NamedTuple):
    collective: str
    n: int
    numel: int


class Row(NamedTuple):
    """One form of a case, with its seconds."""

    case: Case
    form: str
    measured: float
    priced: float

    @property
    def ratio(self) -> float:
        return self.measured / self.priced


def cases(number: int, seed: int) -> list[Case]:
    """Draws collectives on 2 to 8 ranks with random sizes, small ones as often as large ones."""
    draw = random.Random(seed)
    names = list(FORMS)
    return [
        Case(
            names[i % len(names)],
            draw.randint(2, RANKS),
            round(SMALLEST * (LARGEST / SMALLEST) ** draw.random()),
        )
        for i in range(number)
    ]


def rank_main(rank: int, netns: str, folder: Path, given: argparse.Namespace) -> None:
    """Runs one rank in its slot of the network; rank 0 writes the rows."""
    with open(netns) as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS
    )
    os.environ["GLOO_SOCKET_IFNAME"] = "rail0"
    groups = {n: dist.new_group(range(n)) for n in range(2, RANKS + 1)}
    link = Link(given.rail_mbit / 8e3, given.latency_us)
    times = defaultdict(list)
    drawn = [(case, form) for case in cases(given.cases, given.seed)
             for form in FORMS[case.collective]]  # fmt: skip
    for repeat in range(given.repeats + 1):
        for case, form in drawn:
            seconds = one_call(rank, case, form, groups[case.n], link)
            if repeat:  # the first call opens TCP's windows
                times[case, form].append(seconds)
    rows = [
        Row(case, form, min(times[case, form]),
            price_of(case.collective, form, case.n, case.numel, ITEM, link))
        for case, form in drawn
    ]  # fmt: skip
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.barrier()


def one_call(rank: int, case: Case, form: str, group: dist.ProcessGroup, link: Link) -> float:
    """Returns the seconds from the first rank's start to the last one's end; all ranks share a
    clock."""
    buffer = torch.full((case.numel,), rank + 1.0)
    dist.barrier()
    begun = time.monotonic()
    if rank < case.n:
        run(case.collective, form, buffer, "sum", group, link)
    ended = time.monotonic() if rank < case.n else 0.0
    span = torch.tensor([-begun, ended], dtype=torch.float64)
    if rank < case.n and not is_right(case.collective, buffer, rank, case.n):
        raise AssertionError(f"{case} {form}: rank {rank} holds {buffer}")
    dist.all_reduce(span, dist.ReduceOp.MAX)
    return float(span.sum())


def measured(given: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="parallel3d-") as name:
        folder = Path(name)
        limits = ("--rail-mbit", str(given.rail_mbit), "--rail-latency-us", str(given.latency_us))
        network = Rails.start(folder / "net", hosts=RANKS, gpus=1, options=(*limits, "--no-spine"))
        try:
            spaces = json.loads((network.state / "railnet.json").read_text())["hosts"]
            children = []
            for rank, host in enumerate(spaces):
                if (pid := os.fork()) == 0:
                    try:
                        rank_main(rank, host["netns_path"], folder, given)
                        os._exit(0)
                    except BaseException as error:
                        print(f"rank {rank}: {error!r}", file=sys.stderr, flush=True)
                        os._exit(1)
                children.append(pid)
            if any(os.waitpid(pid, 0)[1] for pid in children):
                sys.exit("a rank failed")
        finally:
            network.stop()
        found = json.loads((folder / "rows.json").read_text())
    return [Row(Case(*case), *rest) for case, *rest in found]


def table(rows: list[Row]) -> list[str]:
    """Returns a line for each form of each collective, and a summary."""
    lines = [
        "| collective | form | cases | measured / priced: least | median | most | over 20 % off |",
        "|---|---|---|---|---|---|---|",
    ]
    by_form: dict[tuple[str, str], list[float]] = defaultdict(list)
    by_case: dict[Case, list[Row]] = defaultdict(list)
    for row in rows:
        by_form[row.case.collective, row.form].append(row.ratio)
        by_case[row.case].append(row)
    for name in FORMS:
        for form in FORMS[name]:
            if ratios := by_form[name, form]:
                off = sum(abs(ratio - 1) > 0.2 for ratio in ratios)
                lines.append(
                    f"| {name} | {form} | {len(ratios)} | {min(ratios):.2f} | "
                    f"{statistics.median(ratios):.2f} | {max(ratios):.2f} | {off} |"
                )
    off = sum(abs(row.ratio - 1) > 0.2 for row in rows)
    lines.append(f"\n{len(rows)} rows of {len(by_case)} cases, {off} more than 20 % off the price")
    apart = turned = 0
    for of_case in by_case.values():
        for i, a in enumerate(of_case):
            for b in of_case[:i]:
                low, high = sorted((a, b), key=lambda row: row.priced)
                if high.priced > 1.2 * low.priced:
                    apart += 1
                    turned += high.measured <= low.measured
    lines.append(
        f"{apart} pairs of forms are priced 20 % apart or more; {turned} were measured "
        "in the opposite order"
    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--rail-mbit", type=int, default=40)
    parser.add_argument("--latency-us", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for all rows")
    given = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    rows = measured(given)
    if given.json:
        given.json.write_text(json.dumps(rows))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
