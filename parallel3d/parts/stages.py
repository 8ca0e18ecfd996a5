"""Stages of plain modules, as the pipeline's executor wants them.

What a stage raises must not leave its neighbours waiting. So it is kept, the stage goes on with
zeros in the shapes that the others expect, and the ranks tell each other at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.comm.clock import StepTimer
from parallel3d.device.accelerator import is_accelerator
from parallel3d.errors import UserError
from parallel3d.parameters.gradients import WeightGradients
from parallel3d.parts.links import StageOutputs
from parallel3d.parts.put_off import SplitBackward
from parallel3d.pipeline.executor import Executor
from parallel3d.pipeline.mailbox import SharedMemoryP2P
from parallel3d.pipeline.p2p import P2PRoute
from parallel3d.schedules.actions import Action, Kind

LossFn = Callable[..., Tensor]


@dataclass
class StageFailure:
    """What a rank raised in a step, and where."""

    where: str
    error: Exception

    def __str__(self) -> str:
        if isinstance(self.error, UserError):
            return str(self.error)
        return f"{self.where} raised {type(self.error).__name__}: {self.error}"


@dataclass
class Progress:
    """What the stages of a rank have made of the step under way.

    Attributes:
        outputs: by micro-batch what the last stage returned, where that is wanted.
    """

    failure: StageFailure | None = None
    wants_outputs: bool = False
    outputs: dict[int, Any] = field(default_factory=dict)

    def fails(self, where: str, error: Exception) -> None:
        """The first one counts: the rest are its consequences."""
        if self.failure is None:
            self.failure = StageFailure(where, error)


@dataclass
class PlainStage:
    """Some modules in a row.

    Attributes:
        number: of the stage in the pipeline.
        links: what travels behind each stage, by its number.
        loss_fn: of the last stage's output and the targets; None: the output is the loss.
        splits: the schedule makes weight gradients apart.
    """

    number: int
    first: bool
    last: bool
    modules: Sequence[nn.Module]
    loss_fn: LossFn | None
    splits: bool
    links: Mapping[int, StageOutputs]
    progress: Progress
    device: torch.device

    def parameters(self) -> list[nn.Parameter]:
        return [p for module in self.modules for p in module.parameters()]

    def run(self, values: tuple[Any, ...]) -> Any:
        """The modules' own results, one after the other."""
        out: Any = values
        for module in self.modules:
            out = module(*out) if isinstance(out, tuple | list) else module(out)
        return out

    def __call__(
        self,
        x: Tensor | None,
        inputs: tuple[Tensor, ...] | None,
        targets: tuple[Tensor, ...] | None,
        microbatch: int,
        scale: Tensor | None = None,
    ) -> Tensor:
        """The message to the next stage, of the last one the loss."""
        if self.progress.failure is None:
            try:
                return self._forward(x, inputs, targets, microbatch)
            except Exception as error:
                where = f"stage {self.number} in the forward of micro-batch {microbatch}"
                self.progress.fails(where, error)
        if self.last:
            return torch.zeros((), device=self.device)
        link = self.links[self.number]
        return torch.zeros(link.shape, dtype=link.dtype, device=self.device)

    def _forward(
        self, x: Tensor | None, inputs: Any, targets: tuple[Tensor, ...] | None, microbatch: int
    ) -> Tensor:
        values = inputs if x is None else self.links[self.number - 1].values(x)
        split = self.splits and torch.is_grad_enabled()
        with SplitBackward() if split else nullcontext():
            out = self.run(values)
            if self.last:
                return self._end(out, targets, microbatch)
        link, wanted = StageOutputs.of(out, self.number), self.links[self.number]
        if link != wanted:
            raise UserError(
                f"stage {self.number} made {link} of micro-batch {microbatch}, but must make "
                f"{wanted} as in the first step: the shapes of a pipeline are fixed"
            )
        return wanted.message(out)

    def _end(self, out: Any, targets: tuple[Tensor, ...] | None, microbatch: int) -> Tensor:
        if self.progress.wants_outputs:
            self.progress.outputs[microbatch] = out
            return torch.zeros((), device=self.device)
        loss = out if self.loss_fn is None else self.loss_fn(out, *(targets or ()))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"the pipeline's loss must be one number of each micro-batch, not {kind}; give a "
                "loss_fn that takes the mean"
            )
        return loss.reshape(())


@contextmanager
def unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards buffers and the generators of random numbers are as before."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    on_device = [device] if is_accelerator(device) else []
    with torch.random.fork_rng(on_device, device_type=device.type if on_device else "cuda"):
        try:
            yield
        finally:
            for buffer, before in kept:
                buffer.copy_(before)


class PlainExecutor(Executor):
    """The executor for messages whose shape and type differ from link to link."""

    def __init__(
        self,
        stages: Sequence[PlainStage],
        route: P2PRoute,
        links: Mapping[int, StageOutputs],
        device: torch.device,
        boxes: SharedMemoryP2P | None,
        weight_gradients: WeightGradients,
    ) -> None:
        super().__init__(stages, route, (), torch.float32, device, boxes, StepTimer())
        self.links, self.progress = links, stages[0].progress
        self.weight_gradients = weight_gradients
        for stage in stages:
            for parameter in stage.parameters():
                parameter.weight_gradients = weight_gradients

    def room_for(self, action: Action) -> Tensor:
        stage = self.route.placement.stage(self.route.group.index, action.chunk)
        link = self.links[stage - 1 if action.kind == Kind.RECV_F else stage]
        return torch.empty(link.shape, dtype=link.dtype, device=self.device)

    def differentiate(self, step: Action, x: Tensor | None, y: Tensor, grad: Tensor) -> None:
        if self.progress.failure is None and y.requires_grad:
            try:
                super().differentiate(step, x, y, grad)
            except Exception as error:
                number = self.stages[step.chunk].number
                where = f"stage {number} in the backward of micro-batch {step.microbatch}"
                self.progress.fails(where, error)
        if x is not None and x.grad is None:  # the stage does not read it, or failed
            x.grad = torch.zeros_like(x)

    def _weights(self, step: Action) -> None:
        if self.progress.failure is not None:
            self.put_off.pop((step.microbatch, step.chunk), None)
        else:
            super()._weights(step)
