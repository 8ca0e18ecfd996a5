"""How launched processes agree, through the store, on which of them is which rank."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel3d.comm.store import (
    behind_secret,
    get,
    get_all,
    is_loopback,
    listen_at,
    listen_everywhere,
    put,
    serve,
    sign,
    verify,
)
from parallel3d.config.schema import Config
from parallel3d.errors import UserError
from parallel3d.host.devices import device_of_rank
from parallel3d.host.memory import nothing_collected
from parallel3d.run.directory import PLACEMENT_FILE, make_run_directory, take_run
from parallel3d.run.launch import RankAssignment, Worker
from parallel3d.topology.cluster.discover import discover, run_command
from parallel3d.topology.cluster.parts import Cluster
from parallel3d.topology.layout import layout_of
from parallel3d.topology.placement import placed_ranks
from parallel3d.topology.placement.placed_ranks import PlacedRanks, Process

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore


PROCESS_KEY = "parallel3d/process"
RANKS_KEY = "parallel3d/ranks"
RANKS_SEEN_KEY = "parallel3d/ranks_seen"


def assign_rank(
    config: Config, worker: Worker, store: Store, environ: Mapping[str, str], app: str
) -> None:
    """Set `worker.rank` and `worker.placement`; every launched process calls it once.

    On entry `worker.rank` is the launch rank. Launch rank 0 decides, says what the user should
    know, and leaves the map in the run directory. With the default placement nobody waits for it:
    each process says where it is, and the ranks are the launcher's.

    Raises:
        UserError: the placement does not fit; on every process, with the same sentence.
    """
    if worker.world_size == 1:
        return
    launch_rank = worker.rank
    mine = Process(
        environ.get("SLURMD_NODENAME") or socket.gethostname(),  # as Slurm's topology calls it
        worker.local_rank,
        environ.get("SLURM_TOPOLOGY_ADDR", ""),
        environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""),
    )
    put(store, f"{PROCESS_KEY}/{launch_rank}", mine)
    needs_cluster = placed_ranks.wants_cluster(config) or app == "bench comm"
    moves = needs_cluster or config.placement != placed_ranks.DEFAULT
    if launch_rank == 0:
        _decide(config, worker, store, environ, needs_cluster, moves)
    if not moves:
        return
    word = verify(RANKS_KEY, store.get(RANKS_KEY))
    if launch_rank > 0:
        store.add(RANKS_SEEN_KEY, 1)
    if word.startswith(b"error:"):
        raise UserError(word.removeprefix(b"error:").decode())
    ranks, worker.placement = placed_ranks.from_word(word, layout_of(config))
    worker.rank = ranks[launch_rank]


def _decide(
    config: Config,
    worker: Worker,
    store: Store,
    environ: Mapping[str, str],
    needs_cluster: bool,
    moves: bool,
) -> None:
    """On launch rank 0: the map made, saved, said and handed on."""
    keys = [f"{PROCESS_KEY}/{launch_rank}" for launch_rank in range(worker.world_size)]
    processes = [Process(*said) for said in get_all(store, keys)]
    try:
        cluster = find_cluster(config, processes, environ) if needs_cluster else None
        placed = placed_ranks.place_processes(config, processes, cluster)
    except UserError as error:
        store.set(RANKS_KEY, sign(RANKS_KEY, b"error:" + str(error).encode()))
        wait_for_readers(store, RANKS_SEEN_KEY, worker.world_size - 1)
        return
    if moves:
        store.set(RANKS_KEY, sign(RANKS_KEY, placed_ranks.to_word(placed)))
    _tell(placed)
    placed_ranks.save(placed, worker.run_dir / PLACEMENT_FILE)


def find_cluster(config: Config, processes: list[Process], environ: Mapping[str, str]) -> Cluster:
    """The cluster as the configuration or its discovery describes it.

    Left without a number of nodes it has one for each host, or as many as the ranks need.
    """
    settings = config.cluster
    if settings.source == "config" and settings.nodes is None:
        hosts = len({process.host for process in processes})
        nodes = max(hosts, -(-len(processes) // (settings.gpus_per_node or len(processes))))
        settings = dataclasses.replace(settings, nodes=nodes)
    addresses = {p.host: (p.address, p.pattern) for p in processes if p.address}
    return discover(settings, environ, run_command, len(processes), addresses or None)


def _tell(placed: PlacedRanks) -> None:
    if placed.note:
        print(f"parallel3d: {placed.note}", file=sys.stderr, flush=True)


def wait_for_readers(store: Store, key: str, readers: int) -> None:
    """Keep rank 0, which may hold the store, until the others have read why it ends."""
    deadline = time.monotonic() + 5
    while store.add(key, 0) < readers and time.monotonic() < deadline:
        time.sleep(0.02)


# How the processes of torchrun or srun meet: store, run directory, device.


# Those that take up a run that exists.
CAN_GO_ON = ("train",)

# Rank 0's word to the others, once the store is up.
RUN_KEY = "parallel3d/run"
SEEN_KEY = "parallel3d/run_seen"

# Written by ProcessGroupNCCL on an error or time-out past all prefixes (kStoreDumpKey in
# ProcessGroupNCCL.hpp): whoever finds it waits TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC and aborts. All
# its other keys, such as remote_error, have the group's prefix and so the attempt's.
NCCL_DUMP_KEY = "exception_dump"
CLEARED_KEY = "parallel3d/cleared"


class RankZerosError(UserError):
    """What rank 0 has found and says itself; its store may be gone with it."""


def rendezvous(config: Config, place: RankAssignment) -> Store:
    """Connect to the store at rank 0 (or, under torchrun, its agent).

    Raises UserError if rank 0's port is taken.
    """
    with nothing_collected():
        import torch.distributed as dist

    more = {"world_size": place.world_size, "timeout": timedelta(seconds=config.launch.timeout_s)}
    agent_listens = keeps_store(os.environ)
    try:
        if place.rank == 0 and not agent_listens:
            store = _listening_store(place, more)
        else:
            store = dist.TCPStore(
                place.master_addr, place.master_port, wait_for_workers=False, **more
            )
    except OSError as error:  # of which torch's DistNetworkError is none
        if error.errno != errno.EADDRINUSE:
            raise
        key = "launch.master_port" if place.launcher == "slurm" else "MASTER_PORT"
        raise UserError(
            f"port {place.master_port} is in use on {place.master_addr}: choose another {key}"
        ) from None
    # The agent's store outlives the ranks: what those before a restart said is not for these.
    attempt = _attempt() if agent_listens else 0
    own = dist.PrefixStore(f"attempt{attempt}", behind_secret(store))
    if attempt and place.rank == 0:
        store.delete_key(NCCL_DUMP_KEY)
        own.set(CLEARED_KEY, "")
    elif attempt:
        own.wait([CLEARED_KEY])  # NCCL looks for the other key from the start of its first group
    return own


def keeps_store(environ: Mapping[str, str]) -> bool:
    """Whether the agent that started this process keeps the store: torchrun's, or ours."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listening_store(place: RankAssignment, more: dict[str, Any]) -> TCPStore:
    """Rank 0's store, on MASTER_ADDR's address alone; on all where it is none of this machine's."""
    one_host = place.launcher == "slurm" and place.world_size == place.local_world_size
    loopback = one_host or is_loopback(place.master_addr)
    listening = listen_at(place.master_addr, place.master_port, loopback)
    if listening is None:
        note = (
            f"MASTER_ADDR={place.master_addr} leads to no address of this host that others reach: "
            "the ranks' store listens on all of its addresses"
        )
        print(f"parallel3d: {note}", file=sys.stderr, flush=True)
        listening = listen_everywhere(place.master_port)
    return serve(place.master_addr, listening, **more)


def _attempt() -> int:
    """How many times torchrun's agent has started the ranks again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def agree_on_run(
    app: str, config: Config, place: RankAssignment, worker: Worker, store: Store, kind: str
) -> Config:
    """Make or take the run directory on rank 0 and make it known; the others learn the run.

    Sets `worker.run_dir` and `worker.device`, one of `kind`, this host's choice. A UserError of
    rank 0 is raised on every rank, on the others as a RankZerosError; so is one on ranks whose host
    chose another kind.
    """
    error: UserError | None = None
    if place.rank == 0:
        try:
            if _attempt() and (made := _name_before(store)):
                config = dataclasses.replace(config, run=made)
            config, run_dir = make_run_directory(
                config, job_id=place.job_id, may_go_on=app in CAN_GO_ON
            )
            take_run(config, run_dir)
            worker.run_dir = run_dir  # now that it is ours: what fails later tidies it up
            put(store.underlying_store, RUN_KEY, config.run)
            word = {"run": config.run, "run_dir": str(run_dir), "device": kind}
        except UserError as refused:
            error, word = refused, {"error": str(refused)}
        put(store, RUN_KEY, word)
        if error is not None:
            wait_for_readers(store, SEEN_KEY, place.world_size - 1)
            raise error
    word = get(store, RUN_KEY)
    if place.rank != 0:
        store.add(SEEN_KEY, 1)
    if "error" in word:
        raise RankZerosError(word["error"])
    worker.run_dir = Path(word["run_dir"])
    if kind != word["device"]:
        raise UserError(
            f"device={config.device}: rank 0 computes on {word['device']}, rank {place.rank} would "
            f"on {kind}; give device=cpu or device=cuda"
        )
    worker.device = device_of_rank(kind, place.local_rank)
    return dataclasses.replace(config, run=word["run"])


def _name_before(store: Store) -> str | None:
    """The run's name before torchrun's agent started the ranks again: one without is made once."""
    before = store.underlying_store
    return get(before, RUN_KEY) if before.check([RUN_KEY]) else None
