"""Rank files: a map from ranks to processes that the user wrote by hand.

A line is `rank host local_index`, or OpenMPI's `rank 0=host slot=0`; `#` starts a comment. The
local index is the process's number on its host (LOCAL_RANK, SLURM_LOCALID).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from parallel3d.errors import UserError, nearest

OWN_FORM = re.compile(r"(\d+)\s+(\S+)\s+(\d+)")
OPENMPI_FORM = re.compile(r"rank\s+(\d+)\s*=\s*(\S+)\s+slots?\s*=\s*(\d+)", re.IGNORECASE)


class Process(NamedTuple):
    """A launched process: where it runs, in the order in which the launcher numbered them.

    `address` and `pattern` are Slurm's SLURM_TOPOLOGY_ADDR, the switches above the node, and
    SLURM_TOPOLOGY_ADDR_PATTERN, what each part of it is; "" where unknown.
    """

    host: str
    local: int
    address: str = ""
    pattern: str = ""


class Entry(NamedTuple):
    """One line of a rank file."""

    rank: int
    host: str
    local: int
    where: str  # "ranks.txt line 3"


def parse_rank_file(text: str, name: str) -> list[Entry]:
    """The lines of a rank file, `name` for messages. Raises UserError at the first odd line."""
    entries = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].strip()
        if not words:
            continue
        where = f"{name} line {number}"
        match = OWN_FORM.fullmatch(words) or OPENMPI_FORM.fullmatch(words)
        if match is None:
            raise UserError(
                f"rank_file: {where}, {words!r}, cannot be read: it must be "
                "`rank host local_index`, as in `0 node1 0`, or `rank 0=node1 slot=0`"
            )
        entries.append(Entry(int(match[1]), match[2], int(match[3]), where))
    return entries


def launch_ranks_by_file(text: str, name: str, processes: Sequence[Process]) -> list[int]:
    """The launch rank of each rank, as a rank file says it.

    Args:
        text, name: the file's content, and its name for messages.
        processes: all that were launched, by launch rank.

    Raises:
        UserError: a line that cannot be read or names a rank, host or index that is not there, a
            rank or process named twice or never, or a rank 0 that is not launch rank 0.
    """
    world = len(processes)
    at = {(process.host, process.local): i for i, process in enumerate(processes)}
    found: dict[int, int] = {}
    lines: dict[int, str] = {}  # of each launch rank
    for entry in parse_rank_file(text, name):
        if entry.rank >= world:
            raise UserError(
                f"rank_file: {entry.where} places rank {entry.rank}, but the run has ranks 0 to "
                f"{world - 1}; the nearest is {world - 1}"
            )
        if entry.rank in found:
            raise UserError(
                f"rank_file: {entry.where} places rank {entry.rank} again after "
                f"{lines[found[entry.rank]]}"
            )
        host = _host_called(entry, processes)
        launch = at.get((host, entry.local))
        if launch is None:
            there = sorted(process.local for process in processes if process.host == host)
            close = min(there, key=lambda local: abs(local - entry.local))
            raise UserError(
                f"rank_file: {entry.where} names process {entry.local} of {host}, which runs "
                f"{len(there)}; the nearest is {host} {close}"
            )
        if launch in lines:
            raise UserError(
                f"rank_file: {entry.where} gives {host} {entry.local} to rank {entry.rank}, but "
                f"{lines[launch]} gave it to another"
            )
        found[entry.rank] = launch
        lines[launch] = entry.where
    return _complete(found, lines, name, processes)


def _host_called(entry: Entry, processes: Sequence[Process]) -> str:
    """The host that a line means: by its name, its first label, or `localhost` for the only one."""
    hosts = list(dict.fromkeys(process.host for process in processes))
    if entry.host in hosts:
        return entry.host
    short = [host for host in hosts if host.split(".")[0] == entry.host.split(".")[0]]
    if len(short) == 1:
        return short[0]
    if entry.host == "localhost" and len(hosts) == 1:
        return hosts[0]
    close = nearest(entry.host, hosts) or hosts[0]
    raise UserError(
        f"rank_file: {entry.where} names host {entry.host}, on which no rank of this run was "
        f"started; the nearest is {close}"
    )


def _complete(
    found: dict[int, int], lines: dict[int, str], name: str, processes: Sequence[Process]
) -> list[int]:
    """`found` as a list, once every rank has its process and rank 0 the first one."""
    missing = [rank for rank in range(len(processes)) if rank not in found]
    if missing:
        launch = next(i for i in range(len(processes)) if i not in lines)
        host, local, *_ = processes[launch]
        raise UserError(
            f"rank_file: {name} has no line for rank {missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}; "
            f"`{missing[0]} {host} {local}` is free"
        )
    if found[0] != 0:
        host, local, *_ = processes[0]
        raise UserError(
            f"rank_file: {lines[found[0]]} puts rank 0 elsewhere than the launcher's first "
            f"process, with which the others meet; it must be `0 {host} {local}`"
        )
    return [found[rank] for rank in range(len(processes))]
