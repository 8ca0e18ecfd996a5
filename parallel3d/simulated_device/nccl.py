"""How the members of a simulated communicator talk: over gloo, on a thread that plays its stream.

The thread does one operation of the group after the other, as NCCL's stream does, a batch of
messages as one. Every operation carries what it is: members that differ are told so.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.simulated_device.device import TYPE, Stream, this_machine
from parallel3d.simulated_device.machine import Kernel, extent
from parallel3d.simulated_device.tensor import SimulatedTensor, poison

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


# Handles of what is under way on a simulated communicator.


class Together(dist.Work):
    """The handle of several messages."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self.works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self.works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


class Started(dist.Work):
    """A collective under way.

    Args:
        done: gives what belongs into `outputs`; None: nothing does.
        held: tensors that live until somebody has waited.
    """

    def __init__(
        self,
        stream: Stream,
        done: Future[Sequence[Tensor]] | None,
        outputs: Sequence[SimulatedTensor],
        held: Any,
    ) -> None:
        super().__init__()
        self.done, self.outputs, self.held = done, outputs, held
        self.behind = stream.record_event()
        self.ended = False
        this_machine().once_known(stream.number, self.end)

    def end(self) -> None:
        """Puts the results in their place; waits for the other members."""
        if self.ended or (self.done is not None and self.done.cancelled()):  # with its group
            return
        self.ended = True
        if self.done is not None:
            for output, value in zip(self.outputs, self.done.result(), strict=True):
                output.data_.copy_(value.view(output.shape))
        self.outputs = ()  # the machine keeps this handle until the host has waited

    def wait(self, timeout: Any = None) -> bool:
        self.end()
        self.behind.wait()
        self.held = None
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self.ended


# A communicator of the simulated NCCL: who is in it, and how an operation of it starts.
#
# A group is made and destroyed by all of its members in one order; the operations are `nccl.py`'s.


BACKEND = "simulated_nccl"


class Options:
    """As `ProcessGroupNCCL.Options`."""

    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(min_ctas=-1, max_ctas=-1, cga_cluster_size=-1)


class Communicator(dist.ProcessGroup):
    """The ranks of a group, made and destroyed by all of them, and the stream of its operations."""

    supports_splitting = True
    supports_coalescing = False

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        options: Options | None,
        timeout: timedelta,
        device: int | None = None,
        world: Communicator | None = None,
    ) -> None:
        super().__init__(rank, size)
        self.store, self.options, self.timeout = store, options or Options(), timeout
        self._rank, self._size, self.world = rank, size, world or self
        # Groups destroyed, in order, and what tells when all members have; of the world.
        self.closed: list[str] = []
        self.destroyed: list[tuple[str, Future[Sequence[Tensor]]]] = []
        self.closing: list[Wire] = []  # of the world: those of its groups, destroyed so far
        self.index = this_machine().device if device is None else device
        self.bound_device_id = torch.device(TYPE, self.index)
        self.stream = Stream(self.index)
        self.name, self.description = "", ""
        is_alone = this_machine().data == "meta"
        self.wire = None if is_alone else Wire(store, rank, size, timeout)

    # --- what torch.distributed asks of a group -----------------------------------------------

    @property
    def group_name(self) -> str:
        return self.name

    @property
    def group_desc(self) -> str:
        return self.description

    def _set_group_name(self, name: str) -> None:
        self.name = name

    def _set_group_desc(self, description: str) -> None:
        self.description = description
        if self.wire is not None:
            self.wire.name = description

    def getGroupName(self) -> str:
        return self.name

    def getBackendName(self) -> str:
        return BACKEND

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _get_backend(self, device: torch.device) -> Communicator:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(TYPE)]

    def _has_hooks(self) -> bool:
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Connected when made."""

    def _set_sequence_number_for_group(self) -> None:
        """Counted from the start."""

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def meet(self) -> None:
        """Members tell each other their devices. Raises RuntimeError where two share one."""
        if self.wire is None:
            return
        host = zlib.crc32(socket.gethostname().encode())
        mine = torch.tensor([[host, self.index]])
        for at, other in enumerate(self.wire.gathered(mine)):
            if at != self._rank and torch.equal(other, mine):
                raise RuntimeError(
                    f"Duplicate GPU detected: ranks {at} and {self._rank} of a group are both on "
                    f"device {self.index} of one host"
                )

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        **more: Any,
    ) -> Communicator | None:
        """A group of some members; a collective of all of this one, as ncclCommSplit is."""
        if self.wire is not None:
            what = zlib.crc32(str(group_desc).encode())
            self.wire.start("split", torch.empty(0), what, lambda copies: copies, []).result()
        if self._rank not in ranks:
            return None
        prefix = dist.PrefixStore(f"split/{group_name}", self.store)
        at, timeout = list(ranks).index(self._rank), timeout or self.timeout
        made = type(self)(prefix, at, len(ranks), opts, timeout, self.index, self.world)
        made._set_group_name(str(group_name))
        made._set_group_desc(str(group_desc))
        return made

    def shutdown(self) -> None:
        """Destroys it with all members, at the same place among those that they share with others.

        Raises Mismatch where another member is in an operation of the group: on NCCL both would
        wait. The destruction of a group is awaited in that of the world, so that ranks that take
        two of them in different orders are told so.
        """
        self.world.closed.append(self.description or "world")
        if self.wire is None:
            return
        if self._size > 1:
            nothing = torch.empty(0)
            destroyed = self.wire.start("destroy", nothing, 0, lambda copies: copies, [])
            self.world.destroyed.append((self.description or "world", destroyed))
        if self.world is self and self._size > 1:
            self._await_destroyed("world")
            self._compare_ends()
            self._await_destroyed()
        self.wire.close()
        self.world.closing.append(self.wire)
        if self.world is self:
            for wire in self.closing:
                wire.join()

    def _await_destroyed(self, only: str | None = None) -> None:
        for name, destroyed in self.destroyed:
            if only in (None, name):
                try:
                    destroyed.result()
                except Mismatch:
                    raise
                except RuntimeError as error:
                    raise RuntimeError(
                        f"rank {self._rank} destroys group {name}, and not all members do: NCCL "
                        "waits for them"
                    ) from error

    def abort(self) -> None:
        """Lets go of it without the other members."""
        if self.wire is not None:
            self.wire.close(cancels=True)

    def _compare_ends(self) -> None:
        order = ",".join(self.closed).encode()
        mine = torch.tensor([[zlib.crc32(order), len(self.closed)]])
        for at, other in enumerate(self.wire.gathered(mine)):
            if other[0, 1] == mine[0, 1] and not torch.equal(other, mine):
                raise Mismatch(
                    f"rank {self._rank} destroyed its groups in the order {', '.join(self.closed)} "
                    f"and rank {at} in another: NCCL may wait for ever"
                )

    # --- what starts on it ------------------------------------------------------------------------

    def _check(self, name: str, tensors: Sequence[Tensor]) -> None:
        for t in tensors:
            if not isinstance(t, SimulatedTensor):
                raise RuntimeError(
                    f"No backend type associated with device type {t.device.type}: {name} of a "
                    f"group on {TYPE}:{self.index}"
                )
            if t.index != self.index:
                raise RuntimeError(
                    f"{name}: a tensor is on {t.device}, its group on {TYPE}:{self.index}"
                )
            if not t.is_contiguous():
                raise ValueError(f"{name}: Tensors must be contiguous")

    def _start(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        run: Run,
        extra: int = 0,
    ) -> Started:
        """Starts a collective, behind the current stream."""
        self._check(name, [*inputs, *outputs])
        copies = [t.data_.detach().clone() for t in inputs]
        self._on_stream(name, inputs, outputs)
        done = None
        if self._travels([*inputs, *outputs]):
            done = self.wire.start(name, copies[0], extra, run, copies)
        return Started(self.stream, done, outputs, (inputs, outputs))

    def _travels(self, tensors: Sequence[Tensor]) -> bool:
        """Whether there is anybody to talk to, and anything to say: NCCL skips what is empty."""
        return self.wire is not None and any(t.numel() for t in tensors)

    def _on_stream(
        self, name: str, inputs: Sequence[SimulatedTensor], outputs: Sequence[SimulatedTensor]
    ) -> None:
        """The kernel behind the current stream, and poison where its results will be."""
        machine = this_machine()
        current = Stream(self.index, number=machine.stream_of(self.index))
        self.stream.wait_stream(current)
        uses = [[machine.use(t.data_, t.index) for t in some] for some in (inputs, outputs)]
        for observer in machine.observers:
            observer.collective(name, self, (inputs or outputs)[0].data_)
        machine.launch(Kernel(name, self.stream.number, *uses))
        for t in outputs:
            poison(t.data_)


# A process-group backend that behaves as NCCL does, over gloo.
#
# What NCCL does and gloo does not:
#
# - A collective runs on a stream of its group's own, behind what is on the current stream when it
# is
#   called; `wait()` orders the current stream behind it. Until then its results are poison here.
# - It takes tensors of its one device alone, contiguous ones; a gather or scatter may be in place
#   only at the rank's own part.
# - What has no elements is not sent, so nobody waits for it: neither a message nor a collective.
# - All members call the same operations in the same order, by position and not by tag, and a group
# is
#   made and destroyed by all of its members in one order (`wire.py` tells members that differ).
#
# Where tensors have no values (`data="meta"`) there is nobody to talk to: one process is one rank
# of any world, every collective and message is done at its `wait()`, and nothing is compared.


SUMS = [getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT")]
# The same over the first dimension.
OPERATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t.sum(0),
    lambda t: t.mean(0),
    lambda t: t.amin(0),
    lambda t: t.amax(0),
    lambda t: t.prod(0),
)


def _number(op: Any) -> int:
    return next(i for i, known in enumerate(SUMS) if op == known)


class SimulatedNCCL(Communicator):
    """One communicator. See the module's docstring."""

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Started:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            return [self._sum(copies[0], op)]

        return self._start("allreduce", tensors, tensors, run, _number(op))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Started:
        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            return [self._broadcast(copies[0], opts.rootRank)]

        return self._start("broadcast", tensors, tensors, run, opts.rootRank)

    def _sum(self, value: Tensor, op: Any) -> Tensor:
        """Over the members, in fp32 or better, as NCCL adds; on the wire's thread."""
        mean = op == dist.ReduceOp.AVG
        wide = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
        settings = dist.AllreduceOptions()
        settings.reduceOp = dist.ReduceOp.SUM if mean else op
        self.wire.gloo.allreduce([wide], settings).wait()
        return (wide / self._size if mean else wide).to(value.dtype)

    def _broadcast(self, value: Tensor, root: int) -> Tensor:
        settings = dist.BroadcastOptions()
        settings.rootRank = root
        self.wire.gloo.broadcast([value.view(-1).view(torch.uint8)], settings).wait()
        return value

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Started:
        self._check_in_place("all_gather", output, given)

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            return [torch.cat(self.wire.gather_data(copies))]

        return self._start("all_gather", [given], [output], run)

    def allgather(self, outputs: list[list[Tensor]], given: list[Tensor], opts: Any = None) -> Any:
        gather: Callable = lambda copies: self.wire.gather_data(copies)  # noqa: E731
        return self._start("all_gather", given, outputs[0], gather)

    def gather(self, outputs: list[list[Tensor]], given: list[Tensor], opts: Any) -> Started:
        mine = outputs[0] if outputs else []

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            everyone = self.wire.gather_data(copies)
            return everyone if mine else []

        return self._start("gather", given, mine, run, opts.rootRank)

    def scatter(self, outputs: list[Tensor], given: list[list[Tensor]], opts: Any) -> Started:
        """As parts of one broadcast; the others give a tensor of equal size."""
        parts = given[0] if given else [torch.empty_like(outputs[0]) for _ in range(self._size)]

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            flat = torch.cat([copy.view(-1) for copy in copies])
            return [self._broadcast(flat, opts.rootRank).chunk(self._size)[self._rank]]

        return self._start("scatter", parts, outputs, run, opts.rootRank)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Started:
        """The sum on the root; the others keep what they gave."""
        is_root = opts.rootRank == self._rank

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            given = copies[0].clone()
            total = self._sum(copies[0], opts.reduceOp)
            return [total if is_root else given]

        return self._start("reduce", tensors, tensors, run, opts.rootRank)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Started:
        self._check_in_place("reduce_scatter", given, output)
        number = 0 if opts is None else _number(opts.reduceOp)

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            wide = torch.promote_types(given.dtype, torch.float32)
            everyone = self.wire.gather_data(copies)
            parts = [t.chunk(self._size)[self._rank].to(wide) for t in everyone]
            return [OPERATIONS[number](torch.stack(parts)).to(given.dtype)]

        return self._start("reduce_scatter", [given], [output], run, number)

    def _check_in_place(self, name: str, whole: Tensor, part: Tensor) -> None:
        """NCCL takes a part inside the whole only where it belongs."""
        if not all(isinstance(t, SimulatedTensor) for t in (whole, part)):
            return  # `_check` refuses it
        if whole.untyped_storage()._cdata != part.untyped_storage()._cdata:
            return
        (first, end), (at, stop) = extent(whole.data_), extent(part.data_)
        if at < end and first < stop and at != first + self._rank * (stop - at):
            raise RuntimeError(f"{name} in place needs the part to be number {self._rank}")

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list, input_sizes: list, opts: Any = None
    ) -> Started:
        if output_sizes or input_sizes:
            raise NotImplementedError(f"uneven all_to_all on the {TYPE} device")

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            everyone = self.wire.gather_data(copies)
            return [torch.cat([t.chunk(self._size)[self._rank] for t in everyone])]

        return self._start("all_to_all", [given], [output], run)

    # As torch called them before 2.13.
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single
    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Together:
        """The host waits, as it does for NCCL's."""
        token = torch.zeros(1, device=torch.device(TYPE, self.index))
        started = self._start("barrier", [token], [token], lambda copies: copies)
        started.wait()
        this_machine().wait_for_stream(self.stream.number, "a barrier", is_detected=False)
        return Together([started])

    # --- messages ------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Started:
        self._check("send", tensors)
        copy = tensors[0].data_.detach().clone()
        self._on_stream("send", tensors, [])
        done = self.wire.send(copy, target, tag) if self._travels(tensors) else None
        return Started(self.stream, done, [], (tensors, copy))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Started:
        self._check("receive", tensors)
        self._on_stream("receive", [], tensors)
        travels = self._travels(tensors)
        done = self.wire.receive(tensors[0].data_, source, tag) if travels else None
        return Started(self.stream, done, tensors, tensors)


# Makes the simulated backend known to torch.distributed, and to DTensor's collectives.


def register() -> None:
    """Makes the backend known to torch.distributed, and batches of messages go out as one."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[TYPE])
    dist.Backend.default_device_backend_map[TYPE] = BACKEND
    plain = dist.batch_isend_irecv

    def batched(operations: list[dist.P2POp]) -> list[Any]:
        group = operations[0].group or dist.group.WORLD
        if not isinstance(group, SimulatedNCCL):
            return plain(operations)
        with nullcontext() if group.wire is None else group.wire.batch():
            works = plain(operations)
        return [Together(works)]  # NCCL hands out one handle for all

    dist.batch_isend_irecv = dist.distributed_c10d.batch_isend_irecv = batched


def functional() -> dict[Any, Callable[..., Any]]:
    """DTensor's collectives, which find their group by its name in C++: operator → what it does.

    Each is waited for at once.
    """
    ops = torch.ops._c10d_functional

    def all_gather(_: Any, tensor: Tensor, size: int, name: str) -> Tensor:
        group = _named(name)
        out = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
        group.all_gather_single(out, tensor.contiguous()).wait()
        return out

    def all_reduce(_: Any, tensor: Tensor, op: str, name: str) -> Tensor:
        out = tensor.clone()
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op.upper())
        _named(name).allreduce([out], options).wait()
        return out

    return {
        ops.all_gather_into_tensor.default: all_gather,
        ops.all_reduce.default: all_reduce,
        ops.wait_tensor.default: lambda _, tensor: tensor,
    }


def _named(name: str) -> SimulatedNCCL:
    names = dist.distributed_c10d._world.pg_names
    return next(group for group, known in names.items() if known == name)


def _create(asked: Any, options: Options | None) -> SimulatedNCCL:
    group = SimulatedNCCL(asked.store, asked.group_rank, asked.group_size, options, asked.timeout)
    group.meet()
    return group
