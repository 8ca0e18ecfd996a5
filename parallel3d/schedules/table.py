"""Schedules as text: a row a rank, a cell an action, to be written, read and changed by hand.

A cell is the number of the stage, the kind and the number of the micro-batch, as in
torch.distributed.pipelining: `0F3`, `1I2`, `0W5`, `2B1`. Stages count through the model, so the
table says where each one lies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from parallel3d.errors import UserError
from parallel3d.schedules.actions import Action, ComputeSchedule, Kind, action
from parallel3d.schedules.check import check
from parallel3d.schedules.messages import add_communication
from parallel3d.schedules.placement import SHAPES, StageAssignment
from parallel3d.schedules.schedule import Schedule
from parallel3d.schedules.simulate import ScheduleError

_CELL = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
Cell = tuple[int, Kind, int]


def write_table(schedule: Schedule) -> str:
    """The orders as CSV: a line a rank, a cell an action."""
    lines = []
    for rank, order in enumerate(schedule.orders):
        stages = [schedule.placement.stage(rank, c) for c in range(schedule.placement.chunks)]
        lines.append(",".join(f"{stages[s.chunk]}{s.kind}{s.microbatch}" for s in order))
    return "\n".join(lines) + "\n"


def read_table(
    text: str, name: str, ranks: int, microbatches: int, chunks: int | None = None
) -> Schedule:
    """The schedule of a table, proven sound. Empty cells and lines count for nothing.

    Args:
        text: a line for each rank, in order; cells as `write_table` writes them.
        name: of the file, for messages.
        microbatches: how many there must be.
        chunks: stages per rank that there must be; None: as many as the table has.

    Raises:
        UserError: a wrong word, another number of ranks, chunks or micro-batches, stages that lie
            neither in loops nor as a V, or whatever the checker finds, by rank and action.
    """
    key = f"schedule.file={name}"
    rows = [_cells(line, key, number) for number, line in enumerate(text.splitlines(), 1)]
    rows = [row for row in rows if row]
    if len(rows) != ranks:
        raise UserError(f"{key} has {len(rows)} rows of actions, one a rank, but pp={ranks}.")
    placement = _placement(rows, key)
    if chunks is not None and placement.chunks != chunks:
        raise UserError(
            f"{key} has {placement.chunks} stages per rank, but vpp={chunks}; the nearest is "
            f"vpp={placement.chunks}."
        )
    orders = [
        [action(kind, m, placement.place(stage)[1]) for stage, kind, m in row] for row in rows
    ]
    check_orders(orders, placement, microbatches, key)
    return Schedule("file", placement, microbatches, orders)


def check_orders(
    orders: ComputeSchedule, placement: StageAssignment, microbatches: int, key: str
) -> None:
    """Prove orders without messages sound; raises UserError with the place and the reason."""
    try:
        for rank, order in enumerate(orders):
            check_rank(rank, order, placement, microbatches)
        check(add_communication(orders, placement), microbatches, placement)
    except ScheduleError as error:
        raise UserError(f"{key} cannot run: {_in_stages(str(error), placement)}.") from None


def check_rank(
    rank: int, order: Sequence[Action], placement: StageAssignment, microbatches: int
) -> None:
    """One rank's actions are complete, none of them doubled, and those of a micro-batch in order.

    Raises ScheduleError.
    """
    single = StageAssignment(1, 1)
    for chunk in range(placement.chunks):
        mine = [Action(s.kind, s.microbatch) for s in order if s.chunk == chunk]
        try:
            check([mine], microbatches, single)
        except ScheduleError as error:
            words = re.sub(r"\b([FBIW]\d+)\b", rf"\1.{chunk}", str(error))
            raise ScheduleError(words.replace("rank 0 ", f"rank {rank} ", 1)) from None


def _in_stages(sentence: str, placement: StageAssignment) -> str:
    """The checker's actions, `F3.1` of the rank named before, as the table spells them."""
    rank = 0

    def spelled(found: re.Match[str]) -> str:
        nonlocal rank
        if found[1] is not None:
            rank = int(found[1])
            return found[0]
        return f"{placement.stage(rank, int(found[4] or 0))}{found[2]}{found[3]}"

    return re.sub(r"\brank (\d+)|\b([FBIW])(\d+)(?:\.(\d+))?\b", spelled, sentence)


def _cells(line: str, key: str, number: int) -> list[Cell]:
    cells = []
    for word in line.split(","):
        word = word.strip()
        if not word:
            continue
        match = _CELL.fullmatch(word)
        if match is None or len(word) > 30:
            raise UserError(
                f"{key}, line {number}: {word[:40]!r} is no action; they are a stage, one of F, B, "
                "I and W, and a micro-batch, as in 0F3."
            )
        cells.append((int(match[1]), Kind(match[2]), int(match[3])))
    return cells


def _placement(rows: Sequence[Sequence[Cell]], key: str) -> StageAssignment:
    """Loops or a V, whichever has every stage on the rank where the table has it."""
    held = [{stage for stage, _, _ in row} for row in rows]
    chunks = max(1, len(held[0]))
    for shape in SHAPES:
        placement = StageAssignment(len(rows), chunks, shape)
        wanted = [
            {placement.stage(rank, chunk) for chunk in range(chunks)} for rank in range(len(rows))
        ]
        if wanted == held:
            return placement
    best = min(
        (StageAssignment(len(rows), chunks, shape) for shape in SHAPES),
        key=lambda p: sum(len(held[r] ^ _stages(p, r)) for r in range(len(rows))),
    )
    rank = next(r for r in range(len(rows)) if held[r] != _stages(best, r))
    raise UserError(
        f"{key}: rank {rank} has the stages {_listed(held[rank])}, but "
        f"{_listed(_stages(best, rank))} lie there with {chunks} per rank, "
        f"{'as a V' if best.shape == 'v' else 'one rank after the other'}."
    )


def _stages(placement: StageAssignment, rank: int) -> set[int]:
    return {placement.stage(rank, chunk) for chunk in range(placement.chunks)}


def _listed(stages: set[int]) -> str:
    ordered = sorted(stages)
    shown = ", ".join(map(str, ordered[:6]))
    return shown + (" …" if len(ordered) > 6 else "") if ordered else "none"
