"""Communication hooks with PyTorch's interface: what a user's function makes of each bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.comm.group import Group
from parallel3d.device.accelerator import is_accelerator
from parallel3d.parts.ddp.buckets import views_of
from parallel3d.parts.ddp.transport import Size


class GradBucket:
    """What a communication hook is given; the interface of `torch.distributed.GradBucket`."""

    def __init__(
        self, index: int, last: bool, buffer: Tensor, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._index, self._last, self._buffer = index, last, buffer
        self._parameters = list(parameters)

    def index(self) -> int:
        """The bucket's number, in the order in which hooks are called."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last of this backward."""
        return self._last

    def buffer(self) -> Tensor:
        """All of its gradients, flat; this rank's own, neither summed nor divided."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Puts another tensor in the place of the buffer."""
        self._buffer = buffer

    def parameters(self) -> list[Tensor]:
        """Its parameters, in the order in which their gradients lie in the buffer."""
        return list(self._parameters)

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, one for each parameter."""
        return views_of(self._buffer, self._parameters)


Hook = Callable[[Any, GradBucket], torch.futures.Future]


def alone_hook(_: object, bucket: GradBucket) -> torch.futures.Future:
    """In the place of a hook that reduces, for a group of one: the bucket as it is."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class HookTransport:
    """Hands each full bucket to a hook, whose future holds what becomes of it.

    On a CPU a bucket waits for the one before: what a hook sends in a second round leaves from
    whichever thread ends the first, so that of several buckets under way two ranks could send in
    different orders, and wait for each other for ever (PyTorch's PowerSGD hook on gloo does).

    The flags travel apart, in one message after the buckets: what the hook makes of a buffer, which
    it may round, is its own business.
    """

    adds = False

    def __init__(
        self,
        sizes: Sequence[Size],
        flags: int,
        group: Group,
        members: Sequence[Sequence[nn.Parameter]],
        state: object,
        hook: Hook,
    ) -> None:
        device = members[0][0].device
        self.group, self.members, self.state, self.hook = group, members, state, hook
        self.buffers = [torch.zeros(n, dtype=dtype, device=device) for n, dtype in sizes]
        self.flags = self.summed_flags = torch.zeros(flags, device=device)
        self.futures: list[torch.futures.Future] = []
        self.fault: str | None = None

    def before(self) -> None:
        """At any time between two backwards."""

    def start(self, index: int) -> None:
        if self.futures and not is_accelerator(self.buffers[index].device):
            self.futures[-1].wait()
        last = index == len(self.buffers) - 1
        bucket = GradBucket(index, last, self.buffers[index], self.members[index])
        future = self.hook(self.state, bucket)
        if not isinstance(future, torch._C.Future):  # what a Work gives is no subclass
            raise TypeError(
                f"the communication hook must return a torch.futures.Future; it returned a "
                f"{type(future).__name__}"
            )
        self.futures.append(future)

    def finish(self) -> Iterator[Tensor]:
        futures, self.futures, self.fault = self.futures, [], None
        for index, (future, buffer) in enumerate(zip(futures, self.buffers, strict=True)):
            made = future.wait()
            made = made[0] if isinstance(made, (list, tuple)) else made
            if isinstance(made, Tensor) and made.shape == buffer.shape:
                yield made
                continue
            shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
            self.fault = (
                f"the communication hook returned {shape} for bucket {index}, which must stay a "
                f"tensor of {tuple(buffer.shape)}"
            )
            yield buffer
        if self.fault:
            self.flags[-1] = 1
        if self.group.size > 1:
            dist.all_reduce(self.flags, group=self.group.handle)

    def release(self) -> None:
        """As the hooks' results are this rank's own."""

    def close(self) -> None:
        self.futures = []
