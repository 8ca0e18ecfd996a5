"""Tests parsing a flight recorder's content, as NCCL's groups write it (version 2.10)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parallel3d.comm.operation_log import LoggedOperation
from parallel3d.faults import hang
from parallel3d.faults.hang import KEPT, QueuedOperation, read_flight_record

NAMES = {"0": "default_pg", "7a": "dp", "3c": "pp"}
RANKS = {"0": "[0, 1, 2, 3]", "7a": "[1, 3]", "3c": "[2, 3]"}


def entry(
    group: str, name: str, number: int, state: str, sizes: list[list[int]], p2p: int = 0
) -> dict[str, Any]:
    return {
        "pg_id": list(NAMES).index(group),
        "process_group": [group, NAMES[group]],
        "profiling_name": f"nccl:{name}",
        "collective_seq_id": number,
        "p2p_seq_id": p2p,
        "input_sizes": sizes,
        "input_dtypes": ["Float"] * len(sizes),
        "state": state,
        "retired": False,
        "is_p2p": p2p > 0,
    }


def text(*entries: dict[str, Any]) -> str:
    config = {
        name: {"name": name, "desc": desc, "ranks": RANKS[name]} for name, desc in NAMES.items()
    }
    return json.dumps({"version": "2.10", "pg_config": config, "entries": entries})


def operation(
    group: str, number: int, name: str, *shape: int, peer: int | None = None
) -> LoggedOperation:
    return LoggedOperation(group, number, name, shape, "float", peer)


def test_groups_are_called_as_we_call_them() -> None:
    queue, ranks = read_flight_record(
        text(
            entry("7a", "all_reduce", 4, "completed", [[8]]),
            entry("0", "_all_gather_base", 9, "started", [[2, 3]]),
            entry("7a", "all_reduce", 5, "scheduled", [[8]]),
        ),
        {},
    )
    assert queue == (
        QueuedOperation(operation("dp", 4, "all_reduce", 8), True),
        QueuedOperation(operation("world", 9, "all_gather_base", 2, 3), False),
        QueuedOperation(operation("dp", 5, "all_reduce", 8), False),
    )
    assert ranks == {"dp": (1, 3), "world": (0, 1, 2, 3), "pp": (2, 3)}


def test_messages_of_a_batch_share_the_state_of_the_batchs_entry() -> None:
    """The entries of single messages stay as they were when they were queued."""
    batches = [
        entry("3c", name, 2, state, [[4]] if "<" in name or ">" in name else [], p2p=number)
        for number, state in ((1, "completed"), (2, "started"))
        for name in ("send 1->0", "recv 1<-0", "coalesced")
    ]
    for one in batches:
        one["state"] = one["state"] if "coalesced" in one["profiling_name"] else "scheduled"
    queue, _ = read_flight_record(text(*batches), {})
    assert queue == (
        QueuedOperation(operation("pp", 1, "send", 4, peer=2), True),
        QueuedOperation(operation("pp", 1, "receive", 4, peer=2), True),
        QueuedOperation(operation("pp", 2, "send", 4, peer=2), False),
        QueuedOperation(operation("pp", 2, "receive", 4, peer=2), False),
    )


def test_the_kept_entries_surround_the_first_unfinished_one() -> None:
    entries = [
        entry("7a", "all_reduce", number, "completed" if number < 90 else "scheduled", [[8]])
        for number in range(1, 200)
    ]
    queue, _ = read_flight_record(text(*entries), {})
    assert [q.operation.number for q in queue] == list(range(90 - KEPT, 90 + KEPT))


def test_ranks_missing_in_the_recorder_are_those_of_the_log() -> None:
    content = json.loads(text(entry("7a", "all_reduce", 1, "started", [[8]])))
    content["pg_config"] = {"": {"name": "", "desc": "", "ranks": "[]"}}
    known = {"dp": (0, 1), "tp": (0, 2)}
    assert read_flight_record(json.dumps(content), known).ranks == known


def test_groups_of_hosts_are_left_out() -> None:
    host = entry("7a", "all_reduce", 1, "scheduled", [[8]])
    host["profiling_name"] = "gloo:all_reduce"
    assert read_flight_record(text(host), {}).queue == ()


def test_torchs_own_recorder_can_be_read() -> None:
    """Tests this build's recorder: without NCCL it has the other name, and is empty."""
    taken = hang.take_flight_record()
    assert taken is not None
    assert read_flight_record(taken, {}).queue == ()


def test_the_record_that_has_entries_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 has a recorder for its old class of NCCL groups and one for each name of the new
    class."""
    empty, full = '{"version": "2.10"}', '{"version": "2.10", "entries": [{}]}'
    for records in ([empty, full, empty], [full, empty]):
        monkeypatch.setattr(hang, "flight_records", lambda found=records: found)
        assert hang.take_flight_record() == full
    monkeypatch.setattr(hang, "flight_records", lambda: [empty, empty])
    assert hang.take_flight_record() == empty
