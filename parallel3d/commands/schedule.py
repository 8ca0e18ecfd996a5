"""Draws a pipeline schedule and compares all schedules (`parallel3d schedule`), without torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from parallel3d.config.fields import check_fields
from parallel3d.config.user_files import check_free, write
from parallel3d.config.values import Replicas
from parallel3d.errors import UserError
from parallel3d.loop.checks import check_batch
from parallel3d.resolve import stage_weights
from parallel3d.run_config import Config
from parallel3d.schedules.check import check
from parallel3d.schedules.checks import check_work
from parallel3d.schedules.choose import (
    LARGEST,
    ScheduleChoice,
    choose,
    measure,
    measured_schedules,
    wanted,
)
from parallel3d.schedules.draw import render_svg, render_text
from parallel3d.schedules.keys import ScheduleConfig
from parallel3d.schedules.messages import peak_unread
from parallel3d.schedules.schedule import ONE_CHUNK
from parallel3d.schedules.table import write_table
from parallel3d.schedules.walk import RankWork, Timeline, Walk, time_orders
from parallel3d.text import aligned

MADE_BY = "parallel3d schedule"
# If schedule.memory is not given, further rows have these memory limits, relative to 1F1B's peak.
MORE_MEMORY = (1.25, 1.5)


@dataclass(frozen=True)
class ScheduleView:
    """The schedule to draw, and the rows of the table.

    Attributes:
        choice: the schedule to draw, with its time, bubble and memory.
        report: the result of checking it.
        timeline: the times of its actions.
        unread: maximum number of unread messages from one rank to another.
        rows: the schedules in the table.
    """

    choice: ScheduleChoice
    report: Walk
    timeline: Timeline
    unread: int
    rows: list[ScheduleChoice]


def schedule(config: Config, _typed: Sequence[str] = ()) -> int:
    """Prints the timeline and the table, and writes the requested files. Returns the exit code, 0.

    Raises UserError for an impossible configuration, and for a file that must not be overwritten.
    """
    check_fields(config)
    keys = config.schedule
    check_free("schedule.svg", keys.svg, "data-by='parallel3d schedule'", MADE_BY)
    check_free("schedule.json", keys.json, f'"made_by": "{MADE_BY}"', MADE_BY)
    check_free("schedule.csv", keys.csv, None, MADE_BY)
    found = find(config)
    if keys.json:
        table = facts(keys, found, config.pp, config.vpp)
        write("schedule.json", keys.json, json.dumps(table, indent=1) + "\n")
    if keys.csv:
        write("schedule.csv", keys.csv, write_table(found.choice.schedule))
    if keys.svg:
        write("schedule.svg", keys.svg, picture(keys, found))
    print(text(keys, found), flush=True)
    return 0


def find(config: Config) -> ScheduleView:
    """Makes, checks and times the requested schedule, and measures all others for the table.

    Raises UserError for an impossible configuration.
    """
    check_work(config.schedule.costs)
    keys, ranks, chunks = config.schedule, config.pp, config.vpp
    count = keys.num_microbatches
    if count is None:
        check_batch(config.global_batch_size, Replicas(config.micro_batch_size, config.dp or 1))
        count = config.global_batch_size // (config.micro_batch_size * (config.dp or 1))
    if ranks * chunks * count > LARGEST:
        raise UserError(
            f"pp={ranks}, vpp={chunks} and num_microbatches={count} make {ranks * chunks * count:,}"
            f" boxes, which are too many to draw; the nearest is num_microbatches="
            f"{max(1, LARGEST // (ranks * chunks))}."
        )
    weights = stage_weights(config, balances=True) if keys.of_model else None
    forward, input, weight = keys.costs
    work = RankWork(forward, input, weight, keys.hop, weights)
    given = None
    if keys.name != "auto":  # a one-chunk schedule ignores vpp
        given = wanted(keys.name, ranks, count, 1 if keys.name in ONE_CHUNK else chunks, keys.file)
        if not work.fits(given.assignment):
            stages, layers = given.assignment.stages, config.model.num_layers
            raise UserError(
                f"schedule.of_model=true: {stages} stages must be at most model.num_layers="
                f"{layers}, as no stage may be empty; the nearest is schedule.of_model=false, or "
                f"model.num_layers={stages}."
            )
    named = measured_schedules(ranks, count, chunks, work)
    best = choose(ranks, count, chunks, work, keys.memory or 1.0, named)
    rows = [*named, best]
    for more in MORE_MEMORY if keys.memory is None else ():
        faster = choose(ranks, count, chunks, work, more, named)
        if faster.seconds < rows[-1].seconds:
            rows.append(faster)
    choice = best if given is None else measure(given, work)
    if keys.name == "file":
        rows.append(choice)
    made = choice.schedule
    program = made.program()
    report = check(program, count, made.assignment)
    unread = peak_unread(program, made.assignment)
    timeline = time_orders(made.orders, made.assignment, work.costs(made.assignment))
    return ScheduleView(choice, report, timeline, max(unread.values(), default=0), rows)


def text(keys: ScheduleConfig, found: ScheduleView) -> str:
    """Returns the report for the terminal: the timeline, the checks and the table."""
    choice, report = found.choice, found.report
    placed = choice.schedule.assignment
    width = shutil.get_terminal_size((120, 40)).columns
    peaks = [f"{peak / placed.chunks:.4g}" for peak in report.peaks]
    live = " ".join(peaks if len(peaks) <= 16 else [*peaks[:8], "…", *peaks[-8:]])
    lines = [
        heading(keys, found),
        "",
        render_text(found.timeline, width),
        "",
        f"Sound: complete, ordered, paired, free of deadlock; {report.messages} messages, of "
        f"which at most {found.unread} from one rank to another are unread at a time.",
        f"Live activations, in micro-batches of a whole rank: {live} "
        f"(at most {choice.peak_live:.0%} of 1F1B's).",
        *([choice.why[0].upper() + choice.why[1:] + "."] if choice.why else []),
        "",
        *_table(found),
    ]
    return "\n".join(lines)


def heading(keys: ScheduleConfig, found: ScheduleView) -> str:
    """Formats the name, the sizes and the costs of the schedule in one line."""
    made = found.choice.schedule
    placed = made.assignment
    shape = "as a V" if placed.shape == "v" else "in loops"
    chunks = f", {placed.chunks} chunks {shape}" if placed.chunks > 1 else ""
    name = keys.name if made.name == keys.name else f"{keys.name}: {made.name}"
    return (
        f"{name}, {placed.ranks} ranks{chunks}, {made.microbatches} micro-batches, "
        f"F:I:W = {':'.join(f'{c:g}' for c in keys.costs)}"
        f"{' and the head' if keys.of_model else ''}, hop {keys.hop:g}"
    )


def _table(found: ScheduleView) -> list[str]:
    rows = [("schedule", "chunks", "time", "overhead", "bubble", "activations", "")]
    for row in found.rows:
        mark = "←" if row.schedule == found.choice.schedule else ""
        shares = f"{row.overhead:.1%}", f"{row.bubble:.1%}", f"{row.peak_live:.0%}"
        chunks = f"{row.schedule.assignment.chunks}"
        rows.append((row_name(row), chunks, f"{row.seconds:.5g}", *shares, mark))
    said = "overhead: relative to the busiest rank's compute; activations: share of 1F1B's peak"
    return [*aligned(rows, "<>>>>><"), said]


def row_name(row: ScheduleChoice) -> str:
    """Returns the name of a row, which for auto also names the schedule that auto chose."""
    if not row.why:
        return row.schedule.name
    return "auto" if row.schedule.name == "auto" else f"auto: {row.schedule.name}"


def facts(keys: ScheduleConfig, found: ScheduleView, pp: int, vpp: int) -> dict[str, Any]:
    """Returns the table as plain data for JSON, with an entry of `schedules` for each row."""
    return {
        "made_by": MADE_BY,
        "pp": pp,
        "vpp": vpp,
        "num_microbatches": found.choice.schedule.microbatches,
        "costs": list(keys.costs),
        "hop": keys.hop,
        "of_model": keys.of_model,
        "schedules": [
            {
                "name": "auto" if row.why else row.schedule.name,
                "overhead": row.overhead,
                "bubble": row.bubble,
                "peak_live": row.peak_live,
                "time": row.seconds,
                "vpp": row.schedule.assignment.chunks,
                "placement": row.schedule.assignment.shape,
                **({"chosen": row.schedule.name, "why": row.why} if row.why else {}),
            }
            for row in found.rows
        ],
    }


def picture(keys: ScheduleConfig, found: ScheduleView) -> str:
    """Draws the timeline as an SVG document."""
    placed = found.choice.schedule.assignment
    return render_svg(
        found.timeline, heading(keys, found), assignment=placed, hop=keys.hop, unit=""
    )
