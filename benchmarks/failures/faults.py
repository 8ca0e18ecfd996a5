"""Kills runs again and again, and checks that the result shows no trace of it.

Each run is killed 1 to --kills times at random moments, anywhere or while a checkpoint is being
written: a rank, all ranks or the launcher (ours, or torchrun); under Slurm a rank, all ranks, the
step, a node, or the whole job, which is queued again. If the launcher survives, it starts the ranks
again; otherwise the same command runs again. With --failing-files the file system below the runs'
folder and their token caches fails as well: some of a run's processes, launchers too, get an error,
a short read or write, a slow call or a lost answer, once or for up to 30 calls.

In the end the weights, their average and the optimizer's states must be those of the undisturbed
run, bit for bit, and every step must have been taken once, with the loss of the undisturbed run: a
sample left out or read twice would change it. No process may have printed a traceback, and no
checkpoint may have been set aside as damaged.

    python -m benchmarks.faults --runs 50 --seed 0 --launcher all --failing-files --out faults.json

It needs Linux and runs from the repository's root, with two ranks per run and the processes of at
most two runs. Slurm needs root and Debian's slurm-wlm and munge, and runs on virtual nodes of this
machine.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.failures.killed_runs import (
    Campaign,
    Command,
    ForkedCommand,
    SlurmCommand,
    TorchrunCommand,
)
from benchmarks.failures.kills import Result, one_run, plan
from tests.e2e.command import Shell
from tests.e2e.private_slurm import Slurm

LAYOUTS = (  # the first layout is also used by tests/e2e/test_faults.py
    ("cp=2", "zero=1"),
    ("tp=2",),
    ("pp=2",),
    ("dp=2",),
    ("dp=2", "zero=1"),
    ("tp=2", "checkpoint.async=false"),
)
LAUNCHERS: dict[str, type[Command]] = {
    "ours": Command,
    "forked": ForkedCommand,
    "torchrun": TorchrunCommand,
    "slurm": SlurmCommand,
}
NODES = 8  # two for the processes of a run, the others replace nodes that died
TINY = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.seq_length=32",
    "micro_batch_size=2",
    "global_batch_size=4",
    "train.batch_schedule={0:8,80:4}",
    "train.eval_every=10",
    "train.eval_batches=1",
    "train.save_weights=true",
    "optim=muon",
    "optim.state=bf16",
    "optim.ema_decay=0.9",
    "optim.freeze=[layers.0.mlp.*]",
    "checkpoint.every=5",
    "recovery.max_restarts=10",
    "launch.peak_tflops=0.1",
    "launch.timeout_s=60",
    "device=cpu",
    "data=text",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=5, help="kills of a run at most")
    parser.add_argument("--launcher", choices=(*LAUNCHERS, "all"), default="ours")
    share = "share of processes that meet a fault (default 0.15)"
    parser.add_argument(
        "--failing-files", nargs="?", type=float, const=0.15, default=0.0, help=share
    )
    parser.add_argument("--out", type=Path, help="write every kill and fault to this JSON file")
    args = parser.parse_args()
    # removes the files that are left
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    names = ("ours", "torchrun", "slurm") if args.launcher == "all" else (args.launcher,)
    results: list[Result] = []
    with campaign(args, "slurm" in names) as shared:
        references: dict[tuple[str, ...], Command] = {}
        for number in range(args.runs):
            layout = LAYOUTS[number // len(names) % len(LAYOUTS)]
            # The undisturbed run trains at the same time as the first run that is compared with it.
            if layout not in references:
                of_ours = ForkedCommand if args.launcher == "forked" else Command
                references[layout] = of_ours(shared, f"undisturbed-{len(references)}", layout)
                references[layout].start()
            kind = LAUNCHERS[names[number % len(names)]]
            command = kind(shared, f"run-{number:03d}", layout, args.failing_files)
            chance = random.Random(f"{args.seed}/{number}")
            kills = plan(chance, kind.targets, args.steps, args.kills)
            results.append(one_run(command, references[layout], kills, args.steps))
            say(number, results[-1])
    return summary(results, args)


@contextmanager
def campaign(args: argparse.Namespace, on_slurm: bool) -> Iterator[Campaign]:
    """Holds the folder of all runs, a text to train on and, for Slurm, a cluster."""
    with tempfile.TemporaryDirectory(prefix="parallel3d-faults-") as place:
        folder = Path(place)
        (folder / "disk").mkdir()
        slurm = None
        if on_slurm:
            (folder / "scratch").mkdir()
            slurm = Slurm.start(Shell(folder, scratch=folder / "scratch"), nodes=NODES)
        shared = Campaign(folder, (*TINY, f"train.steps={args.steps}"), args.seed, slurm)
        lines = "".join(f"{n} bottles of beer on the wall.\n" for n in range(300))
        shared.book.write_text(lines)
        try:
            yield shared
        finally:
            shared.end()
            if slurm is not None:
                slurm.stop(folder / "slurm-logs")


def say(number: int, result: Result) -> None:
    kills = ", ".join(
        f"{k.target} at step {k.at_step}" + (" (saving)" * (k.moment != "anywhere"))
        for k in result.kills
        if k.at_step is not None
    )
    verdict = "equal" if result.is_good else "DIFFERENT"
    times = f"{result.starts} starts, {result.restarts} restarts, {result.seconds} s"
    met = f"; {len(result.faults)} faults" if result.faults else ""
    who = f"run {number:3d}  {result.launcher:8s}  {result.layout:27s}"
    print(f"{who} {verdict}  {times}{met}; killed: {kills}", flush=True)
    if not result.is_good:
        print(f"{result.facts() | {'log': ''}}\n{result.log}", file=sys.stderr, flush=True)


def summary(results: list[Result], args: argparse.Namespace) -> int:
    """Prints the table, by launcher; writes the JSON. Returns the exit code."""
    good = sum(r.is_good for r in results)
    print("\n| launcher | runs | kills | during a save | faults met | starts | restarts | equal |")
    print("|---|---|---|---|---|---|---|---|")
    for name in LAUNCHERS:
        some = [r for r in results if r.launcher == name]
        if some:
            print(table_row(name, some))
    met = Counter(fault["what"] for r in results for fault in r.faults)
    print(f"faults met: {', '.join(f'{n} {what}' for what, n in met.most_common()) or 'none'}")
    print(f"{good} of {len(results)} runs end with the undisturbed run's weights and losses")
    if args.out:
        runs = [r.facts() for r in results]
        content = {"seed": args.seed, "steps": args.steps, "runs": runs, "good": good}
        args.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0 if good == len(results) else 1


def table_row(name: str, results: list[Result]) -> str:
    done = [k for r in results for k in r.kills if k.at_step is not None]
    targets = Counter(k.target for k in done)
    kills = f"{len(done)} ({', '.join(f'{n} of {t}' for t, n in sorted(targets.items()))})"
    saving = sum(k.moment != "anywhere" for k in done)
    faults = sum(len(r.faults) for r in results)
    starts, restarts = sum(r.starts for r in results), sum(r.restarts for r in results)
    good = sum(r.is_good for r in results)
    cells = (name, len(results), kills, saving, faults, starts, restarts, good)
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
