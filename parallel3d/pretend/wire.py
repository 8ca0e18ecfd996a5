"""How the members of a pretended communicator talk: over gloo, on a thread that plays its stream.

The thread does one operation of the group after the other, as NCCL's stream does, a batch of
messages as one. Every operation carries what it is: members that differ are told so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

JOIN_S = 10.0
Run = Callable[[list[Tensor]], Sequence[Tensor]]  # copies of the inputs → values of the outputs

NAMES = ("split", "allreduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather",
         "scatter", "reduce", "barrier", "destroy")  # fmt: skip
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
          torch.int16, torch.uint8, torch.int8, torch.bool)  # fmt: skip


class Mismatch(RuntimeError):
    """The members of a group do not call the same operations in the same order."""


class WireMessage:
    """One send or receive.

    Args:
        start: gives the works of its heading and of its data. finish: what arrived.
    """

    def __init__(
        self, start: Callable[[], list[Any]], finish: Callable[[], Sequence[Tensor]]
    ) -> None:
        self.start, self.finish = start, finish
        self.done: Future[Sequence[Tensor]] = Future()

    def end(self, works: list[Any]) -> None:
        """With what arrived, or with what the wait raises."""
        try:
            for work in works:
                work.wait()
            self.done.set_result(self.finish())
        except Exception as error:
            self.done.set_exception(error)


class WorkerThread:
    """A thread that does one thing after the other.

    Unlike an executor's it also takes work while the interpreter ends, and does not hold that up.
    """

    def __init__(self) -> None:
        self.jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.cancels = False
        self.thread = Thread(target=self._run, name="communicator", daemon=True)
        self.thread.start()

    def submit(self, job: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        self.jobs.put((done, lambda: job(*args)))
        return done

    def close(self, cancels: bool) -> None:
        """Ends the thread behind what was submitted, which it may cancel."""
        self.cancels = cancels
        self.jobs.put(None)

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            done, call = job
            if self.cancels:
                done.cancel()
                continue
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)


class Wire:
    """Of one member of a group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self.name = "world"  # of the group, for what is said
        parts = [dist.PrefixStore(name, store) for name in ("data", "headings")]
        self.gloo, self.headings = (dist.ProcessGroupGloo(p, rank, size, timeout) for p in parts)
        self.queue = WorkerThread()
        self.calls = 0
        self.messages: dict[tuple[int, int], int] = {}  # (from, to) → so far
        self.batched: list[WireMessage] | None = None

    def close(self, cancels: bool = False) -> None:
        """Takes no more operations; those that were started go on, unless it `cancels` them."""
        self.queue.close(cancels)

    def join(self) -> None:
        """Waits for the thread of a closed one: a thread that is left when the interpreter ends is
        unwound through torch's C++, which may abort the process."""
        self.queue.thread.join(JOIN_S)

    # --- collectives ---------------------------------------------------------------------------

    def start(
        self, name: str, like: Tensor, extra: int, run: Run, copies: list[Tensor]
    ) -> Future[Sequence[Tensor]]:
        """One operation, behind those before it. The future raises Mismatch where members differ.

        Args:
            like: a tensor of its type and size. extra: what else must agree.
        """
        self.calls += 1
        says = [self.calls, NAMES.index(name), DTYPES.index(like.dtype), like.numel(), extra]
        return self.queue.submit(self._do, torch.tensor([says]), run, copies)

    def _do(self, heading: Tensor, run: Run, copies: list[Tensor]) -> Sequence[Tensor]:
        for at, other in enumerate(self._gather(heading)):
            if not torch.equal(other, heading):
                raise Mismatch(
                    f"member {self.rank} of {self.name} calls {_operation(heading)} where member "
                    f"{at} calls {_operation(other)}"
                )
        return run(copies)

    def gathered(self, mine: Tensor) -> list[Tensor]:
        """Of every member, in rank order; behind what is under way."""
        return self.queue.submit(self._gather, mine).result()

    def _gather(self, mine: Tensor) -> list[Tensor]:
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self.headings.allgather([everyone], [mine]).wait()
        return everyone

    def gather_data(self, copies: list[Tensor]) -> list[Tensor]:
        """Flat, of every member; on the wire's thread."""
        data = copies[0].view(-1).view(torch.uint8)
        everyone = [torch.empty_like(data) for _ in range(self.size)]
        self.gloo.allgather([everyone], [data]).wait()
        return [t.view(copies[0].dtype) for t in everyone]

    # --- messages ------------------------------------------------------------------------------

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Messages that are posted inside go out together."""
        self.batched = batched = []
        try:
            yield
        finally:
            self.batched = None
        self.queue.submit(_exchange, batched)

    def send(self, copy: Tensor, target: int, tag: int) -> Future[Sequence[Tensor]]:
        heading, number = self._heading(self.rank, target, copy, tag)

        def start() -> list[Any]:
            data = copy.view(-1).view(torch.uint8)
            return [
                self.headings.send([heading], target, number),
                self.gloo.send([data], target, number),
            ]

        return self._post(WireMessage(start, lambda: []))

    def receive(self, like: Tensor, source: int, tag: int) -> Future[Sequence[Tensor]]:
        heading, number = self._heading(source, self.rank, like, tag)
        theirs = torch.empty_like(heading)
        data = torch.empty(like.nbytes, dtype=torch.uint8)

        def start() -> list[Any]:
            return [
                self.headings.recv([theirs], source, number),
                self.gloo.recv([data], source, number),
            ]

        def finish() -> Sequence[Tensor]:
            if not torch.equal(theirs, heading):
                raise Mismatch(
                    f"member {self.rank} of {self.name} receives {_size(heading)} as message "
                    f"{number} of member {source}, which sent {_size(theirs)}"
                )
            return [data.view(like.dtype)]

        return self._post(WireMessage(start, finish))

    def _heading(self, source: int, target: int, like: Tensor, tag: int) -> tuple[Tensor, int]:
        number = self.messages.get((source, target), 0)
        self.messages[source, target] = number + 1
        return torch.tensor([[number, tag, DTYPES.index(like.dtype), like.numel()]]), number

    def _post(self, message: WireMessage) -> Future[Sequence[Tensor]]:
        if self.batched is None:
            self.queue.submit(_exchange, [message])
        else:
            self.batched.append(message)
        return message.done


def _exchange(messages: list[WireMessage]) -> None:
    """A batch: all are started before any is waited for."""
    started = [(message, message.start()) for message in messages]
    for message, works in started:
        message.end(works)


def _operation(heading: Tensor) -> str:
    number, name, dtype, numel, extra = heading.flatten().tolist()
    return f"{NAMES[name]} number {number} ({_words(dtype, numel)}, {extra})"


def _size(heading: Tensor) -> str:
    _, tag, dtype, numel = heading.flatten().tolist()
    return f"{_words(dtype, numel)} with tag {tag}"


def _words(dtype: int, numel: int) -> str:
    return f"{str(DTYPES[dtype]).removeprefix('torch.')}[{numel}]"
