"""Writes schedules as CSV tables and reads tables that may have been edited by hand.

A cell consists of stage, kind and micro-batch, as in torch.distributed.pipelining: `0F3`, `1I2`,
`0W5`, `2B1`. Stages are numbered through the whole model, so the table also determines the stage
assignment.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from parallel3d.errors import UserError
from parallel3d.files import plain, read_bounded
from parallel3d.schedules.actions import ComputeSchedule, Kind, action
from parallel3d.schedules.check import check, fault_of_rank
from parallel3d.schedules.messages import add_communication
from parallel3d.schedules.orders import SHAPES, StageAssignment
from parallel3d.schedules.schedule import Schedule
from parallel3d.schedules.walk import ScheduleError

_CELL = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
Cell = tuple[int, Kind, int]
LARGEST = 1 << 26  # maximum bytes of `schedule.file`, about six million actions


def write_table(schedule: Schedule) -> str:
    """Returns a schedule's orders as CSV text with a row per rank and a cell per action."""
    lines = []
    for rank, order in enumerate(schedule.orders):
        stages = [schedule.assignment.stage(rank, c) for c in range(schedule.assignment.chunks)]
        lines.append(",".join(f"{stages[s.chunk]}{s.kind}{s.microbatch}" for s in order))
    return "\n".join(lines) + "\n"


def read_file(file: str | None, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    """Reads a table from a file and parses it with `read_table`.

    Raises UserError as `read_table` does, and if `file` is None or cannot be read.
    """
    if file is None:
        raise UserError(
            "schedule=file needs schedule.file=…, a table with one row of actions per rank; the "
            "nearest is schedule=1f1b."
        )
    shown = file if file.isprintable() and " " not in file else repr(file)
    try:
        table = read_bounded(Path(file), LARGEST).decode("utf-8-sig")  # Excel writes a BOM
    except UnicodeDecodeError:
        raise UserError(f"schedule.file={shown} cannot be read: it is not text.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or plain(str(error))
        raise UserError(f"schedule.file={shown} cannot be read: {reason}.") from None
    return read_table(table, shown, ranks, microbatches, chunks)


def read_table(
    text: str, name: str, ranks: int, microbatches: int, chunks: int | None = None
) -> Schedule:
    """Parses a table and proves its schedule sound. Empty cells and lines are ignored.

    Args:
        text: a line for each rank in order, with cells as `write_table` writes them.
        name: the file's name, for error messages.
        chunks: the number of stages that each rank must have; None allows any number.

    Raises:
        UserError: a cell is malformed, the table has another number of ranks, chunks or
            micro-batches, the stages form neither loops nor a V, or the checker finds a fault.
    """
    key = f"schedule.file={name}"
    rows = [_cells(line, key, number) for number, line in enumerate(text.splitlines(), 1)]
    rows = [row for row in rows if row]
    if len(rows) != ranks:
        raise UserError(f"{key} has {len(rows)} rows of actions, one per rank, but pp={ranks}.")
    assignment = _assignment(rows, key)
    if chunks is not None and assignment.chunks != chunks:
        raise UserError(
            f"{key} has {assignment.chunks} stages per rank, but vpp={chunks}; the nearest is "
            f"vpp={assignment.chunks}."
        )
    orders = [
        [action(kind, m, assignment.place(stage)[1]) for stage, kind, m in row] for row in rows
    ]
    check_orders(orders, assignment, microbatches, key)
    return Schedule("file", assignment, microbatches, orders)


def check_orders(
    orders: ComputeSchedule, assignment: StageAssignment, microbatches: int, key: str
) -> None:
    """Proves orders without messages sound, or raises UserError with the place and the reason."""
    try:
        check(add_communication(orders, assignment, microbatches), microbatches, assignment)
    except (ScheduleError, IndexError) as error:
        faults = (
            fault_of_rank(order, rank, assignment, microbatches)
            for rank, order in enumerate(orders)
        )
        sentence = next(filter(None, faults), str(error))
        raise UserError(f"{key} cannot run: {_in_stages(sentence, assignment)}.") from None


def _in_stages(sentence: str, assignment: StageAssignment) -> str:
    """Returns the checker's sentence with its actions written as cells of the table.

    An action such as `F3.1` belongs to the rank that the sentence named last.
    """
    rank = 0

    def spelled(found: re.Match[str]) -> str:
        nonlocal rank
        if found[1] is not None:
            rank = int(found[1])
            return found[0]
        return f"{assignment.stage(rank, int(found[4] or 0))}{found[2]}{found[3]}"

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
                f"{key}, line {number}: {word[:40]!r} is not an action: an action is a stage, one "
                "of F, B, I and W, and a micro-batch, as in 0F3."
            )
        cells.append((int(match[1]), Kind(match[2]), int(match[3])))
    return cells


def _assignment(rows: Sequence[Sequence[Cell]], key: str) -> StageAssignment:
    """Returns the loop or V that assigns the stages to ranks in the same way as the table.

    Raises UserError if the table has neither form.
    """
    held = [{stage for stage, _, _ in row} for row in rows]
    chunks = max(1, len(held[0]))
    loop, vee = (StageAssignment(len(rows), chunks, shape) for shape in SHAPES)
    for assignment in (loop, vee):
        fits = [mine == _stages(assignment, rank) for rank, mine in enumerate(held)]
        if all(fits):
            return assignment
    rank = next(r for r, mine in enumerate(held) if mine != _stages(loop, r))
    in_loop, in_v = (sorted(_stages(one, rank))[:6] for one in (loop, vee))
    raise UserError(
        f"{key}: rank {rank} has the stages {sorted(held[rank])[:6]}, but with {chunks} per rank "
        f"it must have {in_loop} (loop) or {in_v} (V)."
    )


def _stages(assignment: StageAssignment, rank: int) -> set[int]:
    return {assignment.stage(rank, chunk) for chunk in range(assignment.chunks)}
