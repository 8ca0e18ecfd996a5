"""Measures the rates of a cluster for `parallel3d calibrate`.

Every rank runs `measure_machine`. The first 2, 4, … ranks measure the latency and the bandwidth of
collectives and messages. Rank 0 measures products, attention, memory and launches while the others
wait idle, and writes the cluster file.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from parallel3d.blueprint.collectives import bus_factor
from parallel3d.blueprint.layout import Layout
from parallel3d.calibrate.record import MEASURED, CalibrationSource, GroupTime, MeasuredRates
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.comm.shared_memory import SPIN_S
from parallel3d.comm.timed_operations import REDUCING, Site, TimedOperation, prepare
from parallel3d.device import accelerator
from parallel3d.device.precision import compute_dtype, set_matmul_precision
from parallel3d.errors import print_line
from parallel3d.files import replace_durably
from parallel3d.host.devices import device_name
from parallel3d.host.quotas import available_cores, memory_in_all
from parallel3d.metrics.provenance import version_of
from parallel3d.pipeline.p2p import SharedP2P
from parallel3d.run.launch import Worker
from parallel3d.run_config import Config

Run = Callable[[], object]
Tell = Callable[[str], None]
MEASURED_KEY = "parallel3d/calibrate/measured"
LEAST_US = 0.1  # lower bound of a latency in microseconds
LOG_EVERY_S = 15.0  # seconds between progress lines in the log file of a batch job


def measure_machine(config: Config, worker: Worker, passes: int, to: Callable[[], Path]) -> None:
    """Runs all measurements, and writes the cluster file on rank 0. The call is collective.

    Args:
        config: the configuration of the measuring ranks, which are all replicas (dp).
        worker: this rank.
        passes: how often each rate is measured.
        to: returns the path of the cluster file when it is about to be written.
    """
    device, began = torch.device(worker.device), time.perf_counter()
    set_matmul_precision(config.precision)
    tell = _teller(worker)
    rates = memory_of(device)
    groups = group_times(config, device, tell, passes)
    if worker.rank == 0:  # the other ranks wait idle, so that they do not disturb rank 0
        rates |= device_rates(device, compute_dtype(config.precision), tell, passes)
        made, path = provenance(config, device, worker.local_world_size), to()
        machine = MeasuredRates(made, rates, groups)
        replace_durably(path, machine.text().encode())
        _print_result(path, machine, worker.world_size, time.perf_counter() - began)
    if worker.store is not None:  # rank 0 may take longer than a collective's timeout
        if worker.rank == 0:
            worker.store.set(MEASURED_KEY, "")
        else:
            worker.store.wait([MEASURED_KEY], datetime.timedelta(days=1))


def provenance(config: Config, device: torch.device, local_ranks: int) -> CalibrationSource:
    """Returns the device, the software versions and the date to record in the cluster file.

    `local_ranks`: number of ranks on this host, each of which may see only its own GPU.
    """
    on_device = accelerator.is_accelerator(device)
    count = available_cores()
    if on_device:
        count = max(accelerator.module(device).device_count(), local_ranks)
    return CalibrationSource(
        device=device.type,
        name=device_name(device.type) or accelerator.name(device),
        count=count,
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


def _print_result(path: Path, machine: MeasuredRates, ranks: int, seconds: float) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    made, rates = machine.made, machine.rates
    each = "a core" if made.device == "cpu" else "a GPU"
    print(
        f"{made.name} × {made.count}, {made.type}: {1e3 * rates['product_tflops']:.0f} GFLOP/s and "
        f"{rates['memory_gb_per_s']:.0f} GB/s of {each}, and groups of up to {ranks} ranks, "
        f"measured in {seconds:.0f} s."
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


def lower_quartile(seconds: Iterable[float]) -> float:
    """Returns the lower quartile of the times, which is typical of an undisturbed step.

    The minimum would not be typical, because the processor is unusually fast at some moments. The
    slower half of the runs may be disturbed by other processes.
    """
    ordered = sorted(seconds)
    return ordered[len(ordered) // 4]


# Sizes on a CPU and on a GPU.
PRODUCT = 1024, 8192  # rows and columns of a large product, and the length of its sums
SHORT = 16  # how much shorter the sums of a short product are
ADDED = 1 << 24, 1 << 28  # bytes of the tensors that are added to measure memory
ATTENTION = (2, 512), (32, 4096)  # heads and length
HEAD = 128  # width of a head of attention
LAUNCHES = 100  # operations whose launches are timed together
CALLS, WINDOWS = 2, 4  # calls of a window, and windows of a pass


def device_rates(
    device: torch.device, dtype: torch.dtype, tell: Tell, passes: int
) -> dict[str, float]:
    """Measures products, attention, memory and launches on one GPU, or with one thread on a CPU.

    Returns the rates by their names in a cluster file.
    """
    on_gpu = accelerator.is_accelerator(device)
    threads = torch.get_num_threads()
    if not on_gpu:
        torch.set_num_threads(1)

    def seconds(run: Run, calls: int = CALLS) -> float:
        return lower_quartile(work for _, work in windows(run, device, calls, WINDOWS * passes))

    try:
        tell("products")
        size = PRODUCT[on_gpu]
        a = torch.rand(size, size, device=device).to(dtype)
        few = a[:, : size // SHORT].contiguous()
        long, short = seconds(lambda: a @ a), seconds(lambda: few @ few.T)
        # The seconds are proportional to the length of the sums plus the ramp.
        ramp = (short * size - long * size / SHORT) / max(long - short, 1e-9)
        ramp = min(max(ramp, 1.0), float(size))
        tell("attention")
        heads, length = ATTENTION[on_gpu]
        q = torch.rand(1, heads, length, HEAD, device=device).to(dtype)
        attend = torch.nn.functional.scaled_dot_product_attention
        attends = seconds(lambda: attend(q, q, q, is_causal=True))
        tell("memory")
        b = torch.rand(ADDED[on_gpu] // dtype.itemsize, device=device).to(dtype)
        out = torch.empty_like(b)
        added = seconds(lambda: torch.add(b, b, out=out))
        tell("launches")
        tiny = torch.zeros(8, device=device)

        def launch() -> None:
            for _ in range(LAUNCHES):
                tiny.add_(1.0)

        launched = seconds(launch)
    finally:
        torch.set_num_threads(threads)
    units = 1
    if on_gpu:
        properties = accelerator.module(device).get_device_properties(device)
        units = getattr(properties, "multi_processor_count", 1)
    return {
        "product_tflops": 2e-12 * size**2 * (size + ramp) / long,
        "product_ramp": ramp,
        "attention_tflops": 2e-12 * heads * length**2 * HEAD / attends,
        "memory_gb_per_s": 1e-9 * 2 * ADDED[on_gpu] / added,
        "launch_us": max(1e6 * launched / LAUNCHES, LEAST_US),
        "units": units,
    }


# Bytes of small and of large messages on CPUs, and on GPUs.
SIZES = (64, 4 << 20), (1024, 256 << 20)


def group_times(
    config: Config, device: torch.device, tell: Tell, passes: int
) -> dict[str, dict[int, GroupTime]]:
    """Measures each operation over the first 2, 4, … ranks.

    Returns operation → number of ranks → its time. A small message gives the latency, and a large
    one the bandwidth. If there is only one rank, the times are placeholders that no layout uses.
    Ranks that share a core sleep while they wait. The call is collective over the world.
    """
    found: dict[str, dict[int, GroupTime]] = {op: {} for op in MEASURED}
    world, launch, on_gpu = dist.get_world_size(), config.launch, accelerator.is_accelerator(device)
    count = 2
    while count <= world:
        layout = Layout(tp=count, dp=world // count)
        groups = ProcessGroups.create(layout, device.type, launch.timeout_s, launch)
        tp, boxes = groups.tp, None
        if device.type == "cpu" and launch.shared_memory:
            boxes = SharedP2P.open(tp, launch.timeout_s)
        spin = SPIN_S if count <= available_cores() else 0.0
        for memory in (tp.shared, boxes):
            if memory is not None:
                memory.memory.spin_s = spin
        for op in MEASURED:
            tell(f"{op} over {count} ranks")
            site = Site(tp, device, boxes, chain=op == "send_recv")
            seconds = []
            for size in SIZES[on_gpu]:
                reduction = "sum" if op in REDUCING else None
                run = prepare(TimedOperation(op, reduction, own=True), site, size).run
                least = 0.0
                if groups.rank < count:
                    least = min(w for w, _ in windows(run, device, CALLS, WINDOWS * passes))
                seconds.append(max(all_gather_json(least, dist.group.WORLD, device)))
            small, large = seconds
            sent = bus_factor(op, count) * (SIZES[on_gpu][1] - SIZES[on_gpu][0])
            rate = 1e-9 * sent / max(large - small, 1e-9)
            found[op][count] = GroupTime(max(1e6 * small, LEAST_US), rate)
        if boxes is not None:
            boxes.memory.close()
        groups.close()
        count *= 2
    alone = {1: GroupTime(LEAST_US, 1.0)}
    return {op: times or alone for op, times in found.items()}
