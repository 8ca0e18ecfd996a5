"""Times steps of pipelines next to PyTorch's own schedules, in turns (see `pipeline.py`).

All contenders of a row run at the same time, and all but one of them are stopped (SIGSTOP). A turn
can then be a few steps, so that a disturbance of the machine that lasts longer affects all of them
equally.
"""

from __future__ import annotations

import json
import operator
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.peer import MODEL, OURS, PEER, VOCAB, commit, corpus, environment
from parallel3d.comm.step_timer import KINDS
from parallel3d.schedules.schedule import LOOPED, V_SHAPED, make
from parallel3d.schedules.walk import Costs, time_orders

SAMPLES = 2
STEPS = 10**6  # longer than any turn takes; after this time contenders are ended
WARMUP = 3  # number of steps before the turns
# number of steps of a turn; the first, during which the contender was stopped, does not count
TURN = 3
# PyTorch's flags by name. Its zero-bubble schedules do not compile.
THEIRS = {
    "1F1B": [],
    "1F1B compiled": ["--compile"],
    "interleaved": ["--vpp=2"],
    "interleaved compiled": ["--vpp=2", "--compile"],
    "zero bubble": ["--vpp=2", "--zero-bubble"],
    "ZB-V": ["--vpp=2", "--zero-bubble", "--v-assignment"],
}
OUR_SCHEDULES = {  # every contender is compiled
    "1f1b": ["compile=true"],
    "interleaved": ["vpp=2", "schedule=interleaved", "compile=true"],
    "zb_h1": ["schedule=zb_h1", "compile=true"],
    "interleaved_zb": ["vpp=2", "schedule=interleaved_zb", "compile=true"],
    "zbv": ["schedule=zbv", "compile=true"],
}


@dataclass
class Setting:
    """The settings that the contenders of a row share. `overrides`: keys for our side."""

    pp: int
    microbatches: int
    precision: str
    overrides: Sequence[str]
    folder: Path
    data: Path


class Failed(Exception):
    """Raised when a contender has ended."""


@dataclass
class Contender:
    """The ranks of one schedule; each step writes a line into the file of this pattern."""

    name: str
    words: list[str]
    ranks: int
    folder: Path
    pattern: str
    processes: list[subprocess.Popen] = field(default_factory=list)
    counted: list[dict[str, Any]] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)  # milliseconds per step of each turn
    computed: list[float] = field(default_factory=list)  # CPU seconds per step of each turn

    def start(self) -> None:
        """Runs until the contender has warmed up. Raises Failed."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        one = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self.ranks)}
        one["LOCAL_WORLD_SIZE"] = one["WORLD_SIZE"]
        for rank in map(str, range(self.ranks)):
            env = environment() | one | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            words = [sys.executable, *self.words]
            self.processes.append(
                subprocess.Popen(
                    words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            )
        self._run_until(WARMUP)

    def turn(self) -> None:
        """Runs a few more steps. Raises Failed."""
        done, spent = len(self._lines()), self._cpu_s()
        self._signal(signal.SIGCONT)
        self._run_until(done + TURN)
        self.computed.append((self._cpu_s() - spent) / TURN)
        counted = [json.loads(line) for line in self._lines()[done + 1 : done + TURN]]
        self.counted += counted
        self.medians.append(1e3 * statistics.median(step["step_time_s"] for step in counted))

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    @property
    def ms(self) -> float:
        return 1e3 * statistics.median(step["step_time_s"] for step in self.counted)

    def __str__(self) -> str:
        """Describes the median, the smallest and the largest turn, and the CPU seconds of all
        ranks."""
        cpu = statistics.median(self.computed)
        turns = f"{min(self.medians):.0f}–{max(self.medians):.0f}"
        return f"{self.name} {self.ms:.0f} ({turns}; {cpu:.2f} s of CPU)"

    def _cpu_s(self) -> float:
        """Returns the CPU seconds of all ranks since their start, in the program and in the
        kernel."""
        ticks = 0
        for process in self.processes:
            of = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(of[11]) + int(of[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def _signal(self, number: int) -> None:
        for process in self.processes:
            process.send_signal(number)

    def _lines(self) -> list[str]:
        """Returns the complete lines written so far."""
        files = list(self.folder.glob(self.pattern))
        return files[0].read_text().split("\n")[:-1] if files else []

    def _run_until(self, steps: int) -> None:
        """Stops the contender after this step."""
        while len(self._lines()) < steps:
            if any(process.poll() is not None for process in self.processes):
                raise Failed(self.name)
            time.sleep(0.01)
        self._signal(signal.SIGSTOP)


def ours(name: str, of: Setting) -> Contender:
    folder = of.folder / name
    keys = [f"pp={of.pp}", f"global_batch_size={SAMPLES * of.microbatches}", f"runs_dir={folder}"]
    keys += ["data=text", f"data.path={of.data}", f"data.cache_dir={of.folder}"]
    keys += [f"train.steps={STEPS}", "train.log_every=1", "launch.timeout_s=100000"]
    keys += [f"precision={of.precision}", *OUR_SCHEDULES[name], *of.overrides]
    words = ["-m", "parallel3d", "train", *OURS, *keys]
    return Contender(name, words, of.pp, folder, "*/metrics.jsonl")


def theirs(name: str, of: Setting) -> Contender:
    folder = of.folder / f"PyTorch's {name}"
    folder.mkdir()
    flags = [f"--{key}={value}" for key, value in (MODEL | {"vocab": VOCAB}).items()]
    flags += [f"--pp={of.pp}", f"--micro-batch={SAMPLES}", f"--num-microbatches={of.microbatches}"]
    flags += [f"--steps={STEPS}", f"--data={of.data}", f"--precision={of.precision}"]
    words = [str(PEER), *flags, f"--times={folder / 'times'}", *THEIRS[name]]
    return Contender(folder.name, words, of.pp, folder, "times")


def compare_with_peer(
    stages: Sequence[int],
    microbatches: Sequence[int],
    turns: int,
    precision: str,
    contenders: tuple[Sequence[str], Sequence[str]],
    overrides: Sequence[str],
) -> None:
    """Prints a table of our schedules and PyTorch's. With `precision` bf16, PyTorch uses autocast
    over fp32 weights, and we use bf16 parameters with fp32 masters. If one of PyTorch's schedules
    fails, the table names it; if one of ours fails, the run ends."""
    facts = f"commit {commit()}, torch {torch.__version__}, {os.cpu_count()} cores"
    print(f"{facts}, {platform.machine()}; `{' '.join(['python', *sys.argv])}`\n")
    print("| pp | micro-batches | parallel3d, ms | PyTorch, ms | ratio of the best |")
    print("|---|---|---|---|---|", flush=True)
    spent = []
    for pp in stages:
        for count in microbatches:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                setting = Setting(pp, count, precision, overrides, folder, corpus(folder))
                best = _row(setting, turns, contenders)
            spent.append(_spent(setting, best))
    print("\nTime of rank 0 of our fastest schedule, by kind:\n", *spent, sep="\n")


def _row(of: Setting, turns: int, names: tuple[Sequence[str], Sequence[str]]) -> Contender:
    """Prints a line of the table; returns our fastest."""
    sides = [ours(name, of) for name in names[0]], [theirs(name, of) for name in names[1]]
    failed = []
    try:
        for contender in (*sides[0], *sides[1]):
            try:
                contender.start()
            except Failed:
                if contender in sides[0]:
                    raise
                failed.append(f"{contender.name} failed")
                sides[1].remove(contender)
        for _ in range(turns):
            for contender in (*sides[0], *sides[1]):
                contender.turn()
                said = f"pp={of.pp} m={of.microbatches} {contender.name}"
                print(f"{said}: {contender.medians[-1]:.0f} ms", file=sys.stderr, flush=True)
    finally:
        for contender in (*sides[0], *sides[1]):
            contender.end()
    ranked = [sorted(side, key=lambda c: c.ms) for side in sides]
    us = ", ".join(map(str, ranked[0]))
    them = ", ".join([*map(str, ranked[1]), *failed])
    best = zip(ranked[1][0].medians, ranked[0][0].medians, strict=True)
    ratios = [theirs / mine for theirs, mine in best]  # compares adjacent turns
    cpu = statistics.median(map(operator.truediv, ranked[1][0].computed, ranked[0][0].computed))
    ratio = f"**{statistics.median(ratios):.2f}×** ({min(ratios):.2f}–{max(ratios):.2f})"
    ratio += f", of CPU {cpu:.2f}×"
    line = f"| {of.pp} | {of.microbatches} | {us} | {them} | {ratio} |"
    print(line, flush=True)
    return ranked[0][0]


def _spent(of: Setting, best: Contender) -> str:
    """Describes the shares of a step by kind, and the idle share that the clock gives for equal
    costs."""
    seconds = {kind: sum(step["times"][kind] for step in best.counted) for kind in KINDS}
    total = sum(seconds.values())
    chunks = 2 if best.name in LOOPED or best.name in V_SHAPED else 1
    schedule = make(best.name, of.pp, of.microbatches, chunks)
    half = seconds["backward"] / 2  # one for the inputs, and one for the weights
    costs = Costs.even(schedule.assignment, seconds["forward"], half, half)
    clock = time_orders(schedule.orders, schedule.assignment, costs).bubble_fraction
    shares = sorted(seconds.items(), key=lambda item: -item[1])
    said = ", ".join(f"{kind} {part / total:.1%}" for kind, part in shares if part > 1e-3 * total)
    where = f"pp={of.pp}, {of.microbatches} micro-batches, `{best.name}`"
    return f"- {where}: {said}; idle on the clock {clock:.1%}"
