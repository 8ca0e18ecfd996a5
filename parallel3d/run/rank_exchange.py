"""How launched processes agree, through the store, on which of them is which rank."""

from __future__ import annotations

import dataclasses
import socket
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from parallel3d.comm.job_store import get_all, put, sign, verify
from parallel3d.config.schema import Config
from parallel3d.errors import UserError
from parallel3d.run.directory import PLACEMENT_FILE
from parallel3d.run.launch import Worker
from parallel3d.topology.cluster.discover import discover, run_command
from parallel3d.topology.cluster.parts import Cluster
from parallel3d.topology.layout import layout_of
from parallel3d.topology.placement import placed_ranks
from parallel3d.topology.placement.placed_ranks import PlacedRanks
from parallel3d.topology.placement.rank_file import Process

if TYPE_CHECKING:
    from torch.distributed import Store

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
