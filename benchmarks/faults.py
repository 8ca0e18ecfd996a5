"""Runs that are killed again and again, and whether anything of that is left in the result.

Each run is killed 1 to 5 times at random moments: one rank, all ranks, or the launcher, anywhere
in a run or while a checkpoint is being written. A launcher that still lives starts its ranks again;
else the same command is given again. In the end the weights must be those of the undisturbed run,
bit for bit, and every step must have been taken once, with the loss that it has there: a sample
left out or seen twice would change it.

    python benchmarks/faults.py --runs 50 --seed 0 --out faults.json

Linux. Needs nothing but the package; two ranks a run, at most two runs' worth of processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from parallel3d.metrics.jsonl import read_metrics

STEPS = 60
TIMEOUT_S = 300.0
LAYOUTS = (("tp=2",), ("pp=2",), ("dp=2",), ("dp=2", "zero=1"), ("tp=2", "checkpoint.async=false"))
TARGETS = ("a rank", "all ranks", "the launcher")
MOMENTS = ("anywhere", "during a save")
TINY = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.seq_length=32",
    "micro_batch_size=2",
    "global_batch_size=4",
    f"train.steps={STEPS}",
    "train.eval_every=0",
    "train.eval_batches=1",
    "train.save_weights=true",
    "checkpoint.every=5",
    "recovery.max_restarts=10",
    "launch.peak_tflops=0.1",
    "launch.timeout_s=60",
    "device=cpu",
    "data=text",
)


@dataclass
class Command:
    """A training run in `folder` that can be started again and again."""

    folder: Path
    name: str
    layout: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / self.name

    def start(self) -> None:
        words = ("train", f"run={self.name}", *TINY, *self.layout)
        text = (f"data.path={self.folder / 'book.txt'}", f"data.cache_dir={self.folder / 'cache'}")
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                (sys.executable, "-m", "parallel3d", *words, *text),
                cwd=self.folder,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )
        self.starts += 1

    def ranks(self) -> list[int]:
        """The launcher's live children."""
        assert self.process is not None
        pid = self.process.pid
        try:
            return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []

    def last_step(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        rows = read_metrics(path) if path.exists() else []
        return rows[-1]["step"] if rows else 0

    def is_saving(self) -> bool:
        return any((self.run_dir / "checkpoints").glob(".saving-*"))

    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")


@dataclass
class Kill:
    """One kill as it was planned, and as it came about."""

    target: str
    moment: str
    step: int  # not before this step has been written to metrics.jsonl
    delay_s: float
    at_step: int | None = None  # None: the run had ended before


@dataclass
class Result:
    """What became of one run."""

    layout: str
    kills: list[dict[str, Any]]
    starts: int
    restarts: int
    seconds: float
    weights_equal: bool
    steps_once: bool
    losses_equal: bool
    log: str = field(repr=False, default="")

    @property
    def is_good(self) -> bool:
        return self.weights_equal and self.steps_once and self.losses_equal


def plan(chance: random.Random) -> list[Kill]:
    """1 to 5 kills of one run, in the order of their steps."""
    steps = sorted(chance.randrange(STEPS) for _ in range(chance.randint(1, 5)))
    return [
        Kill(chance.choice(TARGETS), chance.choice(MOMENTS), step, chance.uniform(0, 0.1))
        for step in steps
    ]


def disturb(command: Command, kill: Kill, chance: random.Random) -> None:
    """Waits for the moment and kills; gives the command again if nobody else will go on."""
    assert command.process is not None
    deadline = time.monotonic() + TIMEOUT_S
    while command.process.poll() is None and command.last_step() < kill.step:
        check(command, deadline)
    if kill.moment == "during a save":
        while command.process.poll() is None and not command.is_saving():
            check(command, deadline, pause_s=0.0005)
    else:
        time.sleep(kill.delay_s)
    ranks = command.ranks()
    if command.process.poll() is not None or not ranks:
        return
    pids = {
        "a rank": [chance.choice(ranks)],
        "all ranks": ranks,
        "the launcher": [command.process.pid],
    }[kill.target]
    kill.at_step = command.last_step()
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it has just ended
    if kill.target == "the launcher":
        command.process.wait()
    else:
        time.sleep(0.3)  # the launcher looks ten times a second


def check(command: Command, deadline: float, pause_s: float = 0.02) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{command.name} hangs: {command.log()[-2000:]}")
    time.sleep(pause_s)


def go_on(command: Command) -> None:
    """Starts the command again if it has ended before its last step."""
    assert command.process is not None
    if command.process.poll() not in (None, 0):
        wait_for_orphans(command)
        command.start()


def wait_for_orphans(command: Command) -> None:
    """Until the run is free: ranks whose launcher was killed die at once, but not in no time."""
    deadline = time.monotonic() + 10
    name = f"{command.run_dir.name}".encode()
    while time.monotonic() < deadline:
        if not any(name in words and b"_worker" in words for words in command_lines()):
            return
        time.sleep(0.05)


def command_lines() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue  # it has just ended
    return found


def finish(command: Command) -> None:
    """Runs to the end, however many starts it takes."""
    assert command.process is not None
    for _ in range(20):
        if command.process.wait(TIMEOUT_S) == 0:
            return
        go_on(command)
    raise RuntimeError(f"{command.name} does not end: {command.log()[-2000:]}")


def undisturbed(folder: Path, number: int, layout: tuple[str, ...]) -> Command:
    """Starts it; it trains beside the first run that is compared with it."""
    command = Command(folder, f"undisturbed-{number}", layout)
    command.start()
    return command


def compare(command: Command, reference: Command, kills: list[Kill], seconds: float) -> Result:
    """The disturbed run beside the undisturbed one."""
    name = "weights-final.safetensors"
    mine, theirs = load_file(command.run_dir / name), load_file(reference.run_dir / name)
    equal = mine.keys() == theirs.keys() and all(
        mine[k].tobytes() == theirs[k].tobytes() for k in theirs
    )
    rows, right = (
        [r for r in read_metrics(c.run_dir / "metrics.jsonl") if "loss" in r]
        for c in (command, reference)
    )
    figures = ("step", "loss", "grad_norm", "tokens")
    return Result(
        layout=" ".join(command.layout),
        kills=[vars(kill) for kill in kills],
        starts=command.starts,
        restarts=command.log().count("; restart "),
        seconds=round(seconds, 1),
        weights_equal=equal,
        steps_once=[r["step"] for r in rows] == list(range(1, STEPS + 1)),
        losses_equal=[[r[f] for f in figures] for r in rows]
        == [[r[f] for f in figures] for r in right],
        log=command.log(),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON with every kill")
    args = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="parallel3d-faults-") as place:
        folder = Path(place)
        lines = "".join(f"{n} bottles of beer on the wall.\n" for n in range(300))
        (folder / "book.txt").write_text(lines)
        references: dict[tuple[str, ...], Command] = {}
        for number in range(args.runs):
            layout = LAYOUTS[number % len(LAYOUTS)]
            if layout not in references:
                references[layout] = undisturbed(folder, len(references), layout)
            chance = random.Random(f"{args.seed}/{number}")
            results.append(one_run(folder, number, references[layout], chance))
            say(number, results[-1])
    return summary(results, args)


def one_run(folder: Path, number: int, reference: Command, chance: random.Random) -> Result:
    command, kills = Command(folder, f"run-{number:03d}", reference.layout), plan(chance)
    begin = time.monotonic()
    command.start()
    for kill in kills:
        disturb(command, kill, chance)
        go_on(command)
    finish(command)
    seconds = time.monotonic() - begin
    finish(reference)
    return compare(command, reference, kills, seconds)


def say(number: int, result: Result) -> None:
    kills = ", ".join(
        f"{k['target']} at step {k['at_step']}" + (" (saving)" * (k["moment"] != "anywhere"))
        for k in result.kills
        if k["at_step"] is not None
    )
    verdict = "equal" if result.is_good else "DIFFERENT"
    times = f"{result.starts} starts, {result.restarts} restarts, {result.seconds} s"
    print(f"run {number:3d}  {result.layout:24s} {verdict}  {times}; killed: {kills}", flush=True)


def summary(results: list[Result], args: argparse.Namespace) -> int:
    """Prints the table's last line, writes the JSON. Returns the exit code."""
    done = [k for r in results for k in r.kills if k["at_step"] is not None]
    by_target = Counter(k["target"] for k in done)
    during = sum(k["moment"] != "anywhere" for k in done)
    good = sum(r.is_good for r in results)
    print(
        f"{good} of {len(results)} runs end with the undisturbed run's weights and losses; "
        f"{len(done)} kills: {dict(by_target)}, {during} of them during a save"
    )
    if args.out:
        rows = [{k: v for k, v in vars(r).items() if k != "log"} for r in results]
        content = {"seed": args.seed, "runs": rows, "good": good, "kills": dict(by_target)}
        args.out.write_text(json.dumps(content | {"during_a_save": during}, indent=1) + "\n")
    for result in results:
        if not result.is_good:
            print(result.log[-3000:], file=sys.stderr)
    return 0 if good == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
