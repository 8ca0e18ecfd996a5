"""Throws configurations at the command line's checks, which must accept or refuse each in one
sentence.

Configurations are drawn over all keys (`fuzz_words`), composed as Hydra composes them and checked,
all in this process; some run through `parallel3d train` as far as the run directory. These count as
errors: an exception that is not a UserError, more than two seconds, a sentence that names no key or
that contains control characters for a terminal. With --train some that are accepted train two steps
on up to four ranks.

    python -m benchmarks.fuzz [--seed 0] [--count 10000] [--train 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import reprlib
import resource
import subprocess
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.inputs.fuzz_answers import (
    BUG,
    REFUSED,
    TAKEN,
    Composer,
    Outcome,
    outcome,
    outcome_by_hand,
    outcome_of_command,
)
from benchmarks.inputs.fuzz_words import Drawn, by_hand, draw, trainable

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 4 << 30  # bytes of address space beyond those in use at the start
TRAIN_S = 300
TINY = (
    *("model.num_layers=4", "model.hidden_size=32", "model.num_attention_heads=4"),
    *("model.seq_length=32", "micro_batch_size=2", "global_batch_size=16", "train.steps=2"),
    *("train.eval_batches=1", "checkpoint.every=0", "launch.peak_tflops=0.1", "device=cpu"),
    *("launch.timeout_s=60", "data=text", "data.path=book.txt", "data.cache_dir=cache"),
)


def train_some(seed: int, count: int, composer: Composer) -> Iterator[tuple[Drawn, Outcome]]:
    """Trains `count` accepted configurations, two steps each, one after the other."""
    rng = random.Random(f"train-{seed}")
    with tempfile.TemporaryDirectory(prefix="p3d-fuzz-") as folder:
        Path(folder, "book.txt").write_text("How many bottles are on the wall?\n" * 500)
        while count:
            drawn = trainable(rng)
            drawn = Drawn((*TINY, *drawn.words), drawn.world_size)
            if outcome(drawn, composer).kind == TAKEN:
                count -= 1
                yield drawn, _trained(drawn.words, folder)


def _trained(words: Sequence[str], folder: str) -> Outcome:
    """Returns how `parallel3d train` ends; a start may still refuse, with code 2 and a sentence."""
    command = [sys.executable, "-m", "parallel3d", "train", *words]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environ, timeout=TRAIN_S, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        return Outcome(BUG, f"trains for more than {TRAIN_S} s")
    lines = done.stderr.strip().splitlines()
    if done.returncode == 0:
        return Outcome(TAKEN)
    if done.returncode == 2 and len(lines) == 1:
        return Outcome(REFUSED, lines[0])
    return Outcome(BUG, f"code {done.returncode}: {' | '.join(lines[-4:])[:600]!a}")


def check_all(seed: int, count: int, composer: Composer) -> Iterator[tuple[str, Any, Outcome]]:
    """Yields (way, configuration, outcome); every tenth also in Python, every hundredth also as a
    command."""
    with tempfile.TemporaryDirectory(prefix="p3d-fuzz-") as folder:
        for number in range(count):
            drawn = draw(seed, number)
            yield "composed", drawn, outcome(drawn, composer)
            if number % 10 == 0:
                values = by_hand(seed, number // 10)
                yield "by hand", values, outcome_by_hand(*values)
            if number % 100 == 0:
                yield "command", drawn, outcome_of_command(drawn, Path(folder))


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Limits the address space to MEMORY more than is in use, so that MemoryError comes before
    swapping."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument(
        "--train", type=int, default=0, help="number of configurations that train two steps"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    bugs = []
    composer = Composer()
    with bounded_memory(), warnings.catch_warnings(action="ignore"):
        for way, drawn, found in check_all(given.seed, given.count, composer):
            counts[way][found.kind] += 1
            if found.kind == BUG:
                bugs.append((way, reprlib.repr(drawn), found.text))
    for drawn, found in train_some(given.seed, given.train, composer):
        counts["trained"][found.kind] += 1
        if found.kind == BUG:
            bugs.append(("trained", " ".join(drawn.words), found.text))
        elif found.kind == REFUSED:
            print(f"refused when started: {found.text}")
    for way, kinds in counts.items():
        print(f"{way}: {kinds.total():,} tried, {kinds[TAKEN]:,} taken, {kinds[REFUSED]:,} refused")
    for way, drawn, text in bugs:
        print(f"BUG ({way}) {drawn}\n    {text}".encode("ascii", "backslashreplace").decode())
    if given.json:
        report = {"seed": given.seed, "counts": counts, "bugs": bugs}
        given.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if bugs else 0)


if __name__ == "__main__":
    main()
