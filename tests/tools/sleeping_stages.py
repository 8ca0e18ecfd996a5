"""Runs stages that sleep instead of computing, so the timing of an executor shows on any
machine."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.comm.group import Group
from parallel3d.data.loader import MicroBatch
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.parameters.gradients import deferred_queue
from parallel3d.parameters.state import state_of
from parallel3d.pipeline.executor import ActionTimes, Executor, TimedAction
from parallel3d.pipeline.p2p import P2PRoute, SharedP2P, StageOutputs
from parallel3d.schedules.schedule import Schedule

CPU = torch.device("cpu")


class Activations:
    """Counts the tensors that a rank holds, and their peak."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def made(self) -> Tensor:
        """Counts a tensor until nothing holds it any longer."""
        tensor = torch.empty(1)
        self.now += 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(tensor, self._gone)
        return tensor

    def _gone(self) -> None:
        self.now -= 1


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: SleepingStage) -> Tensor:
        time.sleep(stage.costs[0])
        ctx.weight, ctx.costs, ctx.activation = weight, stage.costs, stage.activations.made()
        return x + 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _, input_s, weight_s = ctx.costs
        time.sleep(input_s)
        activation = ctx.activation

        def weight_gradient() -> None:
            time.sleep(weight_s)
            state_of(ctx.weight).main_grad += activation.numel()

        jobs = deferred_queue(ctx.weight)
        if jobs is None:
            weight_gradient()
        else:
            jobs.append(weight_gradient)
        return grad + 1.0, None, None


class SleepingStage(nn.Module):
    """Takes `costs` seconds for F, I and W; adds 1 to its inputs, both ways."""

    def __init__(
        self, first: bool, last: bool, costs: tuple[float, float, float], held: Activations,
        shape: tuple[int, int, int],
    ) -> None:  # fmt: skip
        super().__init__()
        self.first, self.last, self.costs, self.activations = first, last, costs, held
        self.shape = shape
        self.weight = nn.Parameter(torch.zeros(1))
        state_of(self.weight).main_grad = torch.zeros(1)

    def forward(self, hidden: Tensor | None, *_: Any) -> Tensor:
        x = torch.zeros(self.shape) if hidden is None else hidden
        y = _Work.apply(x, self.weight, self)
        return y.flatten()[0] if self.last else y


@dataclass
class Ran:
    """The observations of one rank in a step."""

    loss: float
    weights: list[float]
    peak_live: int
    left: int
    spans: list[TimedAction] = field(default_factory=list)
    seconds: float = 0.0


def run(
    schedule: Schedule,
    costs: tuple[float, float, float] = (0.0, 0.0, 0.0),
    shape: tuple[int, int, int] = (1, 2, 4),
    shared_memory: bool = True,
    late: Sequence[float] = (),
    steps: int = 1,
) -> Ran:
    """Runs some steps of `schedule` on every rank of a world that is one pipeline; returns the
    last.

    Args:
        costs: seconds of a whole rank's F, I and W, spread over its chunks.
        late: by rank, the factor by which its stages are slower.
    """
    rank, assignment = dist.get_rank(), schedule.assignment
    pp = Group("pp", tuple(range(assignment.ranks)), rank, dist.group.WORLD)
    held, last = Activations(), assignment.stages - 1
    extra = late[rank] if late else 0.0
    each = tuple(cost / assignment.chunks + extra for cost in costs)
    numbers = [assignment.stage(rank, chunk) for chunk in range(assignment.chunks)]
    stages = [SleepingStage(n == 0, n == last, each, held, shape) for n in numbers]
    programs = schedule.program(), schedule.forwards()
    route, boxes = P2PRoute(pp, assignment), None
    if shared_memory:
        boxes = SharedP2P.of_programs(programs, route, torch.empty(shape), 600.0)
    sends = [StageOutputs((shape,), torch.float32)] * last
    executor = Executor(stages, route, sends, CPU, boxes)

    def load(m: int) -> MicroBatch:
        return MicroBatch(None, None, None, LayerInputs(torch.tensor([m])))

    for _ in range(steps):
        dist.barrier()
        executor.action_times = ActionTimes(CPU)
        held.peak = held.now
        for stage in stages:
            state_of(stage.weight).main_grad.zero_()
        start = time.perf_counter()
        loss = executor.train_step(programs[0][rank], load, torch.ones(()))
        seconds = time.perf_counter() - start
    weights = [float(state_of(stage.weight).main_grad) for stage in stages]
    spans = executor.action_times.measured()
    if boxes is not None:
        boxes.memory.close()
    return Ran(float(loss), weights, held.peak, held.now, spans, seconds)


def run_all(schedules: Sequence[Schedule], how: dict[str, Any]) -> list[Ran]:
    """Calls `run` for one schedule after another, with the keywords `how`."""
    return [run(schedule, **how) for schedule in schedules]
