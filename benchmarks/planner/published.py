"""Compares the planner with published runs: fits its constants, reports its errors, predicts.

    python -m benchmarks.published CALIBRATION QUESTIONS [--out predictions.json] [--write]

CALIBRATION and QUESTIONS are folders of JSON files as docs/planner.md describes. Constants are only
fitted on calibration rows. Errors refer to whole groups that were left out of the fit, and choices
(their number, the median regret and the rank correlation) to whole model sizes. `--write` keeps the
constants, those of other software apart (`published_run.write_constants`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.published_experts import fit_experts
from benchmarks.planner.published_fit import Table, fit_memory, fit_times
from benchmarks.planner.published_newer import READERS
from benchmarks.planner.published_rows import Run, read_folder
from benchmarks.planner.published_run import ENGINES, write_constants
from benchmarks.planner.published_scores import (
    PEERS,
    balanced,
    choose,
    errors,
    null,
    scaled,
)
from parallel3d.estimate.fitted_cost import Constants

Array = NDArray[np.float64]
FOLDS = 6
SHARE = (0.1, 0.9)  # quantiles, so that a range covers 80 % of left-out rows
WITH_MEMORY = ("nanotron_playbook", "bigscience_bloom_3d", "torchtitan")


@dataclass(frozen=True)
class Seen:
    """The range of measured runs: values of `PublishedRun`, and the largest number of GPUs by
    engine."""

    speed: list[float]
    fabric: list[float]
    hidden: list[float]
    most_gpus: dict[str, float]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, float]]) -> Seen:
        """Lists the values of `rows`, fields of `PublishedRun`, that runs cover."""
        most: dict[str, float] = {}
        for row in rows:
            engine = ENGINES[int(row["engine"])]
            most[engine] = max(most.get(engine, 0), row["tp"] * row["pp"] * row["dp"])
        speed, fabric, hidden = (sorted({row[key] for row in rows}) for key in _COVERED)
        return cls(speed, fabric, hidden, most)

    def novelty(self, row: Mapping[str, float]) -> str:
        """Returns "place" for a GPU, type, network or engine without a run; "size" for a width
        without one, or for more GPUs than any run has; else "known"."""
        most = self.most_gpus.get(ENGINES[int(row["engine"])])
        if most is None or row["speed"] not in self.speed or row["fabric"] not in self.fabric:
            return "place"
        new = row["hidden"] not in self.hidden or row["tp"] * row["pp"] * row["dp"] > most
        return "size" if new else "known"


_COVERED = ("speed", "fabric", "hidden")


def device(run: Run) -> float:
    return run.candidates[0]["speed"]


def size(run: Run) -> float:
    return run.candidates[0]["hidden"]


def folds(runs: Sequence[Run], kind: Callable[[Run], float] | None = None) -> list[int]:
    """Returns the fold of each run. Whole groups are dealt out in turn within their set, or whole
    `kind`s over all sets, so that none is in two folds."""
    keys = [("", kind(run)) if kind else (run.set, run.group) for run in runs]
    order: dict[str, list[float | str]] = {}
    for name, key in sorted(set(keys)):
        order.setdefault(name, []).append(key)
    return [order[name].index(key) % FOLDS for name, key in keys]


@dataclass
class Held:
    """Predictions of each run, by constants that were fitted without its fold."""

    seconds: Array
    gib: Array  # memory as the run's source reports it
    fits: NDArray[np.bool_]
    fold: list[int]
    novel: list[str]  # novelty, a key of `ranges`


def left_out(runs: Sequence[Run], fold: list[int]) -> Held:
    """Predicts every run with its whole fold left out of the fit."""
    seconds, gib = (np.full(len(runs), np.nan) for _ in range(2))
    well, novel = np.zeros(len(runs), dtype=bool), ["known"] * len(runs)
    for k in sorted(set(fold)):
        known = [run for run, f in zip(runs, fold, strict=True) if f != k]
        rows = [i for i, f in enumerate(fold) if f == k]
        peaks = fit_memory(known)
        values = fit_times(known, peaks)
        hidden = Table.of([runs[i] for i in rows]).with_stalls(peaks)
        seconds[rows] = hidden.seconds(Constants(values))
        gib[rows] = hidden.reported(peaks)
        seen = Seen.of([run.candidates[0] for run in known if run.seconds])
        for i, peak in zip(rows, hidden.memory(peaks), strict=True):
            well[i] = fits(runs[i], peak, peaks)
            novel[i] = seen.novelty(runs[i].candidates[0])
    return Held(seconds, gib, well, fold, novel)


def spreads(
    runs: Sequence[Run], held: Sequence[Held]
) -> tuple[dict[str, list[float]], list[float]]:
    """Returns, by novelty, the range of measured over predicted seconds, and the share of rows
    inside. A range goes from the first to the ninth tenth of left-out rows. It is widened (its
    logarithms are multiplied by a factor) until each fold's rows lie inside the range of the other
    folds in four of five cases: the folds differ more from each other than the rows of one fold
    do."""
    ok = [i for i, run in enumerate(runs) if run.seconds and run.trusted]
    ratio = np.concatenate([
        np.array([runs[i].seconds for i in ok], dtype=float) / h.seconds[ok] for h in held
    ])  # fmt: skip
    novel = np.array([h.novel[i] for h in held for i in ok])
    fold = np.array([h.fold[i] for h in held for i in ok])
    sets = [runs[i].set for i in ok] * len(held)
    # Few places can be left out, so each set has one vote there.
    there = Counter(zip(sets, novel.tolist(), strict=True))
    votes = np.array(
        [1 / there[key] if key[1] == "place" else 1.0 for key in zip(sets, novel, strict=True)]
    )
    made, shares = {}, []
    for kind in ("known", "size", "place"):
        mine = np.flatnonzero(novel == kind)
        logs, vote, folded = np.log(ratio[mine]), votes[mine], fold[mine]
        apart = [k for k in set(folded) if not (folded == k).all()]
        known = np.isin(folded, apart)
        limits = np.zeros((2, len(mine)))
        for k in apart:
            others = folded != k
            limits[:, folded == k] = _quantiles(logs[others], vote[others])[:, None]
        for wider in np.arange(1.0, 4.0, 0.05):
            inside = (logs >= wider * limits[0]) & (logs <= wider * limits[1])
            share = float(np.average(inside[known], weights=vote[known]))
            if share >= SHARE[1] - SHARE[0]:
                break
        shares.append(share)
        made[kind] = np.exp(wider * _quantiles(logs, vote)).tolist()
    return made, shares


def _quantiles(logs: Array, votes: Array) -> Array:
    return np.quantile(logs, SHARE, weights=votes, method="inverted_cdf")


def nulls(runs: Sequence[Run], fold: list[int]) -> tuple[Array, Array]:
    """Returns the seconds of the null model with one constant per set, and with one for all, each
    fitted on the other folds."""
    own, planted = (np.full(len(runs), np.nan) for _ in range(2))
    plain = null(runs)
    measured = np.array([run.seconds or np.nan for run in runs])
    for k in set(fold):
        others = [i for i, run in enumerate(runs) if fold[i] != k and run.seconds]
        rows = [i for i, f in enumerate(fold) if f == k]
        planted[rows] = scaled(plain, others, measured)[rows]
        for name in {runs[i].set for i in rows}:
            mine = [i for i in rows if runs[i].set == name]
            same = [i for i in others if runs[i].set == name]
            own[mine] = scaled(plain, same, measured)[mine]
    return own, planted


def report(runs: Sequence[Run], groups: Held, sizes: Held) -> list[str]:
    """Returns the table by set: errors with whole groups left out, choices with whole sizes left
    out."""
    base, planted = nulls(runs, groups.fold)
    chosen = choose(runs, sizes.seconds, sizes.fits)
    head = (
        "| set | rows | error mean / median | size left out | choices, regret, rho | null | peers |"
    )
    lines = [head, "|---|---|---|---|---|---|---|"]
    for name in [*sorted({run.set for run in runs}), "all"]:
        mine = [i for i, r in enumerate(runs) if name in (r.set, "all") and r.seconds and r.trusted]
        if not mine:
            continue
        measured = np.array([runs[i].seconds for i in mine], dtype=float)
        off = [errors(of[mine], measured) for of in (groups.seconds, sizes.seconds, base)]
        own, unseen, flat = (f"{of.mean():.1f} / {np.median(of):.1f} %" for of in off)
        part = [c for c in chosen if name in (c.set, "all")]
        said = ""
        if part:
            regret = np.median([c.regret for c in part])
            rho = np.nanmedian([c.correlation for c in part])
            wrong = sum(c.regret == np.inf for c in part)
            said = f"{len(part)}: {regret:.1f} %, {rho:.2f}, {wrong} failed"
        lines.append(
            f"| {name} | {len(mine)} | {own} | {unseen} | {said} | {flat} | {PEERS.get(name, '')} |"
        )
    return lines + memory_lines(runs, groups) + planted_line(runs, groups.seconds, planted)


def planted_line(runs: Sequence[Run], seconds: Array, one: Array) -> list[str]:
    """Reports on a model of one constant in place of the planner, scored in the same way. Raises
    SystemExit if that model is not worse: then the report would prove nothing."""
    rows = [i for i, run in enumerate(runs) if run.seconds and run.trusted]
    measured = np.array([runs[i].seconds for i in rows], dtype=float)
    own, planted = (errors(of[rows], measured).mean() for of in (seconds, one))
    if planted <= own:
        raise SystemExit(f"one constant errs by {planted:.1f} %, the planner by {own:.1f} %")
    return ["", f"all rows: the planner errs by {own:.1f} %, one constant by {planted:.1f} %"]


def memory_lines(runs: Sequence[Run], held: Held) -> list[str]:
    """Returns lines with the accuracy of predicted peaks of memory, and of predictions that a run
    fits."""
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
    """Returns whether a run with this peak is expected to succeed."""
    room = run.candidates[0]["memory_bytes"] / 2**30 * values["memory.full"]
    return bool(run.runs and gib < room)


def predictions(
    runs: Sequence[Run], values: dict[str, float], seen: Seen, ranges: dict[str, list[float]]
) -> dict[str, dict[str, object]]:
    """Returns question id → the planner's answer."""
    rows = Table.of(runs).with_stalls(values)
    seconds, peak = rows.seconds(Constants(values)), rows.memory(values)
    gib = rows.reported(values)
    made: dict[str, dict[str, object]] = {}
    for run, s, g, most in zip(runs, seconds.tolist(), gib.tolist(), peak.tolist(), strict=True):
        low, high = ranges[seen.novelty(run.candidates[0])]
        made[run.id] = {"iter_s": s, "low": s * low, "high": s * high}
        if run.set in WITH_MEMORY:
            made[run.id].update(memory_gib=g, fits=fits(run, most, values))
    return made


def commit() -> str:
    """Describes the commit of the source tree in use."""
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
    values |= fit_experts(values)
    groups, sizes, devices = (left_out(known, folds(known, of)) for of in (None, size, device))
    print("\n".join(report(known, groups, sizes)))
    ranges, inside = spreads(known, (groups, sizes, devices))
    for (kind, (low, high)), share in zip(ranges.items(), inside, strict=True):
        print(f"{kind}: from {low:.2f} to {high:.2f} of the prediction, {share:.0%} of rows inside")
    seen = Seen.of([run.candidates[0] for run in known if run.seconds])
    asked = list(read_folder(options.questions, READERS))
    made = predictions(asked, values, seen, ranges)
    options.out.write_text(json.dumps(made, indent=0) + "\n")
    if options.write:
        short = {kind: [round(of, 3) for of in pair] for kind, pair in ranges.items()}
        write_constants(values, ranges=short, seen=asdict(seen))
    print(f"{len(made)} predictions, {time.monotonic() - began:.0f} s, commit {commit()}")


if __name__ == "__main__":
    main()
