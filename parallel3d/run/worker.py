"""Runs one rank from the rendezvous to its exit code."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, cast

from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.layout import Layout
from parallel3d.comm.store import one_host_environment
from parallel3d.config.nccl import parse_nccl_env
from parallel3d.errors import USER_ERROR, UserError, first_line, print_line
from parallel3d.faults.progress import PROGRESS, ProgressFile
from parallel3d.host.devices import device_of_rank, gpu_environment
from parallel3d.host.memory import bind_near, keep_freed_memory, nothing_collected
from parallel3d.host.processes import die_with_parent, drop_failed_output
from parallel3d.host.quotas import available_cores, cores
from parallel3d.resolve import layout_of
from parallel3d.run import failure
from parallel3d.run.agreement import agree_on_run, assign_rank
from parallel3d.run.directory import discard_unused
from parallel3d.run.failure import (
    END_SIGNAL,
    EXIT_COMMAND_RESULT,
    code_of_stop,
    has_steps,
    leave,
    report_end,
    report_failure,
    report_hang,
)
from parallel3d.run.keys import LaunchConfig
from parallel3d.run.launch import (
    Worker,
    begin_on,
    blocked_signals,
    ending_on_signals,
    kept_handlers,
)
from parallel3d.run.launcher_environment import RankAssignment, detect
from parallel3d.run.rendezvous import (
    keeps_store,
    rendezvous,
    with_counted_ranks,
)
from parallel3d.run_config import Config

if TYPE_CHECKING:
    import torch
    from torch.distributed import PrefixStore, Store

Work = Callable[[Config, Worker], int | None]  # what every rank of a subcommand does
TAKING_S = 5.0  # maximum seconds that a signal waits until a run directory is complete

# Subcommands that run on every rank, each with its module and its function. The function is called
# with (config, worker), and returns an exit code or None.
APPS = {
    "train": ("parallel3d.commands.train", "train"),
    "verify": ("parallel3d.commands.verify", "verify_command"),
    "bench comm": ("parallel3d.commands.bench.comm", "bench_comm"),
    "calibrate": ("parallel3d.commands.calibrate", "calibrate"),
    "generate": ("parallel3d.commands.generate", "generate"),
    "eval": ("parallel3d.commands.evaluate.command", "evaluate"),
}


def run_alone(app: str, config: Config, run_dir: Path, kind: str, work: Work | None = None) -> int:
    """Runs a single rank in this process, logs failures, and returns the exit code.

    `work` is what the rank does; None stands for the subcommand's function in `APPS`.
    """
    of_gpus = gpu_environment(kind, os.environ, config.cluster, tp=config.tp, zero=config.zero)
    os.environ.update(of_gpus | one_host_environment(os.environ))
    with blocked_signals(), nothing_collected():
        begin_on(kind)
        from torch.distributed import HashStore
    worker = Worker(0, 0, 1, 1, run_dir, "local")
    with kept_handlers():
        if has_steps(app, config.train):
            worker.stop.install()
        try:
            worker.device = device_of_rank(kind, worker.local_rank)
            _join(app, config, worker, HashStore())
            return _after(worker, _work(app, config, worker, work))
        except Exception as error:
            failed = failure.from_exception(config, worker, error)
            failed = failure.write(failed, error, run_dir)
            if has_steps(app, config.train):
                failure.note_end(failed, run_dir)
            return report_end(failed, run_dir)


def _after(worker: Worker, code: int) -> int:
    """Returns the exit code of a finished run; raises SystemExit after a stop, to end a sweep."""
    if worker.stopped:
        raise SystemExit(code_of_stop(worker.stop.requeues))
    return code


def count_ranks_here(
    launch: LaunchConfig, run: str | None, place: RankAssignment
) -> tuple[RankAssignment, PrefixStore]:
    """Counts the ranks on this host; returns `place` with their number, and the ranks' store.

    The call is collective over the world. If the ranks do not meet, it logs a sentence and ends the
    process.
    """
    place, doing = place.with_port(launch.master_port), "counting the ranks of each host"
    try:
        with ending_on_signals(lambda: doing):
            store = rendezvous(launch, run, place)
            return with_counted_ranks(store, place), store
    except UserError:
        raise
    except Exception as error:
        print_line(f"rank {place.rank} failed in {doing}: {first_line(error)}")
        leave(1)


def run_joined(
    app: str,
    config: Config,
    place: RankAssignment,
    kind: str,
    store: PrefixStore | None = None,
    work: Work | None = None,
) -> int:
    """Runs one of the ranks that a launcher started, on a device of type `kind`.

    Rank 0 creates the run directory and sends its name through `store`. If `store` is None, this
    function opens the store. Until all ranks have met, a signal ends this process. Every failing
    rank logs a line of its own, but only one rank logs a UserError. `work` is as in
    `run_alone`. Returns the exit code.
    """
    if keeps_store(os.environ):  # without the agent, which has the store, nothing could be saved
        die_with_parent()
    drop_failed_output()
    begin_on(kind)
    place = place.with_port(config.launch.master_port)
    worker = Worker.at(place, Path(), place.launcher)
    worker.progress_file = _progress(place.rank, os.environ)
    worker.phase = f"connecting to rank 0 at {place.master_addr}:{place.master_port}"
    if has_steps(app, config.train):
        worker.stop.install()
    try:
        with ending_on_signals(lambda: worker.phase, lambda: _give_up(worker), worker.stop):
            store = store or rendezvous(config.launch, config.run, place)
            worker.phase = "agreeing on the run"
            config = agree_on_run(app, config, place, worker, store, kind)
            _join(app, config, worker, store)
        return _after(worker, _work(app, config, worker, work))
    except Exception as error:
        report_hang(worker, error)
        failed = failure.from_exception(config, worker, error)
        report_failure(failed, worker, error, store)
        if worker.progress_file is not None and failed.kind in ("user", "decided"):
            # What it has said is the end of all ranks, not a loss of one.
            worker.progress_file.done()
        leave(USER_ERROR if isinstance(error, UserError) else 1, worker)


def _progress(rank: int, environ: Mapping[str, str]) -> ProgressFile | None:
    """Returns this rank's file of progress; None if no guard asks for it, or if it cannot be made.

    `rank` is the launcher's number, which names the process; its place in the layout may differ.
    """
    try:
        return ProgressFile.opened(rank, environ)
    except OSError as error:
        print_line(f"{PROGRESS}={environ[PROGRESS]} cannot be used ({error.strerror or error})")
        return None


def _give_up(worker: Worker) -> None:
    """Removes, on rank 0, the directory of a run that has not begun."""
    is_made = worker.taking_run.acquire(timeout=TAKING_S)
    if is_made and worker.rank == 0 and worker.run_dir != Path():
        discard_unused(worker.run_dir)


def local_worker_main(
    app: str,
    config: Config,
    directory: Path,
    launcher_pid: int,
    kind: str,
    work: Work | None = None,
) -> int:
    """Runs a forked rank and returns its exit code; `work` is as in `run_alone`.

    A failing rank only records its failure; the launcher logs the failure that caused the others.
    """
    _die_with(launcher_pid)
    drop_failed_output()
    begin_on(kind)
    place = detect(os.environ)
    assert place is not None  # the launcher has set the rank's variables
    worker = Worker.at(place, directory, "local")
    worker.phase = "rendezvous with the other ranks"
    if has_steps(app, config.train):
        worker.stop.second_interrupts = False  # the launcher itself counts the interrupts
        worker.stop.install()
    try:
        worker.device = device_of_rank(kind, place.local_rank)
        _join(app, config, worker, rendezvous(config.launch, config.run, place))
        code = _work(app, config, worker, work)
        return EXIT_COMMAND_RESULT + code if code else 0
    except Exception as error:
        report_hang(worker, error)
        failure.write(failure.from_exception(config, worker, error), error, directory)
        leave(USER_ERROR if isinstance(error, UserError) else 1, worker)


def _join(app: str, config: Config, worker: Worker, store: Store) -> None:
    """Gives the worker its place in the layout, and initialises torch.distributed."""
    import torch
    import torch.distributed as dist

    from parallel3d.device.accelerator import backend_of, is_accelerator

    worker.store = store if worker.world_size > 1 else None
    worker.phase = "placing the ranks"
    assign_rank(config, worker, store, os.environ, app)
    worker.phase = "starting torch.distributed"
    device = torch.device(worker.device)
    if threads := threads_within_quota(worker.local_world_size, os.environ):
        torch.set_num_threads(threads)
    if is_accelerator(device):
        _prepare_accelerator(config.cluster, config.launch, device)
    else:
        _prepare_cpu(config.cluster, layout_of(config), worker)
    dist.init_process_group(
        backend_of(device),
        store=store,
        rank=worker.rank,
        world_size=worker.world_size,
        timeout=timedelta(seconds=config.launch.timeout_s),
        device_id=device if is_accelerator(device) else None,
    )
    worker.phase = "start"


def _work(app: str, config: Config, worker: Worker, work: Work | None) -> int:
    """Runs the subcommand, closes torch.distributed, and returns the exit code."""
    import torch.distributed as dist

    if work is None:
        module, name = APPS[app]
        work = cast(Work, getattr(importlib.import_module(module), name))
    code = work(config, worker) or 0
    worker.phase = "closing"
    # Groups that are still referenced would abort when the exiting interpreter destroys them.
    gc.collect()
    sys.stdout.flush()
    # A rank that leaves while others still work would look to them like a failed rank.
    dist.barrier()
    if worker.progress_file is not None:
        worker.progress_file.done()
    dist.destroy_process_group()
    return code


def _prepare_accelerator(
    cluster: ClusterConfig, launch: LaunchConfig, device: torch.device
) -> None:
    """Makes the device current, sets NCCL's variables, and binds the process to nearby CPUs."""
    from parallel3d.device.accelerator import bus_id, make_current

    make_current(device)
    # Autograd's own thread may begin with a matmul; cuBLAS then creates a CUDA context and warns.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current")
    for name, value in parse_nccl_env(cluster.nccl_env).items():
        os.environ.setdefault(name, value)
    if launch.numa_binding and (address := bus_id(device)):
        bind_near(address)


def _prepare_cpu(cluster: ClusterConfig, layout: Layout, worker: Worker) -> None:
    """Sets up malloc and checks the network interfaces before any peer waits."""
    from parallel3d.comm.process_groups import Interfaces

    keep_freed_memory()
    if interfaces := Interfaces.of_run(cluster, worker.placement):
        interfaces.check(layout, worker.rank)


def threads_within_quota(local_ranks: int, environ: Mapping[str, str]) -> int | None:
    """Returns a rank's number of threads under a CPU quota.

    It returns None if there is no quota or OMP_NUM_THREADS is set. By default torch starts a thread
    for each core of the machine, and the kernel stops the threads beyond the quota.
    """
    within = available_cores()
    if "OMP_NUM_THREADS" in environ or within == cores():
        return None
    return max(1, within // local_ranks)


def _die_with(launcher_pid: int) -> None:
    """Makes this process end when its launcher ends, and at once on END_SIGNAL."""
    signal.signal(END_SIGNAL, signal.SIG_DFL)
    die_with_parent()
    if os.getppid() != launcher_pid:
        leave(1)
