"""Processes that each do a piece of work when they have nothing to do; results come in order.

A process is sent its next piece only when it waits for one: neither side ever writes into a full
pipe whose reader writes itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from parallel3d.errors import UserError
from parallel3d.host.processes import die_with_parent

AHEAD = 2  # results for each process that wait for an earlier one
LOST = (
    "a process that makes tokens was ended from outside, perhaps as memory ran out: type the line "
    "again to go on, with fewer workers= if memory is short"
)


class Pool:
    """`workers` processes, each with a `make(*arguments)` of its own, which does the work.

    Started by spawn: forked, a library's threads could be caught holding a lock.
    """

    def __init__(self, workers: int, make: Callable[..., Callable[[Any], Any]], *arguments: Any):
        context = get_context("spawn")
        self.workers = {}
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, os.getpid(), make, arguments), daemon=True
            )
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            self.workers[ours] = process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in self.workers.items():
            pipe.close()
            process.terminate()
            process.join()

    def in_order(self, pieces: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """(name, result) for each (name, piece of work), in their order.

        Raises UserError that a piece raised, and for a process that is gone.
        """
        idle, busy = list(self.workers), {}
        names: dict[int, Any] = {}
        results: dict[int, Any] = {}
        given = taken = 0
        more = True
        while more or taken < given:
            while more and idle and given - taken < (1 + AHEAD) * len(self.workers):
                try:
                    names[given], work = next(pieces)
                except StopIteration:
                    more = False
                    break
                pipe = idle.pop()
                busy[pipe], given = given, given + 1
                _talk(pipe.send, work)
            while taken in results:
                yield names.pop(taken), results.pop(taken)
                taken += 1
            for pipe in wait(list(busy)) if busy else ():
                result = _talk(pipe.recv)
                if isinstance(result, Exception):
                    raise result
                results[busy.pop(pipe)] = result
                idle.append(pipe)


def _talk(how: Callable[..., Any], *what: Any) -> Any:
    try:
        return how(*what)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise UserError(LOST) from None


def _serve(
    pipe: Connection, parent: int, make: Callable[..., Callable[[Any], Any]], arguments: Any
) -> None:
    """A process: it ends with its parent, whatever ends that, and leaves signals to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent:
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    failed, work = None, None
    try:
        work = make(*arguments)
    except UserError as error:
        failed = error
    while True:
        try:
            piece = pipe.recv()
        except EOFError:
            return
        try:
            result = failed or work(piece)
        except (UserError, MemoryError) as error:
            result = UserError(LOST) if isinstance(error, MemoryError) else error
        pipe.send(result)
