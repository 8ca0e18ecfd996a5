"""Compiles the GPU kernels of this package without a GPU: `python -m benchmarks.compiled.kernels`.

Training steps on the simulated device record the arguments of every function under `device.fused`.
TorchInductor then writes their kernels, and those of whole transformer blocks under `compile=true`,
forward and backward, for an H100 and a B200, and Triton compiles each candidate configuration to
machine code. Triton's interpreter runs the kernels of small calls on the CPU, and their values are
compared with the plain functions.

Prints Markdown tables and writes all figures as JSON. Exit code 1 if anything is refused, spills or
differs; 2 without Triton or a C++ compiler. It needs `pip install triton==3.6.0` (188 MB) next to a
CPU build of PyTorch, no GPU, and some minutes of two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compiled.card import CARDS
from benchmarks.compiled.table import compiled_table, faults, interpreted_table
from benchmarks.peers.peer import commit


def missing() -> str | None:
    """Returns why this machine cannot run the command, in one sentence."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton==3.6.0 (188 MB, next to a CPU torch)."
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return f"There is no C++ compiler {compiler}: install it or name another by CXX."
    return None


def worker(module: str, *words: str, **environment: str) -> None:
    """Runs a module of the benchmark in a process of its own; its log goes to stderr."""
    command = [sys.executable, "-m", f"benchmarks.compiled.{module}", *words]
    subprocess.run(command, env=os.environ | environment, stdout=sys.stderr, check=True)


def measured(cards: Sequence[str], folder: Path) -> dict[str, Any]:
    """Returns all rows. Files in `folder` from an earlier run are reused."""
    large, small = folder / "large.pt", folder / "small.pt"
    for kind in (large, small):
        if not kind.exists():
            worker("calls", kind.stem, str(kind))
    rows: dict[str, Any] = {"compiled": []}
    # Caches of an earlier PyTorch or Triton are not read.
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    for card in cards:
        out = folder / f"{card}.json"
        if not out.exists():
            worker("worker", "compile", card, str(large), str(out), **caches)
        grouped = folder / f"{card}_grouped.json"
        if not grouped.exists():
            worker("grouped", "compile", card, str(grouped), **caches)
        for part in (out, grouped):
            rows["compiled"] += json.loads(part.read_text(encoding="utf-8"))
    out, grouped = folder / "interpreted.json", folder / "interpreted_grouped.json"
    interpret = caches | {"TRITON_INTERPRET": "1"}
    if not out.exists():
        worker("worker", "interpret", cards[0], str(small), str(out), **interpret)
    if not grouped.exists():
        worker("grouped", "interpret", cards[0], str(grouped), **interpret)
    rows["interpreted"] = [
        row for part in (out, grouped) for row in json.loads(part.read_text(encoding="utf-8"))
    ]
    out = folder / "uncalled.json"
    worker("calls", "uncalled", str(out), str(large), str(small))
    rows["uncalled"] = json.loads(out.read_text(encoding="utf-8"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cards", nargs="+", default=list(CARDS), choices=list(CARDS))
    parser.add_argument("--json", type=Path, default=Path("compiled_kernels.json"))
    parser.add_argument(
        "--folder", type=Path, help="keep the parts in this folder, and reuse those that are there"
    )
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(reason, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = measured(options.cards, folder)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton", "numpy")}
    facts = versions | {"commit": commit(), "date": time.strftime("%Y-%m-%d")}
    text = json.dumps(facts | rows, indent=1) + "\n"
    options.json.write_text(text, encoding="utf-8")
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    print(f"sha256 of {options.json.name}: {hashlib.sha256(text.encode()).hexdigest()}\n")
    print(compiled_table(rows["compiled"]), interpreted_table(rows["interpreted"]), sep="\n\n")
    found = faults(rows["compiled"], rows["interpreted"], rows["uncalled"])
    print("", *found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
