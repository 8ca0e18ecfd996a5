"""Compares a step on one rank with the time of its matrix products alone.

This limit is model FLOPs (metrics/flops.py: full attention square) over the speed of a large GEMM
of the same type. Both run on one thread, take turns, and are timed in CPU seconds: on a quiet
machine those equal the wall time, and on a busy one the work of others is left out. The rest of the
step is listed twice: by the step's own breakdown, and by operators (PyTorch's profiler over one
more step): matrix products, attention, everything element-wise.

    python -m benchmarks.speed.limit [--precision fp32 bf16] [--compile false true] [--rounds 8]
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.speed.zero import MODEL, Ramp
from parallel3d.blueprint.ops import flops_per_token
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.device.precision import compute_dtype
from parallel3d.host.memory import keep_freed_memory
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from parallel3d.trainer import Trainer

GEMM_SIZE = 1024
GEMMS_A_TURN = 20
KINDS = (
    ("attention", r"scaled_dot_product|flash_attention"),
    ("GEMM", r"::(mm|bmm|addmm|baddbmm|linear|linear_backward|matmul|_addmm_activation)$|mkldnn"),
)
REST = "element-wise and rest"


@dataclass(frozen=True)
class Found:
    """Results for one precision, eager or compiled: medians over the rounds, and shares of a
    step."""

    step_ms: float
    limit_ms: float
    gemm_gflops: float
    breakdown: dict[str, float]
    operators: dict[str, float]


def make_trainer(precision: str, compiled: bool, layers: int) -> Trainer:
    config = Config(micro_batch_size=2, global_batch_size=16, device="cpu", compile=compiled)
    config.model = ModelConfig(**(MODEL | {"num_layers": layers}))
    config.precision.name = precision
    groups = ProcessGroups.single()
    return Trainer(config, groups, torch.device("cpu"), train_source=Ramp())


def gemm_flops(dtype: torch.dtype) -> float:
    """Returns the fastest of a few large products, in FLOP/s: the best that these threads can
    do."""
    a = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
    out, best = torch.empty_like(a), float("inf")
    for _ in range(GEMMS_A_TURN):
        start = time.process_time()
        torch.mm(a, a, out=out)
        best = min(best, time.process_time() - start)
    return 2 * GEMM_SIZE**3 / best


def operators(trainer: Trainer) -> dict[str, float]:
    """Returns the share of one step's time inside operators, by kind; the rest is Python between
    them."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        trainer.train_step()
    found: Counter[str] = Counter()
    assert trainer.step_timer.last is not None
    seconds = sum(trainer.step_timer.last.values())
    for event in profiled.key_averages():
        kind = next((k for k, pattern in KINDS if re.search(pattern, event.key)), REST)
        found[kind] += 1e-6 * event.self_cpu_time_total / seconds
    return dict(found)


def measure(precision: str, compiled: bool, rounds: int, layers: int = 8) -> Found:
    trainer = make_trainer(precision, compiled, layers)
    dtype = compute_dtype(trainer.config.precision)
    trainer.train_step()  # the first call warms up, or compiles
    times, peaks = [], []
    for _ in range(rounds):
        start = time.process_time()
        trainer.train_step()
        times.append(time.process_time() - start)
        peaks.append(gemm_flops(dtype))
    model = trainer.config.model
    flops = flops_per_token(model, model.seq_length) * trainer.tokens_per_step
    peak = statistics.median(peaks)
    means = trainer.step_timer.means()
    breakdown = {kind: s / sum(means.values()) for kind, s in means.items() if s}
    step_ms, limit_ms = 1e3 * statistics.median(times), 1e3 * flops / peak
    return Found(step_ms, limit_ms, 1e-9 * peak, breakdown, operators(trainer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument(
        "--compile", nargs="+", choices=["false", "true"], default=["false", "true"]
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print("| precision | compile | step ms | limit ms | step / limit | GEMM GFLOP/s | step by kind "
          "| operators |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for precision in given.precision:
        for compiled in given.compile:
            found = measure(precision, compiled == "true", given.rounds, given.layers)
            kinds, ops = (
                ", ".join(f"{kind} {100 * share:.0f} %" for kind, share in part.items())
                for part in (found.breakdown, found.operators)
            )
            ratio = found.step_ms / found.limit_ms
            print(
                f"| {precision} | {compiled} | {found.step_ms:.0f} | {found.limit_ms:.0f} "
                f"| **{ratio:.2f}** | {found.gemm_gflops:.0f} | {kinds} | {ops} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
