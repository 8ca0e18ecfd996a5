"""`parallel3d calibrate` before its ranks start: how many, and where its file goes. No torch."""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from parallel3d.commands.calibrate import measure
from parallel3d.commands.calibrate.measure import Grids, Kernels, launches, tables_of
from parallel3d.config.checks.parallelism import check_groups
from parallel3d.config.checks.run import check_plain, check_run_name
from parallel3d.config.fields import check_fields, show
from parallel3d.config.schema import Config
from parallel3d.device import accelerator
from parallel3d.device.precision import compute_dtype, set_matmul_precision
from parallel3d.errors import UserError, print_line
from parallel3d.files import replace_durably
from parallel3d.host.devices import CPU, choose_device, cores, device_name, gpu_count
from parallel3d.metrics.provenance import version_of
from parallel3d.plan.measured import COLLECTIVES, SHARED, CalibrationSource, MeasuredMachine, Table
from parallel3d.run.launch import Worker
from parallel3d.topology.text import chosen_keys

CALIBRATE = "calibrate"
PER_CORE, LEAST_RANKS, MOST_RANKS = 4, 8, 64
TYPES = {"cpu": ("fp32", "bf16"), "cuda": ("fp32", "tf32", "bf16", "fp16")}


def calibrate_config(config: Config, typed: Sequence[str], world_size: int | None) -> Config:
    """The configuration of the ranks that measure: all in one row, as many as may be asked for.

    Raises UserError for keys that calibrate decides itself, ranks that it cannot start, a type that
    the device is not measured in and a file that may not be written.
    """
    check_fields(config)
    check_plain(config)
    check_run_name(config)
    check_groups(config)
    for key in ("tp", "pp", "dp", "cp"):
        if key in chosen_keys(typed):
            raise UserError(
                f"{key}={getattr(config, key)}: calibrate measures groups of every size, so {key} "
                "must be left out; the nearest is calibrate.ranks=4, the most ranks of one"
            )
    kind = choose_device(config.device, 1).kind
    types = TYPES.get(kind, TYPES[CPU])
    if config.precision.name not in types:
        raise UserError(
            f"precision={config.precision.name} must be one of {', '.join(types)} for calibrate on "
            f"device={kind}; the nearest is precision={types[0]}"
        )
    ranks = world_size or config.calibrate.ranks or _usual(kind)
    if ranks & (ranks - 1):
        near = 1 << (ranks.bit_length() - 1)
        raise UserError(f"calibrate.ranks={ranks} must be a power of two; the nearest is {near}")
    written_to(config)
    return replace(config, tp=1, pp=1, cp=1, dp=ranks)


def _usual(kind: str) -> int:
    """Four ranks a core, and eight at least; on GPUs one each."""
    most = min(MOST_RANKS, max(LEAST_RANKS, PER_CORE * cores())) if kind == CPU else gpu_count()
    return 1 << (max(1, most).bit_length() - 1)


def written_to(config: Config) -> Path:
    """The file. Raises UserError where one is there already, or its folder is not."""
    file = config.calibrate.file
    path = Path(file)
    if not file.endswith((".yaml", ".yml")):
        raise UserError(
            f"calibrate.file={show(file)} must end in .yaml, by which cluster= knows it; the "
            f"nearest is calibrate.file={show(file + '.yaml')}"
        )
    if not path.parent.is_dir():
        raise UserError(
            f"calibrate.file={show(file)} must lie in a folder that exists; the nearest is "
            f"calibrate.file={show(path.name)}"
        )
    if os.path.lexists(path) and not config.calibrate.replace:
        raise UserError(
            f"calibrate.file={show(file)} is there already and must be another; the nearest is "
            "calibrate.replace=true, which writes it anew"
        )
    return path


def group_sizes(world_size: int) -> list[int]:
    """2, 4, 8, … up to the world."""
    return [n for n in (2**i for i in range(1, 20)) if n <= world_size]


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
