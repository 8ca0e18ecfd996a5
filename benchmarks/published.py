"""Holds the planner against published runs: fits its constants, reports its errors, predicts.

    python -m benchmarks.published CALIBRATION QUESTIONS [--out predictions.json] [--write]

CALIBRATION and QUESTIONS are folders of JSON files as docs/planner.md describes. Constants are
fitted on calibration rows alone. Errors are of groups that were left out of the fit as wholes.
`--write` keeps the constants in parallel3d/estimate/constants.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.published_fit import Table, fit_memory, fit_times
from benchmarks.published_newer import READERS
from benchmarks.published_rows import Run, read_folder
from benchmarks.published_scores import (
    PEERS,
    balanced,
    by_group,
    errors,
    null,
    rank_correlation,
    regret,
    scaled,
)
from parallel3d.estimate.rates import FILE, Constants

Array = NDArray[np.float64]
FOLDS = 6
WITH_MEMORY = ("nanotron_playbook", "bigscience_bloom_3d", "torchtitan")


def folds(runs: Sequence[Run]) -> list[int]:
    """Each run's fold: groups go round in turn within their set, so no group is in two folds."""
    order: dict[str, list[str]] = {}
    for run in runs:
        groups = order.setdefault(run.set, [])
        if run.group not in groups:
            groups.append(run.group)
    return [sorted(order[run.set]).index(run.group) % FOLDS for run in runs]


@dataclass
class Held:
    """What is said of each run by constants that its group had no part in."""

    seconds: Array
    null: Array
    planted: Array  # one constant for all sets in the planner's place
    gib: Array  # as its source reports it
    fits: NDArray[np.bool_]


def left_out(runs: Sequence[Run]) -> Held:
    """Every run's prediction with its whole group left out of the fit."""
    seconds, nulls, planted, gib = (np.full(len(runs), np.nan) for _ in range(4))
    well = np.zeros(len(runs), dtype=bool)
    fold, plain = folds(runs), null(runs)
    measured = np.array([run.seconds or np.nan for run in runs])
    for k in range(FOLDS):
        known = [run for run, f in zip(runs, fold, strict=True) if f != k]
        rows = [i for i, f in enumerate(fold) if f == k]
        if not rows:
            continue
        peaks = fit_memory(known)
        values = fit_times(known, peaks)
        hidden = Table.of([runs[i] for i in rows]).with_stalls(peaks)
        seconds[rows] = hidden.seconds(Constants(values))
        gib[rows] = hidden.reported(peaks)
        for i, peak in zip(rows, hidden.memory(peaks), strict=True):
            well[i] = fits(runs[i], peak, peaks)
        others = [i for i, run in enumerate(runs) if fold[i] != k and run.seconds]
        planted[rows] = scaled(plain, others, measured)[rows]
        for name in {runs[i].set for i in rows}:
            mine = [i for i in rows if runs[i].set == name]
            others = [
                i for i, run in enumerate(runs) if run.set == name and fold[i] != k and run.seconds
            ]
            nulls[mine] = scaled(plain, others, measured)[mine]
    return Held(seconds, nulls, planted, gib, well)


def report(runs: Sequence[Run], held: Held) -> list[str]:
    """The table of errors by set."""
    head = "| set | rows | error mean / median | rho in a group | regret | null | peers |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for name in sorted({run.set for run in runs}):
        mine = [i for i, r in enumerate(runs) if r.set == name and r.seconds and r.trusted]
        if not mine:
            continue
        part = [runs[i] for i in mine]
        measured = np.array([run.seconds for run in part], dtype=float)
        own, base = errors(held.seconds[mine], measured), errors(held.null[mine], measured)
        rho = by_group(part, held.seconds[mine], measured, rank_correlation)
        worse = by_group(part, held.seconds[mine], measured, regret)
        lines.append(
            f"| {name} | {len(mine)} | {own.mean():.1f} / {np.median(own):.1f} % | {rho:.2f} "
            f"| {worse:.1f} % | {base.mean():.1f} / {np.median(base):.1f} % "
            f"| {PEERS.get(name, '')} |"
        )
    return lines + memory_lines(runs, held) + planted_line(runs, held)


def planted_line(runs: Sequence[Run], held: Held) -> list[str]:
    """The report on a model of one constant in the planner's place, scored as the planner is.

    Raises SystemExit where that model is not worse: then the report would prove nothing.
    """
    rows = [i for i, run in enumerate(runs) if run.seconds and run.trusted]
    measured = np.array([runs[i].seconds for i in rows], dtype=float)
    own, planted = (errors(of[rows], measured).mean() for of in (held.seconds, held.planted))
    if planted <= own:
        raise SystemExit(f"one constant errs by {planted:.1f} %, the planner by {own:.1f} %")
    return ["", f"all rows: the planner errs by {own:.1f} %, one constant by {planted:.1f} %"]


def memory_lines(runs: Sequence[Run], held: Held) -> list[str]:
    """How well peaks and the question of fitting are answered."""
    lines = ["", "| set | memory, median error | fits, balanced accuracy |", "|---|---|---|"]
    for name in WITH_MEMORY:
        mine = [i for i, r in enumerate(runs) if r.set == name]
        known = [i for i in mine if runs[i].memory_gib]
        target = np.array([runs[i].memory_gib for i in known], dtype=float)
        off = np.median(errors(held.gib[known], target)) if known else float("nan")
        asked = [i for i in mine if runs[i].fits is not None]
        truth = [bool(runs[i].fits) for i in asked]
        says = [bool(held.fits[i]) for i in asked]
        right = balanced(says, truth) if len(set(truth)) == 2 else float("nan")
        lines.append(f"| {name} | {off:.1f} % | {right:.3f} |")
    return lines


def fits(run: Run, gib: float, values: dict[str, float]) -> bool:
    """Whether a run of that peak is expected to end well."""
    room = run.candidates[0]["memory_bytes"] / 2**30 * values["memory.full"]
    return bool(run.runs and gib < room)


def predictions(runs: Sequence[Run], values: dict[str, float]) -> dict[str, dict[str, object]]:
    """Question id → what the planner says."""
    rows = Table.of(runs).with_stalls(values)
    seconds, peak = rows.seconds(Constants(values)), rows.memory(values)
    gib = rows.reported(values)
    made: dict[str, dict[str, object]] = {}
    for run, s, g, most in zip(runs, seconds.tolist(), gib.tolist(), peak.tolist(), strict=True):
        made[run.id] = {"iter_s": s}
        if run.set in WITH_MEMORY:
            made[run.id].update(memory_gib=g, fits=fits(run, most, values))
    return made


def commit() -> str:
    """The tree that is run."""
    words = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("calibration", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--out", type=Path, default=Path("predictions.json"))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    known = list(read_folder(options.calibration, READERS))
    peaks = fit_memory(known)
    values = peaks | fit_times(known, peaks)
    print("\n".join(report(known, left_out(known))))
    asked = list(read_folder(options.questions, READERS))
    made = predictions(asked, values)
    options.out.write_text(json.dumps(made, indent=0) + "\n")
    if options.write:
        kept = {name: float(f"{value:.5g}") for name, value in sorted(values.items())}
        FILE.write_text(json.dumps({"constants": kept}, indent=1) + "\n")
    print(f"{len(made)} predictions, {time.monotonic() - began:.0f} s, commit {commit()}")


if __name__ == "__main__":
    main()
