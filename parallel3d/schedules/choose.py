"""The schedule of a run: by name, from a file, or the fastest that a search finds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TypeAlias

from parallel3d.errors import UserError
from parallel3d.files import plain, read_bounded
from parallel3d.schedules.actions import ComputeSchedule, Kind
from parallel3d.schedules.draw import read_table
from parallel3d.schedules.greedy import Rule, list_schedule
from parallel3d.schedules.orders import StageAssignment, interleaved_zero_bubble
from parallel3d.schedules.schedule import LOOPED, NAMED_SCHEDULES, V_SHAPED, Schedule, make
from parallel3d.schedules.simulate import Costs, clock

WORK = 600_000  # actions that the search schedules: a few seconds
SAME = 1e-9
# Micro-batches × stages that can be searched in a few seconds.
LARGEST = 300_000
LARGEST_TABLE = 1 << 26  # bytes of `schedule.file`: about six million actions


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule with its seconds, its time over the busiest rank's compute (fraction), its idle
    share of all ranks, and its peak of live activations as a fraction of 1F1B's."""

    schedule: Schedule
    seconds: float
    overhead: float
    bubble: float
    peak_live: float
    why: str = ""


# By stage: (fraction of a rank's layers, extra forwards in its forward, extra forwards in its
# backward, for recomputation), the last two in units of a rank's forward.
Weights: TypeAlias = Sequence[tuple[float, float, float]]


@dataclass(frozen=True)
class RankWork:
    """Seconds that a rank computes per micro-batch, over all its layers.

    The layers are spread evenly over chunks, or by `weights`; None there: no such stages exist.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    hop: float = 0.0
    weights: Callable[[StageAssignment], Weights | None] | None = None

    def fits(self, placement: StageAssignment) -> bool:
        """Whether the model has costs for this stage assignment."""
        return self.weights is None or self.weights(placement) is not None

    def costs(self, placement: StageAssignment) -> Costs:
        """Returns seconds by stage. Raises ValueError if `placement` does not fit."""
        if self.weights is None:
            return Costs.even(placement, self.forward, self.input, self.weight, self.hop)
        weights = self.weights(placement)
        if weights is None:
            raise ValueError(f"no costs are known for {placement}")
        return Costs(
            tuple((part + more) * self.forward for part, more, _ in weights),
            tuple(part * self.input + again * self.forward for part, _, again in weights),
            tuple(part * self.weight for part, _, _ in weights),
            self.hop,
        )


def wanted(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    file: str | None = None,
    work: RankWork = RankWork(),
    memory: float = 1.0,
) -> Schedule:
    """Returns the schedule `name`: a named one, "auto" (`choose`) or "file" (`read_table`).

    Raises UserError for an unknown name, an impossible number of chunks, or an unreadable or
    unsound file.
    """
    if name == "file":
        return _of_file(file, ranks, microbatches, chunks)
    if file is not None:
        raise UserError(
            f"schedule.file={file} is read with schedule=file alone, but schedule={name}; the "
            "nearest is schedule=file."
        )
    if name == "auto":
        return chosen(ranks, microbatches, chunks, work, memory).schedule
    return make(name, ranks, microbatches, chunks)


@functools.lru_cache(maxsize=8)
def chosen(
    ranks: int, microbatches: int, chunks: int, work: RankWork, memory: float
) -> ScheduleChoice:
    """`choose` with its checks, cached: a run asks several times for a search of seconds."""
    check_search(ranks, microbatches, chunks, memory)
    return choose(ranks, microbatches, chunks, work, memory)


def check_search(ranks: int, microbatches: int, chunks: int, memory: float) -> None:
    """Raises UserError if schedule=auto has too much to search or too low a cap."""
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
            f"schedule.memory={_rounded_up(1 / min(ranks, microbatches)):g}."
        )


def _of_file(file: str | None, ranks: int, microbatches: int, chunks: int) -> Schedule:
    if file is None:
        raise UserError(
            "schedule=file needs schedule.file=…, a table with a row of actions a rank; the "
            "nearest is schedule=1f1b."
        )
    shown = file if file.isprintable() and " " not in file else repr(file)
    try:
        table = read_bounded(Path(file), LARGEST_TABLE).decode("utf-8-sig")  # Excel writes a BOM
    except UnicodeDecodeError:
        raise UserError(f"schedule.file={shown} cannot be read: it is not text.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or plain(str(error))
        raise UserError(f"schedule.file={shown} cannot be read: {reason}.") from None
    return read_table(table, shown, ranks, microbatches, chunks if chunks > 1 else None)


def measure(schedule: Schedule, work: RankWork) -> ScheduleChoice:
    """Times a schedule and counts its activations. Raises ScheduleError if it cannot run."""
    costs = work.costs(schedule.placement)
    placement, count = schedule.placement, schedule.microbatches
    _, ends = clock(schedule.orders, placement, costs)
    seconds = max(end[-1] for end in ends)
    busy = [0.0] * placement.ranks
    for (rank, _), *stage in zip(
        placement.places, costs.forward, costs.input, costs.weight, strict=True
    ):
        busy[rank] += sum(stage) * count
    most = min(placement.ranks, count) * placement.chunks
    return ScheduleChoice(
        schedule,
        seconds,
        seconds / max(busy) - 1,
        1 - sum(busy) / (seconds * placement.ranks),
        peak_live(schedule.orders) / most,
    )


def measured_schedules(
    ranks: int, microbatches: int, chunks: int, work: RankWork
) -> list[ScheduleChoice]:
    """Times all named schedules for which `work` has costs."""
    named = named_schedules(ranks, microbatches, chunks)
    return [measure(one, work) for one in named if work.fits(one.placement)]


def peak_live(orders: ComputeSchedule) -> int:
    """Returns the most chunk-activations that a rank holds at once, from F to the end of B or W."""
    most = 0
    for order in orders:
        live = 0
        for step in order:
            if step.kind == Kind.F:
                live += 1
                most = max(most, live)
            elif step.kind != Kind.I:
                live -= 1
    return most


def named_schedules(ranks: int, microbatches: int, chunks: int) -> list[Schedule]:
    """Makes every named schedule, with `chunks` chunks where it can have them."""
    found = []
    for name in NAMED_SCHEDULES:
        if name in V_SHAPED:
            found.append(make(name, ranks, microbatches, 2))
        elif name not in LOOPED:
            found.append(make(name, ranks, microbatches))
        elif chunks > 1:
            found.append(make(name, ranks, microbatches, chunks))
    return found


def choose(
    ranks: int,
    microbatches: int,
    chunks: int,
    work: RankWork,
    memory: float = 1.0,
    named: Sequence[ScheduleChoice] | None = None,
) -> ScheduleChoice:
    """Returns the fastest schedule that holds at most `memory` times 1F1B's peak of activations.

    Tries all named schedules (`named`: their measurements, if there are any) and greedy schedules
    of up to `chunks` chunks per rank. Ties go to the lower peak, then to fewer chunks.

    Raises UserError where the cap is below one micro-batch.
    """
    _check_memory(ranks, microbatches, memory)
    if named is None:
        named = measured_schedules(ranks, microbatches, chunks, work)
    fitting = [one for one in named if one.peak_live <= memory + SAME]
    fitting.sort(key=_merit)
    found = [measure(s, work) for s in _greedy(ranks, microbatches, chunks, work, memory)]
    found = [choice for choice in found if choice.peak_live <= memory + SAME]
    best = min([*fitting, *found], key=_merit, default=None)
    if best is None:
        raise UserError(
            f"schedule.memory={memory:g}: no schedule of pp={ranks} and num_microbatches="
            f"{microbatches} holds as little; the nearest is schedule.memory=1."
        )
    return replace(best, why=_why(best, fitting, memory))


def _rounded_up(value: float) -> float:
    return -(-value * 1000 // 1) / 1000


def _merit(choice: ScheduleChoice) -> tuple[float, float, int]:
    return round(choice.seconds, 9), choice.peak_live, choice.schedule.placement.chunks


def _why(best: ScheduleChoice, fitting: Sequence[ScheduleChoice], memory: float) -> str:
    def described(choice: ScheduleChoice) -> str:
        return f"{choice.schedule.name} ({choice.overhead:.1%})"

    others = [form for form in fitting if form.schedule != best.schedule][:2]
    placed = best.schedule.placement
    kind = (
        f"a list schedule of {placed.chunks} chunks" if best.schedule.name == "auto"
        else best.schedule.name
    )  # fmt: skip
    held = f"at most {memory:g} of 1F1B's activations"
    beaten = f"; next {' and '.join(map(described, others))}" if others else ""
    return f"{kind}: {best.overhead:.1%} over compute with {held}{beaten}"


def _greedy(
    ranks: int, microbatches: int, chunks: int, work: RankWork, memory: float
) -> Iterator[Schedule]:
    """Yields greedy schedules over interleaved orders, the most promising first, until WORK is
    done: several numbers of chunks, sizes of groups and rules."""
    left = WORK
    for wait_fraction, alternates, slope, group, count in product(
        (0.25, 0.0, 0.5), (True, False), (0.0, 0.25), _group_sizes(ranks, microbatches, memory),
        _chunk_counts(chunks),
    ):  # fmt: skip
        actions = 3 * ranks * count * microbatches
        if left < actions:
            return
        left -= actions
        placement = StageAssignment(ranks, count)
        if not work.fits(placement):
            continue
        most = int(memory * min(ranks, microbatches) * count + SAME)
        caps = tuple(max(count, int(most - slope * rank)) for rank in range(ranks))
        base = interleaved_zero_bubble(ranks, count, microbatches, group)
        rule = Rule(caps, wait_fraction, alternates)
        orders = list_schedule(base, placement, work.costs(placement), rule)
        if orders is not None:
            yield Schedule("auto", placement, microbatches, orders)


def _chunk_counts(chunks: int) -> list[int]:
    """Returns `chunks`, then a few smaller numbers."""
    return sorted({chunks, *(n for n in (4, 3, 2, 1) if n <= chunks)}, reverse=True)


def _group_sizes(ranks: int, microbatches: int, memory: float) -> list[int]:
    """Returns group sizes: `ranks`, and larger ones where memory allows, to hide slow hops."""
    sizes = [ranks, *(round(ranks * part) for part in (1.125, 1.25, 1.375) if part <= memory)]
    return sorted({min(size, microbatches) for size in sizes})
