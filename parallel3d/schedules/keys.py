"""Keys of the pipeline schedule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from parallel3d.config.conflicts import Conflict, NoneOf, OneOf
from parallel3d.config.values import (
    FREE,
    LAYOUT,
    key,
)


@dataclass
class ScheduleConfig:
    """The pipeline schedule, `schedule=1f1b`, and the output of `parallel3d schedule`."""

    RESUME: ClassVar[str] = FREE
    ALIKE: ClassVar[bool] = True
    name: str = key(
        "1f1b",
        "pipeline schedule; auto: the fastest by simulation, file: your own table",
        choices=(
            *("gpipe", "1f1b", "interleaved", "zb_h1", "interleaved_zb", "zbv", "v_half"),
            *("auto", "file"),
        ),
        resume=LAYOUT,
    )
    file: str | None = key(
        None, "for schedule=file: CSV, one row per rank, cells such as 0F3 or 1I2", holds=Path
    )
    layers_per_stage: list[int] | None = key(
        None,
        "layers of each of the pp · vpp stages, in the order of the model, e.g. [3,5]; null "
        "balances them by cost",
        tried=([3, 1],),
    )
    slices: bool | None = key(
        None,
        "with tp > 1 and no sp: each tensor-parallel rank sends its part of the sequence to the "
        "next stage, whose ranks gather the parts; null: on accelerators",
    )
    num_microbatches: int | None = key(
        None,
        "parallel3d schedule: micro-batches of a step (short form: num_microbatches); null: as "
        "many as global_batch_size makes",
        minimum=1,
    )
    costs: list[float] = key(
        [1.0, 1.0, 1.0],
        "for auto and parallel3d schedule: time of a micro-batch in all layers of one rank: "
        "forward, gradient of the input, gradient of the weights",
    )
    hop: float = key(
        0.0, "for auto and parallel3d schedule: time of a message, in the unit of costs", minimum=0
    )
    of_model: bool = key(
        False,
        "parallel3d schedule: take the stages' costs from `model`, as auto always does in "
        "training: their layers, and the head with its loss; schedule.costs is then the time of "
        "an average rank's layers",
    )
    memory: float | None = key(
        None,
        "activations that auto may hold, as a share of 1F1B's peak; null: 1, and the table of "
        "parallel3d schedule shows the gain from more",
        above=0,
    )
    timeline: bool = key(
        False,
        "draw the actions of all pipeline ranks in the third step of a start, measured and "
        "simulated, as timeline.svg and, for Perfetto, timeline.json in the run directory",
    )
    svg: str | None = key(None, "parallel3d schedule: file for the timeline as SVG", holds=Path)
    csv: str | None = key(
        None, "parallel3d schedule: file for the schedule as a table of actions", holds=Path
    )
    json: str | None = key(
        None, "parallel3d schedule: file for the table of all schedules as JSON", holds=Path
    )


CONFLICTS = tuple(
    Conflict(
        {"schedule.name": OneOf("auto"), "zero": OneOf(2, 3), replicas: NoneOf(1)},
        "{zero} reduces gradients within whole backwards, and the schedules that {schedule.name} "
        "chooses from split them",
        (("zero", 1), ("schedule.name", "1f1b")),
    )
    for replicas in ("dp", "cp")
)
