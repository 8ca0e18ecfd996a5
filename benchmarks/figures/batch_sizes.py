"""Measures loss against tokens at several global batches, next to the predicted best batch.

    python -m benchmarks.figures.batch_sizes run --runs runs/batches     # an hour on two busy cores
    python -m benchmarks.figures.batch_sizes show --runs runs/batches --svg docs/batch_sizes.svg

`run` trains the default model once for each global batch, one after another, on one CPU rank in
bf16, with `train.noise_scale`, which predicts the batch; finished runs are kept. `show` reads their
metrics.jsonl, prints a table in Markdown and draws the picture.

The learning rate is 1e-3 at 16 sequences and grows with the root of the batch up to 3e-3, constant
after two steps; it is not tuned for each batch.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures.batch_sizes_picture import Line, picture

SEQUENCE = 256  # number of tokens in a sample of the default model
# thousands of tokens of each run, by batch
TOKENS = {8: 250, 16: 250, 32: 300, 64: 350, 128: 500, 256: 700, 512: 1300}


LOSSES = (3.4, 3.2, 3.0, 2.6)  # losses, in nats per byte, at which the runs are compared
NEAR = 0.15  # relative width around such a loss in which the noise scale is averaged


class Run(NamedTuple):
    """One run: `losses` of each step; `traces` and `signals` of the noise scale of each step."""

    batch: int
    losses: list[float]
    traces: list[float]
    signals: list[float]

    @property
    def tokens(self) -> list[int]:
        """Tokens read when the loss of each step was measured, before its update."""
        return [step * self.batch * SEQUENCE for step in range(len(self.losses))]

    def smooth(self) -> list[float]:
        """Means of the losses over the last sixth of the tokens read so far, at least one step."""
        found = []
        for end in range(1, len(self.losses) + 1):
            found.append(statistics.fmean(self.losses[end - max(1, end // 6) : end]))
        return found

    def reaches(self, loss: float) -> float | None:
        """Returns the tokens at which the smoothed loss passes `loss`, interpolated between two
        steps."""
        curve, tokens = self.smooth(), self.tokens
        for i in range(1, len(curve)):
            if curve[i] <= loss < curve[i - 1]:
                share = (curve[i - 1] - loss) / (curve[i - 1] - curve[i])
                return tokens[i - 1] + share * (tokens[i] - tokens[i - 1])
        return None


def rate(batch: int) -> float:
    return min(1e-3 * math.sqrt(batch / 16), 3e-3)


def train(batch: int, runs: Path) -> None:
    """Trains one run, unless it is finished."""
    folder, steps = runs / f"batch-{batch}", max(8, round(1000 * TOKENS[batch] / batch / SEQUENCE))
    if (folder / "summary.json").exists():
        return
    keys = {
        "runs_dir": runs,
        "run": folder.name,
        "device": "cpu",
        "precision": "bf16",
        "global_batch_size": batch,
        "micro_batch_size": min(8, batch // 2),
        "train.steps": steps,
        "train.noise_scale": "true",
        "train.eval_batches": 0,
        "train.log_every": 10,
        "checkpoint.every": 0,
        "optim.lr": rate(batch),
        "optim.lr_decay_style": "constant",
        "optim.lr_warmup_steps": 2,
    }
    words = [f"{key}={value}" for key, value in keys.items()]
    subprocess.run([sys.executable, "-m", "parallel3d", "train", *words], check=True)


def read(folder: Path) -> Run:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    noise = [row["noise"] for row in steps]
    columns = ([n["trace"] for n in noise], [n["signal"] for n in noise])
    return Run(int(folder.name.split("-")[1]), [row["loss"] for row in steps], *columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "show"))
    parser.add_argument("--runs", type=Path, default=Path("runs/batches"))
    parser.add_argument("--batches", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--svg", type=Path)
    args = parser.parse_args()
    if args.what == "run":
        for batch in args.batches:
            train(batch, args.runs)
        return
    show([read(args.runs / f"batch-{batch}") for batch in args.batches], args.svg)


class Fit(NamedTuple):
    """Models the tokens to a loss as least · (1 + batch / critical) (McCandlish et al. 2018,
    §2.3)."""

    least: float
    critical: float

    def tokens(self, batch: float) -> float:
        return self.least * (1 + batch / self.critical)


def fitted(reached: dict[int, float]) -> Fit:
    """Fits by least squares of the logarithms, over a fine grid of critical batches."""

    def at(critical: float) -> tuple[float, Fit]:
        logs = [math.log(t / (1 + b / critical)) for b, t in reached.items()]
        mean = statistics.fmean(logs)
        return sum((log - mean) ** 2 for log in logs), Fit(math.exp(mean), critical)

    return min(at(2 ** (i / 20)) for i in range(-40, 220))[1]


def show(runs: list[Run], svg: Path | None) -> None:
    """Prints both tables, and draws."""
    heads = " | ".join(f"k tokens to {loss}" for loss in LOSSES)
    print(f"| batch | learning rate | steps | last loss | {heads} |\n|{'---|' * (4 + len(LOSSES))}")
    for run in runs:
        found = (run.reaches(loss) for loss in LOSSES)
        cells = " | ".join("" if t is None else f"{t / 1000:.0f}" for t in found)
        last = run.smooth()[-1]
        print(f"| {run.batch} | {rate(run.batch):.2g} | {len(run.losses)} | {last:.2f} | {cells} |")
    print("\n| loss | least k tokens | least steps | critical batch, fitted | noise scale there |")
    print("|---|---|---|---|---|")
    reached, fits, scales = [], [], []
    for loss in LOSSES:
        points = {run.batch: t for run in runs if (t := run.reaches(loss)) is not None}
        seen = around(runs, loss)
        words = "" if seen is None else f"{seen:.1f}"
        if len(points) < 4:
            print(f"| {loss} | | | | {words} |")
            continue
        fit = fitted(points)
        scales += [] if seen is None else [seen]
        steps = fit.least / fit.critical / SEQUENCE
        print(f"| {loss} | {fit.least / 1000:.0f} | {steps:.0f} | {fit.critical:.1f} | {words} |")
        reached.append(Line(f"loss {loss}", [(b, t / 1000) for b, t in points.items()]))
        batches = [6 * 1.05**i for i in range(98)]
        fits.append(Line("", [(b, fit.tokens(b) / 1000) for b in batches]))
    if svg is not None:
        curves = []
        for run in runs:
            seen_at = zip(run.tokens, run.smooth(), strict=True)
            curves.append(Line(f"{run.batch}", [(t / 1000, at) for t, at in seen_at if t]))
        svg.write_text(picture(curves, reached, fits, (min(scales), max(scales))))


def around(runs: list[Run], loss: float) -> float | None:
    """Returns the noise scale over the steps of all runs whose loss was near `loss`: Σ trace / Σ
    signal, where each term is divided by the squared norm of its step."""
    traces = signals = 0.0
    for run in runs:
        rows = zip(run.smooth(), run.traces, run.signals, strict=True)
        for at, trace, signal in rows:
            if abs(at - loss) < NEAR:
                square = signal + trace / run.batch
                traces, signals = traces + trace / square, signals + signal / square
    return traces / signals if min(traces, signals) > 0 else None


if __name__ == "__main__":
    main()
