"""Measures a node of eight GPUs: layouts of one model against each other and against their prices.

1. `verify …`: a layout trains the same model as one process, on these GPUs.
2. `comm …`: every collective of a layout's groups, by `parallel3d bench comm`, next to its price.
3. `train …`: llama3_8b by layout, with the same global batch: tokens/s, MFU and peak memory, next
   to the figures of `parallel3d plan` and `parallel3d dryrun` for the same layout.

Each line runs in a process of its own with a time limit; all results are in one file with those of
`benchmarks.gpu_first` and `benchmarks.gpu.card`. `--plan` prints the calls. `--device cpu --size
tiny` runs every kind of line with two ranks; the suite does so. The benchmark has not run on a node
yet, and seconds are estimates.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from functools import partial

from benchmarks.gpu import first_kernels as kernels
from benchmarks.gpu.commands import (
    TINY,
    UNSAVED,
    cluster_of,
    command_line_missing,
    compared,
    devices_missing,
    dry_run,
    learns,
    model_words,
    new_run,
    parallel3d,
    run,
    run_words,
    speed_sentence,
    succeeded,
    trained,
)
from benchmarks.gpu.tasks import Bench, Given, Row, Task, judged, noted
from parallel3d.device import accelerator

SEQUENCES, TINY_SEQUENCES = 16, 4  # sequences of a step, the same for all layouts
NEAR = 0.05  # tolerance, relative to the peak memory that a dry run predicts
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "send_recv")
# A collective of 64 MiB takes at most this many times its price.
TIMES_PRICE = 1.5
LARGE = 64 << 20


def ranks_of(words: str) -> int:
    """Returns the keys of a layout as typed."""
    sizes = dict(re.findall(r"\b(tp|pp|dp)=(\d+)", words))
    return math.prod(map(int, sizes.values()))


def _missing(given: Given, words: str, may_share: bool = False) -> Row | None:
    return command_line_missing() or devices_missing(given, ranks_of(words), may_share)


def verify(given: Given, words: str) -> Row:
    """Runs `parallel3d verify` for a layout: one process gives the same losses, norms and
    weights."""
    if (missing := _missing(given, words, may_share=True)) is not None:
        return missing
    small = ["verify.steps=1"] if given.is_tiny else []
    batch, run_dir = ["micro_batch_size=2", "global_batch_size=16"], new_run(given, "verify")
    model = model_words(given, "model=llama_tiny", "model.num_layers=8")
    done = parallel3d("verify", *words.split(), *model, *small, *batch, *run_words(given, run_dir))
    path = run_dir / "verify.json"
    if done.returncode and path.exists():
        differs = json.loads(path.read_text(encoding="utf-8"))["failure"]
        if differs is not None:
            return judged(False, differs, {})
    succeeded(done)
    return judged(True, "the layout does not change the model", {})


def comm(given: Given, words: str) -> Row:
    """Runs `parallel3d bench comm` for a layout: each collective of training with its price."""
    if (missing := _missing(given, words)) is not None:
        return missing
    run_dir, sizes = new_run(given, "comm"), [4096] if given.is_tiny else [65536, LARGE]
    budget = 1 if given.is_tiny else 30
    where = [*run_words(given, run_dir), *cluster_of(accelerator.name(given.device))]
    run("bench", "comm", *words.split(), *where, f"bench.sizes={json.dumps(sizes)}",
        f"bench.budget_s={budget}")  # fmt: skip
    report = json.loads((run_dir / "bench.json").read_text(encoding="utf-8"))
    rows = [
        {key: row[key] for key in ("dim", "op", "mode", "bytes", "seconds", "bus_gb_per_s")}
        | {"times_price": row["times_the_price"]}
        for row in report["rows"]
        if row.get("times_the_price") and row["op"] in COLLECTIVES and row["reduction"] != "max"
    ]
    large = [row for row in rows if row["bytes"] >= sizes[-1]]
    worst = max(large, key=lambda row: row["times_price"])
    figures: Row = {"rows": rows, "findings": report["findings"], "fitted": report["fitted"]}
    figures["median_times_price"] = statistics.median(row["times_price"] for row in large)
    found = f"{len(rows)} rows; of {sizes[-1]:,} B the median takes "
    found += f"{figures['median_times_price']:.2f} times its price, at worst {worst['op']} over "
    found += f"{worst['dim']} {worst['times_price']:.2f} ({worst['bus_gb_per_s']:.3g} GB/s)"
    if report["findings"]:
        found += f"; {len(report['findings'])} slow rank(s) or pair(s)"
    if not given.is_timed:
        return noted(found, figures)
    return judged(worst["times_price"] <= TIMES_PRICE and not report["findings"], found, figures)


def train(given: Given, words: str) -> Row:
    """Runs `parallel3d train` of llama3_8b in a layout; compares it with `plan` and `dryrun`."""
    if (missing := _missing(given, words)) is not None:
        return missing
    batch = TINY_SEQUENCES if given.is_tiny else SEQUENCES
    keys = [*model_words(given, "model=llama3_8b"), *words.split(), "precision=bf16"]
    keys += ["micro_batch_size=1", f"global_batch_size={batch}"]
    steps, run_dir = 5 if given.is_tiny else 12, new_run(given, "train")
    where = [f"train.steps={steps}", *UNSAVED, *run_words(given, run_dir)]
    figures = trained([*keys, *where], run_dir)
    figures["plan"] = planned(given, words, batch)
    beside = compared(dry_run(given, *keys, f"device={given.device.type}"), figures)
    dry = beside.pop("dryrun")
    figures["dryrun"] = {key: dry[key] for key in ("peak_bytes", "seconds", "fits", "mfu")}
    plan = figures["plan"]
    found = f"{speed_sentence(figures)}; plan: {plan['step s']:g} s, MFU {plan['MFU %']:g} %, "
    found += f"{plan['GiB']:g} GiB; dryrun: {beside['found']}"
    if not given.is_timed:
        return judged(learns(figures["losses"]), found, figures)
    # A dry run leaves communication out: its time is a lower bound.
    near = abs(beside.get("peak_bytes_off", 0.0)) <= NEAR and beside.get("seconds_off", 0.0) <= 0
    return judged(learns(figures["losses"]) and near, found, figures)


def planned(given: Given, words: str, batch: int) -> dict[str, float]:
    """Returns the numbers of `parallel3d plan`'s row for a layout whose keys are all given."""
    layout = {"tp": "1", "pp": "1", "zero": "0", "recompute": "none", "micro_batch_size": "1"}
    layout |= dict(word.split("=") for word in words.split())
    layout.pop("sp", None)  # otherwise the planner would choose it from tp
    model = [word for word in TINY if word.startswith("model")] if given.is_tiny else []
    where = cluster_of(accelerator.name(given.device)) or ["cluster=dgx_h100"]
    if model:  # a tiny run has fewer ranks than the eight GPUs of a preset's host
        where.append(f"cluster.gpus_per_node={ranks_of(words)}")
    out = run("plan", *(model or ["model=llama3_8b"]), *where, f"global_batch_size={batch}",
              "cluster.nodes=1", "plan.confirm=0",
              *(f"{key}={value}" for key, value in layout.items()))  # fmt: skip
    return row_of_plan(out)


def row_of_plan(text: str) -> dict[str, float]:
    """Returns the numbers of the first row of a printed plan, by the names above them."""
    lines = text.splitlines()
    place = next(i for i, line in enumerate(lines) if line.split()[:2] == ["#", "tp"])
    names = lines[place].replace("step s", "step_s").replace("MFU %", "MFU_%").split()
    # The reason consists of several words.
    row = dict(zip(names, lines[place + 1].split(), strict=False))
    return {name.replace("_", " "): float(row[name]) for name in ("step_s", "MFU_%", "GiB")}


LAYOUTS = (
    "dp=8 zero=3",
    "tp=4 sp=true dp=2 zero=1",
    "tp=2 sp=true dp=4 zero=1",
    "tp=8 sp=true",
    "tp=2 sp=true pp=2 dp=2 zero=1 schedule=interleaved_zb vpp=8",
    "pp=4 dp=2 zero=1 schedule=zbv vpp=2",
)
VERIFIED = (
    "tp=2 sp=true pp=2 dp=2 zero=1 schedule=interleaved_zb vpp=2",
    "dp=8 zero=3",
    "tp=8 sp=true",
    "pp=8 schedule=zb_h1",
    "dp=8 ddp.hierarchical=true",
)
MEASURED = ("tp=8", "dp=8", "tp=2 pp=2 dp=2")
LINES = {
    "versions": Task(
        kernels.versions, 5, "torch ≥ 2.11 built for CUDA, and the names of driver and card"
    ),
    **{
        f"verify {words}": Task(
            partial(verify, words=words), 50, "eight ranks give the results of one process",
            by_command=True,
        )
        for words in VERIFIED
    },
    **{
        f"comm {words}": Task(
            partial(comm, words=words), 60,
            f"64 MiB take at most {TIMES_PRICE:g} times the price; no rank is slow",
            by_command=True,
        )
        for words in MEASURED
    },
    **{
        f"train {words}": Task(
            partial(train, words=words), 100,
            "the loss falls; peak memory is within 5 % of `dryrun`, and the time above it",
            by_command=True,
        )
        for words in LAYOUTS
    },
}  # fmt: skip
_NAMES = tuple(LINES)
_VERIFIED, _MEASURED, _TRAINED = (
    tuple(name for name in _NAMES if name.startswith(kind)) for kind in ("verify", "comm", "train")
)
CALLS = (
    ("versions", *_VERIFIED[:2], *_TRAINED[:2]),
    (*_TRAINED[2:5], *_MEASURED[:1]),
    (*_TRAINED[5:], *_MEASURED[1:], *_VERIFIED[2:]),
)
BENCH = Bench("benchmarks.gpu.node", __doc__, LINES, CALLS)
main = BENCH.main

if __name__ == "__main__":
    sys.exit(main())
