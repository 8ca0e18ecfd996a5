"""Measures the DDP figures on eight ranks over rails: eight hosts with one GPU slot each.

Hosts are network namespaces. Each replica's gradients cross a rail of `--rail-mbit`; no two hosts
share memory. Needs root and iproute2 (tests/tools/railnet).

    python -m benchmarks.network.ddp_rails [--rail-mbit 1000] [--out folder]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.e2e.command import Shell
from tests.e2e.forked import Forked
from tests.e2e.rails import Rails, why_not

SLOTS = [f"h{host}g0" for host in range(1, 9)]
SIZES = ("cluster.nodes=8", "cluster.gpus_per_node=1", "placement=default", "device=cpu")
# Code of ranks that are forked from a process with torch imported.
FIGURES = "import runpy; runpy.run_module('benchmarks.figures.ddp', run_name='__main__')"
WIRES = ("cluster.nvlink_interface=nvl0", "cluster.rail_interface=rail*")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rail-mbit", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--budget", type=float, default=600)
    parser.add_argument("--out", type=Path, help="folder of the report and its pictures")
    given = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="parallel3d-") as folder:
        shell = Shell(Path(folder), Path(folder))
        forked = Forked(shell)
        limits = ("--rail-mbit", str(given.rail_mbit), "--spine-mbit", str(given.rail_mbit))
        network = Rails.start(Path(folder) / "net", hosts=8, gpus=1, options=limits)
        try:
            words = (
                "dp=8",
                *SIZES,
                *WIRES,
                f"bench.iterations={given.iterations}",
                "bench.warmup=1",
            )
            rails = f"cluster.rail_gb_per_s={given.rail_mbit / 8000:g}"
            ran = network.run(
                forked,
                SLOTS,
                *("-c", FIGURES),
                *words,
                rails,
                f"bench.budget_s={given.budget:g}",
                timeout_s=1800,
            )
            print((ran.folder / "ddp_figures.md").read_text())
            print(f"{ran.on('rail') / 1e6:.0f} MB over the rail")
            if given.out:
                shutil.copytree(ran.folder, given.out, dirs_exist_ok=True)
        finally:
            network.stop()
            shell.end_all()


if __name__ == "__main__":
    main()
