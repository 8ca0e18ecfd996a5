"""Runs the GPU benchmarks: one process per task, whose row is written to one file at once.

`benchmarks.gpu.card`, `benchmarks.gpu_first` and `benchmarks.gpu.node` are tables of tasks for it.
Tasks may be grouped into calls: tasks that fit into one command on a machine that is lent for
minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import process
from benchmarks.gpu.results import NotOurs, ResultFiles, why_not
from benchmarks.gpu.rows import SIZES, Size, device_of
from benchmarks.gpu.tables import markdown
from parallel3d.device import accelerator
from parallel3d.metrics.peak import datasheet_peak
from parallel3d.metrics.provenance import git_commit

Row = dict[str, Any]
PASS, DIFFERS, NOTED, SKIPPED, FAILED = "PASS", "DIFFERS", "NOTED", "SKIPPED", "FAILED"
# facts about the card come from another process, because this one must not use its memory
MACHINE = "machine"
START_S = 6  # seconds to start a process: Python, torch, the device's context
CALL_S = 480  # planned seconds of a call
# A call ends its last task at this time: before 600 s, so that results can be written and copied.
WITHIN_S = 560
ALL_CALLS_S = 1680  # planned seconds of all calls together, out of half an hour


@dataclass(frozen=True)
class Given:
    """The inputs of a task: the device, the amount of work, the folder, and the rows so far."""

    device: torch.device
    size: str  # "full" or "tiny"
    folder: Path
    earlier: dict[str, Row]
    micro_batch: int = 8

    @property
    def is_tiny(self) -> bool:
        return self.size == "tiny"

    @property
    def on_accelerator(self) -> bool:
        return accelerator.is_accelerator(self.device)

    @property
    def is_timed(self) -> bool:
        """Whether times and shares are meaningful, which they are not on a CPU or for tiny
        shapes."""
        return self.on_accelerator and not self.is_tiny

    def steps(self) -> Size:
        return SIZES[self.size]


@dataclass(frozen=True)
class Task:
    """A task: a measurement or a check on a device.

    Attributes:
        run: returns the row: figures; `verdict` and `found` if a result is expected; `skipped` with
            the reason if the device or a package is missing. seconds: its expected time on one
            H100, without the start of its process. expected: the result of a good card.
        by_command: whether the task runs `parallel3d`, which then gets the card to itself.
    """

    run: Callable[[Given], Row]
    seconds: int
    expected: str = ""
    group: str = ""
    by_command: bool = False

    @property
    def limit_s(self) -> int:
        """Seconds after which the task is ended, because estimates err and a hang would last for
        ever."""
        return max(120, 5 * self.seconds // 2)


def judged(is_as_expected: bool, found: str, figures: Row) -> Row:
    return {"verdict": PASS if is_as_expected else DIFFERS, "found": found} | figures


def noted(found: str, figures: Row) -> Row:
    """Returns the row of a result that is not compared with anything."""
    return {"verdict": NOTED, "found": found} | figures


def verdict_of(row: Row) -> str:
    if "failed" in row:
        return FAILED
    return SKIPPED if "skipped" in row else row.get("verdict", NOTED)


def summary_of(row: Row) -> str:
    return why_not(row) or row.get("found") or json.dumps(row)


def machine(device: torch.device) -> Row:
    """Returns the facts that distinguish one section of the results from another."""
    here: Row = {"python": platform.python_version(), "torch": torch.__version__}
    if not accelerator.is_accelerator(device):
        return here | {"device": f"CPU, {torch.get_num_threads()} threads"}
    here["device"] = accelerator.name(device)
    if (count := accelerator.module(device).device_count()) > 1:
        here["devices"] = count
    properties = getattr(accelerator.module(device), "get_device_properties", None)
    if properties is not None:
        here["memory_gb"] = round(properties(device).total_memory / 1e9)
    known = datasheet_peak(here["device"], "bf16")
    if known is not None:
        here |= {"datasheet_tflops": known.flops / 1e12, "datasheet": known.source}
    return here


def call_seconds(names: Sequence[str], tasks: dict[str, Task]) -> int:
    """Returns the expected seconds of a call, with the processes that it starts, one of them to
    identify the machine."""
    return sum(tasks[name].seconds for name in names) + START_S * (len(names) + 1)


def commit_of(path: Path) -> dict[str, str]:
    """Returns the short commit of the checkout, as a part of a row."""
    commit = git_commit(path)
    if commit is None:
        return {}
    return {"commit": commit[:7] + ("-dirty" if commit.endswith("-dirty") else "")}


@dataclass(frozen=True)
class Bench:
    """A command: its tasks in order, and the calls that group them.

    Attributes:
        module: the module that `python -m` starts for each task.
        default: tasks of a command without `--only`, `--group` and `--call`; None: all.
    """

    module: str
    description: str
    tasks: dict[str, Task]
    calls: tuple[tuple[str, ...], ...] = ()
    default: tuple[str, ...] | None = None

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(task.group for task in self.tasks.values() if task.group))

    def main(self, words: list[str] | None = None) -> int:
        """Runs the command line. Returns 0; 1 if a task failed or differs; 2 if none could run."""
        began = time.monotonic()
        options = self.parser().parse_args(words)
        if options.plan:
            print(self.plan_text())
            return 0
        if options.task:
            process.die_with_parent(options.parent)
            earlier = json.loads((options.folder / "earlier.json").read_text(encoding="utf-8"))
            row = self.answer(options.task, options, earlier)
            (options.folder / "row.json").write_text(json.dumps(row), encoding="utf-8")
            return 0
        names = options.only or (options.call and self.calls[options.call - 1])
        if not names:
            groups = options.group or self.groups
            grouped = [name for name, task in self.tasks.items() if task.group in groups]
            names = grouped if options.group else (self.default or tuple(self.tasks))
        within = options.within or (WITHIN_S if options.call else None)
        deadline = None if within is None else began + within
        options.markdown = options.markdown or options.json.with_suffix(".md")
        try:
            files = ResultFiles(options.json, options.markdown, markdown)
            with _folder(options), process.stops_on_sigterm():
                here = self.ask(MACHINE, options, {}, deadline)
                if "failed" in here:
                    hint = "--device cpu --size tiny tries the paths"
                    print(f"{here['failed']}; {hint}", file=sys.stderr)
                    return 2
                rows = self._run(names, options, files, here, deadline)
        except NotOurs as error:
            print(error, file=sys.stderr)
            return 2
        return 1 if {FAILED, DIFFERS} & {verdict_of(row) for row in rows} else 0

    def _run(
        self,
        names: Sequence[str],
        options: argparse.Namespace,
        files: ResultFiles,
        here: Row,
        deadline: float | None,
    ) -> list[Row]:
        """Runs one task after the other and writes both files after each; returns the rows."""
        done = files.rows(here, options.size)
        if options.missing:
            names = [name for name in names if name not in done or why_not(done[name])]
        others = len(files.sections()) - bool(done)
        if others:
            print(f"{options.json} keeps {others} section(s) of other machines, versions or sizes")
        rows, remaining, commit = [], [], commit_of(Path(__file__).resolve())
        for name in names:
            task = self.tasks[name]
            if deadline is not None and deadline - time.monotonic() < task.seconds + START_S:
                remaining.append(name)  # a shorter task after it may still fit
                continue
            at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            row = {"expected": task.expected} if task.expected else {}
            row |= self.ask(name, options, files.rows(here, options.size), deadline)
            row |= {"at": at} | commit
            files.add(here, options.size, name, row)
            rows.append(row)
            print(f"{verdict_of(row):8} {name}: {summary_of(row)} ({row['took_s']} s)", flush=True)
            if task.expected:
                print(f"{'':8} expected: {task.expected}", flush=True)
        if rows:
            print(f"{options.json} and {options.markdown} are written")
        if remaining:
            print(f"No time left for: {', '.join(remaining)}. --missing runs them.")
        return rows

    def answer(self, name: str, options: argparse.Namespace, earlier: dict[str, Row]) -> Row:
        """Returns the row, made in this process; an exception is in it as `failed`."""
        try:
            device = device_of(options.device)
            if name not in self.tasks or not self.tasks[name].by_command:
                accelerator.make_current(device)
            if name == MACHINE:
                return machine(device)
            given = Given(device, options.size, options.folder, earlier, options.micro_batch)
            return self.tasks[name].run(given)
        except Exception as error:
            traceback.print_exc()
            return {"failed": process.sentence_of(error)}

    def ask(
        self,
        name: str,
        options: argparse.Namespace,
        earlier: dict[str, Row],
        deadline: float | None = None,
    ) -> Row:
        """Does the work of `answer` in a process of its own, which is ended at the task's limit or
        the deadline."""
        began = time.monotonic()
        if options.in_process:
            row = self.answer(name, options, earlier)
        else:
            limit_s = options.limit or (120 if name == MACHINE else self.tasks[name].limit_s)
            if deadline is not None:
                limit_s = min(limit_s, round(max(1.0, deadline - began)))
            row = self._ask_process(name, options, earlier, limit_s)
        took = {} if name == MACHINE else {"took_s": round(time.monotonic() - began, 1)}
        return row | took

    def _ask_process(
        self, name: str, options: argparse.Namespace, earlier: dict[str, Row], limit_s: float
    ) -> Row:
        out, given = options.folder / "row.json", options.folder / "earlier.json"
        given.write_text(json.dumps(earlier), encoding="utf-8")
        words = ["--task", name, "--size", options.size, "--device", options.device]
        words += ["--folder", str(options.folder), "--micro-batch", str(options.micro_batch)]
        command = [sys.executable, "-m", self.module, *words, "--parent", str(os.getpid())]
        try:
            ended = process.run_limited(command, limit_s)
            row = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
        finally:
            for path in (out, given):
                path.unlink(missing_ok=True)
        row = row or {"failed": process.reason(ended, limit_s)}
        sys.stdout.write(ended.out)  # other output, such as the kernels of a trace
        if "failed" in row:
            sys.stderr.write(ended.err)  # the whole message; the row keeps one line
        return row

    def parser(self) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.module}",
            description=self.description,
            epilog=self.tasks_text(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--device", default="cuda")
        parser.add_argument("--size", choices=sorted(SIZES), default="full")
        if self.groups:
            parser.add_argument("--group", nargs="+", choices=self.groups, help="these groups")
        if self.calls:
            numbers = range(1, len(self.calls) + 1)
            parser.add_argument(
                "--call", type=int, choices=numbers, help="run the tasks of this call"
            )
        parser.set_defaults(group=None, call=None)
        parser.add_argument("--only", nargs="+", choices=list(self.tasks), metavar="NAME")
        parser.add_argument("--missing", action="store_true", help="skip tasks that have figures")
        parser.add_argument(
            "--plan", action="store_true", help="print calls and seconds, run nothing"
        )
        parser.add_argument(
            "--within",
            type=float,
            metavar="S",
            help=f"start no task that would end later; {WITHIN_S} with --call",
        )
        parser.add_argument(
            "--limit", type=float, metavar="S", help="seconds per task; default: by its estimate"
        )
        parser.add_argument("--json", type=Path, default=Path("gpu.json"))
        parser.add_argument("--markdown", type=Path, help="default: next to the JSON file")
        parser.add_argument(
            "--folder", type=Path, help="folder of runs and traces; default: a new one"
        )
        parser.add_argument("--micro-batch", type=int, default=8, help="of the 1B runs")
        parser.add_argument(
            "--in-process",
            action="store_true",
            help="run all tasks in this process, without limits",
        )
        parser.add_argument("--task", choices=[*self.tasks, MACHINE], help=argparse.SUPPRESS)
        parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
        return parser

    def tasks_text(self) -> str:
        """Lists the tasks in their order, with their seconds and expected results."""
        lines = ["tasks, with their estimated seconds on one H100:"]
        for name, task in self.tasks.items():
            lines.append(f"  {name:24} {task.seconds:4}  {task.expected or task.group}".rstrip())
        return "\n".join(lines)

    def page_rows(self) -> list[str]:
        """Formats the calls' tasks as rows of benchmarks/gpu/README.md."""
        return [
            f"| {number} | `{name}` | {self.tasks[name].expected or '–'} | "
            f"{self.tasks[name].seconds} |"
            for number, names in enumerate(self.calls, 1)
            for name in names
        ]

    def plan_text(self) -> str:
        """Lists the calls with their tasks and seconds; without calls the groups."""
        kinds = [(f"--call {number}", names) for number, names in enumerate(self.calls, 1)]
        kinds = kinds or [
            (f"--group {group}", tuple(n for n, task in self.tasks.items() if task.group == group))
            for group in self.groups
        ]
        lines, total = [], 0
        for word, names in kinds:
            seconds = call_seconds(names, self.tasks)
            total += seconds
            lines.append(f"python -m {self.module} {word}: {seconds} s, {START_S} s a process")
            lines += [f"  {self.tasks[name].seconds:4} s  {name}" for name in names]
        return "\n".join([*lines, f"{total} s in all"])


@contextlib.contextmanager
def _folder(options: argparse.Namespace) -> Iterator[None]:
    """Makes the folder of runs and traces; one that was made here is removed if it stayed empty."""
    own = options.folder is None
    options.folder = (options.folder or Path(tempfile.mkdtemp(prefix="gpu-"))).resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        if own:
            with contextlib.suppress(OSError):
                options.folder.rmdir()
        if options.folder.exists():
            print(f"runs and traces are in {options.folder}")
