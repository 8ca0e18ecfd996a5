"""Tests that every named schedule is sound at any size, with the time and memory of its paper."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain, pairwise, product

import pytest

from parallel3d.errors import UserError
from parallel3d.schedules.actions import Action, Kind
from parallel3d.schedules.check import check
from parallel3d.schedules.choose import choose, measure, measured_schedules
from parallel3d.schedules.messages import add_communication, peak_unread
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import LOOPED, NAMED_SCHEDULES, V_SHAPED, Schedule, make
from parallel3d.schedules.walk import Costs, RankWork, ScheduleError, time_orders
from tests.tools.schedule_faults import corrupt, is_sound


def chunks_of(name: str) -> list[int]:
    if name in LOOPED:
        return [1, 2, 3, 4, 8]
    return [2 if name in V_SHAPED else 1]


def overhead(schedule: Schedule, forward: float, input: float, weight: float) -> float:
    return measure(schedule, RankWork(forward, input, weight)).overhead


def test_loops_and_vs_hold_each_stage_once() -> None:
    assert StageAssignment(3, 2).places == ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1))
    assert StageAssignment(3, 2, "v").places == ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1))
    for assignment in (StageAssignment(5, 4), StageAssignment(5, 3, "v")):
        assert [assignment.stage(*place) for place in assignment.places] == list(
            range(assignment.stages)
        )
        assert assignment.neighbour(*assignment.place(0), -1) is None
        assert assignment.neighbour(*assignment.places[-1], 1) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED_SCHEDULES)
def test_every_schedule_is_valid_at_any_size(name: str) -> None:
    for ranks, chunks in product((1, 2, 3, 4, 7), chunks_of(name)):
        for count in sorted({1, 2, ranks - 1, ranks, ranks + 1, 3 * ranks - 1} - {0}):
            made = make(name, ranks, count, chunks)
            report = check(made.program(), count, made.assignment)
            links = sum(
                a[0] != b[0]
                for a, b in zip(made.assignment.places, made.assignment.places[1:], strict=False)
            )
            assert report.messages == 2 * links * count


@pytest.mark.parametrize("name", NAMED_SCHEDULES)
def test_backwards_of_a_chunk_run_in_microbatch_order(name: str) -> None:
    """Gradients then add up in the same order everywhere, and so have the same bits."""
    for chunks in chunks_of(name):
        for order in make(name, 4, 11, chunks).orders:
            for chunk in range(chunks):
                ends = [s.microbatch for s in order
                        if s.chunk == chunk and s.kind in (Kind.B, Kind.W)]  # fmt: skip
                assert ends == list(range(11))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 13])
def test_bubbles_are_those_of_the_papers(ranks: int) -> None:
    """Compares the bubble with the ideal time: GPipe and 1F1B (p-1)/m with any m, interleaved that
    over v if p divides m; ZB-H1 (p-1)(F+I-W)/(m(F+I+W)) from m = p on, also over v. These figures
    hold if W is at most F."""
    counts = {1, 2, ranks, ranks + 1, 2 * ranks - 1, 3 * ranks, 3 * ranks + 2}
    for count, costs in product(counts, ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (2.0, 2.5, 1.75))):
        forward, input, weight = costs
        split = (forward + input - weight) / sum(costs)
        wanted = {("gpipe", 1): 1.0, ("1f1b", 1): 1.0}
        if count >= ranks:
            wanted["zb_h1", 1] = split
        if count % ranks == 0:
            for chunks in (1, 2, 3, 8):
                wanted["interleaved", chunks] = 1 / chunks
                wanted["interleaved_zb", chunks] = split / chunks
        for (name, chunks), of_1f1b in wanted.items():
            found = measure(make(name, ranks, count, chunks), RankWork(*costs))
            ideal = (ranks - 1) / count * of_1f1b
            assert found.overhead == pytest.approx(ideal, abs=1e-12), (name, chunks, count)
            assert found.bubble == pytest.approx(ideal / (1 + ideal), abs=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 13])
def test_zero_bubble_v_idles_only_before_and_after(ranks: int) -> None:
    """With F = I = W and m of at least 2p-1, no rank waits between its first action and its last.

    The rest of the bubble comes from ranks that start late, (p-1)/(6m), which counts because of the
    global norm.
    """
    for count in (2 * ranks - 1, 2 * ranks, 3 * ranks, 5 * ranks + 1):
        made = make("zbv", ranks, count, 2)
        assert overhead(made, 1, 1, 1) == pytest.approx((ranks - 1) / (6 * count), abs=1e-12)
        timeline = time_orders(made.orders, made.assignment, Costs.even(made.assignment))
        assert all(a.end == b.start for spans in timeline.spans for a, b in pairwise(spans))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 16])
def test_activations_are_those_of_the_papers(ranks: int) -> None:
    def peak(name: str, chunks: int = 1) -> float:
        made = make(name, ranks, 4 * ranks, chunks)
        return measure(made, RankWork()).peak_live

    assert peak("1f1b") == peak("zb_h1") == peak("interleaved_zb", 4) == 1
    assert peak("zbv", 2) == 1
    assert peak("gpipe") == 4
    assert peak("interleaved", 4) == 1 + (ranks - 1) / (4 * ranks)
    assert peak("v_half", 2) <= 0.6
    # The bubble is about half of 1F1B's if a pattern without idle units needs that little memory.
    most = 0.67 * (ranks - 1) / (4 * ranks) if ranks > 3 else 0.45
    assert overhead(make("v_half", ranks, 4 * ranks, 2), 1, 1, 1) < most


def test_two_ranks_with_chunks_exchange_both_directions() -> None:
    made = make("interleaved", 2, 3, 2)
    program = made.program()
    kinds = {m.kind for step in program[0] if isinstance(step, tuple) for m in step}
    assert kinds == {Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B}
    swapped = {"SF0": "SF0.1", "SF0.1": "SF0"}
    program[0] = [
        tuple(Action.parse(swapped.get(str(a), str(a))) for a in step)
        if isinstance(step, tuple)
        else step
        for step in program[0]
    ]
    with pytest.raises(ScheduleError, match=r"waits to send SF0\.1|message 0"):
        check(program, 3, made.assignment)


@pytest.mark.slow
def test_exactly_the_harmful_random_faults_are_rejected() -> None:
    """The judge runs each program."""
    rng = random.Random(13)
    sizes = ((2, 3), (3, 4), (4, 5))
    cases = [make(n, p, m, c) for n in NAMED_SCHEDULES for c in chunks_of(n)[:3] for p, m in sizes]
    programs = [(made, made.program()) for made in cases]
    assert all(is_sound(program, made.assignment, made.microbatches) for made, program in programs)
    found: Counter[bool] = Counter()
    for _ in range(1000):
        made, program = rng.choice(programs)
        bad = corrupt(program, rng)
        sound = is_sound(bad, made.assignment, made.microbatches)
        found[sound] += 1
        try:
            check(bad, made.microbatches, made.assignment)
            passed = True
        except ScheduleError as error:
            passed = False
            assert "rank" in str(error)
        assert passed == sound, (made.name, made.assignment)
    assert found[False] > 800


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("F0 W0 I0", "rank 0 does W0 before I0"),
        ("F0 I0", "rank 0 never does W0"),
        ("F0 W0", "rank 0 never does I0"),
        ("F0 B0 W0", "rank 0 has both B0 and W0"),
        ("F0 I0 B0", "rank 0 has both B0 and I0"),
        ("F0 I0 W0 W0", "rank 0 has W0 twice"),
        ("F0 I0.1 W0", "rank 0 has I0.1, but chunks are 0 to 0"),
    ],
)
def test_incomplete_split_backwards_are_rejected(words: str, sentence: str) -> None:
    from_text = [[Action.parse(word) for word in words.split()]]
    with pytest.raises(ScheduleError, match=sentence):
        check(from_text, 1)


def test_whole_and_split_backwards_may_be_mixed() -> None:
    made = make("zb_h1", 3, 4)
    whole = [
        [Action(Kind.B, s.microbatch) if s.kind == Kind.I and s.microbatch == 1 else s
         for s in order if not (s.kind == Kind.W and s.microbatch == 1)]
        for order in made.orders
    ]  # fmt: skip
    assert check(add_communication(whole, made.assignment), 4, made.assignment).messages == 16


def test_orders_that_wait_for_each_other_are_named() -> None:
    made = make("1f1b", 2, 2)
    first = made.orders[0]
    stuck = [[first[0], first[2], first[1], first[3]], made.orders[1][::-1]]
    with pytest.raises(
        ScheduleError, match="rank 0 waits for ever for the input of B0, while rank 1"
    ):
        time_orders(stuck, made.assignment, Costs.even(made.assignment))


def test_unread_messages_counted_by_hand() -> None:
    """Ranks of 1F1B receive a message only when they read it."""
    made = make("1f1b", 3, 6)
    assert peak_unread(made.program(), made.assignment) == dict.fromkeys(
        [(0, 1), (1, 2), (2, 1), (1, 0)], 1
    )
    program = [
        [one if one.kind.is_compute else (one,) for one in map(Action.parse, words.split())]
        for words in ("F0 SF0 F1 SF1", "RF0 RF1 F1 F0")
    ]
    assert peak_unread(program, StageAssignment(2)) == {(0, 1): 2}


@pytest.mark.parametrize("name", NAMED_SCHEDULES)
def test_a_group_has_one_send_which_comes_first(name: str) -> None:
    """One slot for each message that waits to be read is enough (`peak_unread`)."""
    made = make(name, 4, 6, chunks_of(name)[-1])
    for step in chain.from_iterable(made.program()):
        if isinstance(step, tuple):
            assert not any(message.kind.is_send for message in step[1:])


def test_costs_of_hops_by_hand() -> None:
    """With two ranks of two chunks and one micro-batch, messages go both ways. A V's turn stays on
    its rank."""
    order = [Action.parse(word) for word in ("F0", "F0.1", "B0.1", "B0")]
    for shape, hops in (("loop", 6), ("v", 4)):
        assignment = StageAssignment(2, 2, shape)
        timeline = time_orders([order, order], assignment, Costs.even(assignment, 2, 2, 2, 0.25))
        assert timeline.makespan == 4 * 1 + 4 * 2 + hops * 0.25


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hop", "memory", "most"), [(0, 1, 0.026), (0.1, 1.25, 0.07), (0.2, 1.25, 0.101)]
)
def test_the_choice_beats_all_named_schedules(hop: float, memory: float, most: float) -> None:
    """Tests p = 8, m = 32, F:I:W = 1:1.2:0.8, up to four chunks."""
    work = RankWork(1, 1.2, 0.8, hop)
    forms = measured_schedules(8, 32, 4, work)
    best = choose(8, 32, 4, work, memory, forms)
    assert best.overhead <= most
    assert best.peak_live <= memory + 1e-9
    assert all(best.seconds <= f.seconds + 1e-9 for f in forms if f.peak_live <= memory)
    made = best.schedule
    report = check(made.program(), 32, made.assignment)
    assert max(report.peaks) / (8 * made.assignment.chunks) == best.peak_live


def test_memory_below_one_microbatch_is_the_users_error() -> None:
    with pytest.raises(UserError, match=r"schedule.memory=0.1 .*nearest is schedule.memory=0.25"):
        choose(4, 8, 2, RankWork(), 0.1)


@pytest.mark.parametrize(
    ("name", "chunks", "sentence"),
    [("zbv", 1, "vpp=1 must be 2"), ("v_half", 4, "must be 2"), ("1f1b", 2, "vpp=1, or")],
)
def test_invalid_numbers_of_chunks_are_refused(name: str, chunks: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make(name, 4, 8, chunks)


def test_stages_of_unequal_cost_by_hand() -> None:
    """Two ranks; the second has a third of the layers, and a head that costs as much as a forward
    and a half of them.

    So F, I and W take 1.5, 1.5 and 1.5 on the first rank, and 2, 0.5 and 0.5 on the second.
    """
    work = RankWork(weights=lambda assignment: [(1.5, 0.0, 0.0), (0.5, 1.5, 0.0)])
    assignment = StageAssignment(2)
    costs = work.costs(assignment)
    assert (costs.forward, costs.input, costs.weight) == ((1.5, 2.0), (1.5, 0.5), (1.5, 0.5))
    found = measure(make("gpipe", 2, 2), work)
    # On the first rank F0 ends at 1.5 and F1 at 3; on the second they end at 3.5 and 5.5, and B0
    # and B1 at 6.5 and 7.5; on the first B0 and B1 end at 9.5 and 12.5.
    assert found.seconds == 12.5
    assert found.overhead == pytest.approx(12.5 / 9 - 1)
    assert found.bubble == pytest.approx(1 - (9 + 6) / 25)


def test_placements_without_costs_are_left_out() -> None:
    work = RankWork(weights=lambda p: [(1.0, 0.0, 0.0)] * p.stages if p.chunks == 1 else None)
    names = {choice.schedule.name for choice in measured_schedules(4, 8, 4, work)}
    assert names == {"gpipe", "1f1b", "zb_h1"}
    best = choose(4, 8, 4, work)
    assert best.schedule.assignment.chunks == 1
    with pytest.raises(ValueError, match="no costs are known"):
        work.costs(StageAssignment(4, 2))
