"""Executes one rank's part of a pipeline program, whatever the schedule, and times it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from parallel3d.comm.process_groups import Group, ProcessGroups
from parallel3d.comm.step_timer import StepTimer
from parallel3d.config.schema import Config
from parallel3d.data.loader import InOrder
from parallel3d.device import accelerator
from parallel3d.estimate.balance import sends_slices
from parallel3d.parameters.sharding import DeferredGradient, WeightGradients, state_of
from parallel3d.pipeline.p2p import (
    P2PRoute,
    PendingTransfer,
    SharedMemoryP2P,
    measure_baseline_latency,
    post,
)
from parallel3d.schedules.actions import Action, Kind, Step
from parallel3d.schedules.schedule import Schedule
from parallel3d.tensor_parallel.mappings import all_gather_sequence

Measured = tuple[str, float, float]  # an action as text, start and end in seconds
Loader = Callable[[int], tuple[Any, ...]]  # micro-batch number → arguments of a stage


class PipelineStage(Protocol):
    """Declares what the executor needs of a stage."""

    first: bool
    last: bool

    def parameters(self) -> Iterable[nn.Parameter]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...


Place = tuple[int, int]  # micro-batch and chunk
# Sends that may be in flight before the rank waits for the oldest: it bounds their memory.
SENDS = 8


class ActionTimes:
    """Collects the start and end of every computation of one step on this rank.

    By the host's clock, or on an accelerator by events on the compute stream. All ranks start a
    step together, after the reductions that end the step before, so their times are comparable.
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
        start = self._now()
        yield
        self.spans.append((action, start, self._now()))

    def measured(self) -> list[Measured]:
        if accelerator.is_accelerator(self.device):
            accelerator.synchronize(self.device)
        return [(str(action), self._since(a), self._since(b)) for action, a, b in self.spans]

    def _since(self, instant: Any) -> float:
        if isinstance(instant, float):
            return instant - self.begin
        return 1e-3 * self.begin.elapsed_time(instant)


class _Start(torch.autograd.Function):
    """Starts a backward from `y` with the gradient `grad`.

    `torch.autograd.backward(y, grad)` does the same, but imports sympy to compare the shapes, a
    tenth of a CPU rank's start.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        return ctx.grad, None


class Executor:
    """Interprets pipeline programs for the stages of one rank.

    Args:
        stages: of this rank, by chunk.
        message_shape: (b, s, h) of messages between stages, (b, s/tp, h) under sequence parallelism
            or with `slices`.
        slices: the tensor group whose members each send a part of the sequence, all-gathered on the
            next stage (Megatron-LM's scatter_gather_tensors_in_pipeline); None: whole messages.
        channel: the group's shared memory, if it has any.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        route: P2PRoute,
        message_shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        channel: SharedMemoryP2P | None = None,
        step_timer: StepTimer | None = None,
        slices: Group | None = None,
    ) -> None:
        self.stages, self.route, self.channel = stages, route, channel
        self.step_timer = step_timer or StepTimer()
        if channel is not None:
            channel.step_timer = self.step_timer
        self.message_shape, self.dtype, self.device = message_shape, dtype, device
        self.slices = slices
        # Input and output of forwards, from F to B or I.
        self.live: dict[Place, tuple[Tensor | None, Tensor]] = {}
        # Deferred weight gradients, from I to W.
        self.deferred: dict[Place, list[DeferredGradient]] = {}
        self.outbox: dict[Action, Tensor] = {}  # from the compute to its send
        self.local_handoff: dict[Action, Tensor] = {}  # from a chunk of this rank to another one
        self.receiving: dict[Action, PendingTransfer] = {}  # to the compute that reads it
        # Keeps sent tensors until the transfer has ended: autograd may free an activation after its
        # backward while the transport still reads it.
        self.sending: deque[PendingTransfer] = deque()
        self.action_times: ActionTimes | None = None
        self.weight_gradients = WeightGradients()
        for stage in stages:
            for parameter in stage.parameters():
                state_of(parameter).weight_gradients = self.weight_gradients

    @classmethod
    def of_run(
        cls,
        config: Config,
        stages: Sequence[PipelineStage],
        schedule: Schedule,
        groups: ProcessGroups,
        dtype: torch.dtype,
        device: torch.device,
        step_timer: StepTimer,
    ) -> Executor:
        """Creates a run's executor and sets the step timer's baseline latencies; collective."""
        model, sliced = config.model, sends_slices(config, accelerator.is_accelerator(device))
        sequence = model.seq_length // (groups.tp.size if config.sp or sliced else 1)
        shape = (config.micro_batch_size, sequence, model.hidden_size)
        message = torch.zeros(shape, dtype=dtype, device=device)
        plans, placement = (schedule.plan(), schedule.forwards()), schedule.placement
        channel = SharedMemoryP2P.of_plans(plans, placement, config.launch, groups.pp, message)
        step_timer.baseline_latency = measure_baseline_latency(groups, message, channel)
        slices = groups.tp if sliced else None
        route = P2PRoute(groups.pp, placement, groups.pp_backward)
        return cls(stages, route, shape, dtype, device, channel, step_timer, slices)

    def train_step(
        self,
        plan: Sequence[Step],
        load: Loader,
        loss_scale: Tensor,
        before_last_backward: Callable[[], None],
    ) -> Tensor:
        """Runs the forwards and backwards of one step; gradients are of loss_scale · Σ losses.

        Args:
            plan: this rank's steps, computes and groups of messages.
            load: micro-batch number → tensors.
            loss_scale: scalar tensor, 1 / unmasked tokens of the global batch.

        Returns: the sum of this rank's losses (zero without the last stage), a scalar tensor.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        batches = self._batches(plan, load)
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
        """Runs a plan of forwards; returns the sum of the losses (zero without the last stage)."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        batches = self._batches(plan, load)
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
        with self.step_timer.starting("pp", self._name(*group)):
            transfers = post(messages, self.route, self.channel)
        for transfer in transfers:
            if transfer.action.kind.is_send:
                self.sending.append(transfer)
            else:
                self.receiving[transfer.action] = transfer

    def alloc_recv_buffer(self, action: Action) -> Tensor:
        return torch.empty(self.message_shape, dtype=self.dtype, device=self.device)

    def _finish_sends(self, left: int) -> None:
        while len(self.sending) > left:
            self._wait(self.sending.popleft())

    def _wait(self, transfer: PendingTransfer) -> None:
        """Waits for a transfer; time above the baseline latency is idle, as the peer was late."""
        self.step_timer.push("pp", self._name(transfer.action, waits=True))
        transfer.work.wait()
        self.step_timer.pop(self.step_timer.baseline_latency.get("pp", math.inf))

    def _input(self, kind: Kind, step: Action) -> Tensor:
        """Returns the input of `step` from the stage before (RECV_F) or after (RECV_B)."""
        action = Action(kind, step.microbatch, step.chunk)
        if action in self.local_handoff:
            return self.local_handoff.pop(action)
        transfer = self.receiving.pop(action)
        self._wait(transfer)
        if self.slices is None:
            return transfer.tensor
        return all_gather_sequence(transfer.tensor, self.slices)

    def _hand_off(self, kind: Kind, step: Action, tensor: Tensor) -> None:
        """Gives a result to the stage after (SEND_F) or before (SEND_B): local or by outbox."""
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
            self.step_timer.within(kind, self._name(step)),
            nullcontext() if times is None else times.within(step),
        ):
            yield

    def _name(self, *actions: Action, waits: bool = False) -> str | None:
        if self.step_timer.ranges is None:
            return None
        names = [f"{_NAMES[a.kind]} m{a.microbatch} c{a.chunk}" for a in actions]
        return f"{'wait ' * waits}{', '.join(names)}"

    def _batches(self, plan: Sequence[Step], load: Loader) -> InOrder:
        order = [s.microbatch for s in plan if isinstance(s, Action) and s.kind == Kind.F]
        return InOrder(load, order, self.device)

    def _forward(
        self, step: Action, batches: InOrder, loss_scale: Tensor | None = None
    ) -> Tensor | float:
        stage, x = self.stages[step.chunk], None
        if not stage.first:
            x = self._input(Kind.RECV_F, step).requires_grad_(torch.is_grad_enabled())
        with self.step_timer.within("data"):
            batch = batches.take(step.microbatch)
        with self._computing("forward", step):
            y = stage(x, *batch, loss_scale)
        if batches.looks_ahead:
            with self.step_timer.within("data"):
                batches.look_ahead()
        self.live[step.microbatch, step.chunk] = (x, y)
        if stage.last:
            return y.detach().double()
        self._hand_off(Kind.SEND_F, step, y.detach())
        return 0.0

    def _backward(self, step: Action, loss_scale: Tensor) -> None:
        """Runs B, or I, which leaves deferred weight gradients for W."""
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
            assert x.grad is not None
            self._hand_off(Kind.SEND_B, step, x.grad.contiguous())

    def differentiate(self, step: Action, x: Tensor | None, y: Tensor, grad: Tensor) -> None:
        _Start.apply(y, grad).backward()

    @torch.no_grad()
    def _weights(self, step: Action) -> None:
        """Runs W: computes the deferred weight gradients."""
        queue = self.deferred.pop((step.microbatch, step.chunk))
        queue.reverse()
        with self._computing("backward", step):
            while queue:  # popped, so that each one's operands are freed after it
                queue.pop()()


# Kind of a send → offset of the receiving stage, and kind of the receive.
_NEXT = {Kind.SEND_F: (1, Kind.RECV_F), Kind.SEND_B: (-1, Kind.RECV_B)}

_NAMES = {
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
