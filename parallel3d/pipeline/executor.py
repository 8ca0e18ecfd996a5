"""Runs and times one rank's part of a pipeline program, for any schedule and any stages."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from parallel3d.comm.batch_overlap import BatchOverlap
from parallel3d.comm.step_timer import StepTimer
from parallel3d.device import accelerator
from parallel3d.errors import UserError
from parallel3d.parameters.state import DeferredGradient, WeightGradients, state_of
from parallel3d.pipeline.offload import ActivationOffload, Place
from parallel3d.pipeline.p2p import (
    P2PRoute,
    PendingTransfer,
    SharedP2P,
    StageOutputs,
    Values,
    as_tuple,
    is_backward,
    post,
)
from parallel3d.schedules.actions import Action, Kind, Step
from parallel3d.schedules.messages import SENDS

TimedAction = tuple[str, float, float]  # (action as text, start, end), times in seconds
Loader = Callable[[int], tuple[Any, ...]]  # micro-batch number → arguments of a stage
T = TypeVar("T")


class PipelineStage(Protocol):
    """Consecutive layers of the model; any module can be a stage."""

    def parameters(self) -> Iterable[nn.Parameter]: ...

    def __call__(self, x: Any, *args: Any) -> Any:
        """Returns a tensor or a tuple of tensors; the last stage returns a loss.

        Args:
            x: the output of the previous stage, or None on the first stage.
            args: the loaded micro-batch, followed by the scale of the loss (None in an evaluation).
        """


@dataclass
class StageFailure:
    """An exception that a stage raised, with the stage, direction and micro-batch as text."""

    where: str
    error: Exception

    def __str__(self) -> str:
        if isinstance(self.error, UserError):
            return str(self.error)
        return f"{self.where} raised {type(self.error).__name__}: {self.error}"


class MicroBatches:
    """Loads micro-batches for a program, and keeps each one until its last forward has taken it.

    On an accelerator the host has queued a forward long before the device has computed it.
    `look_ahead` uses this time: it loads and pins the next micro-batch while the device computes.
    The first micro-batch of a step is loaded on demand, because the device is then still busy with
    the optimizer step.
    """

    def __init__(self, load: Loader, order: Iterable[int]) -> None:
        """Stores the loader and the micro-batch numbers of the forwards, in order.

        With several chunks, each number occurs once per chunk.
        """
        self.load = load
        self.order = deque(order)
        self.held: dict[int, tuple[Any, ...]] = {}

    def take(self) -> tuple[Any, ...]:
        """Returns the micro-batch of the next forward."""
        m = self.order.popleft()
        batch = self.held.pop(m) if m in self.held else self.load(m)
        if m in self.order:
            self.held[m] = batch
        return batch

    def look_ahead(self) -> None:
        """Loads the micro-batch of the next forward, if it is not loaded yet."""
        if self.order and self.order[0] not in self.held:
            self.held[self.order[0]] = self.load(self.order[0])


class ActionTimes:
    """Collects the start and end of every computation of one step on this rank.

    On a CPU the times come from the host's clock, on an accelerator from events of the compute
    stream. All ranks start a step together, after the reductions that end the previous step, so
    times of different ranks are comparable.
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

    def measured(self) -> list[TimedAction]:
        if accelerator.is_accelerator(self.device):
            accelerator.synchronize(self.device)
        return [(str(action), self._since(a), self._since(b)) for action, a, b in self.spans]

    def _since(self, instant: Any) -> float:
        if isinstance(instant, float):
            return instant - self.begin
        return 1e-3 * self.begin.elapsed_time(instant)


class BackwardStart(torch.autograd.Function):
    """Starts a backward from the tensors `ys` with the gradients in the list `grads`.

    The list may be filled after the forward, and the backward empties it.
    `torch.autograd.backward(ys, grads)` imports sympy to compare shapes, which takes a tenth of a
    CPU rank's start-up time.
    """

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *ys: Tensor) -> Tensor:
        ctx.grads = grads
        return ys[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor | None, ...]:
        given = tuple(ctx.grads)
        ctx.grads.clear()  # the backward of the last layer then frees them
        return None, *given


class BackwardEnd(torch.autograd.Function):
    """Ends a backward by appending the gradients of the inputs to the list `grads`.

    Autograd keeps its leaves alive, but not the inputs of this node. `anchor` requires a gradient,
    so autograd records the node although the inputs require none.
    """

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], anchor: Tensor, *xs: Tensor) -> Values:
        ctx.grads = grads
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        ctx.grads += grads
        return None, None, *(None for _ in grads)


@dataclass
class _Live:
    """The ends of a forward's autograd graph, which its backward needs.

    The inputs and outputs of the stage are not kept.

    Attributes:
        start: the result of `BackwardStart`, from which the backward starts.
        given: gradients of the outputs, filled just before the backward.
        grads: gradients of the inputs, which `BackwardEnd` fills in the backward.
    """

    start: Tensor
    given: list[Tensor]
    grads: list[Tensor]


class Executor:
    """Runs pipeline programs with the stages of one rank.

    Args:
        stages: the stages of this rank, by chunk.
        sends: for each stage of the pipeline, the outputs that it sends to the next stage. `sends`
            and `channel` may be replaced between two steps.
        channel: shared memory for the messages, or None to send them through the backend.
        step_timer: times the communication and the computations. If it is None, the executor makes
            a new one.
        keeps_failures: whether an exception of a stage is kept in `failure` instead of raised. The
            rank then continues with zeros to the end of the step, so that its neighbours do not
            wait for it.
        offload: moves tensors that the stages save for the backward to the host, or is None to keep
            all of them on the device.
        without_backward: number of stages at the beginning of the pipeline with nothing to train.
            Their backwards are empty, and no rank sends or expects gradients for them.
        overlap: lets a forward and the backward after it take turns, if they belong to different
            micro-batches or chunks. If it is None, all computations run one after the other.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        route: P2PRoute,
        sends: Sequence[StageOutputs],
        device: torch.device,
        channel: SharedP2P | None = None,
        step_timer: StepTimer | None = None,
        keeps_failures: bool = False,
        offload: ActivationOffload | None = None,
        without_backward: int = 0,
        overlap: BatchOverlap | None = None,
    ) -> None:
        self.overlap = overlap
        self.stages = stages
        self.route = route
        self.sends = sends
        self.device = device
        self.channel = channel
        self.step_timer = step_timer or StepTimer()
        if channel is not None:
            channel.step_timer = self.step_timer
        self.counts_kinds = True
        self.keeps_failures = keeps_failures
        self.offload = offload
        self.without_backward = without_backward
        self.failure: StageFailure | None = None
        self.last_stage = route.assignment.stages - 1
        self.live: dict[Place, _Live] = {}  # kept from each F to its B or I
        # Deferred weight gradients are kept from each I to its W.
        self.deferred: dict[Place, list[DeferredGradient]] = {}
        self.outbox: dict[Action, Tensor] = {}  # results that have not been sent yet
        # Results of one chunk of this rank that another chunk of this rank will read.
        self.local_handoff: dict[Action, Values] = {}
        # Received messages, from the start of their transfer until a computation reads them.
        self.receiving: dict[Action, PendingTransfer] = {}
        # Keeps sent tensors until the transfer has ended: autograd may free an activation after its
        # backward while the transport still reads it.
        self.sending: deque[PendingTransfer] = deque()
        self.action_times: ActionTimes | None = None
        self.weight_gradients = WeightGradients()
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        for stage in stages:
            for parameter in stage.parameters():
                state_of(parameter).weight_gradients = self.weight_gradients

    def train_step(
        self,
        program: Sequence[Step],
        load: Loader,
        loss_scale: Tensor,
        before_last_backward: Callable[[], None] = lambda: None,
    ) -> Tensor:
        """Runs the forwards and backwards of one step.

        The gradients are those of loss_scale · Σ losses.

        Args:
            program: this rank's part of the pipeline program: computations and groups of messages.
            load: returns a stage's arguments, given the number of a micro-batch.
            loss_scale: scalar tensor, 1 / unmasked tokens of the global batch.
            before_last_backward: called just before the last backward that is not empty.

        Returns: the sum of this rank's losses as a scalar tensor (zero without the last stage).
        """
        return self._run(program, load, loss_scale, before_last_backward)

    @torch.no_grad()
    def evaluate(self, program: Sequence[Step], load: Loader) -> Tensor:
        """Runs only forwards, and returns the sum of the losses (zero without the last stage)."""
        return self._run(program, load)

    def _run(
        self,
        program: Sequence[Step],
        load: Loader,
        loss_scale: Tensor | None = None,
        before_last_backward: Callable[[], None] = lambda: None,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        computes = [step for step in program if isinstance(step, Action)]
        batches = MicroBatches(load, (step.microbatch for step in computes if step.kind == Kind.F))
        last = next(filter(self._has_gradient, reversed(computes)), None)
        following = iter([*computes[1:], None])
        done: Action | None = None  # the last backward that took turns with a forward
        for step in program:
            if step is done:
                next(following)
                continue
            if not isinstance(step, Action):
                self._communicate(step)
                continue
            after = next(following)
            before_backward = (
                after if after is not None and after.kind in (Kind.B, Kind.I) else None
            )
            if self.offload is not None and before_backward is not None:
                self.offload.prefetch(_place(before_backward))
            if step.kind == Kind.F and self._in_turns(step, before_backward):
                assert before_backward is not None
                done = before_backward
                total += self._both(step, done, batches, loss_scale)
            elif step.kind == Kind.F:
                total += self._forward(step, batches, loss_scale, before_backward)
            elif step.kind == Kind.W:
                self._weights(step)
            else:
                if step is last:
                    before_last_backward()
                self._backward(step, loss_scale)
        self._finish_sends(0)
        if self.offload is not None:
            self.offload.boundary()
        return total

    def _in_turns(self, forward: Action, backward: Action | None) -> bool:
        """Returns whether a forward takes turns with the backward after it."""
        if self.overlap is None or backward is None:
            return False
        return _place(backward) != _place(forward)

    def _both(
        self, forward: Action, backward: Action, batches: MicroBatches, loss_scale: Tensor | None
    ) -> Tensor | float:
        """Lets a forward and a backward take turns; the time of both counts as backward."""
        assert self.overlap is not None
        losses: list[Tensor | float] = []
        name = self._name(forward, backward)
        with self.step_timer.within("backward", name), self._untimed():
            self.overlap.run(
                lambda: losses.append(self._forward(forward, batches, loss_scale, backward)),
                partial(self._backward, backward, loss_scale),
            )
        return losses[0]

    @contextmanager
    def _untimed(self) -> Iterator[None]:
        """Stops timing by kind in a `with` block, because its computations are interleaved."""
        self.counts_kinds = False
        try:
            yield
        finally:
            self.counts_kinds = True

    def _stage(self, action: Action) -> int:
        """Returns the number of the stage that performs an action."""
        return self.route.assignment.stage(self.route.group.index, action.chunk)

    def _takes_gradient(self, stage: int) -> bool:
        """Returns whether a stage has a backward that is not empty.

        Such a stage receives the gradient of its outputs; the last stage computes it from its loss.
        """
        return stage >= self.without_backward

    def _has_gradient(self, step: Action) -> bool:
        """Returns whether a computation is a backward that is not empty."""
        return step.kind in (Kind.B, Kind.I) and self._takes_gradient(self._stage(step))

    def _is_sent(self, action: Action) -> bool:
        """Returns whether a message of the program is actually sent.

        Gradients for a stage whose backward is empty are not sent.
        """
        to_earlier, stage = action.kind == Kind.SEND_B, self._stage(action)
        return not is_backward(action) or self._takes_gradient(stage - to_earlier)

    def _sent(self, action: Action) -> StageOutputs:
        """Returns the shapes and dtype of the tensors in a message."""
        return self.sends[self._stage(action) - (action.kind in (Kind.RECV_F, Kind.SEND_B))]

    def _communicate(self, group: Sequence[Action]) -> None:
        messages = []
        for action in filter(self._is_sent, group):
            if action.kind.is_send:
                messages.append((action, self.outbox.pop(action)))
            else:
                messages.append((action, self._sent(action).empty_message(self.device)))
        self._finish_sends(SENDS)
        if not messages:
            return
        with self.step_timer.starting("pp", self._name(*group)):
            transfers = post(messages, self.route, self.channel)
        for transfer in transfers:
            if transfer.action.kind.is_send:
                self.sending.append(transfer)
            else:
                self.receiving[transfer.action] = transfer

    def _finish_sends(self, left: int) -> None:
        while len(self.sending) > left:
            self._wait(self.sending.popleft())

    def _wait(self, transfer: PendingTransfer) -> None:
        """Waits for a transfer.

        Time beyond the baseline latency counts as idle, because the peer was late.
        """
        self.step_timer.push("pp", self._name(transfer.action, waits=True))
        transfer.work.wait()
        self.step_timer.pop(self.step_timer.baseline_latency.get("pp", math.inf))

    def _received(self, kind: Kind, step: Action) -> Values:
        """Returns the tensors that `step` needs from the previous or the next stage.

        `kind` is RECV_F for outputs of the previous stage, and RECV_B for gradients of the next.
        """
        action = Action(kind, step.microbatch, step.chunk)
        if action in self.local_handoff:
            return self.local_handoff.pop(action)
        transfer = self.receiving.pop(action)
        self._wait(transfer)
        return self._sent(action).values(transfer.tensor)

    def _hand_off(self, kind: Kind, step: Action, values: Values) -> None:
        """Passes a result to the next stage (SEND_F) or to the previous one (SEND_B).

        If that stage is on this rank, it gets the result directly; otherwise the result becomes a
        message in the outbox.
        """
        me, (offset, received) = self.route.group.index, _NEXT[kind]
        place = self.route.assignment.neighbour(me, step.chunk, offset)
        if place is not None and place[0] == me:
            # A stage always gets contiguous tensors, as it would from a message.
            values = tuple(value.contiguous() for value in values)
            self.local_handoff[Action(received, step.microbatch, place[1])] = values
        else:
            action = Action(kind, step.microbatch, step.chunk)
            self.outbox[action] = self._sent(action).message(values)

    @contextmanager
    def _computing(self, kind: str, step: Action) -> Iterator[None]:
        times = self.action_times
        counts = self.counts_kinds
        with (
            self.step_timer.within(kind, self._name(step)) if counts else nullcontext(),
            nullcontext() if times is None else times.within(step),
        ):
            yield

    def _name(self, *actions: Action, waits: bool = False) -> str | None:
        if self.step_timer.ranges is None:
            return None
        names = [f"{_NAMES[a.kind]} m{a.microbatch} c{a.chunk}" for a in actions]
        listed = ", ".join(names)
        return f"wait {listed}" if waits else listed

    def _attempt(self, step: Action, compute: Callable[[], T]) -> T | None:
        """Returns the result of `compute`, or None after a failure if failures are kept."""
        if self.failure is not None:
            return None
        try:
            return compute()
        except Exception as error:
            if not self.keeps_failures:
                raise
            half = "forward" if step.kind == Kind.F else "backward"
            where = f"stage {self._stage(step)} in the {half} of micro-batch {step.microbatch}"
            self.failure = StageFailure(where, error)
            return None

    def _forward(
        self,
        step: Action,
        batches: MicroBatches,
        loss_scale: Tensor | None,
        before_backward: Action | None,
    ) -> Tensor | float:
        """Runs F and returns its loss, or 0.0 before the last stage.

        `before_backward` is the computation after this one if it is a backward, else None.
        """
        number = self._stage(step)
        trains = loss_scale is not None
        offload = self.offload if trains else None
        given: list[Tensor] = []
        grads: list[Tensor] = []
        xs: Values = ()
        if number > 0:
            xs = self._received(Kind.RECV_F, step)
            if trains and self._takes_gradient(number - 1):
                xs = BackwardEnd.apply(grads, self.anchor, *xs)
        with self.step_timer.within("data"):
            args = (*batches.take(), loss_scale)
        turns = before_backward is not None and _place(before_backward) == _place(step)
        with (
            self._computing("forward", step),
            nullcontext() if offload is None else offload.forward(_place(step), turns),
            nullcontext() if self.overlap is None else self.overlap.on_stream_of(step.microbatch),
        ):
            ys = self._attempt(step, partial(self._outputs, step, xs, args))
        if ys is None:
            last = (torch.zeros((), device=self.device),)
            ys = last if number == self.last_stage else self.sends[number].zeros(self.device)
        if accelerator.is_accelerator(self.device):
            with self.step_timer.within("data"):
                batches.look_ahead()
        if trains:
            self.live[_place(step)] = _Live(BackwardStart.apply(given, *ys), given, grads)
        if number == self.last_stage:
            return ys[0].detach().double()
        self._hand_off(Kind.SEND_F, step, tuple(y.detach() for y in ys))
        return 0.0

    def _outputs(self, step: Action, xs: Values, args: tuple[Any, ...]) -> Values:
        number, x = self._stage(step), xs[0] if len(xs) == 1 else xs or None
        out = self.stages[step.chunk](x, *args)
        if number < self.last_stage:
            made, wanted = StageOutputs.of(out, number), self.sends[number]
            if made != wanted:
                raise UserError(
                    f"stage {number} returned {made} for micro-batch {step.microbatch}, but must "
                    f"return {wanted} as in the first step: a pipeline's shapes are fixed"
                )
        return as_tuple(out)

    def _backward(self, step: Action, loss_scale: Tensor | None) -> None:
        """Runs B, or I, which defers the weight gradients to W."""
        place, stage = _place(step), self._stage(step)
        live = self.live.pop(place)
        if self.offload is not None:
            self.offload.backward(place)
        if not self._takes_gradient(stage):
            if step.kind == Kind.I:
                self.deferred[place] = []
            return
        if stage < self.last_stage:
            live.given += self._received(Kind.RECV_B, step)
        else:
            assert loss_scale is not None  # there is no backward in an evaluation
            live.given.append(loss_scale.to(live.start.dtype))
        differentiate = partial(self._attempt, step, partial(_differentiate, live.start))
        with self._computing("backward", step):
            if step.kind == Kind.I:
                with self.weight_gradients.deferred() as self.deferred[place]:
                    differentiate()
            else:
                differentiate()
            if self.overlap is not None:
                self.overlap.join()
        if stage > 0 and self._takes_gradient(stage - 1):
            # There are no gradients if the stage does not use its inputs or has failed.
            made = tuple(live.grads) or self.sends[stage - 1].zeros(self.device)
            self._hand_off(Kind.SEND_B, step, made)

    @torch.no_grad()
    def _weights(self, step: Action) -> None:
        """Runs W, which computes the deferred weight gradients."""
        queue = self.deferred.pop(_place(step))
        with self._computing("backward", step):
            self._attempt(step, partial(run_deferred, queue))


def _place(action: Action) -> Place:
    return action.microbatch, action.chunk


def _differentiate(start: Tensor) -> None:
    if start.requires_grad:
        start.backward()


def run_deferred(queue: list[DeferredGradient]) -> None:
    queue.reverse()
    while queue:  # popping an element frees its operands right after its computation
        queue.pop()()


# Maps the kind of a send to the offset of the receiving stage and to the kind of the receive.
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
