"""Lets the ranks of a run agree on their run directory, their devices and their ranks."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel3d.blueprint.cluster import Cluster
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.checkpoint import identity
from parallel3d.comm.store import get, get_all, put
from parallel3d.config.fields import show
from parallel3d.errors import UserError, print_line
from parallel3d.host.devices import device_of_rank, gpu_of_rank, shared_gpu
from parallel3d.resolve import layout_of
from parallel3d.run.directory import (
    PLACEMENT_FILE,
    folder_in_run,
    make_run_directory,
    take_run,
)
from parallel3d.run.failure import note_earlier
from parallel3d.run.keys import LaunchConfig
from parallel3d.run.launch import Worker, ending_on_signals, until
from parallel3d.run.launcher_environment import RankAssignment
from parallel3d.run.rendezvous import (
    OtherStart,
    RankZerosError,
    attempt_of_agent,
    from_rank_0,
    rendezvous,
    seen_key,
)
from parallel3d.run_config import Config
from parallel3d.topology import placed_ranks
from parallel3d.topology.cluster.discover import discover, run_command
from parallel3d.topology.placed_ranks import Process

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store

PROCESS_KEY = "parallel3d/process"
RANKS_KEY = "parallel3d/ranks"
TELL_S = 15.0  # maximum wait for the store of rank 0, which imports torch first
# Subcommands that continue an existing run.
CAN_RESUME = ("train",)
READ_A_RUN = ("eval",)  # subcommands that write into a folder of an existing run

RUN_KEY = "parallel3d/run"  # the store's key of rank 0's run, read by the other ranks


def agree_on_run(
    app: str, config: Config, place: RankAssignment, worker: Worker, store: PrefixStore, kind: str
) -> Config:
    """Creates or continues the run directory on rank 0; the other ranks receive its name.

    Sets `worker.run_dir`, and sets `worker.device` to a device of type `kind`, which this host has
    chosen. A UserError of rank 0 is raised on every rank; on the other ranks, it is a
    RankZerosError. A rank whose configuration differs from rank 0's raises a RankZerosError here;
    rank 0 and the others raise it in `assign_rank`.
    """

    def decide() -> dict[str, Any]:
        worker.device = device_of_rank(kind, place.local_rank)
        named, before = config, store.underlying_store
        if attempt_of_agent() and before.check([RUN_KEY]):  # torchrun's agent restarted the ranks
            named = dataclasses.replace(config, run=get(before, RUN_KEY))
        with worker.taking_run:  # a signal that ends this process removes the whole directory
            if app in READ_A_RUN:
                run_dir = folder_in_run(named.runs_dir, str(named.run), app)
            else:
                named, run_dir = make_run_directory(
                    named, job_id=place.job_id, may_resume=app in CAN_RESUME
                )
                note_earlier(run_dir)
                take_run(named, run_dir)
            # `run_dir` is set only once this process holds the run, because a failure may remove
            # that directory.
            worker.run_dir = run_dir
        put(before, RUN_KEY, named.run)
        return {
            "run": named.run,
            "run_dir": str(run_dir),
            "device": kind,
            "init_from": named.init_from,
            "keys": identity.of_all_ranks(named),
            "typed_run": config.run,
        }

    message = from_rank_0(store, RUN_KEY, place, decide)
    worker.run_dir = Path(message["run_dir"])
    try:
        return _as_on_rank_0(config, place, worker, kind, message)
    except UserError as error:
        refuse(store, place.rank, error)
        raise RankZerosError(str(error)) from None


def _as_on_rank_0(
    config: Config, place: RankAssignment, worker: Worker, kind: str, message: dict[str, Any]
) -> Config:
    """Returns this rank's configuration with rank 0's run. Raises UserError if they differ."""
    if kind != message["device"]:
        raise UserError(
            f"device={config.device}: rank 0 computes on {message['device']}, but rank "
            f"{place.rank} would compute on {kind}; give device=cpu or device=cuda"
        )
    if message["typed_run"] != config.run:
        raise UserError(
            f"run is {show(message['typed_run'])} on rank 0 and {show(config.run)} on rank "
            f"{place.rank}, host {socket.gethostname()}: give all ranks the same command line"
        )
    worker.device = device_of_rank(kind, place.local_rank)
    # Rank 0's `init_from` counts: it may be the newest checkpoint of a run that is still training,
    # and that run may have saved another one since.
    config = dataclasses.replace(config, run=message["run"], init_from=message["init_from"])
    other = identity.first_difference(message["keys"], identity.of_all_ranks(config))
    if other is not None:
        raise UserError(
            f"{other.key} is {show(other.there)} on rank 0 and {show(other.here)} on rank "
            f"{place.rank}, host {socket.gethostname()}: give all ranks the same command line, "
            f"and make runs_dir={config.runs_dir} one folder for all hosts"
        )
    return config


def refuse(store: Store, rank: int, error: UserError) -> None:
    """Sends rank 0 the reason why this rank refuses to start, in place of its `Process`."""
    put(store, f"{PROCESS_KEY}/{rank}", {"refuses": str(error)})
    store.add(seen_key(RANKS_KEY), 1)


def tell_rank_0(
    launch: LaunchConfig, run: str | None, place: RankAssignment, error: UserError
) -> None:
    """Sends rank 0 the reason why this rank refuses to start, if this rank has no store yet.

    Nothing is sent if rank 0 has no store either, for example because it refuses to start too.
    """
    place = place.with_port(launch.master_port)

    def is_there() -> bool:
        with suppress(OSError):
            socket.create_connection((place.master_addr, place.master_port), 1.0).close()
            return True
        return False

    with ending_on_signals(lambda: "sending rank 0 an error"):
        until(is_there, TELL_S)
        with suppress(RuntimeError, OtherStart):  # rank 0 has ended, or belongs to another run
            if is_there():
                refuse(rendezvous(launch, run, place), place.rank, error)


def assign_rank(
    config: Config, worker: Worker, store: Store, environ: Mapping[str, str], app: str
) -> None:
    """Sets `worker.rank` and `worker.placement`; every launched process calls it once.

    On entry `worker.rank` is the launch rank. Launch rank 0 decides, logs notes for the user, and
    writes the rank mapping to the run directory.

    Raises UserError with the same sentence on every process if the placement does not fit, or if a
    process has refused (`refuse`).
    """
    if worker.world_size == 1:
        return
    launch_rank = worker.rank
    mine = Process(
        environ.get("SLURMD_NODENAME") or socket.gethostname(),  # the name in Slurm's topology
        worker.local_rank,
        environ.get("SLURM_TOPOLOGY_ADDR", ""),
        environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""),
        gpu_of_rank(worker.device, environ),
    )
    put(store, f"{PROCESS_KEY}/{launch_rank}", mine)
    needs_cluster = app == "bench comm" or placed_ranks.wants_cluster(
        config.placement,
        config.cluster,
        preflight=config.preflight,
        hierarchical=config.ddp.hierarchical,
    )

    def decide() -> dict[str, Any] | None:
        keys = [f"{PROCESS_KEY}/{rank}" for rank in range(worker.world_size)]
        answers = get_all(store, keys)
        if refusals := [answer["refuses"] for answer in answers if isinstance(answer, dict)]:
            raise RankZerosError(refusals[0])
        processes = [Process(*fields) for fields in answers]
        if shared := shared_gpu([(process.host, process.gpu) for process in processes]):
            raise UserError(shared)
        cluster = find_cluster(config.cluster, processes, environ) if needs_cluster else None
        placed = placed_ranks.place_processes(config, processes, cluster)
        if placed.note:
            print_line(placed.note)
        placed_ranks.save(placed, worker.run_dir / PLACEMENT_FILE)
        moves = needs_cluster or config.placement != placed_ranks.DEFAULT
        # The message is long and every rank reads it, so it is only sent if it is needed.
        return placed_ranks.to_message(placed) if moves else None

    if (message := from_rank_0(store, RANKS_KEY, worker, decide)) is not None:
        ranks, worker.placement = placed_ranks.from_message(message, layout_of(config))
        worker.rank = ranks[launch_rank]


def find_cluster(
    settings: ClusterConfig, processes: list[Process], environ: Mapping[str, str]
) -> Cluster:
    """Returns the configured or discovered cluster, by default with enough nodes for the ranks."""
    if settings.source == "config" and settings.nodes is None:
        hosts = len({process.host for process in processes})
        nodes = max(hosts, -(-len(processes) // (settings.gpus_per_node or len(processes))))
        settings = dataclasses.replace(settings, nodes=nodes)
    addresses = {p.host: (p.address, p.pattern) for p in processes if p.address}
    return discover(settings, environ, run_command, len(processes), addresses or None)
