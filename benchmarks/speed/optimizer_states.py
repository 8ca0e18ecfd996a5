"""Measures time and memory of AdamW by the type of its moments.

    python -m benchmarks.speed.optimizer_states

Updates one segment of a matrix on one thread; each row is the fastest of some steps, in turns.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from parallel3d.optim.keys import OptimConfig
from parallel3d.optim.optimizer import Optimizer
from parallel3d.parameters.segments import ParameterSpan, Segment
from parallel3d.parameters.spec import ParameterSpec, ShardSpec

WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"state": "bf16"},
    "fp32, average": {"ema_decay": 0.999},
}


def optimizer_of(rows: int, columns: int, **keys: Any) -> Optimizer:
    shape = (rows, columns)
    spec = ParameterSpec(shape, (ShardSpec("w", shape, (0, 0), shape),), replicated=False)
    flat = torch.randn(rows * columns)
    span = ParameterSpan("w", spec, 0, flat.numel())
    segment = Segment(flat, torch.randn_like(flat), flat, [span])
    return Optimizer(OptimConfig(clip_grad=0.0, **keys), [segment])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = {way: optimizer_of(options.rows, options.columns, **keys) for way, keys in WAYS.items()}
    seconds = dict.fromkeys(WAYS, float("inf"))
    for _ in range(options.steps):
        for way, optimizer in made.items():
            start = time.perf_counter()
            optimizer.step(1e-3, 1.0)
            seconds[way] = min(seconds[way], time.perf_counter() - start)
    numel = options.rows * options.columns
    print("| states | bytes a parameter | ns a parameter |\n|---|---|---|")
    for way, optimizer in made.items():
        states = (t for group in optimizer.groups for ts in group.state.values() for t in ts)
        nbytes = sum(t.nbytes for t in states)
        print(f"| {way} | {nbytes / numel:.0f} | {1e9 * seconds[way] / numel:.1f} |")


if __name__ == "__main__":
    main()
