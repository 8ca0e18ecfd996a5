"""Which layers go to which pipeline stage: balanced by cost, or as the user says."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from parallel3d.errors import UserError
from parallel3d.schedules.placement import StageAssignment


def balance_chunks(
    cost: float,
    layers: int,
    placement: StageAssignment,
    first_extra: float = 0.0,
    last_extra: float = 0.0,
) -> list[int]:
    """How many of `layers` layers of one `cost`, in any unit, each stage gets: one at least.

    `first_extra` (embedding) burdens the first stage and `last_extra` (final norm, head, loss) the
    last one. What counts is the most expensive rank, over all of its chunks. Of the splits that
    make it cheapest, those with the most even stages (least sum of squares) are taken, then those
    whose layers lie closest to the middle stages, then to the earlier ones: a layer too many never
    lands on the last stage, which also holds the logits, when another could take it at the same
    cost. It is the exact optimum at any size: a layer is worth less to a stage the more it has, and
    a rank that is full takes no more, so that giving layers away one by one, each to where it does
    least harm, is best in the end. Raises UserError if there are more stages than layers.
    """
    if not all(math.isfinite(c) and c >= 0 for c in (cost, first_extra, last_extra)):
        raise ValueError("costs of layers must be finite and not negative")
    _refuse_empty_stages(layers, placement.ranks, placement.chunks)
    (unit,), first, last = _integers([cost], first_extra, last_extra)
    stages = placement.stages
    ranks = [rank for rank, _ in placement.places]
    extras = [first * (stage == 0) + last * (stage == stages - 1) for stage in range(stages)]
    room = _room(unit, layers, placement, ranks, extras)

    def harm(stage: int, count: int) -> tuple[int, int, int]:
        """What one layer more than `count` adds to a stage's squared cost, and the next best."""
        squares = unit * (2 * (count * unit + extras[stage]) + unit)
        return squares, abs(2 * stage - (stages - 1)), stage

    counts = [1] * stages
    waiting = [harm(stage, 1) for stage in range(stages)]
    heapq.heapify(waiting)
    for _ in range(layers - stages):
        while not room[ranks[waiting[0][-1]]]:
            heapq.heappop(waiting)
        stage = waiting[0][-1]
        counts[stage] += 1
        room[ranks[stage]] -= 1
        heapq.heapreplace(waiting, harm(stage, counts[stage]))
    return counts


def _room(
    unit: int, layers: int, placement: StageAssignment, ranks: Sequence[int], extras: Sequence[int]
) -> list[int]:
    """How many layers each rank may take beyond one a chunk, if none is to cost more than must be.

    Args:
        unit: the cost of a layer. ranks, extras: of each stage, its rank and what else it costs.
    """
    burdens: Counter[int] = Counter()
    for rank, extra in zip(ranks, extras, strict=True):
        burdens[rank] += extra + unit
    if not unit:
        return [layers] * placement.ranks

    def rooms(limit: int) -> list[int]:
        return [(limit - burdens[rank]) // unit for rank in range(placement.ranks)]

    low = max(burdens.values())
    high = low + unit * layers
    while low < high:
        middle = (low + high) // 2
        if sum(rooms(middle)) >= layers - placement.stages:
            high = middle
        else:
            low = middle + 1
    return rooms(low)


def _refuse_empty_stages(layers: int, pp: int, vpp: int = 1) -> None:
    """Raises UserError if there are more stages than layers."""
    if pp * vpp <= layers:
        return
    said = f"pp={pp} is" if vpp == 1 else f"pp={pp} × vpp={vpp} stages are"
    enough = f"pp={layers // vpp}" if vpp <= layers else f"pp=1 and vpp={layers}"
    raise UserError(
        f"{said} more than model.num_layers={layers}, but every stage needs a layer: set {enough} "
        "or less."
    )


def _integers(
    costs: Sequence[float], first_extra: float, last_extra: float
) -> tuple[list[int], int, int]:
    """The same costs as exact integers of a common unit, so that equal sums compare equal."""
    exact = [Fraction(c) for c in (*costs, first_extra, last_extra)]
    unit = math.lcm(*(f.denominator for f in exact))
    scaled = [int(f * unit) for f in exact]
    return scaled[:-2], scaled[-2], scaled[-1]


def layers_per_stage_given(
    given: Sequence[int], num_layers: int, pp: int, vpp: int = 1
) -> list[int]:
    """The user's `schedule.layers_per_stage`, if it is a split of the model; else UserError."""
    _refuse_empty_stages(num_layers, pp, vpp)
    said = f"schedule.layers_per_stage={list(given)}".replace(" ", "")
    fair = str(balance_chunks(1.0, num_layers, StageAssignment(pp * vpp))).replace(" ", "")
    if len(given) != pp * vpp:
        sizes = f"pp={pp}" if vpp == 1 else f"pp={pp} × vpp={vpp}"
        raise UserError(
            f"{said} has {len(given)} entries, but {sizes} stages need one each, e.g. {fair}."
        )
    if min(given) < 1:
        stage = next(s for s, count in enumerate(given) if count < 1)
        raise UserError(
            f"{said} gives stage {stage} {given[stage]} layers, but every stage needs at least "
            f"one, e.g. {fair}."
        )
    if sum(given) != num_layers:
        raise UserError(
            f"{said} adds up to {sum(given)} layers, but model.num_layers={num_layers}, "
            f"e.g. {fair}."
        )
    return list(given)
