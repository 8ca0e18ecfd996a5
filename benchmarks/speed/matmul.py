"""Compares fp32 products of a CPU by oneDNN with PyTorch's own choice, in turns.

    python -m benchmarks.speed.matmul                 # the table of docs/performance.md
    python -m benchmarks.speed.matmul --threads 1 --sizes 512x256x1376

For each size (rows × inputs × outputs) it times the forward x·Wᵀ and the gradient of the input: the
median microseconds of both, and their ratio. `parallel3d/device/matmul.py` decides which library
training uses for each product.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.peers.peer import commit
from parallel3d.device import matmul

SIZES = ["64x64x64", "128x128x128", "512x128x264", "512x256x1376", "512x688x256"]
SIZES += ["1024x1024x1024", "512x2048x8192"]
TURNS = 15
TURN_S = 0.02


def in_turns(made: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Returns the seconds of each, the median of its turns."""
    times: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(TURNS + 1):
        for name, make in made.items():
            count, start = 0, time.perf_counter()
            while not count or time.perf_counter() < start + TURN_S:
                make()
                count += 1
            if turn:  # the first call warms up
                times[name].append((time.perf_counter() - start) / count)
    return {name: statistics.median(of) for name, of in times.items()}


def row(rows: int, inputs: int, outputs: int) -> str:
    """Returns a line of the table."""
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    grad = torch.randn(rows, outputs)
    made = {
        "forward": lambda: torch.nn.functional.linear(x, weight),
        "forward by oneDNN": lambda: matmul.by_onednn(x, weight, None),
        "backward": lambda: grad @ weight,
        "backward by oneDNN": lambda: matmul.by_onednn(grad, weight.t(), None),
    }
    times = in_turns(made)
    cells = [f"{rows} × {inputs} × {outputs}"]
    for name in ("forward", "backward"):
        theirs, ours = times[name], times[f"{name} by oneDNN"]
        cells.append(f"{1e6 * theirs:.0f}, {1e6 * ours:.0f} µs: {theirs / ours:.2f}×")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="ROWSxINPUTSxOUTPUTS")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    facts = f"commit {commit()}, torch {torch.__version__}, {platform.machine()}"
    used = "used" if matmul.onednn_is_faster() else "not used"
    print(f"{facts}, {options.threads} of {os.cpu_count()} cores; oneDNN is {used} here\n")
    print("| rows × inputs × outputs | forward: MKL, oneDNN | gradient of the input |")
    print("|---|---|---|", flush=True)
    for size in options.sizes:
        print(row(*map(int, size.split("x"))), flush=True)


if __name__ == "__main__":
    main()
