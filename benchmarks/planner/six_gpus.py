"""Compares three assignments of ranks to six GPUs in three servers, with tp=2 pp=3.

    python -m benchmarks.planner.six_gpus        # 20 s of CPU; Markdown for docs/topology.md

Compute and memory of each stage are those of `parallel3d dryrun`; times of messages and bytes of
wires are those of `parallel3d topology` (`price_step`, `loads_of`). The clock of the schedules
combines both: a micro-batch's forward takes a third of its stage's time, after half of its tensor
group's time; a message to the next stage takes a hop. No wait of a tensor group is hidden. The
gradient of the tied table comes at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

import parallel3d
from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling
from parallel3d.estimate.network import price_step
from parallel3d.estimate.traffic import transfers
from parallel3d.schedules.orders import StageAssignment as Stages
from parallel3d.schedules.walk import Costs, time_orders
from parallel3d.topology.links import Loads, loads_of
from parallel3d.topology.report import make_report

JOB = (
    *("cluster=rails_3x2", "tp=2", "pp=3", "sp=true", "model=llama_3b", "precision=bf16"),
    *("micro_batch_size=1", "global_batch_size=24"),
)
THIN = "cluster.oversubscription=4"  # a thin spine
GPUS = ("A1", "B1", "A2", "B2", "A3", "B3")  # name of the GPU at each slot


class Row(NamedTuple):
    """An assignment: its placement, seconds of a step, and the traffic of its wires in a step."""

    name: str
    stages: str
    step: float
    idle: float
    loads: Loads
    communication: float


def dry_run() -> list[dict]:
    """Returns, for each stage, the seconds of compute in a step, and the bytes at the peak."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "six.json"
        words = [sys.executable, "-m", "parallel3d", "dryrun", *JOB, f"dryrun.json={file}"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        return json.loads(file.read_text())["rows"]


def assignments(*more: str) -> tuple[parallel3d.Config, list[tuple[str, RankMapping]]]:
    """Returns the configuration and the three placements, ours first."""
    config = parallel3d.compose(*JOB, *more, world_size=6)
    report = make_report(config, JOB, {})
    cluster, layout = report.cluster, report.layout
    crossed = np.array([0, 1, 3, 2, 4, 5])  # the second server's GPUs are swapped
    return config, [
        ("tensor groups inside, stages along rails", report.placement),
        ("the second server turned round", RankMapping(cluster, layout, crossed, "crossed")),
        ("pipelines inside", RankMapping.tiled(cluster, layout, Tiling.parse("pp-tp", layout))),
    ]


def measure(
    name: str, placement: RankMapping, config: parallel3d.Config, compute: list[float]
) -> Row:
    layout, count = placement.layout, config.num_microbatches
    waits = []  # seconds of each stage's tensor group per micro-batch
    for stage in range(layout.pp):
        sent = transfers(config, layout, stage)
        waits.append(price_step(placement, sent).dims["tp"].seconds / count)
    price = price_step(placement, transfers(config, layout))
    messages = price.dims["pp"].transfers
    hop = max(message.seconds / message.transfer.count for message in messages)
    third = [seconds / count / 3 for seconds in compute]
    forward = tuple(c + w / 2 for c, w in zip(third, waits, strict=True))
    half = tuple(c + w / 4 for c, w in zip(third, waits, strict=True))
    orders = Blueprint.of(config).pipeline.schedule().orders
    line = time_orders(orders, Stages(layout.pp), Costs(forward, half, half, hop))
    ends = sum(price.dims[dim].seconds for dim in ("embedding", "world") if dim in price.dims)
    step = line.makespan + ends
    pairs = [placement.slots[rank : rank + 2] for rank in range(0, 6, 2)]
    stages = " → ".join("".join(GPUS[slot] for slot in pair) for pair in pairs)
    idle = 1 - sum(compute) / (layout.pp * step)
    return Row(name, stages, step, idle, loads_of(placement, price), price.seconds)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rows = dry_run()
    compute = [row["seconds"] for row in rows]
    config, placements = assignments()
    found = [measure(*row, config, compute) for row in placements]
    config, placements = assignments(THIN)
    thin = [measure(*row, config, compute) for row in placements]
    head = "assignment | stages | NVLink of a GPU | NIC, busiest | rail 1 | rail 2 | spine"
    head += " | communication ms | step ms | idle | thin spine: step ms | idle"
    print(f"`{' '.join(JOB)}`; GB sent in a step, one way; thin: {THIN}\n")
    print(f"| {head} |\n|{'---|' * (head.count('|') + 1)}")
    for row, other in zip(found, thin, strict=True):
        nic, loads = row.loads.nic, row.loads
        wires = (loads.nvlink.max(), nic.max(), nic[0::2].sum(), nic[1::2].sum())
        gigabytes = " | ".join(f"{b / 1e9:.2f}" for b in (*wires, loads.uplink.sum()))
        times = f"{1000 * row.communication:,.0f} | {1000 * row.step:,.0f} | {row.idle:.1%}"
        times += f" | {1000 * other.step:,.0f} | {other.idle:.1%}"
        print(f"| {row.name} | {row.stages} | {gigabytes} | {times} |")
    peaks = ", ".join(f"{row['peak_bytes'] / 1e9:.1f}" for row in rows)
    print(f"\nmemory of a GPU of each stage: {peaks} GB, under every assignment")


if __name__ == "__main__":
    main()
