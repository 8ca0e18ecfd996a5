"""Starts the figures on the ranks of this host, or under torchrun or srun.

    python -m benchmarks.figures.ddp dp=4 [bench.iterations=5 bench.warmup=2 bench.budget_s=60]
    torchrun --nproc-per-node 4 -m benchmarks.figures.ddp bench.budget_s=300

The keys, checks, launcher and run directory are those of `parallel3d bench comm`; only the function
that each rank runs differs.
"""

from __future__ import annotations

import sys

from parallel3d.cli.command_line import main
from parallel3d.run.worker import APPS

if __name__ == "__main__":
    APPS["bench comm"] = ("benchmarks.figures.ddp.figures", "ddp_figures")
    sys.exit(main(["bench", "comm", *sys.argv[1:]]))
