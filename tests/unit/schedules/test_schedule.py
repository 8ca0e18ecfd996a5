"""Tests schedules as data: the orders of GPipe and 1F1B, and the messages between them."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest

from parallel3d.errors import UserError
from parallel3d.schedules.actions import Action, Kind, PipelineProgram
from parallel3d.schedules.messages import add_communication
from parallel3d.schedules.schedule import IN_ORDER, make


def words(steps: list) -> str:
    """Formats a rank's steps, groups in parentheses."""
    return " ".join(
        str(step) if isinstance(step, Action) else f"({' '.join(map(str, step))})" for step in steps
    )


def test_action_text_round_trip() -> None:
    for kind in Kind:
        for microbatch in (0, 7, 123):
            for chunk in (0, 2):
                action = Action(kind, microbatch, chunk)
                assert Action.parse(str(action)) == action
    compact = [str(Action(kind, number)) for number, kind in enumerate(Kind)]
    assert compact == ["F0", "B1", "I2", "W3", "SF4", "RF5", "SB6", "RB7"]
    assert str(Action(Kind.F, 3, 1)) == "F3.1"


@pytest.mark.parametrize("text", ["", "F", "3", "FF1", "S1", "f1", "F-1", "F1.", "F1 ", "F1.2.3"])
def test_invalid_action_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a pipeline action"):
        Action.parse(text)


def test_1f1b_plan_by_hand() -> None:
    program = make("1f1b", 3, 3).program()
    assert [words(steps) for steps in program] == [
        "F0 (SF0) F1 (SF1) F2 (SF2 RB0) B0 (RB1) B1 (RB2) B2",
        "(RF0) F0 (SF0 RF1) F1 (SF1 RB0) B0 (SB0 RF2) F2 (SF2 RB1) B1 (SB1 RB2) B2 (SB2)",
        "(RF0) F0 B0 (SB0 RF1) F1 B1 (SB1 RF2) F2 B2 (SB2)",
    ]


def test_gpipe_plan_by_hand() -> None:
    program = make("gpipe", 2, 3).program()
    assert [words(steps) for steps in program] == [
        "F0 (SF0) F1 (SF1) F2 (SF2 RB0) B0 (RB1) B1 (RB2) B2",
        "(RF0) F0 (RF1) F1 (RF2) F2 B0 (SB0) B1 (SB1) B2 (SB2)",
    ]


def test_one_stage_only_computes() -> None:
    assert words(make("1f1b", 1, 3).program()[0]) == "F0 B0 F1 B1 F2 B2"
    assert words(make("gpipe", 1, 3).program()[0]) == "F0 F1 F2 B0 B1 B2"


def test_fewer_microbatches_than_stages() -> None:
    program = make("1f1b", 4, 2).orders
    assert [words(steps) for steps in program] == [
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 F1 B0 B1",
        "F0 B0 F1 B1",
    ]


@pytest.mark.parametrize("name", IN_ORDER)
def test_lowering_keeps_the_compute_order_and_makes_one_group_between_actions(name: str) -> None:
    for stages in range(1, 9):
        for microbatches in range(1, 17):
            compute = make(name, stages, microbatches).orders
            program: PipelineProgram = add_communication(compute)
            for rank, steps in enumerate(program):
                assert [s for s in steps if isinstance(s, Action)] == compute[rank]
                for before, after in pairwise(steps):
                    assert isinstance(before, Action) or isinstance(after, Action)
                assert () not in steps
                if stages == 1:
                    assert all(isinstance(s, Action) for s in steps)


@pytest.mark.parametrize("name", IN_ORDER)
def test_backwards_run_in_microbatch_order(name: str) -> None:
    """Gradients then add up in the same order under every schedule, and so have the same bits."""
    for order in make(name, 4, 9).orders:
        assert [a.microbatch for a in order if a.kind == Kind.B] == list(range(9))


def test_unknown_schedule_names_the_key_and_the_nearest() -> None:
    with pytest.raises(UserError, match=r"schedule=1f1bb .*gpipe, 1f1b.*nearest: 1f1b"):
        make("1f1bb", 2, 2).program()


@pytest.mark.parametrize(("stages", "microbatches"), [(0, 1), (1, 0), (-1, 4)])
def test_impossible_sizes_are_refused(stages: int, microbatches: int) -> None:
    with pytest.raises(ValueError, match=r"needs a (rank and a chunk|micro-batch)"):
        make("gpipe", stages, microbatches).program()


@pytest.mark.slow
def test_pipeline_plans_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from parallel3d.blueprint import stages\n"
        "from parallel3d.schedules import check, draw, schedule, walk\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
