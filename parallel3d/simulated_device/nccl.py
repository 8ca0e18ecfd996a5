"""Provides a process-group backend that behaves like NCCL, over gloo.

It follows NCCL where NCCL differs from gloo:

- A collective runs on its group's stream, after the work that is already on the current stream.
  `wait()` makes the current stream wait for the collective; before that, its outputs hold garbage.
- It takes only contiguous tensors on its device. An all-gather or reduce-scatter may work in place
  only on the rank's own part.
- Tensors without elements are not sent, so nobody waits for them.
- All members must call the same operations in the same order, as they are matched by position and
  not by tag. They must also make and destroy groups in the same order. Mismatches raise an error.

If tensors have no values (`data="meta"`), there are no other members: the process is one rank of a
world of any size, every collective and message is done at its `wait()`, and nothing is compared.
"""

from __future__ import annotations

import itertools
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.private_names import (
    functional_collectives,
    simulated_backend_is_a_group,
    storage_address,
    world_state,
)
from parallel3d.simulated_device.device import TYPE, SimulatedStream, this_machine
from parallel3d.simulated_device.machine import extent
from parallel3d.simulated_device.tensor import SimulatedTensor, launch, poison

JOIN_S = 10.0
HEADER = 400  # bytes of text that are sent before an operation's data
# A Run takes a flat copy of the inputs, and returns the values of the outputs.
Run = Callable[[Tensor], Sequence[Tensor]]


class Mismatch(RuntimeError):
    """Raised when members of a group call different operations, or in different orders."""


@dataclass
class WireMessage:
    """Message that this member sends to or receives from `peer`."""

    peer: int
    number: int  # index among the messages between the two members in this direction
    size: str
    data: Tensor
    receives: bool
    done: Future[Sequence[Tensor]] = field(default_factory=Future)

    def start(self, wire: Wire) -> None:
        self.header = _coded("" if self.receives else self.size)
        self.works = []
        post = wire.gloo.recv if self.receives else wire.gloo.send
        for tag, tensor in enumerate((self.header, _bytes(self.data)), 2 * self.number):
            self.works.append(post([tensor], self.peer, tag))

    def end(self, wire: Wire) -> None:
        try:
            for work in self.works:
                work.wait()
            if (sent := _text(self.header)) != self.size:
                raise Mismatch(
                    f"member {wire.rank} of {wire.name} receives {self.size} as message "
                    f"{self.number} of member {self.peer}, which sent {sent}"
                )
            self.done.set_result([self.data] if self.receives else [])
        except Exception as error:
            self.done.set_exception(error)


class WorkerThread:
    """Runs jobs in order on a daemon thread, which does not keep the interpreter from exiting."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.cancels = False
        self.thread = Thread(target=self._run, name="communicator", daemon=True)
        self.thread.start()

    def submit(self, job: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        self.jobs.put((done, lambda: job(*args)))
        return done

    def close(self, cancels: bool = False) -> None:
        self.cancels = cancels
        self.jobs.put(None)

    def join(self) -> None:
        """Waits until the thread has ended.

        If the interpreter exited before the thread, the process might abort.
        """
        self.thread.join(JOIN_S)

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

    The thread runs one operation after another, and a batch of messages as one operation. Each
    operation carries a header, so that mismatches are reported.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self.name = "world"  # name of the group, for error messages
        # Among the type stubs, only ProcessGroup's declares the operations.
        self.gloo = cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, size, timeout))
        self.queue = WorkerThread()
        self.calls = 0
        # number of messages so far, by peer and by whether this member receives them
        self.messages: dict[tuple[int, bool], int] = defaultdict(int)
        self.batched: list[WireMessage] | None = None

    def start(
        self, call: str, run: Run = lambda _: [], sent: Tensor | None = None
    ) -> Future[Sequence[Tensor]]:
        """Queues an operation; its future raises Mismatch if members make different calls."""
        self.calls += 1
        return self.queue.submit(self._do, f"{call} as operation {self.calls}", run, sent)

    def _do(self, call: str, run: Run, sent: Tensor) -> Sequence[Tensor]:
        for at, other in enumerate(self._tell(call)):
            if other != call:
                raise Mismatch(
                    f"member {self.rank} of {self.name} calls {call} where member {at} calls "
                    f"{other}"
                )
        return run(sent)

    def told(self, words: str) -> list[str]:
        """Sends `words` to all members, and returns the words of each member."""
        return self.queue.submit(self._tell, words).result()

    def _tell(self, words: str) -> list[str]:
        return [_text(header) for header in self.all_gather(_coded(words))]

    def all_gather(self, mine: Tensor) -> list[Tensor]:
        """Returns the flat values of all members; only the wire's own thread may call it."""
        sent = _bytes(mine)
        everyone = [torch.empty_like(sent) for _ in range(self.size)]
        self.gloo.allgather([everyone], [sent]).wait()
        return [theirs.view(mine.dtype) for theirs in everyone]

    @contextmanager
    def batch(self) -> Iterator[None]:
        batched: list[WireMessage] = []
        self.batched = batched
        try:
            yield
        finally:
            self.batched = None
        self.queue.submit(self._exchange, batched)

    def post(self, data: Tensor, peer: int, tag: int, receives: bool) -> Future[Sequence[Tensor]]:
        """Queues a message, or adds it to an open batch; `data` is sent or filled."""
        number = self.messages[peer, receives]
        self.messages[peer, receives] += 1
        message = WireMessage(peer, number, f"{_size(data)} with tag {tag}", data, receives)
        if self.batched is None:
            self.queue.submit(self._exchange, [message])
        else:
            self.batched.append(message)
        return message.done

    def _exchange(self, messages: list[WireMessage]) -> None:
        for message in messages:
            message.start(self)
        for message in messages:
            message.end(self)


def _bytes(values: Tensor) -> Tensor:
    return values.view(-1).view(torch.uint8)


def _coded(words: str) -> Tensor:
    return torch.frombuffer(bytearray(words.encode()[:HEADER].ljust(HEADER)), dtype=torch.uint8)


def _text(header: Tensor) -> str:
    return header.numpy().tobytes().decode(errors="replace").rstrip()


def _size(like: Tensor) -> str:
    return f"{str(like.dtype).removeprefix('torch.')}[{like.numel()}]"


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
    """Handle of a collective; it keeps the objects `held` alive until `wait()` is called."""

    def __init__(
        self,
        stream: SimulatedStream,
        done: Future[Sequence[Tensor]] | None,
        outputs: Sequence[SimulatedTensor],
        held: Any,
    ) -> None:
        super().__init__()
        self.done = done
        self.outputs = outputs
        self.held = held
        self.behind = stream.record_event()
        self.ended = False
        this_machine().once_known(stream.number, self.end)

    def end(self) -> None:
        # `abort` cancels operations, which then have no result.
        if self.ended or (self.done is not None and self.done.cancelled()):
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

    synchronize = wait  # type: ignore[assignment]

    def is_completed(self) -> bool:
        return self.ended


BACKEND = "simulated_nccl"


class Options:
    def __init__(self) -> None:
        self._timeout = timedelta(minutes=10)
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(min_ctas=-1, max_ctas=-1, cga_cluster_size=-1)


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": lambda t: t.sum(0),
    "AVG": lambda t: t.mean(0),
    "MIN": lambda t: t.amin(0),
    "MAX": lambda t: t.amax(0),
    "PRODUCT": lambda t: t.prod(0),
}  # each reduces the first dimension


def _reduced(parts: list[Tensor], op: str) -> Tensor:
    """Reduces in fp32 or better, like NCCL."""
    is_half = parts[0].dtype in (torch.bfloat16, torch.float16)
    stacked = torch.stack(parts)
    return REDUCTIONS[op](stacked.float() if is_half else stacked).to(parts[0].dtype)


def _reduction(options: Any) -> str:
    if options is None:
        return "SUM"
    return next(op for op in REDUCTIONS if options.reduceOp == getattr(dist.ReduceOp, op))


class SimulatedNCCL(dist.ProcessGroup):
    """Process group like NCCL's: all members make and destroy it, and it has its own stream."""

    supports_splitting = True

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        options: Options | None,
        timeout: timedelta,
        device: int | None = None,
        world: SimulatedNCCL | None = None,
    ) -> None:
        begin: Any = super().__init__  # some versions' type stubs lack these arguments
        begin(rank, size)
        self.store = store
        self.options = options or Options()
        self.timeout = timeout
        self._rank = rank
        self._size = size
        self.world = world or self
        # The world's group lists the destroyed groups here, in order.
        self.ended: list[SimulatedNCCL] = []
        self.index = this_machine().device if device is None else device
        self.bound_device_id = torch.device(TYPE, self.index)
        self.stream = SimulatedStream(self.index)
        self.splits = itertools.count()  # numbers the splits, which all members make in one order
        self._name = ""
        self.description = "world"
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

    def _get_backend(self, device: torch.device) -> SimulatedNCCL:  # type: ignore[override]
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(TYPE)]

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Does nothing: the group is connected when it is made."""

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: operations are counted from the start."""

    def check_devices(self) -> None:
        if self.wire is None:
            return
        mine = f"{socket.gethostname()} {self.index}"
        for at, other in enumerate(self.wire.told(mine)):
            if at != self._rank and other == mine:
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
    ) -> SimulatedNCCL | None:
        """Makes a group of some members; returns None on the others.

        All members of this group must call it, as with ncclCommSplit.
        """
        if self.wire is not None:
            self.wire.start(f"split into {group_desc}").result()
        number = next(self.splits)
        if self._rank not in ranks:
            return None
        # PyTorch gives the name of a destroyed group to a later one of the same ranks, which must
        # not read what members of the first have left in the store.
        prefix = dist.PrefixStore(f"split {number}/{group_name}", self.store)
        at, timeout = list(ranks).index(self._rank), timeout or self.timeout
        made = type(self)(prefix, at, len(ranks), opts, timeout, self.index, self.world)
        made._set_group_name(str(group_name))
        made._set_group_desc(str(group_desc))
        return made

    def shutdown(self) -> None:
        """Destroys the group; all members must destroy their groups in the same order.

        Raises Mismatch if another member calls another operation of the group: with NCCL, both
        would wait for ever. Destroying the world's group waits until all groups are destroyed, so
        that a different order on another member raises an error.
        """
        if self.wire is None:
            return
        self.world.ended.append(self)
        self.destroyed = self.wire.start("destroy")  # all members must call this, too
        if self.world is self:
            self._await_destroyed()
            self._check_destroy_order()
            for group in self.ended:
                group._await_destroyed()
        self.wire.queue.close()
        if self.world is self:
            for group in self.ended:
                group.connected.queue.join()

    def _await_destroyed(self) -> None:
        try:
            self.destroyed.result()
        except Mismatch:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self._rank} destroys group {self.description}, but not all members do: "
                "NCCL waits for them"
            ) from error

    def abort(self) -> None:
        if self.wire is not None:
            self.wire.queue.close(cancels=True)

    def _check_destroy_order(self) -> None:
        mine = ", ".join(group.description for group in self.ended)[:HEADER]
        for at, other in enumerate(self.connected.told(mine)):
            if other != mine and other.count(",") == mine.count(","):
                raise Mismatch(
                    f"rank {self._rank} destroyed its groups in the order {mine} and rank {at} in "
                    f"the order {other}: NCCL may wait forever"
                )

    # --- operations ----------------------------------------------------------------------------

    def _check(self, name: str, tensors: Sequence[Tensor]) -> list[SimulatedTensor]:
        """Returns the tensors, or raises NCCL's errors for tensors that NCCL rejects."""
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
        extra: str = "",
        uneven: bool = False,
    ) -> CollectiveWork:
        given, written = self._check(name, inputs), self._check(name, outputs)
        sent = torch.cat([t.data_.detach().view(-1) for t in given])  # copied
        self._on_stream(name, given, written)
        done = None
        if self.wire is not None and (uneven or any(t.numel() for t in (*inputs, *outputs))):
            facts = [_size(sent[:0] if uneven else sent), *filter(None, [extra])]
            done = self.wire.start(f"{name} ({', '.join(facts)})", run, sent)
        return CollectiveWork(self.stream, done, written, (inputs, outputs))

    def _on_stream(
        self, name: str, inputs: Sequence[SimulatedTensor], outputs: Sequence[SimulatedTensor]
    ) -> None:
        """Launches a kernel on the group's stream, and fills its outputs with garbage (`poison`).

        The kernel runs after the work that is already on the current stream.
        """
        machine = this_machine()
        current = SimulatedStream(self.index, number=machine.stream_of(self.index))
        self.stream.wait_stream(current)
        for observer in machine.observers:
            observer.collective(name, self, (inputs or outputs)[0].data_)
        launch(name, inputs, outputs, stream=self.stream.number)
        for t in outputs:
            poison(t.data_)

    def _check_in_place(self, name: str, whole: Tensor, part: Tensor) -> None:
        """Raises RuntimeError if `part` overlaps `whole` outside of this rank's part of it."""
        if not (isinstance(whole, SimulatedTensor) and isinstance(part, SimulatedTensor)):
            return  # `_check` rejects other tensors
        if storage_address(whole.untyped_storage()) != storage_address(part.untyped_storage()):
            return
        (first, end), (at, stop) = extent(whole.data_), extent(part.data_)
        if at < end and first < stop and at != first + self._rank * (stop - at):
            raise RuntimeError(f"{name} in place must use part {self._rank} of the whole")

    def _of_all(self, result: Callable[[list[Tensor]], Sequence[Tensor]]) -> Run:
        """Returns a function that gathers all members' flat inputs and computes the outputs."""
        return lambda sent: result(self.connected.all_gather(sent))

    def allreduce(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any = None
    ) -> CollectiveWork:
        op = _reduction(opts)
        run = self._of_all(lambda everyone: [_reduced(everyone, op)])
        return self._start("allreduce", tensors, tensors, run, op)

    def broadcast(  # type: ignore[override]
        self, tensors: list[Tensor], opts: Any
    ) -> CollectiveWork:
        run = self._of_all(lambda everyone: [everyone[opts.rootRank]])
        return self._start("broadcast", tensors, tensors, run, f"from {opts.rootRank}")

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> CollectiveWork:
        self._check_in_place("all_gather", output, given)
        run = self._of_all(lambda everyone: [torch.cat(everyone)])
        return self._start("all_gather", [given], [output], run)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], given: list[Tensor], opts: Any = None
    ) -> CollectiveWork:
        return self._start("all_gather", given, outputs[0], self._of_all(lambda every: every))

    def gather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], given: list[Tensor], opts: Any
    ) -> CollectiveWork:
        mine = outputs[0] if outputs else []
        is_root = bool(outputs)
        run = self._of_all(lambda everyone: everyone if is_root else [])
        return self._start("gather", given, mine, run, f"to {opts.rootRank}")

    def scatter(  # type: ignore[override]
        self, outputs: list[Tensor], given: list[list[Tensor]], opts: Any
    ) -> CollectiveWork:
        """Scatters by gathering all inputs; members other than the root gather unused tensors."""
        parts = given[0] if given else [torch.empty_like(outputs[0]) for _ in range(self._size)]
        run = self._of_all(lambda everyone: [self._part(everyone[opts.rootRank])])
        return self._start("scatter", parts, outputs, run, f"from {opts.rootRank}")

    def reduce(self, tensors: list[Tensor], opts: Any) -> CollectiveWork:  # type: ignore[override]
        """Reduces into the root's tensor; the tensors of the other members keep their values."""
        op, is_root = _reduction(opts), opts.rootRank == self._rank
        run = self._of_all(lambda every: [_reduced(every, op) if is_root else every[self._rank]])
        return self._start("reduce", tensors, tensors, run, f"{op} to {opts.rootRank}")

    def reduce_scatter_single(
        self, output: Tensor, given: Tensor, opts: Any = None
    ) -> CollectiveWork:
        self._check_in_place("reduce_scatter", given, output)
        op = _reduction(opts)
        run = self._of_all(lambda everyone: [_reduced(list(map(self._part, everyone)), op)])
        return self._start("reduce_scatter", [given], [output], run, op)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_sizes: list, input_sizes: list, opts: Any = None
    ) -> CollectiveWork:
        # `run` uses only these, because it may outlive the tensors
        shape, count = output.shape, len(given)

        def run(sent: Tensor) -> Sequence[Tensor]:
            """Exchanges the numbers of rows in the sizes; empty sizes divide the rows equally."""
            rows = sent.view(torch.uint8).view(count, -1) if sent.numel() else sent
            got = torch.empty(shape, dtype=sent.dtype)
            taken = got.view(-1).view(torch.uint8).view(len(got), -1) if got.numel() else got
            self.connected.gloo.alltoall_base(taken, rows, output_sizes, input_sizes).wait()
            return [got]

        uneven = bool(output_sizes or input_sizes)
        return self._start("all_to_all", [given], [output], run, uneven=uneven)

    def _part(self, whole: Tensor) -> Tensor:
        return whole.chunk(self._size)[self._rank]

    # These were the names before torch 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def barrier(self, opts: Any = None) -> CollectiveWork:
        """Makes the host wait for all members, like NCCL's barrier."""
        token = torch.zeros(1, device=torch.device(TYPE, self.index))
        started = self._start("barrier", [token], [token], lambda sent: [sent])
        started.wait()
        this_machine().wait_for_stream(self.stream.number, "a barrier", is_detected=False)
        return started

    # --- messages ------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], target: int, tag: int) -> CollectiveWork:
        return self._message("send", tensors, target, tag, receives=False)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> CollectiveWork:
        return self._message("receive", tensors, source, tag, receives=True)

    def _message(
        self, name: str, tensors: list[Tensor], peer: int, tag: int, *, receives: bool
    ) -> CollectiveWork:
        checked = self._check(name, tensors)
        data = checked[0].data_.detach().clone()
        sent, got = ([], checked) if receives else (checked, [])
        self._on_stream(name, sent, got)
        done = None
        if self.wire is not None and data.numel():
            done = self.wire.post(data.view(-1), peer, tag, receives)
        return CollectiveWork(self.stream, done, got, (tensors, data))


def register() -> None:
    """Registers the backend with torch.distributed, and makes a batch of messages one operation."""
    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[TYPE])
    dist.Backend.default_device_backend_map[TYPE] = BACKEND
    simulated_backend_is_a_group(BACKEND, SimulatedNCCL)
    plain = dist.batch_isend_irecv

    def batched(operations: list[dist.P2POp]) -> list[Any]:
        group = operations[0].group or dist.group.WORLD
        if not isinstance(group, SimulatedNCCL):
            return plain(operations)
        with nullcontext() if group.wire is None else group.wire.batch():
            works = plain(operations)
        return [BatchWork(works)]  # NCCL also returns a single handle

    dist.batch_isend_irecv = batched  # type: ignore[assignment]
    dist.distributed_c10d.batch_isend_irecv = batched  # type: ignore[assignment]


def functional() -> dict[Any, Callable[..., Any]]:
    """Returns implementations of DTensor's collectives, which find a group by name.

    They wait for their result immediately.
    """
    ops = functional_collectives

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
    names = world_state.pg_names
    group = next(group for group, known in names.items() if known == name)
    assert isinstance(group, SimulatedNCCL)
    return group


def _create(request: Any, options: Options | None) -> SimulatedNCCL:
    group = SimulatedNCCL(
        request.store, request.group_rank, request.group_size, options, request.timeout
    )
    group.check_devices()
    return group
