"""A communicator of the pretended NCCL: who is in it, and how an operation of it starts.

A group is made and destroyed by all of its members in one order; the operations are `nccl.py`'s.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel3d.pretend.device import TYPE, Stream, this_machine
from parallel3d.pretend.records import Kernel
from parallel3d.pretend.tensor import PretendedTensor, poison
from parallel3d.pretend.wire import Mismatch, Run, Wire
from parallel3d.pretend.works import Started

BACKEND = "pretended_nccl"


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
            if not isinstance(t, PretendedTensor):
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
        self, name: str, inputs: Sequence[PretendedTensor], outputs: Sequence[PretendedTensor]
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
