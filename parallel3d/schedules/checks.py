"""Checks the keys of the pipeline schedule and its stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from parallel3d.config.fields import (
    show,
)
from parallel3d.config.values import (
    Replicas,
)
from parallel3d.errors import UserError
from parallel3d.schedules.choose import check_search, wanted
from parallel3d.schedules.keys import ScheduleConfig
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import NAMED_SCHEDULES, check_vpp, make

MOST_STAGES = 256  # for more stages no even split is proposed, because it would fill the screen


class LayerCounts(NamedTuple):
    """The keys of a run that count layers.

    Attributes:
        num_layers: `model.num_layers`.
        layers_per_stage: number of layers of each stage, or None if they are balanced by cost.
        recompute_layers: number of layers that each stage recomputes, or None.
        offload_layers: number of layers that each stage offloads, or None.
    """

    num_layers: int
    layers_per_stage: list[int] | None
    recompute_layers: list[int] | None
    offload_layers: list[int] | None


def check_schedule(
    keys: ScheduleConfig, layers: LayerCounts, *, pp: int, vpp: int, count: int
) -> None:
    """Raises UserError unless the schedule's keys fit each other, the model and the pipeline.

    `count` is the number of micro-batches of a step.
    """
    check_work(keys.costs)
    if keys.name == "auto":  # `PipelineSettings.schedule` later searches with the model
        check_search(pp, count, vpp, 1.0 if keys.memory is None else keys.memory)
        _check_layers(layers, 1)  # the number of stages is not known yet
        given = len(keys.layers_per_stage or ()) // pp
        _check_stages(layers, StageAssignment(pp, given if given in (1, 2, vpp) else 1))
    elif keys.name in NAMED_SCHEDULES and keys.file is None:
        check_vpp(keys.name, vpp)
        _check_stages(layers, StageAssignment(pp, vpp))
    else:
        _check_stages(layers, wanted(keys.name, pp, count, vpp, keys.file).assignment)


def check_work(costs: list[float]) -> None:
    """Raises UserError unless `schedule.costs` consists of three positive numbers."""
    if len(costs) != 3 or not all(0 < cost < float("inf") for cost in costs):
        raise UserError(
            f"schedule.costs={show(costs)} must be three positive numbers: forward, gradient of "
            "the input, gradient of the weights; the default is schedule.costs=[1.0,1.0,1.0]."
        )


def _check_layers(layers: LayerCounts, stages: int) -> None:
    """Raises UserError unless `recompute_layers` and `offload_layers` fit the stages."""
    for key in ("recompute_layers", "offload_layers"):
        if (given := getattr(layers, key)) is not None:
            _check_counts(key, given, layers.num_layers, stages)


def _check_counts(key: str, given: list[int], layers: int, stages: int) -> None:
    name = f"{key}={show(given)}"
    if not given or min(given) < 0 or max(given) > layers:
        near = [min(max(0, count), layers) for count in given] or [layers]
        raise UserError(
            f"{name} must be numbers of layers, from 0 to model.num_layers={layers}; the nearest "
            f"is {key}={show(near)}."
        )
    if len(given) not in (1, stages):
        each = f" for all stages or {stages}, one a stage" if stages > 1 else ""
        raise UserError(f"{name} must have 1 entry{each}; the nearest is {key}={show(given[:1])}.")


def _check_stages(counts: LayerCounts, assignment: StageAssignment) -> None:
    layers, given = counts.num_layers, counts.layers_per_stage
    pp, stages, chunks = assignment.ranks, assignment.stages, assignment.chunks
    _check_layers(counts, stages)
    times = f"pp={pp}" if chunks == 1 else f"pp={pp} times {chunks} chunks of a rank (vpp)"
    if stages > layers:
        near = f"pp={max(1, layers // chunks)}"
        if pp <= layers < stages:
            near += f", or vpp={layers // pp}"
        raise UserError(
            f"{times} must be at most model.num_layers={layers}, as no stage may be empty; the "
            f"nearest is {near}."
        )
    if given is None:
        return
    name = "schedule.layers_per_stage"
    if len(given) != stages:
        wrong = f"has {len(given)} entries for {times} stages"
    elif min(given) < 1:
        wrong = "has a stage with no layer, and each needs at least 1"
    elif sum(given) != layers:
        wrong = f"adds up to {sum(given)} layers, but model.num_layers={layers}"
    else:
        return
    shown = range(min(stages, MOST_STAGES))
    even = [layers // stages + (stage < layers % stages) for stage in shown]
    advice = f"an even split is {name}={show(even)}" if stages == len(even) else f"give {name}=null"
    raise UserError(f"{name}={show(given)} {wrong}; {advice}.")


def check_schedule_of_batches(
    given: Mapping[Any, int], schedule: str, pp: int, vpp: int, replica: Replicas
) -> None:
    """Raises UserError unless the pipeline's schedule works with each of these global batches.

    The values of `given` are the sizes of the global batches of `train.batch_schedule`.
    """
    if schedule not in NAMED_SCHEDULES:
        raise UserError(
            f"train.batch_schedule={show(given)} changes the number of micro-batches, and "
            f"schedule={schedule} is made for one number; the nearest is schedule=1f1b."
        )
    for size in given.values():
        make(schedule, pp, size // replica.multiple, vpp)


def check_no_count(count: int | None, replica: Replicas) -> None:
    """Raises UserError if `schedule.num_microbatches` is given.

    Only `parallel3d schedule` reads this key.
    """
    if count is not None:
        raise UserError(
            f"schedule.num_microbatches={count} must be null except in `parallel3d schedule`: "
            f"here global_batch_size={count * replica.multiple} makes as many."
        )
