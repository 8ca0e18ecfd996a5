"""Measures model parts, collectives and CPU contention for `parallel3d calibrate`.

Every rank runs `measure_machine`. Rank 0 runs pipeline stages that are built as in training, with
the sizes of one tensor-parallel rank. It times the embedding, a few blocks of each kind of layer,
the head with the loss, and the optimizer step. Where experts are divided among ranks,
`comm/mirrored.py` simulates the other ranks. The first 2, 4, … ranks measure collectives and
messages, and how much busy ranks slow each other down. Rank 0 writes the cluster file.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from parallel3d.blueprint.blueprint import StageBlueprint
from parallel3d.blueprint.dispatch import share_sent
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.ops import layer_kinds
from parallel3d.build import sharded_layers
from parallel3d.calibrate.pieces import (
    MOST_SIZES,
    TOGETHER,
    Extent,
    Pieces,
    check_memory,
    powers_of_two,
    room_of_host,
    tensor_sizes,
    whole_extent,
)
from parallel3d.comm import collectives as collective
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.group import Group
from parallel3d.comm.mirrored import MirroredPeers
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.comm.shared_memory import SPIN_S
from parallel3d.comm.timed_operations import Site, TimedOperation, prepare
from parallel3d.data.loader import MicroBatch
from parallel3d.data_parallel.build import data_parallel_engine
from parallel3d.device import accelerator
from parallel3d.device.precision import compute_dtype, set_matmul_precision
from parallel3d.errors import print_line
from parallel3d.estimate.profiled_cost import (
    ALL_TO_ALL,
    COLLECTIVES,
    SHARE_OF_EP,
    SHARED,
    WAYS,
    CalibrationSource,
    MeasuredMachine,
    Table,
    block_name,
    recompute_name,
)
from parallel3d.experts.balance import Balance
from parallel3d.files import replace_durably
from parallel3d.host.devices import device_name
from parallel3d.host.quotas import available_cores, memory_in_all
from parallel3d.metrics.provenance import version_of
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext
from parallel3d.models.repeats import Repeats
from parallel3d.models.transformer import Stage
from parallel3d.optim.optimizer import Optimizer
from parallel3d.parameters.initializer import Initializer
from parallel3d.pipeline.executor import ActionTimes, Executor
from parallel3d.pipeline.p2p import P2PRoute, SharedP2P, StageOutputs
from parallel3d.resolve import blueprint_of, data_parallel_settings
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import make

Run = Callable[[], object]
Tell = Callable[[str], None]
Point = tuple[int, ...]
TURNS = 3  # how often blocks are measured on several ranks at once; the fastest time counts
MEASURED_KEY = "parallel3d/calibrate/measured"
LEAST = 1e-7  # lower bound of times in seconds, and of ratios
LOG_EVERY_S = 15.0  # seconds between progress lines in the log file of a batch job


def measure_machine(
    config: Config, worker: Worker, passes: int, reserve_gb: float, to: Callable[[], Path]
) -> None:
    """Runs all measurements, and writes the cluster file on rank 0. The call is collective.

    Args:
        config: the configuration of the measuring ranks, which are all replicas (dp).
        worker: this rank.
        passes: how many times each piece is measured.
        reserve_gb: the memory of a GPU that stays free, in 1e9 bytes.
        to: returns the path of the cluster file when it is about to be written.
    """
    device, began = torch.device(worker.device), time.perf_counter()
    set_matmul_precision(config.precision)
    tell = _teller(worker)
    numbers = memory_of(device)
    extent, on_all = pieces_that_fit(config, worker, device, reserve_gb)
    tables = collectives(config, device, tell) | slowing(config, device, tell, on_all)
    if worker.rank == 0:  # the other ranks wait idle, so that they do not disturb rank 0
        numbers["peak_tflops"] = peak_tflops(device, compute_dtype(config.precision))
        found, numbers["launch.action"] = pieces(
            config, device, worker.world_size, tell, passes, extent
        )
        made, path = provenance(config, device), to()
        machine = MeasuredMachine(made, config.model, tables | found, numbers)
        replace_durably(path, machine.text().encode())
        _print_result(path, machine, worker.world_size, time.perf_counter() - began)
    if worker.store is not None:  # rank 0 may take longer than a collective's timeout
        if worker.rank == 0:
            worker.store.set(MEASURED_KEY, "")
        else:
            worker.store.wait([MEASURED_KEY], datetime.timedelta(days=1))


def pieces_that_fit(
    config: Config, worker: Worker, device: torch.device, reserve_gb: float
) -> tuple[Extent, Pieces]:
    """Returns the pieces that rank 0 times, and those that all ranks hold at once.

    If not all pieces fit into memory, rank 0 prints a sentence. Raises UserError on every rank if
    not even the smallest fit.
    """
    room, sharing = room_of_host(), worker.local_world_size
    if accelerator.is_accelerator(device):
        free, sharing = accelerator.module(device).mem_get_info(device)[0], 1
        room = max(0.0, free - 1e9 * reserve_gb)
    room = min(all_gather_json(room, dist.group.WORLD, device))
    extent, on_all, left_out = check_memory(config, device.type, worker.world_size, sharing, room)
    if left_out and worker.rank == 0:
        print_line(left_out)
    return extent, on_all


def provenance(config: Config, device: torch.device) -> CalibrationSource:
    """Returns the device, the software versions and the date to record in the cluster file."""
    on_device = accelerator.is_accelerator(device)
    return CalibrationSource(
        device=device.type,
        name=device_name(device.type) or accelerator.name(device),
        count=accelerator.module(device).device_count() if on_device else available_cores(),
        type=config.precision.name,
        host=socket.gethostname(),
        torch=str(torch.__version__),
        parallel3d=version_of("parallel3d") or "source",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _teller(worker: Worker) -> Callable[[str], None]:
    """Returns a function that sets this rank's phase and, on rank 0, shows the progress.

    On a terminal the progress is shown in place. A log file gets a line every LOG_EVERY_S seconds.
    """
    terminal, logged = sys.stderr.isatty(), -LOG_EVERY_S

    def tell(what: str) -> None:
        nonlocal logged
        worker.phase = f"calibrate: {what}"
        if worker.rank != 0:
            return
        if terminal:
            sys.stderr.write(f"\r\x1b[Kcalibrate: {what}")
            sys.stderr.flush()
        elif (now := time.monotonic()) - logged >= LOG_EVERY_S:
            logged = now
            print_line(worker.phase)

    return tell


def memory_of(device: torch.device) -> dict[str, float]:
    """Returns two memory sizes in 1e9 bytes, keyed by their names in a cluster file.

    `memory_gb` is the memory of the GPU or the host. `rank_gb` is the memory that a rank takes
    without a model: its context on the GPU, or the memory of its process.
    """
    if accelerator.is_accelerator(device):
        free, whole = accelerator.module(device).mem_get_info(device)
        return {"rank_gb": max(whole - free, 1) / 1e9, "memory_gb": whole / 1e9}
    whole = memory_in_all()
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        own = max(sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")), 1) / 1e6
    except (OSError, ValueError, IndexError):
        own = 0.25
    return {"rank_gb": own, "memory_gb": whole / 1e9}


def _print_result(path: Path, machine: MeasuredMachine, ranks: int, seconds: float) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    made = machine.made
    each = "a core" if made.device == "cpu" else "a GPU"
    print(
        f"{made.name} × {made.count}, {made.type}: at most "
        f"{1e3 * machine.numbers['peak_tflops']:.0f} GFLOP/s {each}; measured blocks of "
        f"{machine.model.name} and groups of up to {ranks} ranks in {seconds:.0f} s."
    )
    print(f"parallel3d plan cluster={path}  prices layouts of this machine")
    print(f"parallel3d train layout=auto cluster={path}  trains with the best one")
    if made.device == "cpu" and os.getloadavg()[0] > 1.5 * ranks:
        print_line(
            f"the machine was busy (load {os.getloadavg()[0]:.1f}): calibrate again when it is idle"
        )


def clock_of(device: torch.device) -> Callable[[], float]:
    """Returns the clock that times work on the device, in seconds.

    On a CPU, the clock counts the CPU time of this process, which other processes hardly affect. On
    an accelerator, it counts wall time.
    """
    if accelerator.is_accelerator(device):
        return time.perf_counter
    return time.process_time


def windows(run: Run, device: torch.device, calls: int, count: int) -> list[tuple[float, float]]:
    """Times `count` windows, each with `calls` calls of `run`.

    Returns, for each window, the seconds per call by wall time and by the clock of `clock_of`.
    """
    clock, found = clock_of(device), []
    run()
    for _ in range(count):
        accelerator.synchronize(device)
        begun, worked = time.perf_counter(), clock()
        for _ in range(calls):
            run()
        accelerator.synchronize(device)
        found.append(((time.perf_counter() - begun) / calls, (clock() - worked) / calls))
    return found


# The pieces of a model are measured by running pipeline stages in one process.
RUN_S, MOST_RUNS = 0.4, 8  # limits on the seconds and runs for one setting in one pass
LONG_S = 8.0  # if a micro-batch size takes more seconds than this, no larger one is measured


class WorkTimes(ActionTimes):
    """Times actions on a CPU in CPU seconds, which other processes hardly affect."""

    def _now(self) -> Any:
        return super()._now() if accelerator.is_accelerator(self.device) else time.process_time()


def mirrored_group(name: str, size: int) -> Group:
    """Returns a group of this process as rank 0 and `size` - 1 simulated ranks that mirror it."""
    mirror = MirroredPeers(size) if size > 1 else None
    return Group(name, tuple(range(size)), 0, None, mirror=mirror)


class ModelPieces:
    """Runs and times a pipeline of pieces on one rank; its memory is freed at the end of a `with`.

    Args:
        config: the configuration with the model.
        pieces: the sizes and the stages of the pipeline.
        device: the device of all stages.
    """

    def __init__(self, config: Config, pieces: Pieces, device: torch.device) -> None:
        stages = pieces.stages(config.model)
        config, size = pieces.configured(config, device.type), pieces.size
        dtype, groups, model = compute_dtype(config.precision), ProcessGroups.single(), config.model
        initializer = Initializer(
            config.seed, torch.promote_types(dtype, torch.float32), device, deferred=True
        )
        of_tp, of_ep = mirrored_group("tp", config.tp), mirrored_group("ep", config.ep)
        usual = BuildContext.of_run(blueprint_of(config), initializer, of_tp, ep=of_ep)
        self.device = device
        first = StageBlueprint.plain(range(0), first=True)
        made = [Stage(model, first, usual, first_and_last_share_rank=True)]
        self.counts = [len(layers) for _, layers in stages]
        for blocks, layers in stages:
            context = dataclasses.replace(usual, repeats=Repeats.of(tuple(blocks.repeats)))
            made.append(Stage(model, StageBlueprint.plain(layers), context))
        last = StageBlueprint.plain(range(0), last=True)
        made.append(Stage(model, last, usual, made[0], True))
        self.engine = data_parallel_engine(
            data_parallel_settings(config),
            made,
            sharded_layers(made),
            initializer,
            dtype,
            groups,
            usual.gathers,
        )
        self.optimizer = Optimizer(config.optim, self.engine.segments)
        self.elements = sum(p.numel() for p in self.engine.parameters.values())
        route = P2PRoute(groups.pp, StageAssignment(1, len(made)))
        length = model.seq_length // of_tp.size
        outputs = StageOutputs(((size, length, model.hidden_size),), dtype)
        self.executor = Executor(made, route, [outputs] * (len(made) - 1), device)
        self.orders = make("interleaved_zb", 1, TOGETHER, len(made)).orders[0]
        tokens = torch.arange(size * model.seq_length, device=device).view(size, -1)
        tokens = tokens % model.vocab_size
        balance = None if not model.num_experts else _balance(config, size, device, of_tp)
        mask = torch.ones_like(tokens, dtype=torch.bool)
        samples = torch.arange(size, device=device)
        self.batch = MicroBatch(tokens, tokens, mask, LayerInputs(samples, balance=balance))
        self.scale = torch.tensor(1.0 / tokens.numel(), device=device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The engine and the stages refer to each other.
        vars(self).clear()
        gc.collect()

    def run(self) -> dict[str, float]:
        """Runs a step of two micro-batches and returns the seconds of its parts.

        An action's key is its kind and chunk, such as `F1`, and its value is the mean over both
        micro-batches. `action` is the mean time between two actions. `update` is the time to clear
        and clip the gradients and to step the optimizer.
        """
        now = clock_of(self.device)
        accelerator.synchronize(self.device)
        begun = now()
        self.engine.start_step(TOGETHER)
        accelerator.synchronize(self.device)
        cleared = now()
        self.executor.action_times = times = WorkTimes(self.device)
        self.executor.train_step(
            self.orders, lambda _: self.batch, self.scale, self.engine.start_last_microbatch
        )
        accelerator.synchronize(self.device)
        done = now()
        self.engine.finish_step()
        self.optimizer.step(1e-6, float(self.optimizer.squared_norm()) ** 0.5)
        accelerator.synchronize(self.device)
        found = {"update": now() - done + cleared - begun}
        spans = [end - start for _, start, end in times.measured()]
        found["action"] = max(done - cleared - sum(spans), 0.0) / len(spans)
        for action, seconds in zip(self.orders, spans, strict=True):
            key = f"{action.kind.value}{action.chunk}"
            found[key] = found.get(key, 0.0) + seconds / TOGETHER
        return found

    def runs(self) -> list[dict[str, float]]:
        """Returns the seconds of several runs after a warm-up run."""
        return in_turns([self])[0]


def in_turns(models: Sequence[ModelPieces]) -> list[list[dict[str, float]]]:
    """Runs the models in turns, after a warm-up run each, and returns the seconds of their runs.

    Because they take turns, changes in processor speed hardly affect the ratios of their times.
    """
    for model in models:
        model.run()
    begun, found = time.perf_counter(), [[model.run()] for model in models]
    while len(found[0]) < MOST_RUNS and time.perf_counter() - begun < RUN_S * len(models):
        for model, runs in zip(models, found, strict=True):
            runs.append(model.run())
    return found


def _balance(config: Config, size: int, device: torch.device, tp: Group) -> Balance:
    """Returns the data that the balancing losses need, for a micro-batch of whole samples."""
    lengths = torch.full((size,), config.model.seq_length, dtype=torch.float64, device=device)
    samples, one = torch.arange(size, device=device), lengths.new_ones(())
    aux, z = (one if loss else None for loss in (config.moe.aux_loss, config.moe.z_loss))
    sequence = (tp,) if tp.size > 1 else ()
    return Balance(samples, None, None, lengths, aux, z, sequence)


def lower_quartile(seconds: Iterable[float]) -> float:
    """Returns the lower quartile of the times, which is typical of an undisturbed step.

    The minimum would not be typical, because the processor is unusually fast at some moments. The
    slower half of the runs may be disturbed by other processes.
    """
    ordered = sorted(seconds)
    return ordered[len(ordered) // 4]


def pieces(
    config: Config,
    device: torch.device,
    most: int,
    tell: Tell,
    passes: int,
    extent: Extent | None = None,
) -> tuple[dict[str, Table], float]:
    """Measures the pieces of the model for every tp and several micro-batch sizes, in passes.

    The pieces are the blocks, the embedding, the head and the optimizer's update. Blocks with
    experts are also measured for every ep. `most` is the largest number of ranks in a group.
    `extent` limits the pieces; None stands for all of them.
    Returns the tables by name, and the seconds between two actions.
    """
    found: dict[str, dict[Point, list[float]]] = {}  # seconds of all runs by table and grid point
    extent = whole_extent(config) if extent is None else extent
    length, kinds = config.model.seq_length, layer_kinds(config.model)

    def keep(name: str, point: Point, seconds: Iterable[float]) -> None:
        found.setdefault(name, {}).setdefault(point, []).extend(seconds)

    def timed(model: ModelPieces) -> list[dict[str, float]]:
        runs = model.runs()
        keep("update", (model.elements,), (run["update"] for run in runs))
        return runs

    for number, tp in product(range(passes), tensor_sizes(config.model, most)):
        for place, size in enumerate(extent.sizes):
            tell(f"tp={tp} micro_batch_size={size}, pass {number + 1}")
            begun, at = time.perf_counter(), (tp, size * length)
            with ModelPieces(config, extent.of_size(size, tp), device) as model:
                runs, counts = timed(model), [1, *model.counts, 1]
            names = ["embedding", *(block_name(i) for i in range(len(kinds))), "head"]
            for chunk, (name, count) in enumerate(zip(names, counts, strict=True)):
                for way, kind in zip(WAYS, "FIW", strict=True):
                    keep(f"{name}.{way}", at, (run[f"{kind}{chunk}"] / count for run in runs))
            keep("action", (), (run["action"] for run in runs))
            long = time.perf_counter() - begun > LONG_S
            if number == 0 and tp == 1 and place and long:
                extent = dataclasses.replace(extent, sizes=extent.sizes[: place + 1])
                break
        for index, kind_of_layer in enumerate(kinds):
            tell(f"tp={tp}, recomputation, pass {number + 1}")
            for parts, recomputing in extent.of_recomputation(kind_of_layer, tp):
                with ModelPieces(config, recomputing, device) as model:
                    runs = timed(model)
                for chunk, part in enumerate(parts, 2):
                    more = [(run[f"I{chunk}"] - run["I1"]) / run["F1"] for run in runs]
                    # The median is used because noise can make a single difference far too small.
                    share = max(statistics.median(more), 1e-3)
                    keep(recompute_name(part, index), (tp,), [share])
        if tp > 1 or not config.model.num_experts:
            continue
        for size in extent.sizes[:MOST_SIZES]:
            tell(f"experts micro_batch_size={size}, pass {number + 1}")
            every = runs_of_experts(config, extent.of_experts(config.model, size, most), device)
            for ep, (elements, runs) in every.items():
                keep("update", (elements,), (run["update"] for run in runs))
                for way, kind in zip(WAYS, "FIW", strict=True):
                    pairs = zip(runs, every[extent.ep][1], strict=True)
                    keep(
                        f"{SHARE_OF_EP}.{way}",
                        (ep, size * length),
                        (run[f"{kind}1"] / max(alone[f"{kind}1"], LEAST) for run, alone in pairs),
                    )
    typical = {}
    for name, points in found.items():
        usual = statistics.median if name.startswith(SHARE_OF_EP) else lower_quartile
        typical[name] = {point: max(usual(all), LEAST) for point, all in points.items()}
    action = typical.pop("action")[()]
    return {name: table_of(points) for name, points in typical.items()}, action


def runs_of_experts(
    config: Config, every: Mapping[int, Pieces], device: torch.device
) -> dict[int, tuple[int, list[dict[str, float]]]]:
    """Runs the pieces of each ep in turns.

    Returns, for each ep, the number of parameters and the seconds of the runs.
    """
    with ExitStack() as held:
        models = {
            ep: held.enter_context(ModelPieces(config, pieces, device))
            for ep, pieces in every.items()
        }
        numbers = {ep: model.elements for ep, model in models.items()}
        runs = in_turns([*models.values()])
    return {ep: (numbers[ep], each) for ep, each in zip(numbers, runs, strict=True)}


def table_of(points: dict[Point, float]) -> Table:
    """Returns a table of `points`, which must form a complete grid."""
    axes = tuple(tuple(sorted(set(axis))) for axis in zip(*points, strict=True))
    return Table(axes, tuple(points[p] for p in product(*axes)))


# Sizes and limits for measuring collectives, messages and the slowing by other busy ranks.
SIZES = (64, 4096, 65536, 524288, 4 << 20)  # bytes of messages on CPUs
LARGE_SIZES = (1024, 65536, 1 << 20, 16 << 20, 256 << 20)  # bytes of messages on GPUs
# A window has only a few calls, so that other processes leave some windows undisturbed.
CALLS, WINDOWS, FEW_WINDOWS = 4, 40, 8
# Wall times are capped at this multiple of the CPU time, as other processes cause longer waits.
MOST_WAIT = 3.0


def collectives(config: Config, device: torch.device, tell: Tell) -> dict[str, Table]:
    """Measures each collective over the first 2, 4, … ranks.

    Returns the tables by name. In tables with the suffix SHARED, ranks share cores. A waiting rank
    then sleeps, and only CPU time counts, because wall time would include the work of other ranks.
    In the other tables each rank has its own core or GPU, a waiting rank spins, and wall time
    counts. If there is only one rank, the tables hold a placeholder that is never used. The call is
    collective over the world.
    """
    found: dict[str, dict[Point, float]] = {}
    world, launch, on_gpu = dist.get_world_size(), config.launch, accelerator.is_accelerator(device)
    names = [*COLLECTIVES, *([ALL_TO_ALL] if config.model.num_experts else [])]
    for count in powers_of_two(world)[1:]:
        layout = Layout(tp=count, dp=world // count)
        groups = ProcessGroups.create(layout, device.type, launch.timeout_s, launch)
        tp, boxes = groups.tp, None
        if device.type == "cpu" and launch.shared_memory:
            boxes = SharedP2P.open(tp, launch.timeout_s)
        ways = [False] if on_gpu else [True, False] if count <= available_cores() else [True]
        for name, size, shares in product(names, LARGE_SIZES if on_gpu else SIZES, ways):
            tell(f"{name} over {count} ranks")
            for memory in (tp.shared, boxes):  # how long a rank spins before it sleeps
                if memory is not None:
                    memory.memory.spin_s = 0.0 if shares else SPIN_S
            reduction = "sum" if name.startswith(("all_reduce", "reduce")) else None
            site, seconds = Site(tp, device, boxes, chain=name == "send_recv"), 0.0
            if name == ALL_TO_ALL:
                run = _exchange(config.model, site, size)
            else:
                run = prepare(TimedOperation(name, reduction, own=True), site, size).run
            if groups.rank < count:
                each = windows(run, device, CALLS, FEW_WINDOWS if shares else WINDOWS)
                wall, work = zip(*each, strict=True)
                seconds = lower_quartile(work) if shares else min(wall)
            seconds = max(all_gather_json(seconds, dist.group.WORLD, device))
            if not shares and (shared := found.get(name + SHARED)):
                seconds = min(seconds, MOST_WAIT * shared[count, size])
            found.setdefault(name + SHARED * shares, {})[count, size] = seconds
        if boxes is not None:
            boxes.memory.close()
        groups.close()
    tables = {name: table_of(points) for name, points in found.items()}
    for name in names:  # on one core or on GPUs, only one of the two tables was measured
        either = tables.get(name) or tables.get(name + SHARED) or Table(((1,), (64,)), (LEAST,))
        tables = {name: either, name + SHARED: either} | tables
    return tables


def _exchange(model: ModelConfig, site: Site, size: int) -> Run:
    """Returns a function that sends `size` bytes by all-to-all, like tokens to their experts."""
    group, count = site.group, max(1, size // 4 // site.group.size)
    tensor = torch.zeros(group.size * count, device=site.device)
    even = [count] * group.size
    # The all-to-all chooses its algorithm by the largest number of elements that a rank may have to
    # send, which would be needed if each of its tokens went to every rank.
    divides = model.num_experts % group.size == 0
    share = share_sent(model.num_experts, model.experts_per_token, group.size) if divides else 1.0
    most = round(tensor.numel() / share)
    return partial(collective.all_to_all_uneven, tensor, group, even, even, most)


def slowing(config: Config, device: torch.device, tell: Tell, pieces: Pieces) -> dict[str, Table]:
    """Measures blocks on several ranks at once, and on one rank with several threads.

    Returns two tables of relative times. `together` gives, by the number of busy ranks, the time
    relative to that of one rank alone, at least 1. `threads` gives, by the number of threads, the
    time relative to that of one thread, at most 1. On CPUs `together` is a ratio of CPU seconds,
    which grow because busy ranks compete for caches. Every rank holds `pieces`. The call is
    collective.
    """
    with ModelPieces(config, pieces, device) as model:
        return _slowing(device, tell, model.run)


def _slowing(device: torch.device, tell: Tell, run: Run) -> dict[str, Table]:
    on_gpu = accelerator.is_accelerator(device)
    times: dict[Point, float] = {}
    counts = powers_of_two(dist.get_world_size())
    for count, turn in product(counts, range(TURNS)):
        tell(f"blocks on {count} ranks at once")
        dist.barrier()
        work = [s for _, s in windows(run, device, 1, 8)] if dist.get_rank() < count else []
        seen = [lower_quartile(w) for w in all_gather_json(work, dist.group.WORLD, device) if w]
        seconds = sum(seen) / len(seen)
        times[count,] = min(seconds, times[count,] if turn else seconds)
    slow: dict[Point, float] = {}
    for count in reversed(counts):  # if fewer ranks seem to slow down more, this is noise
        slow[count,] = max(1.0, min([times[count,] / times[1,], *slow.values()]))
    found = {"together": slow}
    before, times = torch.get_num_threads(), {}
    for count in powers_of_two(1 if on_gpu or dist.get_rank() else available_cores()):
        torch.set_num_threads(count)
        times[count,] = min(wall for wall, _ in windows(run, device, 1, 8))
    torch.set_num_threads(before)
    found["threads"] = {at: min(1.0, s / times[1,]) for at, s in times.items()}
    return {name: table_of(points) for name, points in found.items()}


def peak_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the TFLOP/s of a large matmul on one GPU, or with one thread on a CPU."""
    size = 1024 if device.type == "cpu" else 8192
    a = torch.rand(size, size, device=device).to(dtype)
    return 2e-12 * size**3 / min(work for _, work in windows(lambda: a @ a, device, 2, 8))
