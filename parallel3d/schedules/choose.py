"""Chooses a run's schedule by name, from a file, or by a search for the fastest one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parallel3d.errors import UserError
from parallel3d.files import plain
from parallel3d.schedules.greedy import SAME, greedy_schedules
from parallel3d.schedules.schedule import LOOPED, NAMED_SCHEDULES, V_SHAPED, Schedule, make
from parallel3d.schedules.table import read_file
from parallel3d.schedules.walk import RankWork, walk

LARGEST = 300_000  # maximum of micro-batches × stages that can be searched in a few seconds


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule and its measurements.

    Attributes:
        seconds: duration of one step.
        overhead: seconds / compute seconds of the busiest rank - 1.
        bubble: idle fraction of the time of all ranks together.
        peak_live: peak of live activations as a fraction of 1F1B's peak.
        why: the reason for the choice, as a phrase for the log.
    """

    schedule: Schedule
    seconds: float
    overhead: float
    bubble: float
    peak_live: float
    why: str = ""


def wanted(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    file: str | None = None,
    work: RankWork | None = None,
    memory: float = 1.0,
) -> Schedule:
    """Returns the schedule `name`: one of NAMED_SCHEDULES, "auto" (see `choose`) or "file".

    Args:
        file: the file of schedule "file" (see `read_file`).
        work: costs for "auto", or None if F, I and W take one second each.
        memory: cap on activations for "auto", as a fraction of 1F1B's peak.

    Raises UserError for an unknown name, a number of chunks that the schedule cannot have, or a
    file that is unreadable or unsound.
    """
    if name == "file":
        return read_file(file, ranks, microbatches, chunks if chunks > 1 else None)
    if file is not None:
        raise UserError(
            f"schedule.file={plain(file)} is only read with schedule=file, but schedule={name}; "
            "the nearest is schedule=file."
        )
    if name == "auto":
        return chosen(ranks, microbatches, chunks, work or RankWork(), memory).schedule
    return make(name, ranks, microbatches, chunks)


@functools.lru_cache(maxsize=8)
def chosen(
    ranks: int, microbatches: int, chunks: int, work: RankWork, memory: float
) -> ScheduleChoice:
    """Returns the choice of schedule=auto, or raises UserError.

    The result is cached, because a run asks for it several times and a search takes seconds.
    """
    check_search(ranks, microbatches, chunks, memory)
    return choose(ranks, microbatches, chunks, work, memory)


def check_search(ranks: int, microbatches: int, chunks: int, memory: float) -> None:
    """Raises UserError if schedule=auto has too much to search or too low a cap on activations."""
    if (cells := ranks * microbatches * max(2, chunks)) > LARGEST:
        raise UserError(
            f"schedule=auto must have at most {LARGEST:,} micro-batches × stages to search, not "
            f"{cells:,}; the nearest is schedule=interleaved_zb."
        )
    _check_memory(ranks, microbatches, memory)


def _check_memory(ranks: int, microbatches: int, memory: float) -> None:
    if memory * min(ranks, microbatches) < 1 - SAME:
        raise UserError(
            f"schedule.memory={memory:g} of 1F1B's {min(ranks, microbatches)} micro-batches is "
            "less than one, and a rank has to hold one; the nearest is "
            f"schedule.memory={-(-1000 / min(ranks, microbatches) // 1) / 1000:g}."
        )


def measure(schedule: Schedule, work: RankWork) -> ScheduleChoice:
    """Times a schedule and counts its activations. Raises ScheduleError if it cannot run."""
    assignment, count = schedule.assignment, schedule.microbatches
    costs = work.costs(assignment)
    found = walk(schedule.orders, assignment, costs, count=count).ended()
    busy = [0.0] * assignment.ranks
    for (rank, _), *stage in zip(
        assignment.places, costs.forward, costs.input, costs.weight, strict=True
    ):
        busy[rank] += sum(stage) * count
    return ScheduleChoice(
        schedule,
        found.seconds,
        found.seconds / max(busy) - 1,
        1 - sum(busy) / (found.seconds * assignment.ranks),
        max(found.peaks) / (min(assignment.ranks, count) * assignment.chunks),
    )


def measured_schedules(
    ranks: int, microbatches: int, chunks: int, work: RankWork
) -> list[ScheduleChoice]:
    """Times all named schedules for which `work` has costs.

    Schedules that take any number of chunks get `chunks`.
    """
    named = [
        make(name, ranks, microbatches, 2 if name in V_SHAPED else chunks if name in LOOPED else 1)
        for name in NAMED_SCHEDULES
        if chunks > 1 or name not in LOOPED
    ]
    return [measure(one, work) for one in named if work.fits(one.assignment)]


def choose(
    ranks: int,
    microbatches: int,
    chunks: int,
    work: RankWork,
    memory: float = 1.0,
    named: Sequence[ScheduleChoice] | None = None,
) -> ScheduleChoice:
    """Returns the fastest schedule that holds at most `memory` times 1F1B's peak of activations.

    The search covers all named schedules and greedy schedules of up to `chunks` chunks per rank.
    Ties go to the lower peak, then to fewer chunks. `named` holds measurements of the named
    schedules; if it is None, they are measured here.

    Raises UserError if the cap is below one micro-batch or no schedule fits into it.
    """
    _check_memory(ranks, microbatches, memory)
    if named is None:
        named = measured_schedules(ranks, microbatches, chunks, work)
    fitting = [one for one in named if one.peak_live <= memory + SAME]
    fitting.sort(key=_merit)
    greedy = greedy_schedules(ranks, microbatches, chunks, work, memory)
    found = [one for one in (measure(s, work) for s in greedy) if one.peak_live <= memory + SAME]
    best = min([*fitting, *found], key=_merit, default=None)
    if best is None:
        raise UserError(
            f"schedule.memory={memory:g}: no schedule of pp={ranks} and num_microbatches="
            f"{microbatches} fits into it; the nearest is schedule.memory=1."
        )
    return replace(best, why=_why(best, fitting, memory))


def _merit(choice: ScheduleChoice) -> tuple[float, float, int]:
    return round(choice.seconds, 9), choice.peak_live, choice.schedule.assignment.chunks


def _why(best: ScheduleChoice, fitting: Sequence[ScheduleChoice], memory: float) -> str:
    name, chunks = best.schedule.name, best.schedule.assignment.chunks
    kind = f"a list schedule of {chunks} chunks" if name == "auto" else name
    others = [
        f"{form.schedule.name} ({form.overhead:.1%})"
        for form in fitting
        if form.schedule != best.schedule
    ][:2]
    beaten = f"; next {' and '.join(others)}" if others else ""
    held = f"at most {memory:g} of 1F1B's activations"
    return f"{kind}: {best.overhead:.1%} over compute with {held}{beaten}"
