"""Provides a process-group backend that behaves as NCCL, over gloo.

Differences of NCCL from gloo that it has:

- A collective runs on a stream of its group, behind the current stream; `wait()` orders the current
stream behind it. Until then its results are poison here. - It takes contiguous tensors of its
device alone; a gather or scatter may be in place only at the rank's own part. - Tensors without
elements are not sent, so nobody waits for them. - All members call the same operations in the same
order, by position and not by tag, and make and destroy groups in one order. Mismatches are
reported.

If tensors have no values (`data="meta"`) there are no other members: one process is one rank of any
world, every collective and message is done at its `wait()`, and nothing is compared.
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
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.simulated_device.device import TYPE, SimulatedStream, this_machine
from parallel3d.simulated_device.machine import Kernel, extent
from parallel3d.simulated_device.tensor import SimulatedTensor, poison

JOIN_S = 10.0
Run = Callable[[list[Tensor]], Sequence[Tensor]]  # copies of the inputs → values of the outputs

NAMES = ("split", "allreduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather",
         "scatter", "reduce", "barrier", "destroy")  # fmt: skip
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32,
          torch.int16, torch.uint8, torch.int8, torch.bool)  # fmt: skip


class Mismatch(RuntimeError):
    """Is raised when members of a group call different operations or orders."""


class WireMessage:
    """Holds a send or receive: `start` returns its works, `finish` the received values."""

    def __init__(
        self, start: Callable[[], list[Any]], finish: Callable[[], Sequence[Tensor]]
    ) -> None:
        self.start, self.finish = start, finish
        self.done: Future[Sequence[Tensor]] = Future()

    def end(self, works: list[Any]) -> None:
        try:
            for work in works:
                work.wait()
            self.done.set_result(self.finish())
        except Exception as error:
            self.done.set_exception(error)


class WorkerThread:
    """Runs jobs in order on a thread, also while the interpreter ends, which it does not delay."""

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
    """Sends a member's collectives and messages over gloo, on a thread that acts as NCCL's stream.

    The thread runs one operation after the other, a batch of messages as one. Each operation
    carries a header, so that mismatches are reported.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self.name = "world"  # of the group, for messages of errors
        self.gloo, self.headers = (
            # The stubs have the operations on ProcessGroup alone.
            cast(
                dist.ProcessGroup,
                dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout),
            )
            for name in ("data", "headings")
        )
        self.queue = WorkerThread()
        self.calls = 0
        self.messages: dict[tuple[int, int], int] = {}  # (from, to) → so far
        self.batched: list[WireMessage] | None = None

    def close(self, cancels: bool = False) -> None:
        self.queue.close(cancels)

    def join(self) -> None:
        """Waits for the thread: unwinding it at the interpreter's end may abort the process."""
        self.queue.thread.join(JOIN_S)

    # --- collectives ---------------------------------------------------------------------------

    def start(
        self, name: str, like: Tensor, extra: int, run: Run, copies: list[Tensor]
    ) -> Future[Sequence[Tensor]]:
        """Queues an operation, which raises Mismatch unless type, size and `extra` agree."""
        self.calls += 1
        facts = [self.calls, NAMES.index(name), DTYPES.index(like.dtype), like.numel(), extra]
        return self.queue.submit(self._do, torch.tensor([facts]), run, copies)

    def _do(self, header: Tensor, run: Run, copies: list[Tensor]) -> Sequence[Tensor]:
        for at, other in enumerate(self._gather(header)):
            if not torch.equal(other, header):
                raise Mismatch(
                    f"member {self.rank} of {self.name} calls {_operation(header)} where member "
                    f"{at} calls {_operation(other)}"
                )
        return run(copies)

    def gathered(self, mine: Tensor) -> list[Tensor]:
        return self.queue.submit(self._gather, mine).result()

    def _gather(self, mine: Tensor) -> list[Tensor]:
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        self.headers.allgather([everyone], [mine]).wait()
        return everyone

    def gather_data(self, copies: list[Tensor]) -> list[Tensor]:
        """Returns the flat values of all members; on the thread."""
        data = copies[0].view(-1).view(torch.uint8)
        everyone = [torch.empty_like(data) for _ in range(self.size)]
        self.gloo.allgather([everyone], [data]).wait()
        return [t.view(copies[0].dtype) for t in everyone]

    # --- messages ------------------------------------------------------------------------------

    @contextmanager
    def batch(self) -> Iterator[None]:
        batched: list[WireMessage] = []
        self.batched = batched
        try:
            yield
        finally:
            self.batched = None
        self.queue.submit(_exchange, batched)

    def send(self, copy: Tensor, target: int, tag: int) -> Future[Sequence[Tensor]]:
        header, number = self._header(self.rank, target, copy, tag)

        def start() -> list[Any]:
            data = copy.view(-1).view(torch.uint8)
            return [
                self.headers.send([header], target, number),
                self.gloo.send([data], target, number),
            ]

        return self._post(WireMessage(start, lambda: []))

    def receive(self, like: Tensor, source: int, tag: int) -> Future[Sequence[Tensor]]:
        header, number = self._header(source, self.rank, like, tag)
        theirs = torch.empty_like(header)
        data = torch.empty(like.nbytes, dtype=torch.uint8)

        def start() -> list[Any]:
            return [
                self.headers.recv([theirs], source, number),
                self.gloo.recv([data], source, number),
            ]

        def finish() -> Sequence[Tensor]:
            if not torch.equal(theirs, header):
                raise Mismatch(
                    f"member {self.rank} of {self.name} receives {_size(header)} as message "
                    f"{number} of member {source}, which sent {_size(theirs)}"
                )
            return [data.view(like.dtype)]

        return self._post(WireMessage(start, finish))

    def _header(self, source: int, target: int, like: Tensor, tag: int) -> tuple[Tensor, int]:
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
    started = [(message, message.start()) for message in messages]
    for message, works in started:
        message.end(works)


def _operation(header: Tensor) -> str:
    number, name, dtype, numel, extra = header.flatten().tolist()
    return f"{NAMES[name]} number {number} ({_words(dtype, numel)}, {extra})"


def _size(header: Tensor) -> str:
    _, tag, dtype, numel = header.flatten().tolist()
    return f"{_words(dtype, numel)} with tag {tag}"


def _words(dtype: int, numel: int) -> str:
    return f"{str(DTYPES[dtype]).removeprefix('torch.')}[{numel}]"


class BatchWork(dist.Work):
    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self.works = works

    def wait(self, timeout: Any = None) -> bool:
        for work in self.works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)


class CollectiveWork(dist.Work):
    """Is the handle of a collective; keeps `held` until somebody has waited."""

    def __init__(
        self,
        stream: SimulatedStream,
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
        if self.ended or (self.done is not None and self.done.cancelled()):  # by `abort`
            return
        self.ended = True
        if self.done is not None:
            for output, value in zip(self.outputs, self.done.result(), strict=True):
                output.data_.copy_(value.view(output.shape))
        self.outputs = ()  # the machine keeps this handle longer, until the host has waited

    def wait(self, timeout: Any = None) -> bool:
        self.end()
        self.behind.wait()
        self.held = None
        return True

    synchronize = wait  # type: ignore[assignment]

    def is_completed(self) -> bool:
        return self.ended


BACKEND = "simulated_nccl"


class Options:
    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(min_ctas=-1, max_ctas=-1, cga_cluster_size=-1)


class Communicator(dist.ProcessGroup):
    """Makes and destroys a group, collectively, and starts operations on its stream."""

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
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.store, self.options, self.timeout = store, options or Options(), timeout
        self._rank, self._size, self.world = rank, size, world or self
        # On the world's group: destroyed groups in order, futures of their destruction on all
        # members, and their wires.
        self.closed: list[str] = []
        self.destroyed: list[tuple[str, Future[Sequence[Tensor]]]] = []
        self.closing: list[Wire] = []
        self.index = this_machine().device if device is None else device
        self.bound_device_id = torch.device(TYPE, self.index)
        self.stream = SimulatedStream(self.index)
        self._name, self.description = "", ""
        is_alone = this_machine().data == "meta"
        self.wire = None if is_alone else Wire(store, rank, size, timeout)

    @property
    def connected(self) -> Wire:
        assert self.wire is not None
        return self.wire

    # --- interface of torch.distributed --------------------------------------------------------

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return self.description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self.description = description
        if self.wire is not None:
            self.wire.name = description

    def getGroupName(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return BACKEND

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _get_backend(self, device: torch.device) -> Communicator:  # type: ignore[override]
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(TYPE)]

    def _has_hooks(self) -> bool:
        return False

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Does nothing: the group is connected when it is made."""

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: operations are counted from the start."""

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def check_devices(self) -> None:
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

    def split_group(  # type: ignore[override]
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        **more: Any,
    ) -> Communicator | None:
        """Makes a group of some members; collective over this group, as ncclCommSplit."""
        if self.wire is not None:
            description = zlib.crc32(str(group_desc).encode())
            nothing = torch.empty(0)
            self.wire.start("split", nothing, description, lambda copies: copies, []).result()
        if self._rank not in ranks:
            return None
        prefix = dist.PrefixStore(f"split/{group_name}", self.store)
        at, timeout = list(ranks).index(self._rank), timeout or self.timeout
        made = type(self)(prefix, at, len(ranks), opts, timeout, self.index, self.world)
        made._set_group_name(str(group_name))
        made._set_group_desc(str(group_desc))
        return made

    def shutdown(self) -> None:
        """Destroys the group with all members, in the same order as their other groups.

        Raises Mismatch if another member is in an operation of the group: on NCCL both would wait.
        The destruction of the world waits for those of all groups, so that members that destroy two
        groups in different orders are reported.
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
            self._check_destroy_order()
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
        if self.wire is not None:
            self.wire.close(cancels=True)

    def _check_destroy_order(self) -> None:
        order = ",".join(self.closed).encode()
        mine = torch.tensor([[zlib.crc32(order), len(self.closed)]])
        for at, other in enumerate(self.connected.gathered(mine)):
            if other[0, 1] == mine[0, 1] and not torch.equal(other, mine):
                raise Mismatch(
                    f"rank {self._rank} destroyed its groups in the order {', '.join(self.closed)} "
                    f"and rank {at} in another: NCCL may wait for ever"
                )

    # --- operations ----------------------------------------------------------------------------

    def _check(self, name: str, tensors: Sequence[Tensor]) -> list[SimulatedTensor]:
        """Returns the tensors. Raises as NCCL for what it does not take."""
        checked = []
        for t in tensors:
            if not isinstance(t, SimulatedTensor):
                raise RuntimeError(
                    f"No backend type associated with device type {t.device.type}: {name} of a "
                    f"group on {TYPE}:{self.index}"
                )
            if t.device_index != self.index:
                raise RuntimeError(
                    f"{name}: a tensor is on {t.device}, its group on {TYPE}:{self.index}"
                )
            if not t.is_contiguous():
                raise ValueError(f"{name}: Tensors must be contiguous")
            checked.append(t)
        return checked

    def _start(
        self,
        name: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        run: Run,
        extra: int = 0,
        uneven: bool = False,
    ) -> CollectiveWork:
        given, written = self._check(name, inputs), self._check(name, outputs)
        copies = [t.data_.detach().clone() for t in given]
        self._on_stream(name, given, written)
        done = None
        if self.wire is not None if uneven else self._travels([*inputs, *outputs]):
            like = copies[0][:0] if uneven else copies[0]
            done = self.connected.start(name, like, extra, run, copies)
        return CollectiveWork(self.stream, done, written, (inputs, outputs))

    def _travels(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether there are other members and any elements: NCCL skips empty tensors."""
        return self.wire is not None and any(t.numel() for t in tensors)

    def _on_stream(
        self, name: str, inputs: Sequence[SimulatedTensor], outputs: Sequence[SimulatedTensor]
    ) -> None:
        """Launches the kernel behind the current stream, and poisons its outputs."""
        machine = this_machine()
        current = SimulatedStream(self.index, number=machine.stream_of(self.index))
        self.stream.wait_stream(current)
        reads, writes = (
            [machine.use(t.data_, t.device_index) for t in tensors] for tensors in (inputs, outputs)
        )
        for observer in machine.observers:
            observer.collective(name, self, (inputs or outputs)[0].data_)
        machine.launch(Kernel(name, self.stream.number, reads, writes))
        for t in outputs:
            poison(t.data_)


SUMS = [getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT")]
# The same operations over the first dimension.
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
    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any = None
    ) -> CollectiveWork:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            return [self._sum(copies[0], op)]

        return self._start("allreduce", tensors, tensors, run, _number(op))

    def broadcast(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any
    ) -> CollectiveWork:
        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            return [self._broadcast(copies[0], opts.rootRank)]

        return self._start("broadcast", tensors, tensors, run, opts.rootRank)

    def _sum(self, value: Tensor, op: Any) -> Tensor:
        """Reduces over the members, in fp32 or better, as NCCL does; on the wire's thread."""
        mean = op == dist.ReduceOp.AVG
        wide = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
        settings = dist.AllreduceOptions()
        settings.reduceOp = dist.ReduceOp.SUM if mean else op  # type: ignore[assignment]
        self.connected.gloo.allreduce([wide], settings).wait()
        return (wide / self._size if mean else wide).to(value.dtype)

    def _broadcast(self, value: Tensor, root: int) -> Tensor:
        settings = dist.BroadcastOptions()
        settings.rootRank = root
        self.connected.gloo.broadcast([value.view(-1).view(torch.uint8)], settings).wait()
        return value

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> CollectiveWork:
        self._check_in_place("all_gather", output, given)

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            return [torch.cat(self.connected.gather_data(copies))]

        return self._start("all_gather", [given], [output], run)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], given: list[Tensor], opts: Any = None
    ) -> CollectiveWork:
        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            return self.connected.gather_data(copies)

        return self._start("all_gather", given, outputs[0], run)

    def gather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], given: list[Tensor], opts: Any
    ) -> CollectiveWork:
        mine = outputs[0] if outputs else []

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            everyone = self.connected.gather_data(copies)
            return everyone if mine else []

        return self._start("gather", given, mine, run, opts.rootRank)

    def scatter(  # type: ignore[override]
        self, outputs: list[Tensor], given: list[list[Tensor]], opts: Any
    ) -> CollectiveWork:
        """Scatters by a broadcast, to which non-roots pass tensors of equal size."""
        parts = given[0] if given else [torch.empty_like(outputs[0]) for _ in range(self._size)]

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            flat = torch.cat([copy.view(-1) for copy in copies])
            return [self._broadcast(flat, opts.rootRank).chunk(self._size)[self._rank]]

        return self._start("scatter", parts, outputs, run, opts.rootRank)

    def reduce(self, tensors: list[Tensor], opts: Any) -> CollectiveWork:  # type: ignore[override]
        """Reduces on the root; the other members' tensors stay."""
        is_root = opts.rootRank == self._rank

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            given = copies[0].clone()
            total = self._sum(copies[0], opts.reduceOp)
            return [total if is_root else given]

        return self._start("reduce", tensors, tensors, run, opts.rootRank)

    def reduce_scatter_single(
        self, output: Tensor, given: Tensor, opts: Any = None
    ) -> CollectiveWork:
        self._check_in_place("reduce_scatter", given, output)
        number = 0 if opts is None else _number(opts.reduceOp)

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            wide = torch.promote_types(given.dtype, torch.float32)
            everyone = self.connected.gather_data(copies)
            parts = [t.chunk(self._size)[self._rank].to(wide) for t in everyone]
            return [OPERATIONS[number](torch.stack(parts)).to(given.dtype)]

        return self._start("reduce_scatter", [given], [output], run, number)

    def _check_in_place(self, name: str, whole: Tensor, part: Tensor) -> None:
        """Raises RuntimeError for a part inside the whole at another place than the rank's own."""
        if not (isinstance(whole, SimulatedTensor) and isinstance(part, SimulatedTensor)):
            return  # refused by `_check`
        if whole.untyped_storage()._cdata != part.untyped_storage()._cdata:
            return
        (first, end), (at, stop) = extent(whole.data_), extent(part.data_)
        if at < end and first < stop and at != first + self._rank * (stop - at):
            raise RuntimeError(f"{name} in place needs the part to be number {self._rank}")

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list, input_sizes: list, opts: Any = None
    ) -> CollectiveWork:
        if output_sizes or input_sizes:

            def exchange(copies: list[Tensor]) -> Sequence[Tensor]:
                (sent,) = copies
                taken = sent.new_empty(output.shape)
                self.connected.gloo.alltoall_base(taken, sent, output_sizes, input_sizes).wait()
                return [taken]

            return self._start("all_to_all", [given], [output], exchange, uneven=True)

        def run(copies: list[Tensor]) -> Sequence[Tensor]:
            everyone = self.connected.gather_data(copies)
            return [torch.cat([t.chunk(self._size)[self._rank] for t in everyone])]

        return self._start("all_to_all", [given], [output], run)

    # Names before torch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> BatchWork:
        """Makes the host wait, as NCCL's."""
        token = torch.zeros(1, device=torch.device(TYPE, self.index))
        started = self._start("barrier", [token], [token], lambda copies: copies)
        started.wait()
        this_machine().wait_for_stream(self.stream.number, "a barrier", is_detected=False)
        return BatchWork([started])

    # --- messages ------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], target: int, tag: int) -> CollectiveWork:
        checked = self._check("send", tensors)
        copy = checked[0].data_.detach().clone()
        self._on_stream("send", checked, [])
        done = self.connected.send(copy, target, tag) if self._travels(tensors) else None
        return CollectiveWork(self.stream, done, [], (tensors, copy))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> CollectiveWork:
        checked = self._check("receive", tensors)
        self._on_stream("receive", [], checked)
        travels = self._travels(tensors)
        done = self.connected.receive(checked[0].data_, source, tag) if travels else None
        return CollectiveWork(self.stream, done, checked, tensors)


def register() -> None:
    """Registers the backend with torch.distributed, and makes batches of messages one operation."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[TYPE])
    dist.Backend.default_device_backend_map[TYPE] = BACKEND
    plain = dist.batch_isend_irecv

    def batched(operations: list[dist.P2POp]) -> list[Any]:
        group = operations[0].group or dist.group.WORLD
        if not isinstance(group, SimulatedNCCL):
            return plain(operations)
        with nullcontext() if group.wire is None else group.wire.batch():
            works = plain(operations)
        return [BatchWork(works)]  # one handle, as NCCL

    dist.batch_isend_irecv = batched  # type: ignore[assignment]
    dist.distributed_c10d.batch_isend_irecv = batched  # type: ignore[assignment]


def functional() -> dict[Any, Callable[..., Any]]:
    """Returns DTensor's collectives, whose group C++ finds by name; they wait at once."""
    ops = torch.ops._c10d_functional

    def all_gather(_: Any, tensor: Tensor, size: int, name: str) -> Tensor:
        group = _group_by_name(name)
        out = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
        group.all_gather_single(out, tensor.contiguous()).wait()
        return out

    def all_reduce(_: Any, tensor: Tensor, op: str, name: str) -> Tensor:
        out = tensor.clone()
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op.upper())
        _group_by_name(name).allreduce([out], options).wait()
        return out

    return {
        ops.all_gather_into_tensor.default: all_gather,
        ops.all_reduce.default: all_reduce,
        ops.wait_tensor.default: lambda _, tensor: tensor,
    }


def _group_by_name(name: str) -> SimulatedNCCL:
    names = dist.distributed_c10d._world.pg_names
    group = next(group for group, known in names.items() if known == name)
    assert isinstance(group, SimulatedNCCL)
    return group


def _create(request: Any, options: Options | None) -> SimulatedNCCL:
    group = SimulatedNCCL(
        request.store, request.group_rank, request.group_size, options, request.timeout
    )
    group.check_devices()
    return group
