"""The device's queue of operations, from the flight recorder of torch's NCCL groups.

A handle of NCCL's only orders streams and the host waits somewhere later, so it cannot tell which
collective never ends. The recorder has an entry for each queued one, and its state.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from parallel3d.comm.operation_log import LoggedOperation

# Of each group, operations kept before and from the first unfinished one: ranks compare them one by
# one.
KEPT = 8
WORLD = "default_pg"  # what torch calls the group of all ranks
MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
DTYPES = {"float": "float32", "double": "float64", "half": "float16", "int": "int32"}
DTYPES |= {"long": "int64", "byte": "uint8"}


class Queued(NamedTuple):
    """A collective or message that was handed to the device, and whether it has ended there.

    `operation.number` is NCCL's count of a group's collectives or of its messages; those of one
    batch share a number.
    """

    operation: LoggedOperation
    is_done: bool


class Record(NamedTuple):
    """One rank's flight record: `queue` in order of queueing, and the ranks of its groups."""

    queue: tuple[Queued, ...]
    ranks: dict[str, tuple[int, ...]]


def take() -> str | None:
    """Returns the recorder's content as JSON, of all groups of this process; None without one."""
    from torch._C import _distributed_c10d as c10d

    # The second is that of other groups than NCCL's, which every build has.
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    dump = next((found for name in names if (found := getattr(c10d, name, None))), None)
    if dump is None:
        return None
    # Finished ones too: a rank that sent less than the others may have got past.
    trace = dump(includeCollectives=True, onlyActive=False)
    return trace.decode() if isinstance(trace, bytes) else trace


def read(text: str, known: Mapping[str, tuple[int, ...]]) -> Record:
    """Parses the newest NCCL entries. Raises KeyError or ValueError for another format."""
    content = json.loads(text)
    ranks = dict(known)
    for group in content.get("pg_config", {}).values():
        if members := tuple(json.loads(group["ranks"])):
            ranks[_name(group["name"], group["desc"])] = members
    entries = [e for e in content.get("entries", []) if not e["profiling_name"].startswith("gloo")]
    queue = [Queued(_operation(entry, ranks), done) for entry, done in _without_batches(entries)]
    return Record(_newest(queue), {name: ranks[name] for name in _groups(queue) if name in ranks})


def _name(name: str, desc: str) -> str:
    if desc == WORLD:
        return "world"
    return desc if desc and desc != "undefined" else name


def _without_batches(entries: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], bool]]:
    """Returns (entry, whether it is done) without the entries of batches.

    Messages of a batch have an entry each, whose state is never updated, then one for all of them.
    """
    found: list[tuple[dict[str, Any], bool]] = []
    for entry in entries:
        done = entry["state"] == "completed"
        if not entry["profiling_name"].endswith(":coalesced"):
            found.append((entry, done))
            continue
        for i in range(len(found) - 1, -1, -1):
            member = found[i][0]
            if member["pg_id"] == entry["pg_id"]:
                if _numbers(member) != _numbers(entry):
                    break
                found[i] = member, done
    return found


def _numbers(entry: dict[str, Any]) -> tuple[int, int]:
    return entry["collective_seq_id"], entry["p2p_seq_id"]


def _operation(entry: dict[str, Any], ranks: Mapping[str, tuple[int, ...]]) -> LoggedOperation:
    group = _name(*entry["process_group"])
    name = entry["profiling_name"].partition(":")[2].removeprefix("_")
    number, peer = entry["collective_seq_id"], None
    if message := MESSAGE.fullmatch(name):
        other = int(message[3])
        members = ranks.get(group, ())
        name = "receive" if message[1] == "recv" else "send"
        number, peer = entry["p2p_seq_id"], members[other] if other < len(members) else other
    shapes, dtypes = entry["input_sizes"], entry["input_dtypes"]
    shape = tuple(size for shape in shapes for size in shape)
    dtype = dtypes[0].lower() if dtypes else ""
    return LoggedOperation(group, number, name, shape, DTYPES.get(dtype, dtype), peer)


def _groups(queue: list[Queued]) -> list[str]:
    return list(dict.fromkeys(queued.operation.group for queued in queue))


def _newest(queue: list[Queued]) -> tuple[Queued, ...]:
    """Returns the last `KEPT` of each group before its first unfinished one, and `KEPT` from it."""
    places: dict[str, list[int]] = defaultdict(list)
    for i, queued in enumerate(queue):
        places[queued.operation.group].append(i)
    kept = []
    for of_group in places.values():
        unfinished = (n for n, i in enumerate(of_group) if not queue[i].is_done)
        first = next(unfinished, len(of_group))
        kept += of_group[max(0, first - KEPT) : first + KEPT]
    return tuple(queue[i] for i in sorted(kept))
