"""What one GPU does: all that docs/performance.md asks of a card, in groups of a few minutes.

1. The card's speed in a large bf16 GEMM, beside its datasheet's.
2. Llama 3.2's 1B and 3B shapes, sequence 4096, bf16: tokens/s and MFU of parallel3d (eager and
   `compile=true`), of Hugging Face transformers (the same two ways) and of torchtitan's model, on
   equal batches of random tokens, AdamW, clipping. The micro-batch is the largest that fits.
3. One rank's share of llama3_70b at tp=8 and of gpt3_175b at tp=8 pp=16, with PyTorch's `fake`
   process group in place of the other ranks: memory, and time of a layer's forward and backward
   without its communication, but with the copies that `fake` makes in all-gathers (by their bytes
   2 to 3 %).
4. fp8 against bf16 in the GEMMs of the first of these, casts included, where the card has fp8.

Each row runs in a process of its own with a time limit; what fails, or needs a package or a device
that is not there, says so in its row. Both files are written after every row, and rows are added to
those that the files have: of the same machine and torch in one section, of others in their own.

`--size tiny --device cpu` runs every path that a CPU has in a few seconds; the suite does. Nothing
here has run on a GPU yet; the seconds below are estimates for one H200.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_process
from benchmarks.gpu_peers import titan, transformers_row
from benchmarks.gpu_results import NotOurs, ResultFiles, why_not
from benchmarks.gpu_rows import SIZES, Size, device_of, fp8_row, gemm_row, model_row
from benchmarks.gpu_shards import shard_row
from benchmarks.gpu_tables import markdown
from parallel3d.device import accelerator
from parallel3d.metrics.peak import datasheet_peak
from parallel3d.metrics.provenance import git_commit


@dataclass(frozen=True)
class Row:
    """A measurement, the group it belongs to, and the seconds that it should take on one H200."""

    run: Callable[[Size, torch.device], dict[str, Any]]
    group: str
    seconds: int

    @property
    def limit_s(self) -> int:
        """After so many seconds it is given up: estimates err, a hang lasts for ever."""
        return max(120, 5 * self.seconds // 2)


ROWS = {
    "gemm": Row(gemm_row, "card", 15),
    "fp8": Row(fp8_row, "card", 35),
    "shard llama3_70b": Row(partial(shard_row, "llama3_70b"), "card", 30),
    "shard gpt3_175b": Row(partial(shard_row, "gpt3_175b"), "card", 40),
    "parallel3d 1b": Row(partial(model_row, "1b", compiled=False), "1b", 45),
    "parallel3d 1b compile": Row(partial(model_row, "1b", compiled=True), "1b", 140),
    "transformers 1b": Row(partial(transformers_row, "1b", compiled=False), "1b", 50),
    "transformers 1b compile": Row(partial(transformers_row, "1b", compiled=True), "1b", 120),
    "parallel3d 3b": Row(partial(model_row, "3b", compiled=False), "3b", 120),
    "parallel3d 3b compile": Row(partial(model_row, "3b", compiled=True), "3b", 220),
    "transformers 3b": Row(partial(transformers_row, "3b", compiled=False), "3b-peer", 80),
    "transformers 3b compile": Row(partial(transformers_row, "3b", compiled=True), "3b-peer", 180),
    "torchtitan 1b": Row(partial(titan, "1b"), "titan", 120),
    "torchtitan 3b": Row(partial(titan, "3b"), "titan", 180),
}
GROUPS = tuple(dict.fromkeys(row.group for row in ROWS.values()))
MACHINE = "machine"  # asked in a process too: this one must not hold memory of the card


def machine(device: torch.device) -> dict[str, Any]:
    """What tells one section of the results from another."""
    here: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if not accelerator.is_accelerator(device):
        return here | {"device": f"CPU, {torch.get_num_threads()} threads"}
    here["device"] = accelerator.name(device)
    properties = getattr(accelerator.module(device), "get_device_properties", None)
    if properties is not None:
        here["memory_gb"] = round(properties(device).total_memory / 1e9)
    known = datasheet_peak(here["device"], "bf16")
    if known is not None:
        here |= {"datasheet_tflops": known.flops / 1e12, "datasheet": known.source}
    return here


def measure(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """The row, measured by this process; what it raises stands in it as `failed`."""
    try:
        device = device_of(given.device)
        accelerator.make_current(device)
        return machine(device) if name == MACHINE else ROWS[name].run(SIZES[given.size], device)
    except Exception as error:
        traceback.print_exc()
        return {"failed": gpu_process.sentence_of(error)}


def run_row(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """The row; `{"failed": why}` of a process that did not end well or in time."""
    if given.in_process:
        return measure(name, given)
    limit_s = given.limit or (120 if name == MACHINE else ROWS[name].limit_s)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        words = ["--row", name, "--size", given.size, "--device", given.device]
        words += ["--out", str(out), "--parent", str(os.getpid())]
        command = [sys.executable, "-m", "benchmarks.gpu", *words]
        ended = gpu_process.run_limited(command, limit_s)
        row = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    row = row or {"failed": gpu_process.reason(ended, limit_s)}
    if "failed" in row:
        sys.stderr.write(ended.err)  # all of it: the row keeps one line
    return row


def main(words: list[str] | None = None) -> int:
    given = _parser().parse_args(words)
    if given.row:
        gpu_process.die_with_parent(given.parent)
        given.out.write_text(json.dumps(measure(given.row, given)), encoding="utf-8")
        return 0
    names = [name for name, row in ROWS.items() if row.group in (given.group or GROUPS)]
    try:
        files = ResultFiles(given.json, given.markdown, markdown)
        with gpu_process.stops_on_sigterm():
            here = run_row(MACHINE, given)
            if "failed" in here:
                hint = "--device cpu --size tiny tries the paths"
                print(f"{here['failed']}; {hint}", file=sys.stderr)
                return 2
            _run(given.only or names, given, files, here)
    except NotOurs as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _run(
    names: list[str], given: argparse.Namespace, files: ResultFiles, here: dict[str, Any]
) -> None:
    """Runs the rows one after the other and writes both files after each."""
    commit = git_commit(Path(__file__).resolve())
    done = files.rows(here, given.size)
    if given.missing:
        names = [name for name in names if name not in done or why_not(done[name])]
    others = len(files.sections()) - bool(done)
    if others:
        print(f"{given.json} keeps its {others} section(s) of other machines, versions or sizes")
    for name in names:
        started = datetime.datetime.now(datetime.UTC)
        row = run_row(name, given) | {"at": started.isoformat(timespec="seconds")}
        if commit is not None:
            row["commit"] = commit[:7] + ("-dirty" if commit.endswith("-dirty") else "")
        files.add(here, given.size, name, row)
        seconds = (datetime.datetime.now(datetime.UTC) - started).total_seconds()
        print(f"{name}: {row} ({seconds:.0f} s)", flush=True)
    print(f"{given.json} and {given.markdown} are written")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        epilog=groups_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    parser.add_argument("--group", nargs="+", choices=GROUPS, help="these groups of rows")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), metavar="ROW", help="these rows")
    parser.add_argument("--missing", action="store_true", help="not those that have figures")
    parser.add_argument("--limit", type=float, metavar="S", help="seconds a row; default: by row")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--markdown", type=Path, default=Path("gpu.md"))
    parser.add_argument("--in-process", action="store_true", help="all rows here, no limits")
    parser.add_argument("--row", choices=[*ROWS, MACHINE], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    return parser


def groups_text() -> str:
    """The groups, what they hold and the seconds that they should take."""
    lines = ["groups of rows, with the seconds that they should take on one H200 (not measured):"]
    for group in GROUPS:
        rows = {name: row.seconds for name, row in ROWS.items() if row.group == group}
        named = ", ".join(f"{name} {seconds}" for name, seconds in rows.items())
        lines.append(f"  {group:8} {sum(rows.values()):4}  {named}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
