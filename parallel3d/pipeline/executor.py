"""When a rank of a pipeline computes what in a step, measured."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from parallel3d.comm.process_groups import Group, ProcessGroups
from parallel3d.comm.step_timer import StepTimer
from parallel3d.config.schema import Config
from parallel3d.data.loader import InOrder, MicroBatch
from parallel3d.device import accelerator
from parallel3d.models.transformer import Stage
from parallel3d.parameters.gradients import DeferredGradient, WeightGradients, set_weight_gradients
from parallel3d.pipeline.p2p import P2PRoute, PendingTransfer, measure_baseline_latency, post
from parallel3d.pipeline.shared_memory import SharedMemoryP2P
from parallel3d.schedules.actions import Action, Kind, Step
from parallel3d.schedules.schedule import Schedule
from parallel3d.sizes.balance import sends_slices
from parallel3d.tensor_parallel.mappings import all_gather_sequence

Measured = tuple[str, float, float]  # an action as its words, start and end in seconds


class ActionTimes:
    """Collects the start and end of every computation of one step on this rank.

    On the CPU by its clock. An accelerator's host only queues, so there by events on the stream
    that computes: reading them waits for the device.

    Times count from the making of this object. The ranks of a step begin together, behind the sums
    that end the step before, so that their times can be laid side by side.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[tuple[Action, Any, Any]] = []
        self.begin = self._now()

    def _now(self) -> Any:
        if not accelerator.is_accelerator(self.device):
            return time.perf_counter()
        event = accelerator.module(self.device).Event(enable_timing=True)
        event.record(accelerator.module(self.device).current_stream(self.device))
        return event

    @contextmanager
    def within(self, action: Action) -> Iterator[None]:
        """The block computes `action`."""
        start = self._now()
        yield
        self.spans.append((action, start, self._now()))

    def measured(self) -> list[Measured]:
        """All of it in the order of time."""
        if accelerator.is_accelerator(self.device):
            accelerator.synchronize(self.device)
        return [(str(action), self._since(a), self._since(b)) for action, a, b in self.spans]

    def _since(self, instant: Any) -> float:
        if isinstance(instant, float):
            return instant - self.begin
        return 1e-3 * self.begin.elapsed_time(instant)


# Runs one rank's part of a pipeline plan: a short interpreter, whatever the schedule.
#
# Lifetimes. A forward's input and output live from F to B or I (`live`), the operands of put-off
# weight gradients from I to W (`deferred`). A received tensor lives from its receive to the compute
# that reads it. A sent tensor is kept in `sending` until its transfer ended: autograd may free an
# activation as soon as its backward is done, and the transport still reads it.


Loader = Callable[[int], MicroBatch]
Place = tuple[int, int]  # micro-batch and chunk
# Sends that may be under way before the rank waits for the oldest: it bounds their memory.
SENDS = 8


class _Start(torch.autograd.Function):
    """Where a backward from `y` with the gradient `grad` begins.

    `torch.autograd.backward(y, grad)` does the same, but compares the shapes by way of sympy,
    whose import is a tenth of a CPU rank's start.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


class Executor:
    """Interprets plans for the stages of one rank.

    Args:
        stages: this rank's, by chunk.
        route: the pipeline group, and which of its ranks holds which stage.
        message_shape: (b, s, h) of what travels between stages, (b, s/tp, h) under sequence
            parallelism or with `slices`: every micro-batch has this shape.
        slices: the tensor group whose members each send a part of the sequence, gathered by those
            of the next stage; None: messages are whole.
        boxes: the group's shared memory, if it has any.
        clock: told what this rank does when.

    Attributes:
        action_times: collects what is computed when, if there is one.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        route: P2PRoute,
        message_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        boxes: SharedMemoryP2P | None = None,
        clock: StepTimer | None = None,
        slices: Group | None = None,
    ) -> None:
        self.stages, self.route, self.boxes = stages, route, boxes
        self.clock = clock or StepTimer()
        if boxes is not None:
            boxes.clock = self.clock
        self.message_shape, self.dtype, self.device = message_shape, dtype, device
        self.slices = slices
        self.live: dict[Place, tuple[Tensor | None, Tensor]] = {}
        self.deferred: dict[Place, list[DeferredGradient]] = {}
        self.outbox: dict[Action, Tensor] = {}
        self.local_handoff: dict[Action, Tensor] = {}  # from a chunk of this rank to another one
        self.receiving: dict[Action, PendingTransfer] = {}
        self.sending: deque[PendingTransfer] = deque()
        self.action_times: ActionTimes | None = None
        self.weight_gradients = WeightGradients()
        for stage in stages:
            for parameter in stage.parameters():
                set_weight_gradients(parameter, self.weight_gradients)

    @classmethod
    def of_run(
        cls,
        config: Config,
        stages: Sequence[Stage],
        schedule: Schedule,
        groups: ProcessGroups,
        dtype: torch.dtype,
        device: torch.device,
        clock: StepTimer,
    ) -> Executor:
        """The executor of a run; collective over the world.

        The clock learns how long the groups take when nobody is late.
        """
        model, sliced = config.model, sends_slices(config, accelerator.is_accelerator(device))
        sequence = model.seq_length // (groups.tp.size if config.sp or sliced else 1)
        shape = (config.micro_batch_size, sequence, model.hidden_size)
        message = torch.zeros(shape, dtype=dtype, device=device)
        plans, placement = (schedule.plan(), schedule.forwards()), schedule.placement
        boxes = SharedMemoryP2P.of_plans(plans, placement, config.launch, groups.pp, message)
        clock.baseline_latency = measure_baseline_latency(groups, message, boxes)
        slices = groups.tp if sliced else None
        route = P2PRoute(groups.pp, placement, groups.pp_backward)
        return cls(stages, route, shape, dtype, device, boxes, clock, slices)

    def train_step(
        self,
        plan: Sequence[Step],
        load: Loader,
        loss_scale: Tensor,
        before_last_backward: Callable[[], None],
    ) -> Tensor:
        """Forwards and backwards of one step; gradients are of loss_scale · Σ losses.

        Args:
            plan: this rank's steps, computes and groups of messages.
            load: micro-batch number → tensors.
            loss_scale: scalar tensor, 1 / unmasked tokens of the global batch.
            before_last_backward: called when the next backward is the last of this rank.

        Returns: the sum of this rank's losses (zero without the last stage), a scalar tensor.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        batches = self._in_order(plan, load)
        last = max(i for i, step in enumerate(plan) if _is_backward(step))
        for i, step in enumerate(plan):
            if not isinstance(step, Action):
                self._communicate(step)
            elif step.kind == Kind.F:
                total += self._forward(step, batches, loss_scale)
            elif step.kind == Kind.W:
                self._weights(step)
            else:
                if i == last:
                    before_last_backward()
                self._backward(step, loss_scale)
        self._finish_sends(0)
        return total

    @torch.no_grad()
    def evaluate(self, plan: Sequence[Step], load: Loader) -> Tensor:
        """The sum of the losses of a plan's forwards (zero without the last stage), of which it
        has nothing else."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        batches = self._in_order(plan, load)
        for step in plan:
            if not isinstance(step, Action):
                self._communicate(step)
            else:
                total += self._forward(step, batches)
                self.live.clear()
        self._finish_sends(0)
        return total

    def _communicate(self, group: Sequence[Action]) -> None:
        messages = []
        for action in group:
            is_send = action.kind.is_send
            tensor = self.outbox.pop(action) if is_send else self.alloc_recv_buffer(action)
            messages.append((action, tensor))
        self._finish_sends(SENDS)
        with self.clock.starting("pp", self._name(*group)):
            transfers = post(messages, self.route, self.boxes)
        for transfer in transfers:
            if transfer.action.kind.is_send:
                self.sending.append(transfer)
            else:
                self.receiving[transfer.action] = transfer

    def alloc_recv_buffer(self, action: Action) -> Tensor:
        """Where a receive writes its message."""
        return torch.empty(self.message_shape, dtype=self.dtype, device=self.device)

    def _finish_sends(self, left: int) -> None:
        """Waits until at most `left` sends are under way."""
        while len(self.sending) > left:
            self._wait(self.sending.popleft())

    def _wait(self, transfer: PendingTransfer) -> None:
        """Beyond the time that the message takes at most, its other end was late: idle."""
        self.clock.push("pp", self._name(transfer.action, waits=True))
        transfer.work.wait()
        self.clock.pop(self.clock.baseline_latency.get("pp", math.inf))

    def _input(self, kind: Kind, step: Action) -> Tensor:
        """What the stage before (RECV_F) or after (RECV_B) made for `step`."""
        action = Action(kind, step.microbatch, step.chunk)
        if action in self.local_handoff:
            return self.local_handoff.pop(action)
        transfer = self.receiving.pop(action)
        self._wait(transfer)
        if self.slices is None:
            return transfer.tensor
        return all_gather_sequence(transfer.tensor, self.slices)

    def _hand_to_local_chunk(self, kind: Kind, step: Action, tensor: Tensor) -> None:
        """What `step` made goes to the stage after (SEND_F) or before (SEND_B) it."""
        me, (offset, received) = self.route.group.index, _NEXT[kind]
        place = self.route.placement.neighbour(me, step.chunk, offset)
        if place is not None and place[0] == me:
            self.local_handoff[Action(received, step.microbatch, place[1])] = tensor
        else:
            if self.slices is not None:
                tensor = tensor.chunk(self.slices.size, dim=1)[self.slices.index].contiguous()
            self.outbox[Action(kind, step.microbatch, step.chunk)] = tensor

    @contextmanager
    def _computing(self, kind: str, step: Action) -> Iterator[None]:
        times = self.action_times
        with (
            self.clock.within(kind, self._name(step)),
            nullcontext() if times is None else times.within(step),
        ):
            yield

    def _name(self, *actions: Action, waits: bool = False) -> str | None:
        """What a profile calls them; None while nobody profiles."""
        if self.clock.ranges is None:
            return None
        words = [f"{_WORDS[a.kind]} m{a.microbatch} c{a.chunk}" for a in actions]
        return f"{'wait ' * waits}{', '.join(words)}"

    def _in_order(self, plan: Sequence[Step], load: Loader) -> InOrder:
        order = [s.microbatch for s in plan if isinstance(s, Action) and s.kind == Kind.F]
        return InOrder(load, order, self.device)

    def _forward(
        self, step: Action, batches: InOrder, loss_scale: Tensor | None = None
    ) -> Tensor | float:
        stage, x = self.stages[step.chunk], None
        if not stage.first:
            x = self._input(Kind.RECV_F, step).requires_grad_(torch.is_grad_enabled())
        with self.clock.within("data"):
            batch = batches.take(step.microbatch)
        with self._computing("forward", step):
            y = stage(x, *batch, loss_scale)
        if batches.looks_ahead:
            with self.clock.within("data"):
                batches.look_ahead()
        self.live[step.microbatch, step.chunk] = (x, y)
        if stage.last:
            return y.detach().double()
        self._hand_to_local_chunk(Kind.SEND_F, step, y.detach())
        return 0.0

    def _backward(self, step: Action, loss_scale: Tensor) -> None:
        """B, or I: then the gradients of the linear weights wait for their W."""
        place = (step.microbatch, step.chunk)
        x, y = self.live.pop(place)
        last = self.stages[step.chunk].last
        grad = loss_scale.to(y.dtype) if last else self._input(Kind.RECV_B, step)
        with self._computing("backward", step):
            if step.kind == Kind.I:
                with self.weight_gradients.deferred() as self.deferred[place]:
                    self.differentiate(step, x, y, grad)
            else:
                self.differentiate(step, x, y, grad)
        if x is not None:
            self._hand_to_local_chunk(Kind.SEND_B, step, x.grad.contiguous())

    def differentiate(self, step: Action, x: Tensor | None, y: Tensor, grad: Tensor) -> None:
        """Gives x its gradient; `grad` is that of y."""
        _Start.apply(y, grad).backward()

    @torch.no_grad()
    def _weights(self, step: Action) -> None:
        jobs = self.deferred.pop((step.microbatch, step.chunk))
        jobs.reverse()
        with self._computing("backward", step):
            while jobs:  # what a job has kept is free behind it
                jobs.pop()()


# By the kind of a send: where its reader's stage lies, and what the reader calls it.
_NEXT = {Kind.SEND_F: (1, Kind.RECV_F), Kind.SEND_B: (-1, Kind.RECV_B)}

_WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.SEND_F: "send activation",
    Kind.RECV_F: "recv activation",
    Kind.SEND_B: "send gradient",
    Kind.RECV_B: "recv gradient",
}


def _is_backward(step: Step) -> bool:
    return isinstance(step, Action) and step.kind in (Kind.B, Kind.I)
