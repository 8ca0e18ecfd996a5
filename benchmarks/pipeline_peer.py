"""Steps of pipelines beside PyTorch's own schedules, in turns (see `pipeline.py`)."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.peer import MODEL, OURS, PEER, VOCAB, commit, corpus, run, torchrun
from parallel3d.comm.clock import KINDS
from parallel3d.schedules.schedule import LOOPED, V_SHAPED, make
from parallel3d.schedules.simulate import Costs, time_orders

SAMPLES = 2
# By name, PyTorch's flags. Its zero-bubble schedules do not compile.
THEIRS = {
    "1F1B": [],
    "1F1B compiled": ["--compile"],
    "interleaved": ["--vpp=2"],
    "interleaved compiled": ["--vpp=2", "--compile"],
    "zero bubble": ["--vpp=2", "--zero-bubble"],
    "ZB-V": ["--vpp=2", "--zero-bubble", "--v-placement"],
}
OUR_SCHEDULES = {  # all compiled
    "1f1b": ["compile=true"],
    "interleaved": ["vpp=2", "schedule=interleaved", "compile=true"],
    "zb_h1": ["schedule=zb_h1", "compile=true"],
    "interleaved_zb": ["vpp=2", "schedule=interleaved_zb", "compile=true"],
    "zbv": ["schedule=zbv", "compile=true"],
}


class Ran(NamedTuple):
    """Median step of one run in ms, and of ours the seconds of all ranks by kind."""

    ms: float
    seconds: dict[str, float]


@dataclass
class Side:
    """The contenders of one side: by name what runs, and what it gave."""

    runs: dict[str, Callable[[], Ran]]
    may_fail: bool = False
    times: dict[str, list[float]] = field(default_factory=dict)
    last: dict[str, Ran] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def run(self, where: str) -> None:
        """Each once. One that may not fail and does raises CalledProcessError."""
        for name, run_once in list(self.runs.items()):
            try:
                self.last[name] = ran = run_once()
            except subprocess.CalledProcessError:
                if not self.may_fail:
                    raise
                self.failed.append(self.drop(name))
                print(f"{where} {name}: failed", file=sys.stderr, flush=True)
            else:
                self.times.setdefault(name, []).append(ran.ms)
                print(f"{where} {name}: {ran.ms:.0f} ms", file=sys.stderr, flush=True)

    def drop(self, name: str) -> str:
        """Takes no part from now on."""
        del self.runs[name]
        self.times.pop(name, None)
        return name

    def ranking(self) -> list[tuple[float, str]]:
        """Medians with their names, the fastest first."""
        return sorted((statistics.median(times), name) for name, times in self.times.items())

    def __str__(self) -> str:
        """Medians, with the least and the most where there are several."""
        said = []
        for ms, name in self.ranking():
            times = self.times[name]
            spread = f" ({min(times):.0f}–{max(times):.0f})" if len(times) > 1 else ""
            said.append(f"{name} {ms:.0f}{spread}")
        return ", ".join([*said, *(f"{name} failed" for name in self.failed)])


def compare_with_peer(
    stages: Sequence[int],
    microbatches: Sequence[int],
    rounds: int,
    best: int,
    steps: tuple[int, int],
    precision: str,
    overrides: Sequence[str],
) -> None:
    """Prints a table. `steps`: of a run, and how many of them are not counted. `precision`: bf16 is
    autocast over fp32 weights there, and bf16 parameters with fp32 masters here.

    In the first round all take part, in the others the `best` fastest of each side. A schedule of
    PyTorch's that fails is named, one of ours ends the run.
    """
    facts = f"commit {commit()}, torch {torch.__version__}, {os.cpu_count()} cores"
    print(f"{facts}, {platform.machine()}; `{' '.join(['python', *sys.argv])}`\n")
    print("| pp | micro-batches | parallel3d, ms | PyTorch, ms | ratio of the best |")
    print("|---|---|---|---|---|")
    overrides = [f"precision={precision}", *overrides]
    spent: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = corpus(folder)
        for pp in stages:
            for count in microbatches:
                ours = {
                    name: partial(_ours, pp, count, steps, [*keys, *overrides], folder, data)
                    for name, keys in OUR_SCHEDULES.items()
                }
                theirs = {
                    f"PyTorch's {name}": partial(
                        _theirs, pp, count, steps, [f"--precision={precision}", *flags], data
                    )
                    for name, flags in THEIRS.items()
                }
                sides = Side(ours), Side(theirs, may_fail=True)
                print(_row(pp, count, rounds, best, *sides), flush=True)
                spent.append(_spent(pp, count, sides[0]))
    print("\nWhere the time of all ranks went in the last run of our fastest:\n", *spent, sep="\n")


def _spent(pp: int, count: int, ours: Side) -> str:
    """Shares of the time of all ranks by kind, and what is idle on the clock with equal costs."""
    name = ours.ranking()[0][1]
    seconds = ours.last[name].seconds
    total = sum(seconds.values())
    chunks = 2 if name in LOOPED or name in V_SHAPED else 1
    schedule = make(name, pp, count, chunks)
    half = seconds["backward"] / 2  # for the inputs, and for the weights
    costs = Costs.even(schedule.placement, seconds["forward"], half, half)
    clock = time_orders(schedule.orders, schedule.placement, costs).bubble_fraction
    shares = sorted(seconds.items(), key=lambda item: -item[1])
    said = ", ".join(f"{kind} {part / total:.1%}" for kind, part in shares if part > 1e-3 * total)
    return f"- pp={pp}, {count} micro-batches, `{name}`: {said}; idle on the clock {clock:.1%}"


def _row(pp: int, count: int, rounds: int, best: int, ours: Side, theirs: Side) -> str:
    for number in range(rounds):
        for side in (ours, theirs):
            side.run(f"pp={pp} m={count}")
            if number == 0 and rounds > 1:
                for _, name in side.ranking()[best:]:
                    side.drop(name)
    ratio = theirs.ranking()[0][0] / ours.ranking()[0][0]
    return f"| {pp} | {count} | {ours} | {theirs} | **{ratio:.2f}×** |"


def _ours(
    pp: int, count: int, steps: tuple[int, int], keys: Sequence[str], folder: Path, data: Path
) -> Ran:
    """One `parallel3d train`, from its metrics.jsonl and its summary."""
    runs = folder / "runs"
    sizes = [f"pp={pp}", f"global_batch_size={SAMPLES * count}", f"train.steps={steps[0]}"]
    files = [f"runs_dir={runs}", "data=text", f"data.path={data}", f"data.cache_dir={folder}"]
    run(torchrun(pp, "-m", "parallel3d", "train", *OURS, *sizes, *files, *keys))
    (folder_of_run,) = runs.iterdir()
    lines = map(json.loads, (folder_of_run / "metrics.jsonl").read_text().splitlines())
    times = [line["step_time_s"] for line in lines if "step_time_s" in line]
    ranks = json.loads((folder_of_run / "summary.json").read_text())["breakdown"]["ranks"]
    shutil.rmtree(runs)
    seconds = {kind: sum(rank[kind] for rank in ranks) for kind in KINDS}
    return Ran(1e3 * statistics.median(times[steps[1] :]), seconds)


def _theirs(pp: int, count: int, steps: tuple[int, int], flags: Sequence[str], data: Path) -> Ran:
    sizes = [f"--{name}={value}" for name, value in (MODEL | {"vocab": VOCAB}).items()]
    sizes += [f"--pp={pp}", f"--micro-batch={SAMPLES}", f"--num-microbatches={count}"]
    sizes += [f"--steps={steps[0]}", f"--warmup={steps[1]}", f"--data={data}"]
    printed, _ = run(torchrun(pp, str(PEER), *sizes, *flags))
    return Ran(json.loads(printed.strip().splitlines()[-1])["ms_per_step"], {})
