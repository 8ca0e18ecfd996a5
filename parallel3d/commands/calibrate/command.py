"""`parallel3d calibrate` before its ranks start: how many, and where its file goes. No torch."""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from parallel3d.commands.calibrate import measure
from parallel3d.commands.calibrate.measure import Grids, Kernels, launches, tables_of
from parallel3d.commands.calibrate.start import (
    group_sizes,
    written_to,
)
from parallel3d.config.schema import Config
from parallel3d.device import accelerator
from parallel3d.device.precision import compute_dtype, set_matmul_precision
from parallel3d.errors import print_line
from parallel3d.files import replace_durably
from parallel3d.host.devices import cores, device_name
from parallel3d.metrics.provenance import version_of
from parallel3d.plan.profiled_cost import (
    COLLECTIVES,
    SHARED,
    CalibrationSource,
    MeasuredMachine,
    Table,
)
from parallel3d.run.launch import Worker

# `parallel3d calibrate` on every rank: pieces on the first, collectives on the first 2, 4, ….
#
# GEMMs, attention, norms, activations, the loss and the optimizer over a grid of sizes, by the
# functions that training calls; what a layer, an action and a step launch; collectives and
# messages; and how much ranks that work at once slow each other. All of it goes into one cluster
# file.


MEASURED_KEY = "parallel3d/calibrate/measured"
SINGLE_RANK = Table(((1.0, 2.0), (64.0, 128.0)), (1e-4,) * 4)  # of one device: never asked


def calibrate(config: Config, worker: Worker, grids: Grids | None = None) -> int:
    """Measures, and writes the file; collective. `grids`: where, if not as usual. Returns 0."""
    device, began = torch.device(worker.device), time.perf_counter()
    set_matmul_precision(config.precision)
    tell = _teller(worker)
    numbers = {"rank_gb": _own_memory(device), "memory_gb": _memory(device)}
    sizes = group_sizes(worker.world_size)
    tables = measure.collectives(sizes, device, config.launch, tell) if sizes else {}
    tables |= measure.slowing(device, tell)
    if worker.rank == 0:  # the others wait: alone is alone
        tables["threads"] = measure.threads(device, tell)
        numbers["peak_tflops"] = measure.peak_tflops(device, compute_dtype(config.precision))
        kernels = Kernels.on(device, compute_dtype(config.precision), grids)
        tables |= tables_of(kernels, config.calibrate.passes, tell)
        made = provenance(config, device)
        numbers |= launches(config, device, made, tables, tell)
        if not sizes:
            names = [name + way for name in COLLECTIVES for way in ("", SHARED)]
            tables |= dict.fromkeys(names, SINGLE_RANK)
        path = written_to(config)
        replace_durably(path, MeasuredMachine(made, tables, numbers).text().encode())
        seconds = time.perf_counter() - began
        _said(path, made, numbers, worker.world_size, seconds)
    _wait_for_rank_0(worker)
    return 0


def _wait_for_rank_0(worker: Worker) -> None:
    """Waits at the store: rank 0 compiles and measures longer than a collective may take."""
    if worker.store is None:
        return
    if worker.rank == 0:
        worker.store.set(MEASURED_KEY, "")
    else:
        worker.store.wait([MEASURED_KEY], datetime.timedelta(days=1))


def provenance(config: Config, device: torch.device) -> CalibrationSource:
    """Of a file that is made here and now."""
    on_device = accelerator.is_accelerator(device)
    return CalibrationSource(
        device=device.type,
        name=device_name(device.type) or accelerator.name(device),
        count=accelerator.module(device).device_count() if on_device else cores(),
        type=config.precision.name,
        host=socket.gethostname(),
        torch=str(torch.__version__),
        parallel3d=version_of("parallel3d") or "source",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _teller(worker: Worker) -> Callable[[str], None]:
    """Says on rank 0's terminal what is measured."""
    shown = worker.rank == 0 and sys.stderr.isatty()

    def tell(what: str) -> None:
        worker.phase = f"calibrate: {what}"
        if shown:
            sys.stderr.write(f"\r\x1b[Kcalibrate: {what}")
            sys.stderr.flush()

    return tell


def _own_memory(device: torch.device) -> float:
    """1e9 bytes that a rank takes before it has a model: its own pages, or the GPU's context."""
    if accelerator.is_accelerator(device):
        free, total = accelerator.module(device).mem_get_info(device)
        return max(total - free, 1) / 1e9
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return max(sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")), 1) / 1e6
    except (OSError, ValueError, IndexError):
        return 0.25


def _memory(device: torch.device) -> float:
    """1e9 bytes of the GPU, or of the host."""
    if accelerator.is_accelerator(device):
        return accelerator.module(device).mem_get_info(device)[1] / 1e9
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


def _said(
    path: Path, made: CalibrationSource, numbers: dict[str, float], ranks: int, seconds: float
) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    each = "a core" if made.device == "cpu" else "a GPU"
    print(
        f"{made.name}, {made.count} of them, {made.type}: {1e3 * numbers['peak_tflops']:.0f} "
        f"GFLOP/s {each} at best; groups of up to {ranks} ranks. {seconds:.0f} s."
    )
    print(f"parallel3d plan cluster={path}  prices layouts of this machine; so does")
    print(f"parallel3d train layout=auto cluster={path}")
    if made.device == "cpu" and os.getloadavg()[0] > 1.5 * ranks:
        print_line(
            f"the machine was busy (load {os.getloadavg()[0]:.1f}): calibrate anew when it is not"
        )
