"""Measures the rows of `bench comm`: collectives with known results, in the groups of a layout.

The input of member m of a group is `pattern(m)`. It consists of small whole numbers, so that sums
are exact in fp32, and repeats with a prime period, so that a misplaced shard is noticed.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.blueprint.cluster import Link, LinkClass, cluster_from_config
from parallel3d.blueprint.collectives import bus_factor
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.layout import DEFAULT_ORDER, DIMENSIONS, Layout
from parallel3d.blueprint.rank_mapping import RankMapping, Tiling
from parallel3d.comm import collectives
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.group import Group
from parallel3d.comm.process_groups import GLOO_ON, ProcessGroups
from parallel3d.device import accelerator
from parallel3d.estimate.network import collective_time
from parallel3d.pipeline.p2p import P2PRoute, SharedP2P, post
from parallel3d.run.keys import LaunchConfig
from parallel3d.run.launch import Worker
from parallel3d.schedules.actions import Action, Kind
from parallel3d.schedules.orders import StageAssignment

# Share of the time budget that the rows may use; the probe of pairs and the report need the rest.
MEASURING_SHARE = 0.75


def timed_calls(
    run: Callable[[], object],
    barrier: Callable[[], object],
    device: torch.device,
    warmup: int,
    calls: int,
) -> list[float]:
    """Returns the seconds of `calls` calls of `run` on this rank, after `warmup` untimed calls.

    A barrier precedes each call.
    """
    seconds = []
    for number in range(warmup + calls):
        barrier()
        accelerator.synchronize(device)
        start = time.perf_counter()
        run()
        accelerator.synchronize(device)
        if number >= warmup:
            seconds.append(time.perf_counter() - start)
    return seconds


def slowest_rank(by_rank: Sequence[Sequence[float]]) -> float:
    """Returns the median over calls of the time of each call at its slowest rank.

    `by_rank` has, for each rank, the seconds of each call.
    """
    return statistics.median(max(call) for call in zip(*by_rank, strict=True))


@dataclass
class CallCounts:
    """Divides a time budget among rows, each of which has at least one timed call."""

    estimates: Sequence[float]  # seconds of one call of each row
    seconds: float  # time left for all rows
    warmup: int  # warm-up calls of every row, if time allows
    calls: int  # timed calls of every row, if time allows
    row: int = 0  # number of rows that are done
    spent: float = 0.0  # seconds that these rows took
    cut: int = 0  # number of rows with fewer calls than requested

    def next(self) -> tuple[int, int]:
        """Returns the numbers of warm-up calls and of timed calls for the next row.

        They are chosen so that the time left suffices for as many calls in every remaining row.
        """
        ahead, full = sum(self.estimates[self.row :]), self.warmup + self.calls
        affordable = (self.seconds - self.spent) / max(ahead, 1e-9)
        if affordable >= full:
            return self.warmup, self.calls
        self.cut += 1
        calls = max(1, int(affordable * self.calls / full))
        return max(0, min(self.warmup, int(affordable) - calls)), calls

    def done(self, seconds: float) -> None:
        """Records that all calls of the row took `seconds`."""
        self.spent += seconds
        self.row += 1


PERIOD = 251
ITEM = 4  # bytes of an fp32 number

REDUCTIONS = {name: getattr(dist.ReduceOp, name.upper()) for name in ("sum", "avg", "max", "min")}
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
PLAIN = ("all_gather", "broadcast", "scatter", "gather", "all_to_all", "send_recv", "barrier")
# Collectives by which training sends activations and gradients; its reductions are sums.
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
TRAINING = dict.fromkeys(("tp", "cp", "dp", "dp_cp"), COLLECTIVES) | {"pp": ("send_recv",)}


class WrongResult(RuntimeError):
    """Signals that a collective has given a wrong result."""


class BenchOperation(NamedTuple):
    """A collective operation, and the path on which it runs."""

    name: str  # one of `network.OPERATIONS`
    reduction: str | None = None  # sum, avg, max or min, or None if it does not reduce
    own: bool = False  # whether training's own path (shared memory of CPU ranks) runs it

    @property
    def label(self) -> str:
        """The operation in words, such as `all-reduce sum` or `send/receive`."""
        name = "send/receive" if self.name == "send_recv" else self.name.replace("_", "-")
        return f"{name} {self.reduction}" if self.reduction else name


def is_trainings(dim: str, name: str, reduction: str | None) -> bool:
    """Returns whether training calls the collective `name` in the groups of `dim`."""
    return reduction in ("sum", None) and name in TRAINING.get(dim, ())


def operations(dim: str) -> list[BenchOperation]:
    """Returns the operations to measure in the groups of `dim`.

    A reducing collective is measured with every reduction. The collectives that training calls are
    also measured on training's own path.
    """
    return [
        BenchOperation(name, reduction, own)
        for name in (*REDUCING, *PLAIN)
        for reduction in (REDUCTIONS if name in REDUCING else (None,))
        for own in ((False, True) if is_trainings(dim, name, reduction) else (False,))
    ]


@dataclass(frozen=True)
class Site:
    """A group of this rank, this rank's device, and the transport of messages."""

    group: Group
    device: torch.device
    boxes: SharedP2P | None = None  # the pipeline's shared memory, or None if it is not used
    chain: bool = False  # whether messages go from stage to stage, instead of around a ring

    def close(self) -> None:
        """Frees the pipeline's shared memory, if it is used."""
        if self.boxes is not None:
            self.boxes.memory.close()

    @property
    def backend(self) -> str:
        name = dist.get_backend(self.group.handle)
        return "gloo" if name == GLOO_ON else name

    def whole_bytes(self, size: int) -> int:
        """Returns `size` rounded down to a whole number of fp32 elements per rank, at least one."""
        unit = ITEM * self.group.size
        return max(unit, size // unit * unit)

    def path(self, operation: BenchOperation, size: int) -> str:
        """Returns the name of the transport that an operation uses for `size` bytes.

        The transport is the backend or, on training's own path if the size fits, `mailbox` or
        `shared memory`.
        """
        if not operation.own or accelerator.is_accelerator(self.device):
            return self.backend
        if operation.name == "send_recv":
            message = torch.empty(self.whole_bytes(size) // ITEM)
            return "mailbox" if self.boxes and self.boxes.fits(message) else self.backend
        return self.backend if self.group.shared is None else "shared memory"


@dataclass
class Call:
    """Contains an operation that is ready to run on its buffers.

    Attributes:
        run: runs the operation.
        result: the buffer with the result, if `run` returns no tensor.
        expected: the required result of the first `run`, or None if this rank checks nothing.
    """

    run: Callable[[], object]
    result: Tensor | None = None
    expected: Tensor | None = None

    def check(self, what: str) -> None:
        """Runs the operation for the first time and compares its result.

        Raises WrongResult with `what`, the name of the operation, and the first wrong number.
        """
        returned = self.run()
        got = returned if isinstance(returned, Tensor) else self.result
        if got is None or self.expected is None:
            return
        got = got.cpu()
        wrong = ~torch.isclose(got, self.expected, rtol=1e-5, atol=0)
        if wrong.any():
            i = int(wrong.nonzero()[0])
            raise WrongResult(
                f"{what}: {int(wrong.sum())} of {got.numel()} numbers are wrong; number {i} is "
                f"{got[i]:g}, not {self.expected[i]:g}"
            )


def pattern(member: int, count: int, start: int = 0) -> Tensor:
    """Returns `count` fp32 numbers of the input of `member`, starting at index `start`."""
    ramp, begin = torch.arange(1.0, PERIOD + 1), start % PERIOD
    return ramp.repeat((begin + count) // PERIOD + 1)[begin : begin + count] * (member + 1)


def reduced(reduction: str, n: int, count: int, start: int = 0) -> Tensor:
    """Returns `count` fp32 numbers of the reduction of `pattern` over `n` members."""
    factor = {"sum": n * (n + 1) / 2, "avg": (n + 1) / 2, "max": n, "min": 1}[reduction]
    return pattern(0, count, start) * factor


def prepare(operation: BenchOperation, site: Site, size: int) -> Call:
    """Prepares an operation on a buffer of `size` bytes, as nccl-tests counts them."""
    group, device, name, own = site.group, site.device, operation.name, operation.own
    n, me, handle, root = group.size, group.index, group.handle, group.ranks[0]
    count = site.whole_bytes(size) // ITEM
    if name == "barrier":
        return Call(partial(dist.barrier, group=handle))
    if name == "send_recv":
        return _messages(operation, site, count)
    run: Callable[..., object]
    mine, whole = pattern(me, count).to(device), torch.empty(count, device=device)
    part = torch.empty(count // n, device=device)
    if operation.reduction is not None:
        op, expected = REDUCTIONS[operation.reduction], reduced(operation.reduction, n, count)
        if name == "reduce":
            run = partial(dist.reduce, mine, root, op, handle)
            return Call(run, mine if me == 0 else None, expected)
        if name == "all_reduce":
            run = partial(dist.all_reduce, mine, op, handle)
            run = partial(collectives.all_reduce, mine, group) if own else run
            return Call(run, mine, expected)
        run = partial(_since_2_13("reduce_scatter"), part, mine, op=op, group=handle)
        run = partial(collectives.reduce_scatter, mine, group) if own else run
        return Call(run, part, expected.chunk(n)[me])
    first = pattern(0, count)
    if name == "broadcast":
        return Call(partial(dist.broadcast, mine, root, handle), mine, first)
    if name == "scatter":
        parts = list(first.to(device).chunk(n)) if me == 0 else None
        return Call(partial(dist.scatter, part, parts, root, handle), part, first.chunk(n)[me])
    if name == "all_to_all":
        expected = torch.cat([pattern(m, count // n, me * count // n) for m in range(n)])
        return Call(partial(dist.all_to_all_single, whole, mine, group=handle), whole, expected)
    shard, expected = mine[: count // n], torch.cat([pattern(m, count // n) for m in range(n)])
    if name == "gather":
        parts = list(whole.chunk(n)) if me == 0 else None
        run = partial(dist.gather, shard, parts, root, handle)
        return Call(run, whole if me == 0 else None, expected)
    run = partial(_since_2_13("all_gather"), whole, shard, group=handle)
    return Call(partial(collectives.all_gather, shard, group) if own else run, whole, expected)


def _since_2_13(name: str) -> Callable[..., object]:
    """Returns torch's collective on single tensors, which version 2.13 renamed."""
    before = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    return getattr(dist, f"{name}_single", None) or getattr(dist, before[name])


def send_receive(sent: Tensor, to: int, received: Tensor, source: int, group: Group) -> None:
    """Sends a message to the rank `to` while receiving one from the rank `source`.

    Both are world ranks in `group`.
    """
    send = dist.P2POp(dist.isend, sent, to, group.handle)
    receive = dist.P2POp(dist.irecv, received, source, group.handle)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def _messages(operation: BenchOperation, site: Site, count: int) -> Call:
    """Prepares messages of `count` numbers from every member to the next, all at once.

    Around a ring the last member sends to the first. Along a pipeline the last only receives, and
    messages are posted as the executor posts them.
    """
    group, device = site.group, site.device
    n, me = group.size, group.index
    sent, got = pattern(me, count).to(device), torch.empty(count, device=device)
    expected = pattern((me - 1) % n, count)
    if not site.chain:
        ranks = group.ranks
        run = partial(send_receive, sent, ranks[(me + 1) % n], got, ranks[(me - 1) % n], group)
        return Call(run, got, expected)
    messages = [(Action(Kind.RECV_F, 0), got)] if me > 0 else []
    messages += [(Action(Kind.SEND_F, 0), sent)] if me < n - 1 else []
    boxes = site.boxes if operation.own else None

    def along() -> None:
        for transfer in post(messages, P2PRoute(group, StageAssignment(n)), boxes):
            transfer.work.wait()

    return Call(along, got if me > 0 else None, expected)


@dataclass(frozen=True)
class Where:
    """The rank mapping of the run, and the host name of every rank."""

    placement: RankMapping
    hosts: tuple[str, ...]

    @classmethod
    def find(cls, settings: ClusterConfig, worker: Worker, layout: Layout) -> Where:
        """Returns the rank mapping and the gathered host names.

        If the worker has no rank mapping, ranks are placed in order on the configured cluster.
        The call is collective over the world. Raises UserError if the cluster has too few GPUs.
        """
        placement = worker.placement
        if placement is None:
            cluster = cluster_from_config(settings, layout.world_size)
            placement = RankMapping.tiled(cluster, layout, Tiling.parse(DEFAULT_ORDER, layout))
        device = torch.device(worker.device)
        hosts = all_gather_json(socket.gethostname(), dist.group.WORLD, device)
        return cls(placement, tuple(hosts))

    def link_class(self, a: int, b: int) -> LinkClass:
        """Returns the class of the link between two ranks."""
        slots = self.placement.slots
        return LinkClass(int(self.placement.cluster.link_class(slots[a], slots[b])))

    def slowest_link(self, ranks: Sequence[int], chain: bool) -> tuple[LinkClass, Link | None]:
        """Returns the class of the slowest link between ranks in a ring or chain, and this link.

        The link is None if no wire connects the neighbours.
        """
        ends = list(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
        worst = max(self.link_class(a, b) for a, b in (ends[:-1] if chain else ends))
        return worst, None if worst is LinkClass.NONE else self.placement.cluster.link(worst)

    def name(self, rank: int) -> str:
        """Describes a rank, such as `rank 5 (pp 1, dp 0, tp 1) on web12 GPU 5, rail 5`.

        The host name precedes the GPU if the cluster has another name for the node.
        """
        place, facts, host = self.placement.layout.named(rank), self.facts(rank), self.hosts[rank]
        gpu = str(facts["gpu"])
        if gpu.split(" GPU ")[0].split(".")[0] != host.split(".")[0]:
            gpu = f"{host}, {gpu}"
        return f"rank {rank} ({place}) on {gpu}, rail {facts['rail']}"

    def facts(self, rank: int) -> dict[str, object]:
        """Returns plain data about a rank for JSON."""
        cluster, slot = self.placement.cluster, int(self.placement.slots[rank])
        return {
            "rank": rank,
            **self.placement.layout.coordinates(rank)._asdict(),
            "host": self.hosts[rank],
            "gpu": cluster.slot_name(slot),
            "rail": int(cluster.rail_of[slot]),
        }


ALONE, TOGETHER = "alone", "together"
MOST_ALONE = 16  # maximum number of a dimension's groups, evenly spread, that are measured alone
WORLD = "world"


class BenchRow(NamedTuple):
    """One operation at one size in the groups of one dimension.

    Attributes:
        dim: the dimension, or WORLD.
        operation: the operation.
        size: the size of the buffer in bytes, or 0 for a barrier.
        mode: ALONE, if the groups work one after another, or TOGETHER, if they work at once.
    """

    dim: str
    operation: BenchOperation
    size: int
    mode: str

    @property
    def label(self) -> str:
        """The row in words, such as `dp all-reduce sum, 4096 bytes, together`."""
        size = f", {self.size} bytes" if self.size else ""
        own = ", training's way" if self.operation.own else ""
        return f"{self.dim} {self.operation.label}{size}{own}, {self.mode}"

    def facts(self) -> dict[str, Any]:
        """Returns the fields that identify the row in JSON."""
        name, reduction, own = self.operation
        named = {"dim": self.dim, "op": name, "reduction": reduction, "training_path": own}
        return named | {"size": self.size, "mode": self.mode}


def groups_of(layout: Layout, dim: str) -> list[list[int]]:
    return layout.groups(*(DIMENSIONS if dim == WORLD else (dim,)))


def dimensions(layout: Layout) -> tuple[list[str], dict[str, str]]:
    """Returns the dimensions to measure, and for each other dimension why it is left out."""
    data = ("cp", "dp_cp") if layout.cp > 1 else ("dp",)
    sizes = {dim: layout.size(dim) for dim in ("tp", "dp", "pp")}
    left_out = {dim: f"{dim}=1 has no groups" for dim, size in sizes.items() if size == 1}
    if layout.cp > 1 == layout.dp:
        left_out["dp_cp"] = "it has the same ranks as cp"
    elif layout.cp > 1:
        left_out["dp"] = "it sends only a token count, while dp_cp sends the gradients"
    dims = [dim for dim in ("tp", *data, "pp") if dim not in left_out]
    same = next((dim for dim in dims if layout.size(dim) == layout.world_size), None)
    if same is None:
        return [*dims, WORLD], left_out
    return dims, left_out | {WORLD: f"it has the same ranks as {same}"}


def sites(groups: ProcessGroups, device: torch.device, launch: LaunchConfig) -> dict[str, Site]:
    """Returns this rank's site in each dimension.

    The call is collective, because stages may open shared memory.
    """
    found = {}
    for dim in dimensions(groups.layout)[0]:
        group, boxes = getattr(groups, dim), None
        if dim == "pp" and device.type == "cpu" and launch.shared_memory:
            boxes = SharedP2P.open(group, launch.timeout_s)
        found[dim] = Site(group, device, boxes, chain=dim == "pp")
    return found


def all_rows(
    mine: dict[str, Site], sizes: Sequence[int], layout: Layout
) -> tuple[list[BenchRow], dict[str, str]]:
    """Returns all rows, and the reasons why dimensions or reductions have none.

    The call is collective over the world, and the result is equal on every rank. Training's own
    path has a row only if it differs from the backend on some rank.
    """
    left_out = dimensions(layout)[1]
    if why := _why_no_average(next(iter(mine.values()))):
        left_out["avg"] = why
    every = [
        BenchRow(dim, operation, size, mode)
        for dim in mine
        for operation in operations(dim)
        if operation.reduction not in left_out
        for size in ((0,) if operation.name == "barrier" else dict.fromkeys(sizes))
        for mode in ((ALONE, TOGETHER) if len(groups_of(layout, dim)) > 1 else (ALONE,))
    ]
    differs = [
        row.operation.own and mine[row.dim].path(row.operation, row.size) != mine[row.dim].backend
        for row in every
    ]
    device = next(iter(mine.values())).device
    by_rank = all_gather_json(differs, dist.group.WORLD, device)
    special = [any(of_row) for of_row in zip(*by_rank, strict=True)]
    rows = [row for row, own in zip(every, special, strict=True) if own or not row.operation.own]
    return rows, left_out


def _why_no_average(site: Site) -> str | None:
    """Returns why the backend cannot average, like gloo before torch 2.13, or None if it can."""
    try:
        dist.all_reduce(torch.ones(1, device=site.device), REDUCTIONS["avg"], site.group.handle)
    except (RuntimeError, ValueError) as error:  # every rank raises it before anything is sent
        if "AVG" not in str(error):
            raise
        return f"{site.backend} in torch {torch.__version__} has no AVG"
    return None


def turns(layout: Layout, row: BenchRow) -> list[list[int]]:
    """Returns, for each turn of a row, the numbers of the groups that work at the same time."""
    count = len(groups_of(layout, row.dim))
    if row.mode == TOGETHER:
        return [list(range(count))]
    taken = min(count, MOST_ALONE)
    return [[turn * count // taken] for turn in range(taken)]


# The path and the seconds of each call on one rank, or None if the rank was not measured.
Timing = tuple[str, list[float]] | None


def result(
    row: BenchRow, calls: int, by_rank: Sequence[Timing], site: Site, where: Where
) -> dict[str, Any]:
    """Returns a measured row for JSON.

    `seconds` is the median over calls of the time at the slowest rank, in the slowest group. Bytes
    and bandwidths in 1e9 B/s are defined as in nccl-tests, whose busbw is `bus_gb_per_s`.

    Args:
        row: the row.
        calls: number of timed calls.
        by_rank: the timing of every rank.
        site: this rank's site in the dimension of the row.
        where: the rank mapping and the hosts.
    """
    groups = groups_of(where.placement.layout, row.dim)
    nbytes = site.whole_bytes(row.size) if row.size else 0
    name, n = row.operation.name, site.group.size
    found: list[dict[str, Any]] = []
    for ranks in groups:
        members = [timing for timing in (by_rank[rank] for rank in ranks) if timing is not None]
        if not members:
            continue
        kind, link = where.slowest_link(ranks, chain=site.chain and name == "send_recv")
        found.append(
            {
                "ranks": ranks,
                "path": members[0][0],
                "link": kind.label,
                "seconds": slowest_rank([seconds for _, seconds in members]),
                "priced_s": link and collective_time(name, n, nbytes, link),
                "rank_seconds": [statistics.median(seconds) for _, seconds in members],
            }
        )
    slowest = max(found, key=lambda group: group["seconds"])
    bandwidth = nbytes / slowest["seconds"] / 1e9
    return row.facts() | {
        "bytes": nbytes,
        "ranks_of_a_group": n,
        "path": " or ".join(sorted({group["path"] for group in found})),
        "groups_measured": len(found),
        "groups_of_the_dimension": len(groups),
        "calls": calls,
        "seconds": slowest["seconds"],
        "algorithm_gb_per_s": bandwidth,
        "bus_gb_per_s": bandwidth * bus_factor(name, n),
        "link": slowest["link"],
        "priced_s": slowest["priced_s"],
        "times_the_price": slowest["priced_s"] and slowest["seconds"] / slowest["priced_s"],
        "result_checked": name != "barrier",
        "groups": found,
    }


# The arguments are a description of the work, the number of units that are done, and their total.
Progress = Callable[[str, int, int], None]


@dataclass
class Measurement:
    """Checks and times all rows within a time budget. All methods are collective."""

    rows: list[BenchRow]  # equal on every rank
    sites: dict[str, Site]  # the sites of this rank by dimension
    where: Where
    warmup: int  # warm-up calls of each row, if `budget_s` allows them
    calls: int  # timed calls of each row, if `budget_s` allows them
    budget_s: float  # seconds for all rows
    progress: Progress = lambda row, done, of: None
    rows_cut: int = 0  # number of rows with fewer calls than `calls`, known after `results`

    def __post_init__(self) -> None:
        self.ends = time.perf_counter() + self.budget_s
        self.layout = self.where.placement.layout
        self.device = next(iter(self.sites.values())).device

    def results(self) -> Iterator[tuple[str, list[dict]]]:
        """Measures and yields each dimension with its rows for JSON, which only rank 0 has.

        Raises WrongResult on a rank that finds a wrong number.
        """
        plan = self._plan()
        for dim, site in self.sites.items():
            of_dim = [row for row in self.rows if row.dim == dim]
            calls, mine = [], []
            for row in of_dim:
                self.progress(row.label, len(self.rows) + plan.row, 2 * len(self.rows))
                warmup, timed = self._agreed(plan)
                start = time.perf_counter()
                mine.append(self._measure(row, warmup, timed))
                plan.done(time.perf_counter() - start)
                calls.append(timed)
            by_row = zip(*all_gather_json(mine, dist.group.WORLD, self.device), strict=True)
            seen = zip(of_dim, calls, by_row, strict=True) if dist.get_rank() == 0 else ()
            yield dim, [result(*row, site, self.where) for row in seen]
        self.rows_cut = plan.cut

    def _plan(self) -> CallCounts:
        """Calls every operation once, to connect the groups and to plan the numbers of calls.

        All groups work at once here. If the groups of a row take turns, the measured time is
        multiplied by the number of turns.
        """
        first: dict[tuple, float] = {}
        for number, row in enumerate(self.rows):
            key = row[:3]
            if key not in first:
                self.progress(f"first call of {row.label}", number, 2 * len(self.rows))
                call = prepare(row.operation, self.sites[row.dim], row.size)
                dist.barrier()
                start = time.perf_counter()
                call.run()
                accelerator.synchronize(self.device)
                dist.barrier()
                first[key] = time.perf_counter() - start
        estimates = [first[row[:3]] * len(turns(self.layout, row)) for row in self.rows]
        return CallCounts(estimates, self.ends - time.perf_counter(), self.warmup, self.calls)

    def _agreed(self, plan: CallCounts) -> tuple[int, int]:
        """Returns, on every rank, rank 0's numbers of calls for the next row: warm-up and timed."""
        calls = torch.tensor(plan.next(), device=self.device)
        dist.broadcast(calls, 0)
        warmup, timed = calls.tolist()
        return warmup, timed

    def _measure(self, row: BenchRow, warmup: int, timed: int) -> Timing:
        site, seen = self.sites[row.dim], None
        mine = groups_of(self.layout, row.dim).index(list(site.group.ranks))
        call = prepare(row.operation, site, row.size)
        together = row.mode == TOGETHER
        barrier = dist.barrier if together else partial(dist.barrier, group=site.group.handle)
        for turn in turns(self.layout, row):
            if mine in turn:
                call.check(f"{row.label}, rank {dist.get_rank()}")  # the first warm-up call
                calls = max(0, warmup - 1), timed
                seen = (
                    site.path(row.operation, row.size),
                    timed_calls(call.run, barrier, self.device, *calls),
                )
            dist.barrier()
        return seen
