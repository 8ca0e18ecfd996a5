"""Draws and traces a measured pipeline step (`schedule.timeline=true`)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from parallel3d.build import Trainer
from parallel3d.comm.exchange import all_gather_json
from parallel3d.errors import print_line
from parallel3d.files import replace_durably
from parallel3d.loop.rank_run import RankRun
from parallel3d.loop.step_hooks import StepHook
from parallel3d.pipeline.executor import ActionTimes, TimedAction
from parallel3d.schedules.actions import Action, Kind
from parallel3d.schedules.draw import TimelinePicture
from parallel3d.schedules.schedule import Schedule
from parallel3d.schedules.walk import Costs, Span, Timeline, time_orders
from parallel3d.svg import Canvas
from parallel3d.trainer import StepResult

LATER = 2  # steps before the drawn one; the first steps also allocate memory and compile
EVENTS, PICTURE = "timeline.json", "timeline.svg"


@dataclass
class StepTimeline(StepHook):
    """Times the actions of one step and draws the pipeline of rank 0.

    Rank 0 writes `timeline.svg`, which shows the measured step above a simulation with the measured
    costs, and `timeline.json` for Perfetto (ui.perfetto.dev) and chrome://tracing.
    """

    run: RankRun

    def __post_init__(self) -> None:
        is_on = self.run.trainer.config.schedule.timeline
        self._step = min(self.run.first + LATER, self.run.last) if is_on else None
        self._times = ActionTimes(self.run.trainer.device)

    def before_step(self, step: int) -> None:
        """Lets the executor time its actions if this step is to be drawn."""
        if step == self._step:
            self.run.trainer.executor.action_times = self._times

    def after_step(self, result: StepResult, seconds: float) -> None:
        """Draws the step that was timed; collective over a pipeline."""
        if result.step == self._step:
            self.run.trainer.executor.action_times = None
            draw_step(
                self.run.trainer, self._times.measured(), result.step, self.run.worker.run_dir
            )


def draw_step(trainer: Trainer, spans: Sequence[TimedAction], step: int, run_dir: Path) -> None:
    """Draws a step of rank 0's pipeline; `spans`: this rank's times; collective over a pipeline."""
    groups = trainer.groups
    by_rank: list[Any] = [spans]
    if groups.pp.size > 1:
        by_rank = all_gather_json(spans, groups.pp.handle, trainer.device)
    if groups.rank != 0:
        return
    measured = timeline_of(by_rank)
    simulated = simulated_timeline(measured, trainer.schedule)
    title = f"{trainer.config.schedule.name}, step {step}"
    _write(run_dir / PICTURE, pictures(measured, simulated, title))
    _write(run_dir / EVENTS, json.dumps(trace_events(measured), indent=1) + "\n")
    if groups.pp.size > 1:
        hop = trainer.step_timer.baseline_latency.get("pp", 0.0)
        layers = [stage.layers for stage in trainer.blueprint.stages]
        recomputed = trainer.blueprint.recompute_forwards()
        costs = measured_costs(measured, trainer.schedule, layers, recomputed)
        print_line(f"measured costs in ms, for schedule=auto: {keys_of(costs, hop)}")


def _write(path: Path, text: str) -> None:
    try:
        replace_durably(path, text.encode())
    except OSError as error:  # the run continues without this file
        print_line(f"{path} could not be written: {error.strerror}")


def timeline_of(by_rank: Sequence[Sequence[TimedAction]]) -> Timeline:
    """Returns the spans of all ranks, with times relative to the earliest start of a span."""
    begin = min(start for spans in by_rank for _, start, _ in spans)
    return Timeline(
        tuple(
            tuple(Span(Action.parse(text), a - begin, b - begin) for text, a, b in spans)
            for spans in by_rank
        )
    )


def seconds_by_stage(
    measured: Timeline, schedule: Schedule
) -> Mapping[tuple[Kind, int], list[float]]:
    """Returns (kind of action, stage) → seconds of each such action."""
    seconds = defaultdict(list)
    for rank, spans in enumerate(measured.spans):
        for span in spans:
            stage = schedule.assignment.stage(rank, span.action.chunk)
            seconds[span.action.kind, stage].append(span.end - span.start)
    return seconds


def simulated_timeline(measured: Timeline, schedule: Schedule) -> Timeline:
    """Simulates the schedule with the median time of each kind of action in each stage."""
    assignment, seconds = schedule.assignment, seconds_by_stage(measured, schedule)

    def cost(kind: Kind, stage: int) -> float:
        if (kind, stage) in seconds:
            return max(median(seconds[kind, stage]), 1e-9)
        return cost(Kind.B, stage) / 2  # I and W are each half of an unsplit backward

    stages = range(assignment.stages)
    forward, input, weight = (
        tuple(cost(kind, stage) for stage in stages) for kind in (Kind.F, Kind.I, Kind.W)
    )
    return time_orders(schedule.orders, assignment, Costs(forward, input, weight))


def measured_costs(
    measured: Timeline, schedule: Schedule, layers: Sequence[range], recomputed: Sequence[float]
) -> tuple[float, float, float]:
    """Returns the seconds that F, I and W of a micro-batch take in an average rank's layers.

    The last stage is left out, because `schedule=auto` computes the head's cost from its size. An
    unsplit backward counts as one half I and one half W.

    Args:
        layers: the layers of each stage.
        recomputed: for each stage, the share of its layers' forward that its backward repeats. The
            time of these repetitions is subtracted.
    """
    each = [
        (kind, stage, one / len(layers[stage]))
        for (kind, stage), all in seconds_by_stage(measured, schedule).items()
        for one in all
        if stage < schedule.assignment.stages - 1
    ]
    forward = median(seconds for kind, _, seconds in each if kind == Kind.F)
    gradient, weight = [], []
    for kind, stage, seconds in each:
        new = seconds - recomputed[stage] * forward
        if kind == Kind.B:
            gradient.append(new / 2)
            weight.append(new / 2)
        elif kind == Kind.I:
            gradient.append(new)
        elif kind == Kind.W:
            weight.append(seconds)
    of_rank = sum(map(len, layers)) / schedule.assignment.ranks
    return of_rank * forward, of_rank * median(gradient), of_rank * median(weight)


def keys_of(costs: Sequence[float], hop: float) -> str:
    """Returns the costs as command-line overrides, in ms."""
    values = ",".join(f"{1e3 * seconds:.3g}" for seconds in costs)
    return f"schedule.costs=[{values}] schedule.hop={1e3 * hop:.3g}"


def pictures(measured: Timeline, simulated: Timeline, title: str) -> str:
    """Draws the simulated timeline below the measured one, on the same scale."""
    canvas, until = Canvas(), max(measured.makespan, simulated.makespan)
    TimelinePicture(canvas, measured, 1200, until, " s").draw(f"{title}, measured")
    below = "the same costs, simulated without hops"
    TimelinePicture(canvas, simulated, 1200, until, " s").draw(below)
    return canvas.svg(title)


def trace_events(timeline: Timeline) -> dict[str, list[dict[str, Any]]]:
    """Returns a trace in the Trace Event Format, with a process for each rank of the pipeline."""
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(timeline.spans):
        name = {"name": f"pipeline rank {rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": name})
        events += [
            {
                "ph": "X",
                "name": str(span.action),
                "cat": str(span.action.kind),
                "pid": rank,
                "tid": span.action.chunk,
                "ts": 1e6 * span.start,
                "dur": 1e6 * (span.end - span.start),
            }
            for span in spans
        ]
    return {"traceEvents": events}
