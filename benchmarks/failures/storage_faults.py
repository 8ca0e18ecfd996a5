"""Makes each system call of a save, a load and the checkpoint commands fail in turn.

Each case is a call (the n-th of its kind) and a fault: an error, once, at every later call of the
kind or at all later calls; a short read or write; a slow call; a lost answer. Afterwards every
checkpoint that was whole must still be whole under its name, and the run must have ended in bounded
time with at most one sentence per fault and no traceback. Once the disk works again, the next start
must resume and save.

    python -m benchmarks.storage_faults --pairs 2500 --seed 0 --out storage_faults.json

It is one process, run from the repository's root; tests/tools/failing_files.py defines which calls
are reached. The pauses before a read is tried again are cut short.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from benchmarks.failures.storage_cases import NEW, NEXT, OLD, SCENARIOS, Run, digests
from parallel3d.checkpoint import manifest
from parallel3d.checkpoint.manifest import CHECKPOINTS, step_folder
from parallel3d.checkpoint.storage import verify_checkpoint
from parallel3d.errors import TrainingFailure, UserError
from tests.tools.failing_files import LOST, SHORT, SLOW, FailingFiles, Fault, Point

LIMIT_S = 20.0
ERRORS = ("EIO", "ESTALE", "EACCES", "ENOSPC", "EMFILE")
LASTING = ("once", "kind", "all")


class Hang(Exception):
    """Raised if an action took longer than LIMIT_S."""


@dataclass
class Result:
    """The end of an action with a fault, and the rules that it violates."""

    ended: str
    wrong: list[str]
    failed: int  # number of calls that failed
    points: list[Point]


def try_pair(run: Run, name: str, fault: Fault | None = None, point: Point | None = None) -> Result:
    """Runs the scenario `name` while calls fail; checks the files, and resumes."""
    run_dir = run.copy()
    act = SCENARIOS[name](run, run_dir)
    run.said.clear()
    result, error = None, None
    words = io.StringIO()
    with limited(), contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
        try:
            with FailingFiles(run_dir.parent, fault, point) as calls:
                result = act()
        except Exception as raised:
            error = raised
    ended = "ended by a sentence" if error is not None else "continued"
    usual = f"run={run.config.run} resumes at step"
    if error is None and (result is False or any(not s.startswith(usual) for s in run.said)):
        ended = "continued with a message"
    wrong = [f"said: {s}" for s in run.said if "\n" in s or "Traceback" in s]
    if error is not None and (not isinstance(error, (UserError, TrainingFailure))):
        wrong.append(f"raised {error!r}")
    wrong += [f"raised an error of several lines: {error}"] * ("\n" in str(error))
    wrong += looked_at(run, run_dir, name, result)
    if not wrong:
        wrong += next_start(run, run_dir, name)
    return Result(ended, wrong, calls.failed, calls.points())


def looked_at(run: Run, run_dir: Path, name: str, result: object) -> Iterator[str]:
    """Yields the errors in a run's checkpoints after a fault."""
    there = digests(run_dir)
    whole = dict(run.before)
    if name.endswith("damaged"):
        del whole[step_folder(NEW)]
        kept = [p for p in (run_dir / CHECKPOINTS).iterdir() if p.name.endswith(step_folder(NEW))]
        if not kept:
            yield "the damaged checkpoint is gone"
    is_there = name.startswith("save") and step_folder(NEXT) in there
    if is_there and result is not True:
        yield f"{step_folder(NEXT)} exists, although its save was reported as failed"
    if name.startswith("save") and result is True:
        new = step_folder(NEW if "same" in name else NEXT)
        if new not in there:
            yield f"{new} was saved and is missing"
        else:
            verify_checkpoint(run_dir / CHECKPOINTS / new)
        if new == step_folder(NEXT):
            whole.pop(step_folder(OLD))
    for step, files in whole.items():
        if there.get(step) != files:
            yield f"{step} was whole before the fault"
    if name.startswith("resume") and isinstance(result, int):
        newest = OLD if name.endswith("damaged") else NEW
        if result != newest + 1 or run.digest() != run.values[newest]:
            yield f"began at step {result}"


def next_start(run: Run, run_dir: Path, name: str) -> Iterator[str]:
    """Yields the errors of the next start, on a healthy disk."""
    run.said.clear()
    checkpoints = run.checkpoints(run_dir)
    with limited():
        first = checkpoints.restore(run.trainer)
        if first <= (OLD if name.endswith("damaged") else NEW):
            yield f"the next start began at step {first}"
        run.trainer.steps_done = first + 2
        if not checkpoints.save(run.trainer):
            yield f"the next start could not save: {run.said}"
    left = [p.name for p in (run_dir / CHECKPOINTS).iterdir() if p.name.startswith(".")]
    if left != [".claim"]:
        yield f"the next start left {left} behind"


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"after {LIMIT_S:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def faults_of(point: Point) -> Iterator[Fault]:
    yield from (Fault(error, lasts) for error in ERRORS for lasts in LASTING)
    yield from (Fault(LOST), Fault(SLOW))
    if point[0] in ("read", "write"):
        yield from (Fault(SHORT), Fault(SHORT, "kind"))


def all_pairs(run: Run) -> list[tuple[str, Fault, Point]]:
    """Returns every call of every scenario with every fault that it can meet."""
    pairs = []
    for name in SCENARIOS:
        usual = try_pair(run, name)
        assert not usual.wrong, f"{name}: {usual.wrong}"
        pairs += [(name, fault, point) for point in usual.points for fault in faults_of(point)]
    return pairs


@contextlib.contextmanager
def without_pauses() -> Iterator[None]:
    before, manifest.PAUSES_S = manifest.PAUSES_S, (0.001,) * len(manifest.PAUSES_S)
    try:
        yield
    finally:
        manifest.PAUSES_S = before


def campaign(folder: Path, count: int, seed: int, say: Callable[[str], None]) -> dict:
    """Tries `count` of all pairs, drawn by `seed`. Returns the counts and the errors."""
    start = time.monotonic()
    with without_pauses():
        run = Run(folder)
        pairs = all_pairs(run)
        drawn = random.Random(seed).sample(pairs, min(count, len(pairs)))
        ended: Counter[tuple[str, str]] = Counter()
        wrong, met = [], 0
        for name, fault, point in drawn:
            result = try_pair(run, name, fault, point)
            met += result.failed > 0
            ended[name, result.ended] += 1
            for sentence in result.wrong:
                wrong.append(f"{name}, {fault} at {point[0]} {point[1]}: {sentence}")
                say(wrong[-1])
    return {
        "pairs": len(pairs),
        "tried": len(drawn),
        "met": met,
        "calls": sorted({(name, point[0]) for name, _, point in pairs}),
        "ended": {f"{name}: {how}": n for (name, how), n in sorted(ended.items())},
        "wrong": wrong,
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(Path(folder), args.pairs, args.seed, print)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for what, n in found["ended"].items():
        print(f"{n:6}  {what}")
    met = f"{found['tried']} of {found['pairs']} pairs tried, {found['met']} met"
    print(f"{met}; {len(found['wrong'])} wrong; {found['seconds']} s")
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
