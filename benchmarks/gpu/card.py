"""Measures one GPU: all figures of docs/performance.md about a card, in groups of a few minutes.

1. The card's speed in a large bf16 GEMM, next to that of its datasheet.
2. Llama 3.2's 1B and 3B shapes, sequence 4096, bf16: tokens/s and MFU of parallel3d (eager and
   `compile=true`), of Hugging Face transformers (the same two ways) and of torchtitan's model, on
   equal batches of random tokens, with AdamW and clipping. The micro-batch is the largest that
   fits. It also times whole steps of all of them in turns, in one process.
3. One rank's share of llama3_70b at tp=8 and of gpt3_175b at tp=8 pp=16, with PyTorch's `fake`
   process group in place of the other ranks: memory, and the time of a layer's forward and backward
   without its communication, but with the copies that `fake` makes in all-gathers (2 to 3 %, by
   their bytes).
4. fp8 against bf16 in the GEMMs of the first of these, casts included, if the card has fp8.

Each row runs in a process of its own with a time limit. A row that fails, or needs a missing
package or device, says so. Both files are written after every row. New rows are added to those that
the files have: rows of the same machine and torch share a section, others get their own.

`--size tiny --device cpu` runs every path that a CPU has in a few seconds; the suite does so.
Seconds are estimates; docs/gpu.md has the results of an H100 and an H200.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.peers import peer_row, side_by_side
from benchmarks.gpu.rows import fp8_row, gemm_row, model_row
from benchmarks.gpu.shards import shard_row
from benchmarks.gpu.tasks import Bench, Given, Row, Task, judged, noted
from parallel3d.device import accelerator
from parallel3d.metrics.peak import datasheet_peak

NEEDED_SHARE = 0.70  # expected share of the datasheet's peak in a GEMM of 8192³


def gemm(given: Given) -> Row:
    """Compares a square bf16 product with the datasheet."""
    row = gemm_row(given.steps(), given.device)
    known = datasheet_peak(accelerator.name(given.device), "bf16")
    found = f"{row['tflops']:.3g} TFLOP/s at {row['size']}³"
    if known is None:
        return noted(f"{found}; the datasheet of this device is not known", row)
    share = row["tflops"] * 1e12 / known.flops
    found += f", {100 * share:.0f} % of {known}"
    return judged(not given.is_timed or share >= NEEDED_SHARE, found, row | {"share": share})


def _row(group: str, seconds: int, function: Callable[..., Row], *names: str, **more: Any) -> Task:
    """Returns the task whose row is `function(*names, size, device, **more)`."""
    return Task(
        lambda given: function(*names, given.steps(), given.device, **more), seconds, group=group
    )


ROWS = {
    "gemm": Task(gemm, 15, "at least 70 % of the datasheet (H200: ≈ 785 TFLOP/s)", "card"),
    "fp8": _row("card", 35, fp8_row),
    "shard llama3_70b": _row("card", 30, shard_row, "llama3_70b"),
    "shard gpt3_175b": _row("card", 40, shard_row, "gpt3_175b"),
    "1b side by side": _row("steps", 90, side_by_side, "1b", compiled=False),
    "1b side by side compile": _row("steps", 220, side_by_side, "1b", compiled=True),
    "parallel3d 1b": _row("1b", 45, model_row, "1b", compiled=False),
    "parallel3d 1b compile": _row("1b", 140, model_row, "1b", compiled=True),
    "transformers 1b": _row("1b", 50, peer_row, "transformers", "1b", compiled=False),
    "transformers 1b compile": _row("1b", 120, peer_row, "transformers", "1b", compiled=True),
    "parallel3d 3b": _row("3b", 120, model_row, "3b", compiled=False),
    "parallel3d 3b compile": _row("3b", 220, model_row, "3b", compiled=True),
    "transformers 3b": _row("3b-peer", 80, peer_row, "transformers", "3b", compiled=False),
    "transformers 3b compile": _row("3b-peer", 180, peer_row, "transformers", "3b", compiled=True),
    "torchtitan 1b": _row("titan", 120, peer_row, "torchtitan", "1b", compiled=True),
    "torchtitan 3b": _row("titan", 180, peer_row, "torchtitan", "3b", compiled=True),
}
BENCH = Bench("benchmarks.gpu.card", __doc__, ROWS)
main = BENCH.main

if __name__ == "__main__":
    sys.exit(main())
