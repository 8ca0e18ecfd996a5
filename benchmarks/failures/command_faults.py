"""Runs whole commands on storage that fails: new and resumed runs, `generate` and others.

Each case is a system call (the n-th of its kind, on the run folder, metrics, configurations,
checkpoints, token cache or text) and a fault, in one command of one rank, from start to end.
Afterwards its exit code must be 0, 1 or 2, with 0 only if the result is right or a sentence named
the fault; its last line must be a sentence, without a traceback; and it must have ended within a
time limit. Then the disk is repaired and the same command runs again. It must end with the
undisturbed run's weights, bit for bit, and with each step once in metrics.jsonl; no checkpoint that
was whole may be gone or set aside. (If the first command left everything unchanged, the undisturbed
command has already shown this.)

    python -m benchmarks.command_faults --pairs 2100 --blocks 100 --cuts 60 --seed 0 --jobs 3

Run it from the repository's root. The calls are those that tests/tools/failing_files.py reaches;
pauses before a read is tried again are cut short. Power cuts are those of power_cuts.py, and need
root.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from benchmarks.failures import power_cuts
from benchmarks.failures.command_cases import RUN
from benchmarks.failures.command_checks import (
    given_again,
    lost,
    said_well,
    silent,
    tree,
    whole_ones,
)
from benchmarks.failures.command_world import World
from benchmarks.failures.storage_faults import ERRORS, LASTING
from parallel3d.checkpoint import manifest
from tests.tools.failing_files import BLOCK, LOST, SHORT, SLOW, Fault, Point

# A command with a call that never returns ends after launch.timeout_s in its start, after
# recovery.watchdog_s in a step, and elsewhere after the longer of the first and three times the
# second (docs/recovery.md). The watchdog takes at most thirty more seconds to report; on a busy
# host it begins late.
SHORT_LIMITS = ("launch.timeout_s=8", "recovery.watchdog_s=2")
BLOCKED_S = 8 + 30 + 22

Pair = tuple[str, Fault, Point]


@dataclass
class Result:
    """The end of a command with a fault, and the rules that it violates."""

    pair: Pair
    code: int | None
    met: bool
    wrong: list[str]
    said: str
    unchanged: bool = False
    seconds: float = 0.0


def try_pair(world: World, pair: Pair) -> Result:
    name, fault, point = pair
    case, stage = world.cases[name], world.stage(f"slot-{os.getpid()}")
    if fault.what == BLOCK:
        stage.limit_s = BLOCKED_S
    if fault.what == BLOCK:
        case = replace(case, words=(*case.words, *SHORT_LIMITS))
    world.lay(stage, case)
    before, found = tree(stage.folder), whole_ones(stage.folder / RUN)
    ended = stage.give(case, fault, point)
    wrong = list(said_well(ended))
    if ended.code == 0:
        wrong += silent(case, name, stage.folder, ended, world.reference)
    wrong += [f"{step} is gone" for step in lost(found, stage.folder / RUN)]
    unchanged = tree(stage.folder) == before
    if not unchanged and not wrong:
        wrong += given_again(case, name, stage, world.reference)
    said = "\n".join((ended.out + ended.err).splitlines()[-3:])
    return Result(pair, ended.code, ended.failed > 0, wrong, said, unchanged, ended.seconds)


def faults_of(point: Point) -> Iterator[Fault]:
    yield from (Fault(error, lasts) for error in ERRORS for lasts in LASTING)
    yield from (Fault(LOST), Fault(SLOW))
    if point[0] in ("read", "write"):
        yield from (Fault(SHORT), Fault(SHORT, "kind"))


def drawn(world: World, count: int, seed: int) -> list[Pair]:
    """Draws this many pairs of a call and a fault, the same number from each scenario where it has
    enough."""
    random_ = random.Random(seed)
    columns = []
    for name, points in world.found.items():
        column = [(name, fault, point) for point in points for fault in faults_of(point)]
        columns.append(random_.sample(column, len(column)))
    rows = itertools.zip_longest(*columns)
    return [pair for row in rows for pair in row if pair is not None][:count]


def blocking(world: World, count: int, seed: int) -> list[Pair]:
    """Draws this many calls that never return, alone or with all later calls, in commands that run
    unattended."""
    pairs = [
        (name, Fault(BLOCK, lasts), point)
        for name, points in world.found.items()
        for point in points
        for lasts in ("once", "all")
        if world.cases[name].trains and not world.cases[name].through_hydra
    ]
    return random.Random(seed).sample(pairs, min(count, len(pairs)))


def work(world: World, pairs: list[Pair], results: SimpleQueue[Result | None]) -> None:
    """Runs in one of the processes that share the pairs."""
    for pair in pairs:
        results.put(try_pair(world, pair))
    results.put(None)


def each(world: World, pairs: list[Pair], jobs: int) -> Iterator[Result]:
    """Yields the results as they arrive."""
    context = multiprocessing.get_context("fork")
    results: SimpleQueue[Result | None] = context.SimpleQueue()
    workers = [
        context.Process(target=work, args=(world, pairs[i::jobs], results)) for i in range(jobs)
    ]
    for worker in workers:
        worker.start()
    left = jobs
    while left:
        result = results.get()
        if result is None:
            left -= 1
        else:
            yield result
    for worker in workers:
        worker.join()


def campaign(world: World, pairs: list[Pair], jobs: int, say: Callable[[str], None]) -> dict:
    """Tries the pairs. Returns the counts and the errors."""
    start = time.monotonic()
    wrong: list[str] = []
    ended: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    scenarios: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    slowest = 0.0
    for result in each(world, pairs, jobs):
        name, fault, point = result.pair
        scenarios[name] += 1
        faults[fault.what] += 1
        ended[f"{name}: code {result.code}"] += 1
        counts["met"] += result.met
        counts["nothing had changed"] += result.unchanged
        slowest = max(slowest, result.seconds)
        if (done := ended.total()) % 100 == 0:
            say(f"{done} of {len(pairs)}, {len(wrong)} wrong")
        for sentence in result.wrong:
            wrong.append(f"{name}, {fault} at {point[0]} {point[1]}: {sentence} | {result.said}")
            say(wrong[-1])
    return {
        "tried": len(pairs),
        **counts,
        "calls": {name: len(points) for name, points in world.found.items()},
        "scenarios": dict(scenarios),
        "faults": dict(faults),
        "ended": dict(sorted(ended.items())),
        "wrong": wrong,
        "slowest_s": round(slowest, 1),
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=100, help="pairs whose call never returns")
    parser.add_argument("--cuts", type=int, default=0, help="power cuts, as root")
    parser.add_argument("--only", nargs="*", default=(), help="scenarios; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=3, help="pairs at once")
    parser.add_argument(
        "--block-jobs", type=int, default=8, help="number of pairs run at once that block and wait"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    manifest.PAUSES_S = (0.001,) * len(manifest.PAUSES_S)
    found = {}
    if args.cuts:
        power_cuts.alone_with_mounts()
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), tuple(args.only))
        say = functools.partial(print, flush=True)
        for name, pairs, jobs in (
            ("pairs", drawn(world, args.pairs, args.seed), args.jobs),
            ("blocks", blocking(world, args.blocks, args.seed), args.block_jobs),
        ):
            if pairs:
                found[name] = campaign(world, pairs, jobs, say)
        if args.cuts:
            found["power cuts"] = power_cuts.campaign(world, args.cuts, args.seed, say)
    for name, part in found.items():
        print(name, json.dumps(part | {"wrong": len(part["wrong"])}, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if any(part["wrong"] for part in found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
