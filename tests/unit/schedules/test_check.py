"""Tests that the checker accepts every schedule and catches every planted fault, for the right
reason."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from parallel3d.schedules.actions import Action, Kind, PipelineProgram, Step
from parallel3d.schedules.check import check
from parallel3d.schedules.schedule import IN_ORDER, make
from parallel3d.schedules.walk import ScheduleError
from tests.pace import in_cpu_time


def plan_of(*ranks: str) -> PipelineProgram:
    """Parses a program: blanks separate steps, and + joins the messages of a group."""
    program: PipelineProgram = []
    for text in ranks:
        steps: list[Step] = []
        for word in text.split():
            actions = tuple(Action.parse(part) for part in word.split("+"))
            steps.append(actions[0] if actions[0].kind.is_compute else actions)
        program.append(steps)
    return program


def split_groups(program: PipelineProgram, sends_first: Callable[[int], bool]) -> PipelineProgram:
    """Returns a program that sends one message after another; some ranks send first."""
    serial: PipelineProgram = []
    for rank, steps in enumerate(program):
        out: list[Step] = []
        for step in steps:
            if isinstance(step, Action):
                out.append(step)
            else:
                ordered = sorted(step, key=lambda a: a.kind.is_send, reverse=sends_first(rank))
                out += [(action,) for action in ordered]
        serial.append(out)
    return serial


@pytest.mark.parametrize("name", IN_ORDER)
@pytest.mark.parametrize("stages", range(1, 9))
def test_every_schedule_is_valid_and_costs_as_much_as_theory(name: str, stages: int) -> None:
    for microbatches in range(1, 17):
        report = check(make(name, stages, microbatches).program(), microbatches)
        assert report.messages == 2 * (stages - 1) * microbatches
        live = [min(stages - r, microbatches) if name == "1f1b" else microbatches
                for r in range(stages)]  # fmt: skip
        assert report.peaks == live


def test_a_plan_written_by_hand_is_accepted() -> None:
    report = check(plan_of("F0 SF0+RB0 B0", "RF0 F0 B0 SB0"))
    assert (report.messages, report.peaks) == (2, [1, 1])


def test_swapped_receives_before_their_use_are_caught_by_position() -> None:
    """Tests orders that are sound by themselves, but differ between two neighbours."""
    good = plan_of(
        "F0 F1 SF0+SF1 RB0 B0 RB1 B1",
        "RF0+RF1 F0 B0 SB0 F1 B1 SB1",
    )
    check(good)
    good[1][0] = (Action.parse("RF1"), Action.parse("RF0"))
    with pytest.raises(
        ScheduleError,
        match=r"message 0 .* 0 to rank 1 is sent as activation 0 for stage 1 but received as activ",
    ):
        check(good)


@pytest.mark.parametrize("name", IN_ORDER)
@pytest.mark.parametrize("kind", [Kind.RECV_F, Kind.RECV_B])
def test_receives_swapped_between_groups_are_caught(name: str, kind: Kind) -> None:
    swap = {Action(kind, 1): Action(kind, 2), Action(kind, 2): Action(kind, 1)}
    program = make(name, 4, 6).program()
    program[1] = [
        s if isinstance(s, Action) else tuple(swap.get(a, a) for a in s) for s in program[1]
    ]
    with pytest.raises(ScheduleError, match=r"message 1 from rank [02] to rank 1"):
        check(program)


@pytest.mark.parametrize("name", IN_ORDER)
def test_backward_messages_swapped_consistently_on_one_rank_are_caught(name: str) -> None:
    """The receiver also computes in the swapped order, so its own order is sound."""
    number = {1: 2, 2: 1}
    program = make(name, 2, 6).program()

    def exchange(a: Action) -> Action:
        back = a.kind in (Kind.B, Kind.RECV_B)
        return Action(a.kind, number.get(a.microbatch, a.microbatch)) if back else a

    program[0] = [
        exchange(s) if isinstance(s, Action) else tuple(map(exchange, s)) for s in program[0]
    ]
    # With m=6, both schedules run F2 on rank 0 before the first of the two backwards.
    with pytest.raises(ScheduleError, match="message 1 from rank 1 to rank 0"):
        check(program)


@pytest.mark.parametrize("name", IN_ORDER)
def test_every_single_missing_action_is_caught(name: str) -> None:
    for rank, steps in enumerate(make(name, 3, 4).program()):
        for index, step in enumerate(steps):
            for dropped in (step,) if isinstance(step, Action) else step:
                program = make(name, 3, 4).program()
                rest = () if isinstance(step, Action) else tuple(a for a in step if a != dropped)
                program[rank][index : index + 1] = [rest] if rest else []
                never = (
                    f"rank {rank} never does {dropped}$"
                    if dropped.kind.is_compute
                    else "wait|message"
                )
                with pytest.raises(ScheduleError, match=never):
                    check(program, 4)


@pytest.mark.parametrize("name", IN_ORDER)
def test_every_single_doubled_action_is_caught(name: str) -> None:
    for rank, steps in enumerate(make(name, 3, 4).program()):
        for index, step in enumerate(steps):
            program = make(name, 3, 4).program()
            program[rank].insert(index, step)
            first = step if isinstance(step, Action) else step[0]
            with pytest.raises(ScheduleError, match=f"rank {rank} has {first} twice"):
                check(program)


def test_missing_microbatch_on_all_ranks_needs_the_number() -> None:
    program = make("1f1b", 2, 3).program()
    assert check(program).messages == 6
    with pytest.raises(ScheduleError, match="rank 0 never does F3"):
        check(program, 4)
    with pytest.raises(ScheduleError, match="rank 0 has F2, but micro-batches are 0 to 1"):
        check(program, 2)


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (("B0 F0",), "rank 0 does B0 before F0"),
        (("F0 SF0+RB0 B0", "F0 RF0 B0 SB0"), "rank 1 waits for the input of F0"),
        (("F0 SF0 B0 RB0", "RF0 F0 B0 SB0"), "rank 0 waits for the input of B0"),
        (("SF0 F0 RB0 B0", "RF0 F0 B0 SB0"), "rank 0 is in group .SF0. and waits to send SF0"),
        (("F0 SF0+RB0 B0", "RF0 F0 SB0 B0"), "rank 1 is in group .SB0. and waits to send SB0"),
    ],
)
def test_wrong_order_on_a_rank_is_caught(ranks: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        check(plan_of(*ranks))


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (("RF0 F0 SF0+RB0 B0", "RF0 F0 B0 SB0"), "rank 0 has RF0, but no other rank"),
        (("F0 SF0+RB0 B0 SB0", "RF0 F0 B0 SB0"), "rank 0 has SB0, but no other rank"),
        (("F0 SF0+RB0 B0", "RF0 F0 SF0 B0 SB0"), "rank 1 has SF0, but no other rank"),
        (("F0 SF0+RB0 B0", "RF0 F0 RB0 B0 SB0"), "rank 1 has RB0, but no other rank"),
        (("F0.1 B0",), "rank 0 has F0.1, but chunks are 0 to 0"),
    ],
)
def test_actions_on_the_wrong_rank_are_caught(ranks: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        check(plan_of(*ranks))


def test_malformed_steps_are_caught() -> None:
    with pytest.raises(ScheduleError, match="a message outside"):
        first, second = plan_of("F0 SF0 RB0 B0", "RF0 F0 B0 SB0")
        check([[first[0], Action.parse("SF0"), *first[2:]], second])
    with pytest.raises(ScheduleError, match="a computation in one"):
        check([[(Action.parse("F0"),), Action.parse("B0")]])
    for empty in ([], [[]], [[], []]):
        with pytest.raises(ScheduleError, match="empty"):
            check(empty)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_both_sending_first_deadlocks_and_the_circle_is_named(stages: int) -> None:
    serial = split_groups(make("1f1b", stages, 16).program(), sends_first=lambda rank: True)
    with pytest.raises(ScheduleError, match="deadlock: ") as caught:
        check(serial)
    last = stages - 1
    sentence = str(caught.value)
    assert f"rank {last - 1} is in group (SF1) and waits to send SF1 to rank {last}" in sentence
    assert f"rank {last} is in group (SB0) and waits to send SB0 to rank {last - 1}" in sentence


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_both_receiving_first_deadlocks(stages: int) -> None:
    serial = split_groups(make("1f1b", stages, 16).program(), sends_first=lambda rank: False)
    with pytest.raises(ScheduleError, match=r"deadlock: .* waits to get RB0 from"):
        check(serial)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_a_mirrored_order_does_not_deadlock(stages: int) -> None:
    """Even ranks send first and odd ones receive first, which the checker must accept."""
    check(
        split_groups(make("1f1b", stages, 16).program(), sends_first=lambda rank: rank % 2 == 0), 16
    )


def test_a_message_held_back_while_its_receivers_group_waits_deadlocks() -> None:
    """Rank 0 needs its first gradient before it sends the activation on which the gradient
    depends."""
    program = plan_of("F0 F1 SF0 RB0 B0 SF1 RB1 B1", "RF0+RF1 F0 B0 SB0 F1 B1 SB1")
    with pytest.raises(ScheduleError, match=r"rank 1 is in group .RF0 RF1. and waits to get RF1"):
        check(program)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_ORDER)
def test_64_stages_512_microbatches_in_under_2_s(name: str) -> None:
    program = make(name, 64, 512).program()
    start = time.process_time()
    report = check(program, 512)
    assert in_cpu_time(time.process_time() - start, 2.0)
    assert report.messages == 2 * 63 * 512
