"""Runs one rank's part of a pipeline plan: a short interpreter, whatever the schedule.

Lifetimes. A forward's input and output live from F to B (`live`). A received tensor lives from its
receive to the compute that reads it. A sent tensor is kept in `sending` until its transfer ended:
autograd may free an activation as soon as its backward is done, and the transport still reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel3d.comm.clock import Clock
from parallel3d.comm.group import Group
from parallel3d.data.batches import InOrder, MicroBatch
from parallel3d.models.transformer import Stage
from parallel3d.pipeline.mailbox import Mailboxes
from parallel3d.pipeline.p2p import Transfer, post
from parallel3d.schedules.actions import Action, Kind, Step
from parallel3d.schedules.messages import add_communication

Loader = Callable[[int], MicroBatch]


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
    """Interprets plans for one stage.

    Args:
        stage: the layers of this rank.
        pp: the pipeline group.
        hidden_shape: (b, s, h) of what travels between stages, (b, s/tp, h) under sequence
            parallelism: every micro-batch has this shape.
        boxes: the group's shared memory, if it has any.
        clock: told what this rank does when.
    """

    def __init__(
        self,
        stage: Stage,
        pp: Group,
        hidden_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        boxes: Mailboxes | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.stage, self.pp, self.boxes = stage, pp, boxes
        self.clock = clock or Clock()
        if boxes is not None:
            boxes.clock = self.clock
        self.hidden_shape, self.dtype, self.device = hidden_shape, dtype, device
        self.live: dict[int, tuple[Tensor | None, Tensor]] = {}
        self.outbox: dict[Action, Tensor] = {}
        self.receiving: dict[Action, Transfer] = {}
        self.sending: list[Transfer] = []

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
            before_last_backward: called when the next backward completes the gradients.

        Returns: the sum of this rank's losses (zero on all but the last stage), a scalar tensor.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        batches = self._in_order(plan, load)
        last = max(i for i, s in enumerate(plan) if isinstance(s, Action) and s.kind == Kind.B)
        for i, step in enumerate(plan):
            if not isinstance(step, Action):
                self._communicate(step)
            elif step.kind == Kind.F:
                total += self._forward(step.microbatch, batches, loss_scale)
            else:
                if i == last:
                    before_last_backward()
                self._backward(step.microbatch, loss_scale)
        self._finish_sends()
        return total

    @torch.no_grad()
    def evaluate(self, load: Loader, microbatches: int) -> Tensor:
        """The sum of the losses of `microbatches` forwards (zero on all but the last stage)."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        forwards = [Action(Kind.F, m) for m in range(microbatches)]
        plan = add_communication([forwards] * self.pp.size)[self.pp.index]
        batches = self._in_order(plan, load)
        for step in plan:
            if not isinstance(step, Action):
                self._communicate(step)
            else:
                total += self._forward(step.microbatch, batches)
                self.live.pop(step.microbatch)
        self._finish_sends()
        return total

    def _communicate(self, group: Sequence[Action]) -> None:
        messages = []
        for action in group:
            if action.kind.is_send:
                tensor = self.outbox.pop(action)
            else:
                tensor = torch.empty(self.hidden_shape, dtype=self.dtype, device=self.device)
            messages.append((action, tensor))
        self._finish_sends()  # those of the group before: bounds the buffers in flight
        with self.clock.starting("pp"):
            transfers = post(messages, self.pp, self.boxes)
        for transfer in transfers:
            if transfer.action.kind.is_send:
                self.sending.append(transfer)
            else:
                self.receiving[transfer.action] = transfer

    def _received(self, action: Action) -> Tensor:
        transfer = self.receiving.pop(action)
        self._wait(transfer)
        return transfer.tensor

    def _finish_sends(self) -> None:
        for transfer in self.sending:
            self._wait(transfer)
        self.sending.clear()

    def _wait(self, transfer: Transfer) -> None:
        """Beyond the time that the message takes at most, its other end was late: idle."""
        self.clock.push("pp")
        transfer.work.wait()
        self.clock.pop(self.clock.floors.get("pp", math.inf))

    def _in_order(self, plan: Sequence[Step], load: Loader) -> InOrder:
        order = [s.microbatch for s in plan if isinstance(s, Action) and s.kind == Kind.F]
        return InOrder(load, order, self.device)

    def _forward(
        self, m: int, batches: InOrder, loss_scale: Tensor | None = None
    ) -> Tensor | float:
        x = None
        if not self.stage.first:
            x = self._received(Action(Kind.RECV_F, m)).requires_grad_(torch.is_grad_enabled())
        with self.clock.within("data"):
            batch = batches.take()
        with self.clock.within("forward"):
            y = self.stage(x, *batch, loss_scale)
        if batches.looks_ahead:
            with self.clock.within("data"):
                batches.look_ahead()
        self.live[m] = (x, y)
        if self.stage.last:
            return y.detach().double()
        self.outbox[Action(Kind.SEND_F, m)] = y.detach()
        return 0.0

    def _backward(self, m: int, loss_scale: Tensor) -> None:
        x, y = self.live.pop(m)
        last = self.stage.last
        grad = loss_scale.to(y.dtype) if last else self._received(Action(Kind.RECV_B, m))
        with self.clock.within("backward"):
            _Start.apply(y, grad).backward()
        if x is not None:
            self.outbox[Action(Kind.SEND_B, m)] = x.grad.contiguous()
