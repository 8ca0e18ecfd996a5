"""Tests a profiled rank's calls, marks, files and output, on a GPU simulated by a list of calls."""

from __future__ import annotations

import errno
import gzip
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile, record_function

from parallel3d.comm.collectives import observed
from parallel3d.comm.step_timer import StepTimer
from parallel3d.device import accelerator
from parallel3d.loop import profiling
from parallel3d.loop.keys import ProfileConfig
from parallel3d.loop.profiling import StepProfiler, layers_shown, longest
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config
from parallel3d.trainer import StepResult
from tests.unit.models.test_checkpointing import NOTHING, hidden, middle_stage

CPU = torch.device("cpu")


class Rank:
    """A rank whose steps only run a forward; `said` records its calls."""

    def __init__(self, patch: pytest.MonkeyPatch, run_dir: Path) -> None:
        self.said: list[str] = []
        self.patch, self.run_dir = patch, run_dir
        self.patch.setattr(dist, "barrier", self.saying("barrier"))
        watchdog = SimpleNamespace(pause=self.saying("pause"), resume=self.saying("resume"))
        self.worker = Worker(0, 0, 2, 2, run_dir, "local", watchdog=watchdog)

    def saying(self, *words: str) -> Callable[..., None]:
        return lambda *args: self.said.append(" ".join((*words, *map(str, args))))

    def gpu(self, name: str = "cuda:0") -> torch.device:
        """Gives the device of that name the functions of `torch.cuda`."""

        def history(enabled: str | None = "all", **how: Any) -> None:
            self.said.append("history off" if enabled is None else "history on")

        def dump(path: str) -> None:
            Path(path).write_text("a snapshot")
            self.said.append("snapshot")

        module = SimpleNamespace(
            synchronize=lambda device: self.said.append("synchronize"),
            nvtx=SimpleNamespace(range_push=self.saying("push"), range_pop=self.saying("pop")),
            memory=SimpleNamespace(_record_memory_history=history, _dump_snapshot=dump),
            profiler=SimpleNamespace(
                start=self.saying("cudaProfilerStart"), stop=self.saying("cudaProfilerStop")
            ),
        )
        self.patch.setattr(accelerator, "module", lambda device: module)
        return torch.device(name)

    def profiler(self, device: torch.device = CPU, done: int = 0, **keys: Any) -> StepProfiler:
        config = Config(profile=ProfileConfig(**keys))
        self.step_timer = StepTimer()
        parts = {"step_timer": self.step_timer, "device": device, "stages": [], "steps_done": done}
        return StepProfiler(SimpleNamespace(config=config, **parts), self.worker)

    def run(self, profiler: StepProfiler, steps: range) -> None:
        for step in steps:
            profiler.before_step(step)
            with self.step_timer.within("forward", "forward m0 c0"):
                torch.ones(3).add(1)
            profiler.after_step(StepResult(step, 2.0, 1.0, 1e-3, 64), 0.1)

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.run_dir.glob("profile/*")}

    def events(self, name: str) -> list[dict[str, Any]]:
        """Returns the ranges of a trace."""
        with gzip.open(self.run_dir / "profile" / f"{name}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        return [event for event in events if event.get("cat") == "user_annotation"]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rank:
    monkeypatch.delenv(profiling.NSYS, raising=False)
    return Rank(monkeypatch, tmp_path)


STEP = ["push forward m0 c0", "pop", "pop"]
WAITED = ["barrier", "resume"]


def test_a_gpu_records_trace_nvtx_ranges_and_allocator_history_of_these_steps(
    rank: Rank,
) -> None:
    profiler = rank.profiler(rank.gpu(), steps=[2, 3], memory=True)
    rank.run(profiler, range(1, 6))
    assert rank.said == [
        *("synchronize", "history on", "push ProfilerStep#2", *STEP, "push ProfilerStep#3", *STEP),
        *("pause", "synchronize", "snapshot", "history off", *WAITED),
    ]
    assert rank.files == {"rank0-steps2-3.json.gz", "rank0-steps2-3-memory.pickle"}
    names = [event["name"] for event in rank.events("rank0-steps2-3")]
    assert sorted(names) == [
        *("ProfilerStep#2", "ProfilerStep#3", "forward m0 c0", "forward m0 c0")
    ]
    assert rank.step_timer.ranges is None


def test_a_rank_that_is_not_profiled_only_pauses_its_watchdog(rank: Rank) -> None:
    rank.run(rank.profiler(rank.gpu(), steps=[2, 3], ranks=[1], memory=True), range(1, 6))
    assert rank.said == ["pause", *WAITED]
    assert not rank.files


def test_under_nsys_only_nvtx_ranges_and_profiler_start_and_stop_are_used(rank: Rank) -> None:
    rank.patch.setenv(profiling.NSYS, "1")
    rank.run(rank.profiler(rank.gpu(), steps=[2, 2], ranks="all"), range(1, 4))
    assert rank.said == [
        *("synchronize", "cudaProfilerStart", "push ProfilerStep#2", *STEP),
        *("pause", "synchronize", "cudaProfilerStop", *WAITED),
    ]
    assert not rank.files


def test_a_device_without_memory_history_is_reported_once_and_traced(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (0, 1):
        rank.worker.rank = number
        rank.run(rank.profiler(steps=[1, 1], ranks=[0, 1], memory=True), range(1, 2))
    assert rank.files == {"rank0-steps1-1.json.gz", "rank1-steps1-1.json.gz"}
    said = capsys.readouterr().err
    assert said.count("no snapshot is written, because that needs a GPU") == 1
    assert said.count("profile of rank 0, step 1; traces are in") == 1
    assert "profile of rank 1" not in said


def test_a_run_stopped_while_profiling_writes_no_trace_and_says_so(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.patch.setenv(profiling.NSYS, "1")  # no profiler of this process stays on
    profiler = rank.profiler(rank.gpu(), steps=[2, 4])
    rank.run(profiler, range(1, 4))
    before = list(rank.said)
    for step in (1, 4):
        profiler.stopped(step)
    assert not capsys.readouterr().err, "before the first step, or all is written"
    profiler.stopped(3)
    assert capsys.readouterr().err == (
        "parallel3d: stopped within profile.steps: no profile of steps 2 to 4 is written\n"
    )
    assert rank.said == before and not rank.files


def test_a_resumed_run_profiles_the_remaining_steps_or_says_there_are_none(
    rank: Rank, capsys: pytest.CaptureFixture[str]
) -> None:
    rank.run(rank.profiler(steps=[2, 5], done=3), range(4, 7))
    assert rank.files == {"rank0-steps4-5.json.gz"}
    assert "goes on" not in capsys.readouterr().err
    rank.said.clear()
    rank.run(rank.profiler(steps=[2, 5], done=5), range(6, 8))
    assert capsys.readouterr().err == (
        "parallel3d: profile.steps=[2,5] are already done: this run resumes at step 6, so nothing "
        "is profiled\n"
    )
    assert not rank.said, "no rank waits for another"


def test_a_full_disk_loses_only_the_trace(rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    def full(self: object, path: str) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rank.patch.setattr(profiling.profile, "export_chrome_trace", full)
    rank.run(rank.profiler(steps=[1, 1]), range(1, 2))
    assert "rank0-steps1-1.json.gz could not be written: No space left" in capsys.readouterr().err
    assert not rank.files and rank.said == ["pause", *WAITED]


class Opened:
    """Returns ranges as a list of their names, each with its depth."""

    def __init__(self) -> None:
        self.names: list[tuple[int, str]] = []
        self.open: list[str] = []

    def push(self, name: str) -> None:
        self.names.append((len(self.open), name))
        self.open.append(name)

    def pop(self) -> None:
        self.open.pop()

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        self.push(name)
        yield
        self.pop()


@pytest.mark.parametrize("on_device", [False, True])
def test_starting_a_collective_has_a_range_on_every_device(on_device: bool) -> None:
    """On an accelerator the range is no kind of the breakdown, as it takes no time there."""
    clock, opened = StepTimer(), Opened()
    clock.times.marks_starts = not on_device
    clock.ranges = opened
    group = SimpleNamespace(name="tp", size=2, timer=clock, log=None)
    work = SimpleNamespace(wait=lambda: opened.push("the wait itself") or opened.pop())
    observed("all_reduce", torch.ones(1), group, lambda: work).wait()
    with clock.starting("pp", "send activation m0 c0"):
        assert opened.open == ["send activation m0 c0"]
    assert opened.names == [
        (0, "all_reduce tp"),
        *((0, "wait all_reduce tp"), (1, "the wait itself"), (0, "send activation m0 c0")),
    ]
    assert not opened.open


@pytest.mark.parametrize(("recompute", "again"), [("none", False), ("full", True)])
def test_layers_have_ranges_in_the_forward_and_in_recomputation(
    recompute: str, again: bool
) -> None:
    """Recomputation leaves a forward by an exception as soon as it has the needed tensors."""
    stage, ranges = middle_stage(recompute, layers=2), Opened()
    x = hidden()
    x.requires_grad_()
    with layers_shown([stage], ranges, compiled=False):
        y = stage(x, *NOTHING).sum()
        forward, ranges.names = ranges.names, []
        y.backward()
    numbers = list(stage.layers)
    parts = {n: [(1, f"layers.{n}.attention"), (1, f"layers.{n}.mlp")] for n in numbers}
    assert forward == [range_ for n in numbers for range_ in ((0, f"layers.{n}"), *parts[n])]
    repeated = [(0, name) for n in reversed(numbers) for _, name in parts[n]]
    assert ranges.names == repeated * again
    assert not ranges.open
    ranges.names.clear()
    stage(x, *NOTHING)
    assert not ranges.names, "no hook stays"


def test_without_kernels_the_table_lists_operators_and_not_our_ranges() -> None:
    with profile() as made, record_function("layers.3"):
        torch.ones(8, 8) @ torch.ones(8, 8)
    table = longest(made)
    assert "aten::mm" in table and "layers.3" not in table
