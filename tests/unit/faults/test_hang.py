"""Tests the verdict on a hang, from the activity of every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch

from parallel3d.comm.operation_log import (
    LoggedOperation,
    LoggedWork,
    OperationLog,
    blocking,
    logged,
)
from parallel3d.faults.hang import QueuedOperation, RankState, diagnose, from_json, to_json

DP = {"dp": (0, 1, 2, 3)}


def operation(
    number: int, group: str = "dp", size: int = 8, peer: int | None = None
) -> LoggedOperation:
    return LoggedOperation(group, number, "all_reduce", (size,), "torch.float32", peer)


def state(
    rank: int,
    waiting: LoggedOperation | None,
    done: Mapping[str, int] = MappingProxyType({}),
    **more,
) -> RankState:
    """Returns a rank that waits in an operation; `done`: group → the number of its last one
    before."""
    queue = tuple(QueuedOperation(operation(number, group), True) for group, number in done.items())
    queue += () if waiting is None else (QueuedOperation(waiting, False),)
    ranks = more.pop("ranks", DP)
    return RankState(rank, f"rank {rank}", "train step 5", queue=queue, ranks=ranks, **more)


def everyone_but(*late: RankState) -> dict[int, RankState]:
    """Returns four ranks of one group that wait in its ninth operation, except `late`."""
    usual = {rank: state(rank, operation(9), waited_s=20.0) for rank in range(4)}
    return usual | {s.rank: s for s in late}


def test_silent_rank_is_at_fault() -> None:
    states = everyone_but()
    del states[2]
    verdict = diagnose(states, {2: ("rank 2 on there", "is stopped (SIGSTOP)")})
    assert (verdict.kind, verdict.ranks) == ("dead", (2,))
    assert verdict.sentence == (
        "rank 2 on there is stopped (SIGSTOP): rank 0 waits in all_reduce 9 of dp (float32[8]) "
        "in train step 5, for 20 s"
    )


def test_a_hang_is_of_the_host_of_the_rank_at_fault() -> None:
    states = everyone_but()
    assert diagnose(states, {}).host is None, "the ranks of this test have no host"
    del states[2]
    silent = {2: ("rank 2 (pp 0, dp 2, tp 0) on node3", "is stopped (SIGSTOP)")}
    assert diagnose(states, silent).host == "node3"


def test_rank_in_no_operation_is_at_fault() -> None:
    late = state(1, None, {"dp": 8}, place=" at parallel3d/data/loader.py:7")
    verdict = diagnose(everyone_but(late), {})
    assert (verdict.kind, verdict.ranks) == ("missing", (1,))
    assert (
        "rank 1 has not begun all_reduce 9 of dp (float32[8]) and is in train step 5 at"
        in verdict.sentence
    )


def test_rank_in_no_operation_is_at_fault_if_others_wait_in_an_unlogged_one() -> None:
    states = {rank: state(rank, None, blocked="barrier", waited_s=9.0) for rank in range(4)}
    assert diagnose(states, {}).kind == "unknown"
    states[2] = state(2, None, place=" at parallel3d/data/loader.py:7")
    verdict = diagnose(states, {})
    assert (verdict.kind, verdict.ranks) == ("missing", (2,))
    assert verdict.sentence.startswith("rank 2 is in train step 5 at parallel3d/data/loader.py:7")


def test_rank_whose_tensor_differs_from_all_others_is_at_fault() -> None:
    verdict = diagnose(everyone_but(state(3, operation(9, size=6))), {})
    assert (verdict.kind, verdict.ranks) == ("shape", (3,))
    assert "rank 3 calls all_reduce 9 of dp (float32[6])" in verdict.sentence


def test_ranks_that_went_different_ways_are_both_named() -> None:
    away = state(1, operation(4, "tp"), {"dp": 8}, ranks=DP | {"tp": (0, 1)})
    states = everyone_but(away)
    states[0] = state(0, operation(9), {"tp": 3}, ranks=DP | {"tp": (0, 1)}, waited_s=30)
    verdict = diagnose(states, {})
    assert verdict.kind == "missing"
    assert set(verdict.ranks) == {0, 1}


def test_rank_behind_in_a_pipeline_is_found_over_the_one_between() -> None:
    """Rank 3 waits for a message from rank 2, which waits for a sum with rank 0, which computes."""
    states = {
        3: state(3, operation(2, "pp", peer=2), ranks={"pp": (2, 3)}, waited_s=30),
        2: state(2, operation(7), waited_s=29),
        0: state(0, None, {"dp": 6}),
    }
    assert diagnose(states, {}).ranks == (0,)


def test_messages_count_in_a_hosts_group() -> None:
    """Rank 1 has continued to messages of the ring, which rank 0 has not reached."""
    ring = {"cp": (0, 1, 2)}
    states = {
        0: state(0, None, {"cp": 3}, ranks=ring),
        1: state(1, operation(9, "cp", peer=0), ranks=ring),
        2: state(2, operation(5, "cp"), ranks=ring, waited_s=30),
    }
    assert diagnose(states, {}).ranks == (0,)
    states[0] = state(0, operation(9, "cp", peer=1), ranks=ring)
    assert diagnose(states, {}).kind == "unknown"  # all have begun the fifth


class Handle:
    def wait(self) -> None:
        return None


class Group:
    name, ranks, index = "dp", (0, 1), 0

    def __init__(self, log: OperationLog) -> None:
        self.log = log


def log_of(*steps: str) -> OperationLog:
    """Returns a log of steps, each a word of a (all-reduce), A (a longer one) and b (broadcast)."""
    log = OperationLog()
    names = {"a": "all_reduce", "A": "all_reduce", "b": "broadcast"}
    for step in steps:
        log.boundary("train step")
        for letter in step:
            size = 12 if letter == "A" else 4
            logged(Group(log), names[letter], torch.zeros(size), Handle).wait()
    return log


def test_ranks_of_a_group_are_known_from_its_first_operation_on() -> None:
    assert log_of("a").ranks == log_of("ab", "b").ranks == {"dp": (0, 1)}


def test_divergence_is_measured_against_the_previous_step() -> None:
    assert log_of("abb", "ab").divergence() is None  # in progress
    assert str(log_of("ab", "b").divergence()) == "left out all_reduce of dp (float32[4])"
    longer = log_of("ab", "Ab").divergence()
    assert longer.is_other_tensor
    assert (
        str(longer) == "called all_reduce 3 of dp (float32[12]), where an earlier step had "
        "float32[4]"
    )
    went = "went to all_reduce 5 of dp (float32[4]), where an earlier step had broadcast 2 of dp"
    assert str(log_of("aba", "aab").divergence()).startswith("left out broadcast of dp")
    assert str(log_of("abb", "aa").divergence()).startswith(went)


def test_other_numbers_of_tokens_for_the_experts_are_no_divergence() -> None:
    log = OperationLog()
    for tokens in (8, 12, 10):
        log.boundary("train step")
        logged(Group(log), "all_to_all", torch.zeros(tokens), Handle).wait()
        assert log.divergence() is None


def test_phases_that_do_not_repeat_hide_no_step() -> None:
    log = log_of("ab", "a")
    for phase in ("hooks", "health check", "checkpoint"):
        log.boundary(phase, repeats=False)
        logged(Group(log), "broadcast", torch.zeros(4), Handle).wait()
    log.boundary("train step")
    assert str(log.divergence()) == "left out broadcast of dp (float32[4])"


def test_a_step_that_all_ranks_skip_is_no_divergence() -> None:
    log = log_of("ab", "a")
    log.allow_others(Group(log))
    assert log.divergence() is None
    for _ in range(2):
        log.boundary("train step")
        for name in ("all_reduce", "broadcast"):
            logged(Group(log), name, torch.zeros(4), Handle).wait()
            assert log.divergence() is None
    log.boundary("train step")
    logged(Group(log), "broadcast", torch.zeros(4), Handle).wait()
    assert str(log.divergence()) == "left out all_reduce of dp (float32[4])"


def test_a_rank_that_has_left_out_the_agreement_has_decided_alone() -> None:
    log = log_of("ab", "")
    log.allow_others(Group(log))
    logged(Group(log), "broadcast", torch.zeros(4), Handle).wait()
    assert str(log.divergence()) == "left out all_reduce of dp (float32[4])"


def test_steps_of_another_batch_are_compared_with_one_another() -> None:
    log = log_of("ab", "")
    log.forget()
    for _ in range(2):
        for _ in range(2):
            logged(Group(log), "all_reduce", torch.zeros(4), Handle).wait()
            assert log.divergence() is None
        log.boundary("train step")
    logged(Group(log), "broadcast", torch.zeros(4), Handle).wait()
    assert "broadcast" in str(log.divergence())


def test_divergence_at_the_end_of_a_step_is_seen_in_the_next() -> None:
    divergence = log_of("ab", "a", "a").divergence()
    assert str(divergence) == "left out broadcast of dp (float32[4])"
    assert log_of("ab", "a", "a", "a", "a", "a").divergence() is None  # usual by now


def test_divergence_is_seen_over_what_lies_between_two_steps() -> None:
    log = log_of("ab", "a")
    log.boundary("evaluation")
    log.boundary("train step")
    assert str(log.divergence()) == "left out broadcast of dp (float32[4])"


def test_rank_that_departed_is_at_fault_and_state_survives_the_store() -> None:
    odd = state(2, operation(4, "tp"), {"dp": 8}, divergence=log_of("ab", "b").divergence())
    odd = from_json(json.loads(json.dumps(to_json(odd))))
    verdict = diagnose(everyone_but(odd), {})
    assert (verdict.kind, verdict.ranks) == ("missing", (2,))
    assert verdict.sentence.startswith("rank 2 left out all_reduce of dp (float32[4]) and waits in")


def test_wait_is_noted_until_it_ends() -> None:
    log = log_of("a")

    class Failing:
        def wait(self) -> None:
            assert str(log.waiting) == "all_reduce 1 of dp (float32[4])"
            raise RuntimeError("closed")

    note = log._notes[0]
    before = log.progress
    LoggedWork(log, note, Handle()).wait()
    assert log.waiting is None
    assert log.progress > before
    try:
        LoggedWork(log, note, Failing()).wait()
    except RuntimeError:
        assert log.waiting is not None  # a failure names the operation


def test_a_read_from_the_device_waits_for_the_groups_newest_operation() -> None:
    log = log_of("ab")
    before = log.progress
    with blocking(Group(log)):
        assert str(log.waiting) == "broadcast 2 of dp (float32[4])"
    assert log.waiting is None
    assert log.progress > before
    with pytest.raises(RuntimeError), blocking(Group(log)):
        raise RuntimeError("device-side assert")
    assert log.waiting is None
    with blocking(Group(OperationLog())):  # no operation has run yet
        pass
    with blocking(Group(None)):
        pass
