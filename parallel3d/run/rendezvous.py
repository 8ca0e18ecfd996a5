"""Lets the processes of a job, which torchrun or srun started, meet in a store."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from parallel3d.comm.store import (
    SECRET,
    behind_secret,
    get,
    get_all,
    is_loopback,
    listen_at,
    listen_everywhere,
    put,
    serve,
)
from parallel3d.config.fields import show
from parallel3d.errors import UserError, print_line
from parallel3d.host.devices import HostError
from parallel3d.host.gpus import boot_id
from parallel3d.host.memory import nothing_collected
from parallel3d.run.keys import LaunchConfig
from parallel3d.run.launch import until
from parallel3d.run.launcher_environment import RankAssignment

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store, TCPStore

    from parallel3d.run.launch import Worker


class RankZerosError(UserError):
    """An error that rank 0 logs for all ranks; the store may end together with rank 0."""


class OtherStart(UserError):
    """Raised if this rank has met the ranks of another start; it ends without disturbing them."""


def from_rank_0(
    store: Store, key: str, place: RankAssignment | Worker, decide: Callable[[], Any]
) -> Any:
    """Returns rank 0's decision, a JSON value, on every rank.

    If `decide` raises a UserError, every rank raises it. Rank 0, which may hold the store,
    first gives the other ranks `READ_S` seconds to read the error.
    """
    if place.rank > 0:
        message = get(store, key)
        if "error" in message:
            store.add(seen_key(key), 1)
            raise RankZerosError(message["error"])
        return message["answer"]
    try:
        answer = decide()
    except UserError as error:
        put(store, key, {"error": str(error)})
        until(lambda: store.add(seen_key(key), 0) >= place.world_size - 1, READ_S)
        raise
    put(store, key, {"answer": answer})
    return answer


def seen_key(key: str) -> str:
    """Returns the store's key that counts the ranks that have read the error under `key`."""
    return f"{key}_seen"


READ_S = 5.0  # rank 0 keeps the store for this time, so that the others can read why it ends

# On an error or time-out, ProcessGroupNCCL writes this key without any prefix (kStoreDumpKey in
# ProcessGroupNCCL.hpp). A rank that finds it waits TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC and aborts. All
# other keys of NCCL, such as remote_error, have the group's prefix, which includes the attempt's.
NCCL_DUMP_KEY = "exception_dump"
# Key under which rank 0 describes its start for every process that reaches its store.
START_KEY = "parallel3d/start"
HOST_KEY = "parallel3d/host"
CONNECT_S = 10.0  # limit of one attempt to connect, as a firewall may drop everything
HINT_S = 30.0  # after this time a rank logs that it waits for rank 0
CLEARED_KEY = "parallel3d/cleared"


def rendezvous(
    launch: LaunchConfig,
    run: str | None,
    place: RankAssignment,
    say: Callable[[str], None] = print_line,
) -> PrefixStore:
    """Connects to the store of rank 0 or of torchrun's agent, and returns it.

    Args:
        run: the name that the user gave the run, or None.
        say: called with a sentence if this rank waits for long, or if the store listens on all
            addresses.

    Raises UserError if rank 0's port is taken, and OtherStart if the store belongs to other ranks.
    """
    with nothing_collected():
        import torch.distributed as dist

    size, timeout = place.world_size, timedelta(seconds=launch.timeout_s)
    agent_listens = keeps_store(os.environ)
    try:
        if place.rank == 0 and not agent_listens:
            store = _listening_store(place, timeout, say)
        else:
            if not agent_listens:
                _wait_for_listener(place, launch.timeout_s, say)
            store = dist.TCPStore(
                place.master_addr,
                place.master_port,
                world_size=size,
                timeout=timeout,
                wait_for_workers=False,
            )
    except OSError as error:  # torch's DistNetworkError is not an OSError
        if error.errno != errno.EADDRINUSE:
            raise
        key = "MASTER_PORT" if place.launcher == "torchrun" else "launch.master_port"
        raise UserError(
            f"port {place.master_port} is in use on {place.master_addr}: choose another {key}"
        ) from None
    # The agent's store outlives the ranks, which must not read the keys of an earlier attempt.
    attempt = attempt_of_agent() if agent_listens else 0
    _check_start(store, run, place, attempt)
    own = dist.PrefixStore(f"{place.prefix}/attempt{attempt}", behind_secret(store))
    if attempt and place.rank == 0:
        store.delete_key(NCCL_DUMP_KEY)
        own.set(CLEARED_KEY, "")
    elif attempt:
        own.wait([CLEARED_KEY])  # NCCL reads NCCL_DUMP_KEY as soon as its first group starts
    return own


def _wait_for_listener(place: RankAssignment, seconds: float, say: Callable[[str], None]) -> None:
    """Waits until a process listens at rank 0's address; torch's wait would print its stack."""
    begin, hinted = time.monotonic(), place.local_rank > 0
    where = f"{place.master_addr}:{place.master_port}"
    remedy = "MASTER_ADDR" if place.launcher == "torchrun" else "launch.master_addr"
    while True:
        try:
            address = place.master_addr, place.master_port
            socket.create_connection(address, min(seconds, CONNECT_S)).close()
            return
        except OSError as error:
            waited, why = time.monotonic() - begin, error.strerror or str(error)
        if waited > seconds:
            raise TimeoutError(
                f"nothing listened at {where} ({why}) within launch.timeout_s={seconds:g}: if rank "
                f"0 is on another host, give {remedy}"
            )
        if waited > HINT_S and not hinted:
            say(
                f"rank {place.rank} has waited {waited:.0f} s for rank 0 at {where} ({why}); if "
                f"rank 0 is on another host, give {remedy}"
            )
            hinted = True
        time.sleep(0.1)


def _check_start(store: Store, run: str | None, place: RankAssignment, attempt: int) -> None:
    """Raises OtherStart, on this rank alone, if the store that it reached belongs to another start.

    Two steps of a job, or two jobs, may use one port, and a rank of one must not train with the
    ranks of the other.
    """
    key = f"{START_KEY}/{attempt}"
    mine = {"start": place.start, "ranks": place.world_size, "run": run}
    if place.rank == 0:
        put(store, key, mine)
        return
    where = f"the store at {place.master_addr}:{place.master_port} belongs to other ranks"
    remedy = "give each start its own port"
    try:
        theirs = get(store, key)
    except ValueError:
        raise OtherStart(
            f"{where}, whose {SECRET} differs: {remedy}, or give all ranks the same {SECRET}"
        ) from None
    named = theirs["start"], theirs["ranks"]
    if named != (place.start, place.world_size):
        words = [
            f"{start or 'a start'} with {ranks} ranks"
            for start, ranks in (named, (mine["start"], mine["ranks"]))
        ]
        raise OtherStart(
            f"{where} ({words[0]}), but this rank belongs to {words[1]}: "
            f"{remedy} (launch.master_port)"
        )
    # If a variable identifies the start, `agree_on_run` finds a differing run, and also reports it
    # to rank 0.
    if not place.start and theirs["run"] != run:
        raise OtherStart(
            f"{where}, which have run={show(theirs['run'])}, but this rank has run={show(run)}: "
            f"{remedy}, or give all ranks the same command line"
        )


def with_counted_ranks(store: Store, place: RankAssignment) -> RankAssignment:
    """Returns `place` with the number of ranks on this host, counted by host name and boot id.

    The call is collective over the world. It raises HostError, a UserError, if the launcher's local
    rank is too large.
    """
    put(store, f"{HOST_KEY}/{place.rank}", [socket.gethostname(), boot_id()])
    hosts = get_all(store, [f"{HOST_KEY}/{rank}" for rank in range(place.world_size)])
    here = hosts.count(hosts[place.rank])
    if place.local_rank >= here:
        raise HostError(
            f"LOCAL_RANK={place.local_rank} must be smaller than the number of ranks on host "
            f"{socket.gethostname()}, which was counted as {here}: export LOCAL_WORLD_SIZE, the "
            "number of ranks on this host"
        )
    return dataclasses.replace(place, local_world_size=here)


def keeps_store(environ: Mapping[str, str]) -> bool:
    """Returns whether the agent that started this process (torchrun's or ours) keeps the store."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listening_store(
    place: RankAssignment, timeout: timedelta, say: Callable[[str], None] = print_line
) -> TCPStore:
    """Opens rank 0's store, which listens on MASTER_ADDR if that is an address of this host.

    If not, the store listens on all addresses.
    """
    one_host = place.launcher != "torchrun" and place.on_one_host
    loopback = one_host or is_loopback(place.master_addr)
    listening = listen_at(place.master_addr, place.master_port, loopback)
    if listening is None:
        say(
            f"MASTER_ADDR={place.master_addr} does not resolve to an address of this host that "
            "other hosts can reach: the ranks' store listens on all addresses of this host"
        )
        listening = listen_everywhere(place.master_port)
    return serve(place.master_addr, listening, world_size=place.world_size, timeout=timeout)


def attempt_of_agent() -> int:
    """Returns how often torchrun's agent has restarted the ranks."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
