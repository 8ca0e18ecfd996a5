"""The first five minutes on a card: what to ask it, in order, and the answer that it should give.

    python -m benchmarks.gpu_first

Each line runs in a process of its own with a time limit and ends in PASS, DIFFERS (from the answer
below), FAILED, SKIPPED, or NOTED where there is nothing to compare with; results are written to
--json after each. Exit code 1 if a line differs or fails. `--device cpu --size tiny` enters every
line that a CPU has; the suite does. No card has answered yet: times and shares are estimates from
bytes and FLOPs for one H200.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import gpu_first_kernels as kernels
from benchmarks import gpu_first_runs as runs
from benchmarks import gpu_process
from benchmarks.gpu import machine
from benchmarks.gpu_first_kernels import DIFFERS, Answer, Given
from benchmarks.gpu_results import NotOurs, ResultFiles
from benchmarks.gpu_rows import SIZES, device_of
from parallel3d.device import accelerator

FAILED = "FAILED"
MACHINE = "machine"


@dataclass(frozen=True)
class Line:
    """A question, the answer that a good card gives, and the seconds that it should take.

    `by_command`: it runs `parallel3d`, which gets the card to itself.
    """

    run: Callable[[Given], Answer]
    expected: str
    seconds: int
    by_command: bool = False

    @property
    def limit_s(self) -> int:
        return max(120, 3 * self.seconds)


LINES = {
    "versions": Line(
        kernels.versions, "torch ≥ 2.11 built for CUDA, and the names of driver and card", 5
    ),
    "gemm": Line(kernels.gemm, "bf16, 8192³: at least 70 % of the datasheet (H200: ≈ 785)", 10),
    "addmm": Line(
        kernels.accumulating_gemm,
        "addmm with out_dtype=fp32: the result is `out`, errors below 1e-4 of its scale, and less "
        "time than a product and a sum",
        10,
    ),
    "attention": Line(
        kernels.attention,
        "flash or cuDNN is chosen, also with 8 key-value heads, and is within 10 % of the fastest",
        25,
    ),
    "rms_norm": Line(kernels.rms_norm, "F.rms_norm: one kernel, right to bf16's rounding", 8),
    "adamw": Line(
        kernels.fused_adamw, "fused AdamW divides by grad_scale and leaves the gradient divided", 8
    ),
    "communicators": Line(runs.communicators, "made, split, summed and destroyed, no hang", 10),
    "losses": Line(
        runs.losses,
        "llama_tiny, fp32, 5 steps: losses as on the CPU to 1e-4, gradient norms to 1e-3",
        20,
    ),
    "host syncs": Line(runs.host_syncs, "one a step: the host reads loss and norm together", 10),
    "train": Line(
        runs.train,
        "1B, bf16, micro-batch 8: MFU ≥ 30 % of the datasheet, a peak of about 65 GB",
        60,
        by_command=True,
    ),
    "dryrun": Line(
        runs.dryrun,
        "as `train` measured: peak memory within 5 %, seconds within 20 %",
        15,
        by_command=True,
    ),
    "trace": Line(runs.trace, "a step of the 1B: the card is busy 90 % of it, GEMMs lead", 45),
    "verify tp=2": Line(
        partial(runs.verify, words="tp=2"),
        "two ranks give what one process gives",
        40,
        by_command=True,
    ),
    "verify dp=2": Line(
        partial(runs.verify, words="dp=2"),
        "two ranks give what one process gives",
        40,
        by_command=True,
    ),
    "train compile": Line(
        partial(runs.train, compiled=True),
        "the same with compile=true: MFU ≥ 40 %",
        150,
        by_command=True,
    ),
}


def answer(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The line's answer by this process, or the machine's name; FAILED with what was raised."""
    try:
        device = device_of(options.device)
        if name not in LINES or not LINES[name].by_command:
            accelerator.make_current(device)
        if name == MACHINE:
            return machine(device)
        earlier = json.loads(options.earlier) if options.earlier else {}
        given = Given(device, options.size, options.folder, earlier, options.micro_batch)
        return LINES[name].run(given)._asdict()
    except Exception as error:
        traceback.print_exc()
        return {"verdict": FAILED, "found": gpu_process.sentence_of(error)}


def ask(name: str, options: argparse.Namespace, earlier: dict[str, Any]) -> dict[str, Any]:
    """`answer` by a process of its own, which is ended at its limit."""
    if options.in_process:
        options.earlier = json.dumps(earlier)
        return answer(name, options)
    limit_s = options.limit or (120 if name == MACHINE else LINES[name].limit_s)
    out = options.folder / "line.json"
    out.unlink(missing_ok=True)
    words = ["--line", name, "--size", options.size, "--device", options.device]
    words += ["--folder", str(options.folder), "--micro-batch", str(options.micro_batch)]
    words += ["--earlier", json.dumps(earlier), "--parent", str(os.getpid())]
    ended = gpu_process.run_limited([sys.executable, "-m", "benchmarks.gpu_first", *words], limit_s)
    if name == "trace":
        sys.stdout.write(ended.out)
    if out.exists():
        row = json.loads(out.read_text(encoding="utf-8"))
    else:
        row = {"verdict": FAILED, "found": gpu_process.reason(ended, limit_s)}
    if row.get("verdict") == FAILED:
        sys.stderr.write(ended.err)
    return row | ({} if name == MACHINE else {"took_s": round(ended.seconds, 1)})


def main(words: list[str] | None = None) -> int:
    options = _parser().parse_args(words)
    if options.line:
        gpu_process.die_with_parent(options.parent)
        found = answer(options.line, options)
        (options.folder / "line.json").write_text(json.dumps(found), encoding="utf-8")
        return 0
    options.folder = (options.folder or Path(tempfile.mkdtemp(prefix="gpu-first-"))).resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        files = ResultFiles(options.json)
    except NotOurs as error:
        print(error, file=sys.stderr)
        return 2
    with gpu_process.stops_on_sigterm():
        here = ask(MACHINE, options, {})
        if "verdict" in here:
            print(f"{here['found']}; --device cpu --size tiny tries the paths", file=sys.stderr)
            return 2
        verdicts = [_run(name, options, files, here) for name in options.only or LINES]
    print(f"{options.json} is written; runs and the trace are in {options.folder}")
    return 1 if {FAILED, DIFFERS} & set(verdicts) else 0


def _run(name: str, options: argparse.Namespace, files: ResultFiles, here: dict[str, Any]) -> str:
    """Asks one line, prints it and writes it; returns the verdict."""
    earlier = files.rows(here, options.size)
    figures = {k: {"figures": earlier[k].get("figures")} for k in ("train",) if k in earlier}
    row = {"expected": LINES[name].expected} | ask(name, options, figures)
    files.add(here, options.size, name, row)
    print(
        f"{row['verdict']:8} {name}: {row['found']}\n{'':8} expected: {row['expected']}", flush=True
    )
    return row["verdict"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_first",
        description=__doc__,
        epilog=lines_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=sorted(SIZES), default="full")
    parser.add_argument("--only", nargs="+", choices=list(LINES), metavar="LINE")
    parser.add_argument("--json", type=Path, default=Path("gpu_first.json"))
    parser.add_argument("--folder", type=Path, help="for runs and the trace; default: a new one")
    parser.add_argument("--micro-batch", type=int, default=8, help="of the 1B model")
    parser.add_argument("--limit", type=float, metavar="S", help="seconds a line; default: by line")
    parser.add_argument("--in-process", action="store_true", help="all lines here, no limits")
    for hidden in ("--line", "--earlier"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    return parser


def lines_text() -> str:
    """The lines in their order, with the seconds that they should take and their answers."""
    total = sum(line.seconds for line in LINES.values())
    lines = [f"lines, with the seconds that they should take on one H200 ({total} in all):"]
    return "\n".join(
        lines + [f"  {name:14} {line.seconds:4}  {line.expected}" for name, line in LINES.items()]
    )


if __name__ == "__main__":
    sys.exit(main())
