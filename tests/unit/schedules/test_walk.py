"""Tests that the clock agrees with the bubble of the papers and with schedules computed by hand."""

from __future__ import annotations

import pytest

from parallel3d.schedules.actions import Action, Kind
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import IN_ORDER, make
from parallel3d.schedules.walk import Costs, ScheduleError, Timeline, time_orders, walk


def timed(
    orders: list[list[Action]], forward: list[float], backward: list[float], hop: float = 0.0
) -> Timeline:
    """Times orders of one chunk per rank, with the seconds of each rank."""
    half = tuple(cost / 2 for cost in backward)
    return time_orders(
        orders, StageAssignment(len(orders) or 1), Costs(tuple(forward), half, half, hop)
    )


def times(timeline: Timeline, rank: int) -> dict[str, tuple[float, float]]:
    return {str(span.action): (span.start, span.end) for span in timeline.spans[rank]}


@pytest.mark.parametrize("name", IN_ORDER)
@pytest.mark.parametrize("stages", range(1, 9))
def test_bubble_of_equal_stages(name: str, stages: int) -> None:
    """The bubble is (p - 1) / (m + p - 1) of the step: Narayanan et al. 2021, section 2.2.1."""
    for microbatches in range(1, 17):
        for forward, backward in ((1.0, 1.0), (1.0, 2.0), (0.3, 0.7)):
            orders = make(name, stages, microbatches).orders
            timeline = timed(orders, [forward] * stages, [backward] * stages)
            bubble = (stages - 1) / (microbatches + stages - 1)
            assert timeline.bubble == pytest.approx([bubble] * stages, rel=1e-12, abs=1e-12)
            assert timeline.bubble_fraction == pytest.approx(bubble, rel=1e-12, abs=1e-12)
            span = (microbatches + stages - 1) * (forward + backward)
            assert timeline.makespan == pytest.approx(span, rel=1e-12)


def test_two_stages_by_hand_with_hops_and_uneven_stages() -> None:
    timeline = timed(make("1f1b", 2, 2).orders, [1.0, 2.0], [3.0, 5.0], 0.5)
    assert times(timeline, 0) == {
        "F0": (0.0, 1.0),
        "F1": (1.0, 2.0),
        "B0": (9.0, 12.0),
        "B1": (16.0, 19.0),
    }
    assert times(timeline, 1) == {
        "F0": (1.5, 3.5),
        "B0": (3.5, 8.5),
        "F1": (8.5, 10.5),
        "B1": (10.5, 15.5),
    }
    assert timeline.makespan == 19.0
    assert timeline.bubble == (1 - 8 / 19, 1 - 14 / 19)
    assert timeline.bubble_fraction == pytest.approx(1 - 22 / 38)


@pytest.mark.parametrize("name", IN_ORDER)
def test_every_action_waits_for_its_rank_and_its_inputs(name: str) -> None:
    stages, hop = 5, 0.25
    forward, backward = [1.0, 0.5, 2.0, 1.5, 0.7], [2.0, 1.1, 3.0, 2.5, 1.9]
    timeline = timed(make(name, stages, 7).orders, forward, backward, hop)
    ends = {(r, s.action): s.end for r, spans in enumerate(timeline.spans) for s in spans}
    for rank, spans in enumerate(timeline.spans):
        free = 0.0
        for span in spans:
            m = span.action.microbatch
            inputs = [free]
            if span.action.kind == Kind.F and rank > 0:
                inputs.append(ends[rank - 1, Action(Kind.F, m)] + hop)
            if span.action.kind == Kind.B:
                inputs.append(ends[rank, Action(Kind.F, m)])
                if rank < stages - 1:
                    inputs.append(ends[rank + 1, Action(Kind.B, m)] + hop)
            # Each action begins as early as possible, and not earlier.
            assert span.start == max(inputs)
            cost = forward[rank] if span.action.kind == Kind.F else backward[rank]
            assert span.end == span.start + cost
            free = span.end


def test_a_program_with_messages_holds_as_many_activations_as_its_orders() -> None:
    made = make("1f1b", 4, 6)
    bare, found = (
        walk(made.orders, made.assignment),
        walk(made.program(), made.assignment, blocks=True),
    )
    assert found.complete and not found.waits
    assert found.peaks == bare.peaks == [4, 3, 2, 1]
    assert found.sent == found.received
    assert {pair: len(names) for pair, names in found.sent.items()} == dict.fromkeys(
        [(0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)], 6
    )


def test_slowest_stage_bounds_the_step() -> None:
    timeline = timed(make("1f1b", 4, 32).orders, [1.0, 1.0, 3.0, 1.0], [2.0, 2.0, 6.0, 2.0])
    assert timeline.bubble[2] < 0.1
    assert timeline.bubble[0] > 0.6


def test_orders_that_can_never_run_are_refused() -> None:
    backward_first = [[Action(Kind.B, 0), Action(Kind.F, 0)]]
    with pytest.raises(ScheduleError, match="rank 0 waits for ever for the input of B0"):
        timed(backward_first, [1.0], [1.0])
    with pytest.raises(ScheduleError, match="rank 1 waits for ever for the input of F1"):
        timed([[Action(Kind.F, 0)], [Action(Kind.F, 1)]], [1.0] * 2, [1.0] * 2)
    for empty in ([], [[]]):
        with pytest.raises(ScheduleError, match="at least one stage"):
            timed(empty, [1.0], [1.0])
