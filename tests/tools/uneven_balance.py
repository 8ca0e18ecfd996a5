"""Layers of unlike cost over stages: the exact optimum, by dynamic programming.

What `balance_chunks` finds for equal layers is held against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from parallel3d.estimate.balance import _integers, _refuse_empty_stages


def balance(
    costs: Sequence[float], stages: int, first_extra: float = 0.0, last_extra: float = 0.0
) -> list[int]:
    """How many consecutive layers each stage gets so that the most expensive stage is cheapest.

    `costs` are those of the layers in model order, in any unit; `first_extra` (embedding) burdens
    the first stage and `last_extra` (final norm, head, loss) the last one. Every stage has at
    least one layer. The largest stage cost is the exact minimum. Of the splits that reach it, the
    one with the most even costs (least sum of squares) is taken, then the one whose layers lie
    closest to the middle stages, then to the earlier ones: a layer too many never lands on the
    last stage, which also holds the logits, when another stage could take it at the same cost.
    Raises UserError if there are more stages than layers.
    """
    if stages < 1:
        raise ValueError(f"stages={stages} must be at least 1")
    if not all(math.isfinite(c) and c >= 0 for c in (*costs, first_extra, last_extra)):
        raise ValueError("costs of layers must be finite and not negative")
    _refuse_empty_stages(len(costs), stages)
    layers, first, last = _integers(costs, first_extra, last_extra)
    prefix = [0]
    for cost in layers:
        prefix.append(prefix[-1] + cost)
    low, high = max(layers), prefix[-1] + first + last
    while low < high:
        middle = (low + high) // 2
        if _fits(prefix, stages, first, last, middle):
            high = middle
        else:
            low = middle + 1
    return _most_even(prefix, stages, first, last, low)


def _fits(prefix: Sequence[int], stages: int, first: int, last: int, limit: int) -> bool:
    """Whether some split keeps each stage within `limit`: let each take all that it can."""
    layers = len(prefix) - 1
    taken = 0
    for stage in range(stages):
        room = limit - (first if stage == 0 else 0) - (last if stage == stages - 1 else 0)
        allowed = layers - (stages - 1 - stage)  # the later stages need a layer each
        start = taken
        while taken < allowed and prefix[taken + 1] - prefix[start] <= room:
            taken += 1
        if taken == start:
            return False
    return taken == layers


def _most_even(prefix: Sequence[int], stages: int, first: int, last: int, limit: int) -> list[int]:
    """The preferred split among those within `limit`, by dynamic programming over the stages.

    best[end] is, for the stages so far holding the layers before `end`, the least preference
    (sum of squared costs, distance of layers from the middle, distance from the front) and the
    split that has it. All three are sums over stages, so the best of a part is part of the best.
    """
    layers = len(prefix) - 1
    best: dict[int, tuple[tuple[int, int, int], list[int]]] = {0: ((0, 0, 0), [])}
    for stage in range(stages):
        room = limit - (first if stage == 0 else 0) - (last if stage == stages - 1 else 0)
        extra = limit - room
        off_middle = abs(2 * stage - (stages - 1))
        grown: dict[int, tuple[tuple[int, int, int], list[int]]] = {}
        for start, ((squares, distance, lateness), split) in best.items():
            for end in range(start + 1, layers - (stages - 1 - stage) + 1):
                cost = prefix[end] - prefix[start]
                if cost > room:
                    break
                count = end - start
                preference = (
                    squares + (cost + extra) ** 2,
                    distance + off_middle * count,
                    lateness + stage * count,
                )
                if end not in grown or preference < grown[end][0]:
                    grown[end] = (preference, [*split, count])
        best = grown
    return best[layers][1]
