"""Counts the groups of one rank, and times their creation, for worlds of any size.

Runs the real `ProcessGroups.create` in one process that acts as one rank of the world: PyTorch's
`fake` backend makes groups without connecting anybody. The times are therefore the work that every
rank does by itself (listing ranks, naming and registering groups, the mesh). Connections take
additional time, for each rank only with the members of its own groups.

    python -m benchmarks.network.groups [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel3d.blueprint.layout import Layout
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.run.keys import LaunchConfig

LAYOUTS = {
    8: Layout(tp=2, pp=2, dp=2),
    512: Layout(tp=8, pp=4, dp=16),
    4096: Layout(tp=8, pp=8, dp=64),
    16384: Layout(tp=8, pp=16, dp=128),  # Llama 3 405B's (arXiv 2407.21783, table 4)
}


@dataclass(frozen=True)
class Row:
    """One world: its groups, the handles and members of one rank, and the median seconds."""

    ranks: int
    tp: int
    pp: int
    dp: int
    groups_in_all: int
    handles_of_a_rank: int
    members_of_a_rank: int
    seconds: float


def measure(ranks: int, repeats: int) -> Row:
    layout = LAYOUTS[ranks]
    rank = ranks - 1  # a last stage: it has a tied embedding, and so the most groups
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        groups = ProcessGroups.create(layout, "cpu", launch=LaunchConfig(shared_memory=False))
        times.append(time.perf_counter() - start)
        kinds = (groups.tp, groups.dp, groups.pp, groups.embedding, groups.world)
        own = {g.ranks for g in kinds if g.handle is not None}
        groups.close()
    dist.destroy_process_group()
    everywhere = sum(
        len(layout.groups(*dims))
        # It is counted twice, for both ends.
        for dims in (("tp",), ("dp",), ("pp",), ("pp",), ("tp", "cp", "dp", "pp"))
    )
    members = sum(map(len, own))
    seconds = statistics.median(times)
    return Row(
        ranks, layout.tp, layout.pp, layout.dp, everywhere, len(own), members, round(seconds, 4)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, help="only this world, in this process")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.ranks is not None:
        print(json.dumps(asdict(measure(given.ranks, given.repeats))))
        return
    rows = []
    print("| ranks | tp | pp | dp | groups in all | of one rank | its members | time on one rank |")
    print("|---|---|---|---|---|---|---|---|")
    # each world in its own process, so that nothing is cached from the preceding one
    for ranks in LAYOUTS:
        command = [sys.executable, __file__, "--ranks", str(ranks), "--repeats", str(given.repeats)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        row = Row(**json.loads(done.stdout))
        rows.append(asdict(row))
        print(
            f"| {row.ranks:,} | {row.tp} | {row.pp} | {row.dp} | {row.groups_in_all:,} "
            f"| {row.handles_of_a_rank} | {row.members_of_a_rank:,} | {1e3 * row.seconds:,.1f} ms |"
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
