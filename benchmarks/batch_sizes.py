"""Loss against tokens at several global batches, and the batch that the noise scale predicts.

    python -m benchmarks.batch_sizes run --runs runs/batches          # an hour on two busy cores
    python -m benchmarks.batch_sizes show --runs runs/batches --svg docs/batch_sizes.svg

`run` trains the default model once for each global batch, one after another, on one CPU rank in
bf16, with `train.noise_scale`; runs that are finished stay. `show` reads their metrics.jsonl: a
table in Markdown, and the picture.

The learning rate is 1e-3 at 16 sequences and goes with the root of the batch up to 3e-3, constant
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

SEQUENCE = 256  # tokens of a sample of the default model
TOKENS = {8: 250, 16: 250, 32: 300, 64: 350, 128: 500, 256: 700, 512: 1300}  # thousands, by batch


class Run(NamedTuple):
    """One run. losses: of each step; traces, signals: of the noise scale, of each step."""

    batch: int
    losses: list[float]
    traces: list[float]
    signals: list[float]

    @property
    def tokens(self) -> list[int]:
        """Read when the loss of each step was measured, which is before its update."""
        return [step * self.batch * SEQUENCE for step in range(len(self.losses))]

    def smooth(self) -> list[float]:
        """Losses as means over the last sixth of the tokens read so far, at least one step."""
        found = []
        for end in range(1, len(self.losses) + 1):
            found.append(statistics.fmean(self.losses[end - max(1, end // 6) : end]))
        return found

    def reaches(self, loss: float) -> float | None:
        """Tokens at which the smoothed loss passes `loss`, between two steps on a straight line."""
        curve, tokens = self.smooth(), self.tokens
        for i in range(1, len(curve)):
            if curve[i] <= loss < curve[i - 1]:
                share = (curve[i - 1] - loss) / (curve[i - 1] - curve[i])
                return tokens[i - 1] + share * (tokens[i] - tokens[i - 1])
        return None

    def noise_scale(self, first: float, last: float) -> float | None:
        """Sequences, from the steps in a range of tokens, each by its own squared norm."""
        traces, signals = [], []
        rows = zip(self.tokens, self.traces, self.signals, strict=True)
        for tokens, trace, signal in rows:
            if first <= tokens <= last:
                square = signal + trace / self.batch  # of the whole batch's gradient
                traces.append(trace / square)
                signals.append(signal / square)
        if not signals or sum(signals) <= 0:
            return None
        return sum(traces) / sum(signals)


def rate(batch: int) -> float:
    return min(1e-3 * math.sqrt(batch / 16), 3e-3)


def train(batch: int, runs: Path) -> None:
    """One run, unless it is finished."""
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


def show(runs: list[Run], svg: Path | None) -> None:
    raise NotImplementedError


if __name__ == "__main__":
    main()
