"""A pool of real worker processes: start once, run many small distributed tests.

Starting eight Pythons with torch costs seconds, so the workers are forked from a server that has
imported torch once, and are kept. Each run makes a default gloo group of just its world size
(milliseconds) and destroys it afterwards, so no run sees the groups of another. A run that fails
leaves its ranks at unknown places inside collectives, so the workers are ended, and the next run
starts new ones.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from tests.garbage import collect_seldom
from tests.pace import PATIENCE

# Modules that the fork server imports once for all workers. multiprocessing skips a name that
# cannot be imported; each worker then imports it itself.
PRELOAD = [
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.device_mesh",
    "pytest",
    "omegaconf",
    "parallel3d.build",
    "parallel3d.models.transformer_architecture",
    "parallel3d.checkpoint.checkpoints",
    "parallel3d.faults.health",
    "parallel3d.simulated_device",
    # Imported by torch when a step first needs them, which would take seconds in every new worker.
    "numpy.random",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo.convert_frame",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
    "torch._inductor.codegen.cpp_wrapper_cpu",
    "sympy",
    "networkx",
    "setuptools",
    "torch.utils.cpp_extension",
    "torch.distributed.tensor.experimental",
]
START_SECONDS = 120.0
# DTensor's caches keep meshes, and with them groups whose threads wake 100 times a second: workers
# with more groups than this are replaced.
GROUPS = 16


class WorkerFailure(AssertionError):
    """Raised if a rank raised, died or hung; the message names the rank and has its traceback."""


def _worker(connection: Connection) -> None:
    """Serves runs until the parent closes the connection."""
    import torch

    # The parent handles Ctrl-C, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    collect_seldom()
    connection.send_bytes(b"ready")
    while True:
        try:
            sys.path[:], job = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        try:
            reply = (True, _run(*pickle.loads(job)))
            message = pickle.dumps(reply)
        except BaseException:  # The parent reports any error as this rank's.
            message = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(message)


def _run(
    rank: int,
    world_size: int,
    store: str,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """Runs one rank of one run, inside a default group of `world_size` ranks."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        # It is shorter than the parent's: a rank that is stuck in a collective then reports the
        # place, with a traceback.
        timeout=timedelta(seconds=0.75 * timeout_s),
    )
    dist.barrier()  # a rank that is done at once must not leave while another one still connects
    result = function(*args)
    # This is not in a `finally`, because after a failure the peers are inside a collective, and the
    # worker is ended.
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def gloo_groups(pid: int) -> int:
    """Returns the number of gloo groups of a process: each has a thread that waits for its
    sockets."""
    found = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        # The process may be ending at this moment.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += (task / "comm").read_text() == "gloo_tcp_loop\n"
    return found


class Pool:
    """Holds up to `limit` gloo ranks. It is a context manager; workers start when they are first
    needed."""

    def __init__(self, limit: int = 8) -> None:
        self.limit = limit
        self._workers: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._runs = 0
        self._folder = tempfile.TemporaryDirectory(prefix="parallel3d-pool-")
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        """Returns the process ids of the live workers, by rank."""
        return [process.pid for process, _ in self._workers]

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0 * PATIENCE,
    ) -> list[Any]:
        """Calls `function(*args)` on ranks 0 … world_size - 1 at once; returns the results by rank.

        `torch.distributed` is initialised (gloo, one thread per rank) while the function runs.
        `function` must be a module-level function; arguments and results must pickle. A function
        that needs its rank asks `torch.distributed.get_rank()`. Raises WorkerFailure for the first
        rank that raises or dies, or when `timeout_s` seconds pass; the workers are then replaced.
        """
        if not 1 <= world_size <= self.limit:
            raise ValueError(f"world_size={world_size}: the pool has 1 to {self.limit} ranks")
        self._start(world_size)
        self._runs += 1
        store = str(Path(self._folder.name) / f"store-{self._runs}")
        connections = [connection for _, connection in self._workers[:world_size]]
        # Pickling comes before anything is sent, so that the workers stay idle if it fails.
        jobs = [
            pickle.dumps((rank, world_size, store, timeout_s, function, args))
            for rank in range(world_size)
        ]
        try:
            for connection, job in zip(connections, jobs, strict=True):
                # The path goes first, in a message of its own: unpickling imports the function's
                # module.
                connection.send_bytes(pickle.dumps((sys.path, job)))
            results = self._collect(connections, function.__name__, time.monotonic() + timeout_s)
        except BaseException:
            self.end()
            raise
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(store)
        if gloo_groups(self.pids[0]) > GROUPS:
            self.end()
        return results

    def end(self) -> None:
        """Ends this pool's own workers; the next run starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
            process.close()
        self._workers.clear()

    def _start(self, count: int) -> None:
        fresh = []
        for rank in range(len(self._workers), count):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_worker, args=(theirs,), daemon=True, name=f"rank{rank}"
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))
            fresh.append(ours)
        try:
            for connection in fresh:
                if not connection.poll(START_SECONDS):
                    raise WorkerFailure(f"a worker did not start within {START_SECONDS:.0f} s")
                connection.recv_bytes()
        except BaseException:
            self.end()
            raise

    def _collect(self, connections: list[Connection], what: str, deadline: float) -> list[Any]:
        """Returns results by rank; the first rank to fail, in order of arrival, decides the
        failure."""
        results: dict[int, Any] = {}
        pending = {connection: rank for rank, connection in enumerate(connections)}
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                stuck = ", ".join(str(rank) for rank in sorted(pending.values()))
                raise WorkerFailure(f"{what}: no result in time from rank {stuck}")
            raised = []
            for connection in ready:
                rank = pending.pop(connection)
                who = f"{what}: rank {rank} of {len(connections)}"
                try:
                    passed, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    # A death causes the errors of its peers, so it is reported before them.
                    process = self._workers[rank][0]
                    process.join()
                    raise WorkerFailure(f"{who} died, exit code {process.exitcode}") from None
                if passed:
                    results[rank] = value
                else:
                    raised.append(f"{who} raised\n{value}")
            if raised:
                raise WorkerFailure(raised[0])
        return [results[rank] for rank in range(len(connections))]
