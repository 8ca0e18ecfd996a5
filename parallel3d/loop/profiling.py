"""Profiles the steps in `profile.steps`, with `torch.profiler` or under Nsight Systems."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from parallel3d.build import Trainer
from parallel3d.device import accelerator
from parallel3d.device.accelerator import Ranges
from parallel3d.errors import print_line
from parallel3d.loop.step_hooks import StepHook
from parallel3d.models.architecture import StageModule
from parallel3d.private_names import memory_history
from parallel3d.run.launch import Worker
from parallel3d.trainer import StepResult

FOLDER = "profile"
ROWS, WIDTH = 10, 60  # rows of the printed table, and the width of its column of names
MOST_ENTRIES = 100_000  # the allocator's history keeps this many of its newest entries
NSYS = "NSYS_PROFILING_SESSION_ID"  # set by Nsight Systems in profiled processes
SILENT = "99"  # a level above errors, because Kineto logs every start and stop as an error
LAYER = re.compile(r"embedding|head|layers\.\d+(\.attention|\.mlp)?")


class StepProfiler(StepHook):
    """Profiles the steps in `profile.steps` on the ranks in `profile.ranks`.

    Other ranks wait until the profiles are written. Because nsys and `torch.profiler` cannot both
    trace a GPU, a process under nsys only marks ranges and the start and end of the profiled steps
    (`--capture-range=cudaProfilerApi`).

    Attributes:
        steps: the steps of `profile.steps` that were not done before the run was resumed.
    """

    def __init__(self, trainer: Trainer, worker: Worker) -> None:
        keys, next_step = trainer.config.profile, trainer.steps_done + 1
        first, last = keys.steps or (1, 0)
        self.trainer = trainer
        self.worker = worker
        self.wants_memory = keys.memory
        self.steps = range(max(first, next_step), last + 1)
        ranks = range(worker.world_size) if keys.ranks == "all" else keys.ranks
        self.is_profiled = worker.rank in ranks
        self.reports = worker.rank == min(ranks)
        self.ranges: Ranges | None = None
        self._profile: profile | None = None
        self._layers = ExitStack()
        device = trainer.device
        self._api: Any = accelerator.module(device) if accelerator.is_accelerator(device) else None
        self._history = memory_history(self._api) if keys.memory else None
        if keys.steps and not self.steps and worker.rank == 0:
            print_line(
                f"profile.steps=[{first},{last}] are already done: this run resumes at step "
                f"{next_step}, so nothing is profiled"
            )

    def before_step(self, step: int) -> None:
        """Starts the profiler before the first profiled step, and marks each profiled step."""
        if not (self.is_profiled and step in self.steps):
            return
        if self.ranges is None:
            self.ranges = self._start()
        self.ranges.push(f"ProfilerStep#{step}")  # the name that analysers of traces look for

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Writes the profile after the last profiled step; collective after that step."""
        step = result.step
        if step not in self.steps:
            return
        if self.ranges is not None:
            self.ranges.pop()
        if step < self.steps[-1]:
            return
        self.worker.phase = f"writing the profile of {self._steps_text()}"
        watchdog = self.worker.watchdog
        assert watchdog is not None
        watchdog.pause()  # writing hundreds of MB takes long, and the other ranks wait
        if self.ranges is not None:
            self._stop()
        dist.barrier()
        watchdog.resume()

    def stopped(self, step: int) -> None:
        """Logs that no profile is written if a signal ended the run within the profiled steps."""
        if step in self.steps[:-1] and self.reports:
            steps = self._steps_text()
            print_line(f"stopped within profile.steps: no profile of {steps} is written")

    def _start(self) -> Ranges:
        trainer, device = self.trainer, self.trainer.device
        accelerator.synchronize(device)  # otherwise kernels of the previous step would be profiled
        if self._history is not None:
            record, _ = self._history
            record(stacks="python", max_entries=MOST_ENTRIES)
        if NSYS in os.environ and hasattr(self._api, "profiler"):
            self._api.profiler.start()
        else:
            if self._api is None:  # on a GPU, the profiler's errors matter and are printed
                os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
            names = ("CPU", device.type.upper())
            kinds = [kind for kind in supported_activities() if kind.name in names]
            # Without acc_events, torch 2.11 warns that events are lost between cycles, although
            # there is only one cycle.
            self._profile = profile(activities=kinds, acc_events=True)
            self._profile.start()
        ranges = trainer.step_timer.ranges = Ranges(device)
        self._layers.enter_context(layers_shown(trainer.stages, ranges, trainer.config.compile))
        return ranges

    def _stop(self) -> None:
        self._layers.close()
        self.trainer.step_timer.ranges = None
        accelerator.synchronize(self.trainer.device)  # kernels of the last step may still run
        if self._profile is None:
            self._api.profiler.stop()
        else:
            self._profile.stop()
        folder = self.worker.run_dir / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        name = f"rank{self.worker.rank}-steps{self.steps[0]}-{self.steps[-1]}"
        if self._profile is not None:
            _write(folder / f"{name}.json.gz", self._profile.export_chrome_trace)
        if self._history is not None:
            record, dump = self._history
            _write(folder / f"{name}-memory.pickle", dump)
            record(enabled=None)
        elif self.wants_memory and self.reports:
            print_line("profile.memory=true: no snapshot is written, because that needs a GPU")
        if self.reports and self._profile is not None:
            title = f"profile of rank {self.worker.rank}, {self._steps_text()}"
            print_line(f"{title}; traces are in {folder}/\n{longest(self._profile)}")

    def _steps_text(self) -> str:
        first, last = self.steps[0], self.steps[-1]
        return f"step {first}" if first == last else f"steps {first} to {last}"


def _write(path: Path, write: Callable[[str], object]) -> None:
    """Calls `write` to write the file at `path` atomically; an error is logged, not raised."""
    partial = path.with_name(f".{path.name}")  # the suffix .gz makes torch compress the file
    try:
        write(str(partial))
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:
        print_line(f"{path} could not be written: {getattr(error, 'strerror', None) or error}")
        partial.unlink(missing_ok=True)


@contextmanager
def layers_shown(stages: Sequence[StageModule], ranges: Ranges, compiled: bool) -> Iterator[None]:
    """Marks the forwards of layers in a `with` block by ranges such as "layers.3.attention".

    If the layers are `compiled`, each graph of layers gets one range, because a graph does not call
    the hooks of its modules. Recomputed forwards appear inside the backward that needs them.
    """
    with ExitStack() as undo:
        for stage in stages:
            for name, module in stage.named_modules():
                if LAYER.fullmatch(name) and not (compiled and name.startswith("layers")):
                    for handle in _hooks(module, name, ranges):
                        undo.callback(handle.remove)
            if compiled:
                undo.enter_context(stage.graphs_within(ranges.within))
        yield


def _hooks(module: nn.Module, name: str, ranges: Ranges) -> Iterator[Any]:
    # Recomputation exits forwards with an exception, so `end` needs `always_call`.
    def begin(module: nn.Module, args: Any) -> None:
        ranges.push(name)

    def end(module: nn.Module, args: Any, result: Any) -> None:
        ranges.pop()

    yield module.register_forward_pre_hook(begin)
    yield module.register_forward_hook(end, always_call=True)


def longest(profile: profile) -> str:
    """Returns PyTorch's table of the slowest kernels, or of the slowest operators on a CPU."""
    events = profile.key_averages()
    operators = [event for event in events if not event.is_user_annotation]
    kernels = [event for event in operators if event.device_type != DeviceType.CPU]
    events[:] = kernels or operators
    key = "self_device_time_total" if kernels else "self_cpu_time_total"
    return events.table(sort_by=key, row_limit=ROWS, max_name_column_width=WIDTH)
