"""Lets the processes of a job meet in a store, and agree on their ranks and their run."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel3d.blueprint.cluster import Cluster
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.layout import layout_of
from parallel3d.checkpoint import identity
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
from parallel3d.host.devices import HostError, device_of_rank, gpu_of_rank, shared_gpu
from parallel3d.host.gpus import boot_id
from parallel3d.host.memory import nothing_collected
from parallel3d.run.directory import (
    PLACEMENT_FILE,
    folder_in_run,
    make_run_directory,
    take_run,
)
from parallel3d.run.keys import LaunchConfig
from parallel3d.run.launch import Worker, ending_on_signals, until
from parallel3d.run.launcher_environment import RankAssignment
from parallel3d.run_config import Config
from parallel3d.topology import placed_ranks
from parallel3d.topology.cluster.discover import discover, run_command
from parallel3d.topology.placed_ranks import Process

if TYPE_CHECKING:
    from torch.distributed import PrefixStore, Store, TCPStore


PROCESS_KEY = "parallel3d/process"
RANKS_KEY = "parallel3d/ranks"


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


# Rendezvous of processes that torchrun or srun started: store, run directory, device

# Subcommands that continue an existing run.
CAN_RESUME = ("train",)
READ_A_RUN = ("eval",)  # subcommands that write into a folder of an existing run

RUN_KEY = "parallel3d/run"  # the store's key of rank 0's run, read by the other ranks
TELL_S = 15.0  # maximum wait for the store of rank 0, which imports torch first
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


def rendezvous(launch: LaunchConfig, run: str | None, place: RankAssignment) -> PrefixStore:
    """Connects to the store of rank 0 or of torchrun's agent, and returns it.

    `run` is the name that the user gave the run, or None.

    Raises UserError if rank 0's port is taken, and OtherStart if the store belongs to other ranks.
    """
    with nothing_collected():
        import torch.distributed as dist

    size, timeout = place.world_size, timedelta(seconds=launch.timeout_s)
    agent_listens = keeps_store(os.environ)
    try:
        if place.rank == 0 and not agent_listens:
            store = _listening_store(place, timeout)
        else:
            if not agent_listens:
                _wait_for_listener(place, launch.timeout_s)
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
    attempt = _attempt() if agent_listens else 0
    _check_start(store, run, place, attempt)
    own = dist.PrefixStore(f"{place.prefix}/attempt{attempt}", behind_secret(store))
    if attempt and place.rank == 0:
        store.delete_key(NCCL_DUMP_KEY)
        own.set(CLEARED_KEY, "")
    elif attempt:
        own.wait([CLEARED_KEY])  # NCCL reads NCCL_DUMP_KEY as soon as its first group starts
    return own


def _wait_for_listener(place: RankAssignment, seconds: float) -> None:
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
            print_line(
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


def _listening_store(place: RankAssignment, timeout: timedelta) -> TCPStore:
    """Opens rank 0's store, which listens on MASTER_ADDR if that is an address of this host.

    If not, the store listens on all addresses.
    """
    one_host = place.launcher != "torchrun" and place.on_one_host
    loopback = one_host or is_loopback(place.master_addr)
    listening = listen_at(place.master_addr, place.master_port, loopback)
    if listening is None:
        print_line(
            f"MASTER_ADDR={place.master_addr} does not resolve to an address of this host that "
            "other hosts can reach: the ranks' store listens on all addresses of this host"
        )
        listening = listen_everywhere(place.master_port)
    return serve(place.master_addr, listening, world_size=place.world_size, timeout=timeout)


def _attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


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
        if _attempt() and before.check([RUN_KEY]):  # torchrun's agent restarted the ranks
            named = dataclasses.replace(config, run=get(before, RUN_KEY))
        with worker.taking_run:  # a signal that ends this process removes the whole directory
            if app in READ_A_RUN:
                run_dir = folder_in_run(named.runs_dir, str(named.run), app)
            else:
                named, run_dir = make_run_directory(
                    named, job_id=place.job_id, may_resume=app in CAN_RESUME
                )
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
