"""Tests the verdict on a hang in which devices wait and hosts do not, from the devices' queues."""

from __future__ import annotations

import json
from dataclasses import replace

from parallel3d.comm.operation_log import LoggedOperation
from parallel3d.faults.hang import QueuedOperation, RankState, diagnose, from_json, to_json
from tests.unit.faults.test_hang import operation, state


def on_device(rank: int, *queue: QueuedOperation, waits: bool = True, **more) -> RankState:
    """Returns a rank whose host waits at the step's last read, for the world's sum, or with
    waits=False does not wait."""
    waiting = LoggedOperation("world", 12, "all_reduce", (4,), "torch.float64") if waits else None
    groups = {"dp": (0, 1, 2, 3), "world": (0, 1, 2, 3)}
    return state(rank, waiting, ranks=more.pop("ranks", groups), device_queue=queue, **more)


def done(op: LoggedOperation) -> QueuedOperation:
    return QueuedOperation(op, True)


def open_(op: LoggedOperation) -> QueuedOperation:
    return QueuedOperation(op, False)


LAST = operation(4, "world")


def test_rank_that_never_queued_an_operation_of_its_group_is_at_fault() -> None:
    usual = (done(operation(8)), open_(operation(9)), open_(LAST))
    states = {rank: on_device(rank, *usual, waited_s=9.0) for rank in range(4)}
    states[2] = on_device(2, done(operation(8)), open_(LAST))
    # The sum over the world waits for the others, whose devices are still in the ninth operation of
    # dp.
    for longest in range(4):
        states[longest] = replace(states[longest], waited_s=10.0 + longest)
        verdict = diagnose(states, {})
        assert (verdict.kind, verdict.ranks) == ("missing", (2,))
        assert verdict.sentence.startswith(
            "rank 2 has not begun all_reduce 9 of dp (float32[8]) and waits on its device in "
            "all_reduce 4 of world (float32[8]): rank "
        )


def test_devices_that_wait_for_each_other_went_different_ways() -> None:
    states = {
        0: on_device(0, open_(operation(9))),
        1: on_device(1, open_(LAST), waited_s=5.0),
    }
    verdict = diagnose(states, {})
    assert verdict.kind == "missing"
    assert set(verdict.ranks) == {0, 1}
    assert verdict.sentence.endswith("their operations differ")


def test_rank_that_gave_another_size_is_at_fault_even_if_it_has_moved_on() -> None:
    usual = (done(operation(8)), open_(operation(9)), open_(LAST))
    states = {rank: on_device(rank, *usual, waited_s=9.0) for rank in range(4)}
    states[3] = on_device(3, done(operation(8)), done(operation(9, size=6)), open_(LAST))
    verdict = diagnose(states, {})
    assert (verdict.kind, verdict.ranks) == ("shape", (3,))
    assert verdict.sentence.startswith(
        "rank 3 calls all_reduce 9 of dp (float32[6]) in train step 5, where rank 0 calls "
        "all_reduce 9 of dp (float32[8]): rank 0 waits on its device in all_reduce 9 of dp"
    )


def test_host_that_is_stuck_in_the_data_is_at_fault_while_others_read_the_last_sum() -> None:
    usual = (done(operation(8)), open_(operation(9)), open_(LAST))
    states = {rank: on_device(rank, *usual, waited_s=9.0) for rank in range(4)}
    place = " at parallel3d/data/loader.py:7"
    states[1] = on_device(1, done(operation(8)), waits=False, place=place)
    verdict = diagnose(states, {})
    assert (verdict.kind, verdict.ranks) == ("missing", (1,))
    assert verdict.sentence == (
        "rank 1 has not begun all_reduce 9 of dp (float32[8]) and is in train step 5 at "
        "parallel3d/data/loader.py:7, in no operation: rank 0 waits on its device in all_reduce 9 "
        "of dp (float32[8]) in train step 5, for 9 s"
    )


def test_the_rank_that_is_late_is_found_over_devices_that_only_wait_for_their_turn() -> None:
    """Rank 2 is late for tp with rank 3, which therefore does not come to dp with rank 1.

    Rank 3's host has still queued dp's operation, but its device is not in it.
    """
    groups = {
        0: {"tp": (0, 1), "dp": (0, 2)},
        1: {"tp": (0, 1), "dp": (1, 3)},
        2: {"tp": (2, 3), "dp": (0, 2)},
        3: {"tp": (2, 3), "dp": (1, 3)},
    }
    tp, dp = operation(5, "tp"), operation(9)
    queues = {
        0: (done(tp), open_(dp)),
        1: (done(tp), open_(dp)),
        2: (done(operation(4, "tp")),),
        3: (done(operation(4, "tp")), open_(tp), open_(dp)),
    }
    for first in range(4):  # the rank that has waited longest
        states = {
            r: on_device(r, *queues[r], ranks=groups[r], waits=r != 2, waited_s=float(r == first))
            for r in range(4)
        }
        assert diagnose(states, {}).ranks == (2,)


def test_rank_that_is_missing_in_a_ring_is_found_though_most_have_met_their_neighbours() -> None:
    """Rank 2 computes. Ranks 1 and 3 wait for it, and rank 0, one round further, waits for
    those."""
    ring = {"cp": (0, 1, 2, 3)}

    def round_of(number: int, rank: int) -> tuple[QueuedOperation, QueuedOperation]:
        sent = LoggedOperation("cp", number, "send", (8,), "float32", (rank + 1) % 4)
        return open_(sent), open_(sent._replace(name="receive", peer=(rank - 1) % 4))

    for longest in (0, 1, 3):
        states = {
            rank: on_device(
                rank, *round_of(number, rank), ranks=ring, waited_s=float(rank == longest)
            )
            for rank, number in ((0, 6), (1, 5), (3, 5))
        }
        states[2] = on_device(2, ranks=ring, waits=False)
        verdict = diagnose(states, {})
        assert (verdict.kind, verdict.ranks) == ("missing", (2,))
        assert verdict.sentence.startswith("rank 2 has not begun send to rank 2 of cp")


def test_message_of_a_batch_is_matched_by_the_peers_batch_not_by_a_later_one() -> None:
    """Stage 1 still waits for stage 0, which computes; its message to stage 2 is queued behind."""

    def message(name: str, number: int, peer: int) -> QueuedOperation:
        return open_(LoggedOperation("pp", number, name, (8,), "float32", peer))

    pp = {"pp": (0, 1, 2)}
    states = {
        0: on_device(0, ranks=pp, waits=False),
        1: on_device(1, message("receive", 4, 0), message("send", 5, 2), ranks=pp),
        2: on_device(2, message("receive", 3, 1), ranks=pp, waited_s=30.0),
    }
    assert diagnose(states, {}).ranks == (0,)
    states[1] = on_device(1, message("receive", 4, 0), message("send", 4, 2), ranks=pp)
    # Rank 2 has met its peer, rank 1 not all of its peers.
    assert diagnose(states, {}).ranks == (0,)
    states[0] = on_device(0, message("send", 4, 1), ranks=pp)
    assert diagnose(states, {}).kind == "unknown"  # all members have entered it


def test_all_in_one_operation_is_nobodys_fault_that_we_know_of() -> None:
    states = {rank: on_device(rank, open_(operation(9))) for rank in range(4)}
    verdict = diagnose(states, {})
    assert verdict.kind == "unknown"
    assert "all ranks of its group are in it too: a device" in verdict.sentence


def test_without_every_ranks_recorder_the_hosts_are_looked_at() -> None:
    usual = (open_(operation(9)), open_(LAST))
    states = {rank: on_device(rank, *usual) for rank in range(4)}
    states[1] = replace(states[1], queue=(), device_queue=None)
    assert diagnose(states, {}).ranks == (1,)


def test_queue_survives_the_store() -> None:
    sent = on_device(1, done(operation(8)), open_(operation(9)), waited_s=2.0)
    assert from_json(json.loads(json.dumps(to_json(sent)))) == sent
    assert from_json(json.loads(json.dumps(to_json(replace(sent, device_queue=None))))) == replace(
        sent, device_queue=None
    )
