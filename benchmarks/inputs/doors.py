"""Gives mutated inputs to each place where data enters, and compares the result with the right
answer.

The other fuzzers check that an input is accepted or refused in a sentence. Here each input carries
its right answer: to accept one as something else is wrong, and so is to refuse an input that is
common in practice. The exit code is 1 if any is wrong. The report also counts the inputs that are
valid by the rules of their reference (transformers, Hydra, Slurm, datasets), and those of them that
are refused.

    python -m benchmarks.doors [--seed 0] [--count 2000] [--door NAME …] [--json FILE] [--show]
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import pkgutil
import random
import reprlib
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.inputs import door_inputs
from benchmarks.inputs.door_inputs.answers import RIGHT, SENTENCE, WRONG, Input, outcome

VALID, REFUSED = "valid", "of these refused"


def doors() -> list[str]:
    """Returns the names of the doors: the modules of `door_inputs` except `answers`."""
    names = (module.name for module in pkgutil.iter_modules(door_inputs.__path__))
    return sorted(set(names) - {"answers"})


def inputs(door: str, seed: int, folder: Path) -> Iterator[Input]:
    """Yields inputs of one door without end; files that they need are written into `folder`."""
    module = importlib.import_module(f"benchmarks.inputs.door_inputs.{door}")
    return module.inputs(random.Random(f"{door}-{seed}"), folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000, help="number of inputs, over all doors")
    parser.add_argument("--door", nargs="*", choices=doors(), default=doors())
    parser.add_argument(
        "--json", type=Path, help="write the counts and the wrong inputs to this file"
    )
    parser.add_argument("--show", action="store_true", help="prints all inputs")
    chosen = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    wrong, refused = [], []
    for index, door in enumerate(chosen.door):
        share = chosen.count // len(chosen.door) + (index < chosen.count % len(chosen.door))
        counts[door] = Counter()
        with tempfile.TemporaryDirectory(prefix="p3d-doors-") as folder:
            for given in itertools.islice(inputs(door, chosen.seed, Path(folder)), share):
                end = outcome(given)
                counts[door][end.kind] += 1
                if given.is_valid:
                    counts[door][VALID] += 1
                    counts[door][REFUSED] += end.is_refused
                    if end.is_refused:
                        refused.append({"door": door, "input": given.text, "words": end.words})
                if end.kind == WRONG:
                    wrong.append({"door": door, "input": given.text, "words": end.words})
                if end.kind == WRONG or chosen.show:
                    print(f"{door}: {given.text}\n    {end.kind}: {reprlib.repr(end.words)}")
    print(f"seed {chosen.seed}")
    for door, count in counts.items():
        kinds = (RIGHT, SENTENCE, WRONG, VALID, REFUSED)
        print(f"{door:12}", *(f"{count[kind]:6} {kind}" for kind in kinds))
    total = sum(counts.values(), Counter())
    print(f"{total[REFUSED]:,} of {total[VALID]:,} valid inputs are refused")
    if chosen.json:
        totals = {door: dict(count) for door, count in counts.items()}
        chosen.json.write_text(
            json.dumps({"counts": totals, "wrong": wrong, "refused": refused}, indent=1)
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
