"""Measures step time and bytes of three placements on a network of rails with a thin spine.

Four hosts with two GPU slots each are network namespaces (tests/tools/railnet), with a tenth of a
rail's bandwidth to the spine. The launch is the same each time, and numbers processes without
regard to hosts. Needs root, iproute2 and an otherwise idle machine.

    python -m benchmarks.network.rails [--rail-mbit 400] [--spine-mbit 40] [--steps 6]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from tests.e2e.command import Shell
from tests.e2e.forked import Forked
from tests.e2e.rails import Rails, why_not
from tests.e2e.test_rails import EIGHT, SCRAMBLED, SMALL

PLACEMENTS = {
    "auto": "the search",
    "dp-pp-tp": "tensor groups outermost",
    "default": "the launcher's order",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rail-mbit", type=int, default=400)
    parser.add_argument("--spine-mbit", type=int, default=40)
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    limits = ("--rail-mbit", str(given.rail_mbit), "--spine-mbit", str(given.spine_mbit))
    with tempfile.TemporaryDirectory(prefix="parallel3d-") as folder:
        shell = Shell(Path(folder), Path(folder))
        forked = Forked(shell)
        network = Rails.start(Path(folder) / "net", hosts=4, gpus=2, options=limits)
        words = (*EIGHT, *SMALL, *shell.text(), f"train.steps={given.steps}")
        print("| placement | | NVLink MB | rails MB | spine MB | step s | times auto's |")
        print("|---|---|---|---|---|---|---|")
        best = None
        try:
            for placement, what in PLACEMENTS.items():
                ran = network.train(forked, SCRAMBLED, *words, f"placement={placement}")
                step = statistics.median(ran.step_times_s[1:])  # the first one warms up
                best = best or step
                megabytes = " | ".join(f"{ran.on(k) / 1e6:.1f}" for k in ("nvl", "rail", "spine"))
                print(f"| `{placement}` | {what} | {megabytes} | {step:.2f} | {step / best:.1f} |")
        finally:
            network.stop()
            shell.end_all()


if __name__ == "__main__":
    main()
