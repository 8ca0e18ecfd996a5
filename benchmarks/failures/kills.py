"""Kills a run at random moments, and checks its result."""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.failures.killed_runs import Command
from parallel3d.checkpoint.manifest import list_checkpoints
from parallel3d.checkpoint.storage import read_full
from parallel3d.metrics.jsonl import rows_of

TIMEOUT_S = 300.0
MOMENTS = ("anywhere", "during a save")
FIGURES = ("step", "loss", "grad_norm", "tokens")
STATES = ("parameter", "ema", "exp_avg", "exp_avg_sq", "momentum")


@dataclass
class Kill:
    """One kill: its plan and its outcome."""

    target: str
    moment: str
    step: int  # the kill waits until this step is in metrics.jsonl
    delay_s: float
    chosen: float  # in [0, 1); selects one of several processes
    at_step: int | None = None  # None if the run had ended before


@dataclass
class Result:
    """The outcome of one run."""

    launcher: str
    layout: str
    kills: list[Kill]
    faults: list[dict[str, Any]]  # faults that its processes met
    starts: int
    restarts: int
    seconds: float
    # By SHA-256: the final weights, and all tensors of the last checkpoint.
    weights_equal: bool
    steps_once: bool
    losses_equal: bool  # whether training and validation losses are equal
    tracebacks: int  # number of tracebacks in the output
    set_aside: list[str]  # checkpoints reported as damaged
    log: str = field(repr=False, default="")

    @property
    def is_good(self) -> bool:
        equal = self.weights_equal and self.steps_once and self.losses_equal
        return equal and not self.tracebacks and not self.set_aside

    def facts(self) -> dict[str, Any]:
        """Returns a dict for JSON, without the log of a good run."""
        return asdict(self) | {"log": "" if self.is_good else self.log}


def plan(chance: random.Random, targets: tuple[str, ...], steps: int, most: int) -> list[Kill]:
    """Draws 1 to `most` kills of one run, in the order of their steps."""
    at = sorted(chance.randrange(steps) for _ in range(chance.randint(1, most)))
    return [
        Kill(
            chance.choice(targets),
            chance.choice(MOMENTS),
            step,
            chance.uniform(0, 0.1),
            chance.random(),
        )
        for step in at
    ]


def one_run(command: Command, reference: Command, kills: list[Kill], steps: int) -> Result:
    """Starts the run, kills it as planned, starts it again until it is done, and compares."""
    begin = time.monotonic()
    command.start()
    for kill in kills:
        disturb(command, kill)
    finish(command)
    seconds = time.monotonic() - begin
    command.close()
    finish(reference)
    return compare(command, reference, kills, seconds, steps)


def disturb(command: Command, kill: Kill) -> None:
    """Waits for the moment and kills; a run that has ended before its last step is started
    again."""
    deadline = time.monotonic() + TIMEOUT_S
    while is_running(command) and (command.last_step() < kill.step or not command.ranks()):
        check(command, deadline)
    if kill.moment == "during a save":
        while is_running(command) and not command.is_saving():
            check(command, deadline, pause_s=0.0005)
    else:
        time.sleep(kill.delay_s)
    if command.code() is not None or not command.ranks():
        return
    kill.at_step = command.last_step()
    command.kill(kill.target, kill.chosen)


def is_running(command: Command) -> bool:
    """Returns whether steps remain; a run that has ended before them is started again."""
    code = command.code()
    if code is not None and code != 0:
        command.start()
    return code != 0


def finish(command: Command) -> None:
    """Starts the run repeatedly until it reaches its end."""
    deadline = time.monotonic() + TIMEOUT_S
    while is_running(command):
        check(command, deadline)


def check(command: Command, deadline: float, pause_s: float = 0.02) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{command.name} hangs: {command.log()[-2000:]}")
    time.sleep(pause_s)


def held(command: Command) -> dict[str, torch.Tensor]:
    """Returns the final weights of a run, and all tensors of its last checkpoint."""
    return load_file(command.run_dir / "weights-final.safetensors") | read_full(
        list_checkpoints(command.run_dir)[0], STATES
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def compare(
    command: Command, reference: Command, kills: list[Kill], seconds: float, steps: int
) -> Result:
    """Compares the disturbed run with the undisturbed one."""
    mine, theirs = held(command), held(reference)
    equal = mine.keys() == theirs.keys() and all(same_bits(mine[k], theirs[k]) for k in theirs)
    mine_rows, right_rows = ([*rows_of(c.run_dir / "metrics.jsonl")] for c in (command, reference))
    rows, right = ([r for r in some if "loss" in r] for some in (mine_rows, right_rows))
    judged = [[(r["step"], r["valid"]) for r in s if "valid" in r] for s in (mine_rows, right_rows)]
    log = command.log()
    faults = command.faults.read_text().splitlines() if command.faults.exists() else []
    return Result(
        launcher=command.launcher,
        layout=" ".join(command.layout),
        kills=kills,
        faults=[json.loads(line) for line in faults],
        starts=command.starts,
        restarts=command.restarts(),
        seconds=round(seconds, 1),
        weights_equal=equal,
        steps_once=[r["step"] for r in rows] == list(range(1, steps + 1)),
        losses_equal=[[r[f] for f in FIGURES] for r in rows]
        == [[r[f] for f in FIGURES] for r in right]
        and judged[0] == judged[1] != [],
        tracebacks=len(re.findall(r"^Traceback \(most", log, re.MULTILINE)),
        set_aside=[p.name for p in command.run_dir.glob("checkpoints/damaged-*")],
        log=log,
    )
