"""Prints the tables of docs/dryrun.md: `python -m benchmarks.planner.dryrun_tables`.

It runs `parallel3d dryrun` once for each row, one after the other, and prints the rows with the
commands, the commit and the machine. It needs no GPU, and takes some minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Row(NamedTuple):
    """A row: its name, and the arguments of `parallel3d dryrun`."""

    name: str
    words: str


ONE = "model=llama_1b precision=bf16 micro_batch_size=8 global_batch_size=8 cluster=dgx_h200"
EIGHT = "model=llama3_8b precision=bf16 micro_batch_size=1 global_batch_size=128 cluster=dgx_h100"
SEVENTY = "model=llama3_70b precision=bf16 micro_batch_size=1 cluster=dgx_h100"
GPT = "model=gpt3_175b precision=bf16 micro_batch_size=1 cluster=dgx_h100"
ROWS = (
    Row("llama_1b, one H200", ONE),
    Row("llama_1b, one H200, in layers' inputs", f"{ONE} recompute=full"),
    Row("llama3_8b, 8 × H100, zero=1", f"{EIGHT} dp=8 zero=1"),
    Row("llama3_8b, 8 × H100, zero=1, recomputed", f"{EIGHT} dp=8 zero=1 recompute=full"),
    Row("llama3_8b, 8 × H100, zero=3", f"{EIGHT} dp=8 zero=3"),
    Row("llama3_8b, 8 × H100, zero=3, recomputed", f"{EIGHT} dp=8 zero=3 recompute=full"),
    Row("llama3_8b, 8 × H100, tp=8", f"{EIGHT} tp=8 sp=true"),
    Row(
        "llama3_70b, 512 × H100, tp=8 pp=4",
        f"{SEVENTY} tp=8 pp=4 dp=16 sp=true zero=1 global_batch_size=512",
    ),
    Row(
        "llama3_70b, 64 × H100, zero=3",
        f"{SEVENTY} dp=64 zero=3 recompute=full global_batch_size=128",
    ),
    Row(
        "llama3_70b, 16,384 × H100, tp=8 pp=4",
        f"{SEVENTY} tp=8 pp=4 dp=512 sp=true zero=1 global_batch_size=8192",
    ),
    Row(
        "gpt3_175b, 1,024 × H100, tp=8 pp=16",
        f"{GPT} tp=8 pp=16 dp=8 sp=true zero=1 global_batch_size=1024",
    ),
)
PARTS = {
    "gemm_layers": "GEMMs, layers",
    "gemm_head": "GEMMs, head",
    "attention": "attention",
    "blocks": "blocks",
    "loss": "loss",
    "optimizer": "optimizer",
    "sharding": "FSDP2's copies",
    "other": "other",
}
KINDS = ("parameters", "gradients", "masters", "optimizer", "activations", "logits", "buffers")


def facts_of(row: Row, folder: Path) -> dict[str, Any]:
    """Returns the JSON of one run, with `took_s`, its seconds here; {"failed": …} if it did not
    run."""
    file = folder / "facts.json"
    file.unlink(missing_ok=True)
    words = [*row.words.split(), f"dryrun.json={file}"]
    start = time.perf_counter()
    command = [sys.executable, "-m", "parallel3d", "dryrun", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip() or "?").splitlines()[-1]}
    return json.loads(file.read_text()) | {"took_s": time.perf_counter() - start}


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([_line(head), _line(["---"] * len(head)), *map(_line, rows)])


def _summary(name: str, f: dict[str, Any]) -> list[str]:
    if "failed" in f:
        return [name, f["failed"], *[""] * 8]
    peak = max(row["peak_bytes"] for row in f["rows"])
    return [
        name,
        f"{peak / 1e9:.1f}",
        "yes" if f["fits"] else "no",
        f"{f['start_peak_bytes'] / 1e9:.1f}",
        f"{f['launches']:,.0f}",
        f"{f['bytes'] / 1e9:,.0f}",
        f"{f['flops'] / 1e12:,.0f}",
        f"{1e3 * f['step_seconds']:,.0f}",
        f"{100 * f['mfu']:.1f} %",
        f"{f['took_s']:.0f}",
    ]


def _memory(f: dict[str, Any]) -> list[str]:
    return [*(f"{f[f'{kind}_bytes'] / 1e9:.2f}" for kind in KINDS), f["peak_in"]]


def _times(f: dict[str, Any]) -> list[str]:
    seconds = [*(f["parts"][part]["seconds"] for part in PARTS), f["seconds"]]
    return [f"{1e3 * s:,.1f}" for s in seconds]


def markdown(found: Sequence[tuple[Row, dict[str, Any]]]) -> str:
    """Returns the tables, with a description of how they were made."""
    good = [(row, f) for row, f in found if "failed" not in f]
    head = ["", "peak GB", "fits", "start GB", "launches", "GB moved", "TFLOP", "step ms", "MFU"]
    head += ["took s"]
    text = _table(head, [_summary(row.name, f) for row, f in found])
    rows = [[row.name, *_memory(f)] for row, f in good]
    text += "\n\n" + _table(["GB at the peak", *KINDS, "in"], rows)
    rows = [[row.name, *_times(f)] for row, f in good]
    text += "\n\n" + _table(["ms of a step", *PARTS.values(), "all"], rows)
    commands = "\n".join(f"parallel3d dryrun {row.words}" for row, _ in found)
    return f"{text}\n\n```\n{commands}\n```\n\n{_origin()}"


def _origin() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True)
    commit = done.stdout.strip() or "unknown"
    return (
        f"Commit {commit}; PyTorch {torch.__version__} on {platform.machine()}, "
        f"{os.cpu_count()} CPUs."
    )


def main() -> None:
    """Prints the tables; progress goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    only = parser.parse_args().only
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for row in ROWS:
            if only in row.name:
                print(row.name, file=sys.stderr, flush=True)
                found.append((row, facts_of(row, Path(folder))))
    print(markdown(found))


if __name__ == "__main__":
    main()
