"""Measures the gain of `tensor_parallel.chunks` when a tensor group crosses a slow network.

Two hosts with one slot each are network namespaces (tests/tools/railnet) with a limited rail
between them; tp=2 with sequence parallelism, one thread per rank. Runs with each number of pieces
take turns. Figures are medians over the steps of all rounds, without the first two of each run.
Needs root and iproute2.

    python -m benchmarks.network.tensor_overlap [--rail-mbit 1000] [--chunks 1 2 4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from tests.e2e.command import Shell
from tests.e2e.forked import Forked
from tests.e2e.rails import Rails, Ran, why_not

WARM_UP = 2
RUN = (
    *("tp=2", "sp=true", "cluster.nodes=2", "cluster.gpus_per_node=1"),
    *("model.num_layers=4", "model.hidden_size=512", "model.num_attention_heads=8"),
    *("model.ffn_hidden_size=2048", "model.seq_length=256", "micro_batch_size=2"),
    *("global_batch_size=8", "train.eval_every=0", "train.eval_batches=0", "checkpoint.every=0"),
    *("launch.peak_tflops=0.1", "launch.timeout_s=120", "launch.shared_memory=false", "device=cpu"),
    *("cluster.nvlink_interface=nvl0", "cluster.rail_interface=rail*"),
)


def exposed_tp_s(ran: Ran) -> list[float]:
    """Measures, in each step, the seconds that rank 0 waited for its tensor group."""
    lines = (ran.folder / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "step_time_s" in record]
    return [record["times"]["tp"] for record in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rail-mbit", type=int, default=1000)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    times: dict[int, list[float]] = {chunks: [] for chunks in given.chunks}
    waits: dict[int, list[float]] = {chunks: [] for chunks in given.chunks}
    megabytes: dict[int, float] = {}
    with tempfile.TemporaryDirectory(prefix="parallel3d-") as folder:
        shell = Shell(Path(folder), Path(folder), {"OMP_NUM_THREADS": "1"})
        forked = Forked(shell)
        limits = ("--rail-mbit", str(given.rail_mbit))
        network = Rails.start(Path(folder) / "net", hosts=2, gpus=1, options=limits)
        words = (*RUN, *shell.text(), f"train.steps={given.steps}")
        try:
            for _ in range(given.rounds):
                for chunks in given.chunks:
                    key = f"tensor_parallel.chunks={chunks}"
                    ran = network.run(forked, ["h1g0", "h2g0"], "train", *words, key, timeout_s=600)
                    times[chunks] += ran.step_times_s[WARM_UP:]
                    waits[chunks] += exposed_tp_s(ran)[WARM_UP:]
                    megabytes[chunks] = ran.on("rail") / given.steps / 1e6
        finally:
            network.stop()
            shell.end_all()
    print(
        "| chunks | step ms (quartiles) | of which waiting for tp, ms | rail MB per step | "
        "times 1 chunk |"
    )
    print("|---|---|---|---|---|")
    one = statistics.median(times[given.chunks[0]])
    for chunks in given.chunks:
        low, middle, high = (1e3 * t for t in statistics.quantiles(times[chunks], n=4))
        wait = 1e3 * statistics.median(waits[chunks])
        print(
            f"| {chunks} | {middle:.0f} ({low:.0f}–{high:.0f}) | {wait:.0f} | "
            f"{megabytes[chunks]:.0f} | {1e3 * one / middle:.2f}× |"
        )


if __name__ == "__main__":
    main()
