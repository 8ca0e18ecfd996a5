"""A pipeline of plain modules: `p3d.Pipeline([block1, block2, head], groups.pp)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.group import SINGLE, Group
from parallel3d.config.schema import LaunchConfig
from parallel3d.errors import UserError
from parallel3d.parameters.gradients import WeightGradients
from parallel3d.parts.groups import group_of
from parallel3d.parts.links import StageOutputs, cut, shapes_of
from parallel3d.parts.replicas import average_gradients, start_equal
from parallel3d.parts.stages import (
    LossFn,
    PlainExecutor,
    PlainStage,
    Progress,
    StageFailure,
    unchanged,
)
from parallel3d.parts.whole import load_own, refuse_sharing, stages_of, whole_state_dict
from parallel3d.pipeline.mailbox import SharedMemoryP2P
from parallel3d.pipeline.p2p import P2PRoute
from parallel3d.schedules.schedule import LOOPED, V_SHAPED, Schedule, make

GroupLike = Group | dist.ProcessGroup | None
CPU = torch.device("cpu")


class Pipeline(nn.Module):
    """Modules in a row, cut into stages that lie on the ranks of a group.

    Every rank gives the whole list and keeps its own stages; names of parameters and state dicts
    are those of `nn.Sequential(*modules)`. All methods are collective over the group. Between
    stages travels a tensor, or a tuple of tensors of one floating-point type, whose shapes are the
    same for all micro-batches of a step.

    Args:
        modules: what each returns, the next one is called with.
        group: `groups.pp`, a group of torch.distributed, or None for all ranks.
        loss_fn: of the last module's output and the targets, a mean over the samples; None: what
            the last module returns is the loss.
        schedule: gpipe, 1f1b, interleaved, zb_h1, interleaved_zb, zbv or v_half.
        num_microbatches: parts of a batch.
        vpp: stages of each rank; None: 2 where the schedule has several, else 1.
        split: how many modules each stage gets; None: as many on each rank, over all of its
            stages, or one more.
        dp: `groups.dp`, whose pipelines are replicas: they start with the first one's weights, and
            gradients are the mean over them.
        shared_memory: CPU ranks of one host exchange through it.
        timeout_s: how long a message through it may take.

    Raises:
        UserError: on every rank alike, arguments that differ between ranks; fewer modules than
            stages; an unknown schedule; a parameter that lies in stages of two ranks.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        group: GroupLike = None,
        *,
        loss_fn: LossFn | None = None,
        schedule: str = "1f1b",
        num_microbatches: int = 8,
        vpp: int | None = None,
        split: Sequence[int] | None = None,
        dp: GroupLike = SINGLE,
        shared_memory: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        self.group, self.dp = group_of(group), group_of(dp)
        modules = list(modules)
        self.device = next((p.device for m in modules for p in m.parameters()), CPU)
        if vpp is None:
            vpp = 2 if schedule in (*LOOPED, *V_SHAPED) else 1
        asked = {"schedule": schedule, "num_microbatches": num_microbatches, "vpp": vpp}
        asked |= {"split": split and list(split), "number of modules": len(modules)}
        self._agree_on(asked)
        if not isinstance(num_microbatches, int) or num_microbatches < 1:
            raise UserError(
                f"Pipeline(num_microbatches={num_microbatches!r}) must be a whole number from 1 "
                "on; the nearest is num_microbatches=1"
            )
        self.schedule: Schedule = make(schedule, self.group.size, num_microbatches, vpp)
        self.plans = self.schedule.plan(), self.schedule.forwards()
        placement = self.schedule.placement
        stages = stages_of(modules, placement, split)
        refuse_sharing(modules, stages, placement)
        self.of_modules = len(modules)
        self.launch = LaunchConfig(shared_memory=shared_memory, timeout_s=timeout_s)
        self.loss_fn, self.numbers = loss_fn, {}
        self.mine: dict[int, list[nn.Module]] = {}  # stage → its modules
        for chunk in range(placement.chunks):
            stage = placement.stage(self.group.index, chunk)
            self.mine[stage] = [modules[i] for i in stages[stage]]
            for i in stages[stage]:
                self.add_module(str(i), modules[i])
        self.progress, self.weight_gradients = Progress(), WeightGradients()
        self.executors: list[PlainExecutor] = []  # for each shape of inputs that was seen
        start_equal(self, self.dp)

    @property
    def is_first(self) -> bool:
        """Whether this rank reads the inputs."""
        return self.schedule.placement.place(0)[0] == self.group.index

    @property
    def is_last(self) -> bool:
        """Whether this rank reads the targets and has the outputs."""
        return self.schedule.placement.places[-1][0] == self.group.index

    def step(self, inputs: Any = None, targets: Any = None) -> Tensor:
        """Forwards and backwards of one batch: adds to `.grad` the gradients of the mean loss.

        Args:
            inputs: a batch (a tensor or a tuple of tensors), or a list of micro-batches; read on
                the rank of the first stage alone.
            targets: the same for the loss, read on the rank of the last stage alone.

        Returns: the mean loss over the batch, the same on all ranks of the group; float64.

        Raises:
            UserError: on every rank alike, a batch that the micro-batches do not divide, or shapes
                that change between micro-batches.
            RuntimeError: where another rank, or another replica, failed; gradients are then not
                whole. The rank itself raises what its modules did.
        """
        executor, batches = self._begin(inputs, targets, self.loss_fn is not None, step=True)
        microbatches = self.schedule.microbatches
        scale = torch.ones((), dtype=torch.float64, device=self.device) / microbatches
        total = executor.train_step(
            self.plans[0][self.group.index], batches.__getitem__, scale, _nothing
        )
        loss = self._end(total, step=True) / microbatches
        average_gradients(list(self.parameters()), self.dp)
        return loss

    def evaluate(self, inputs: Any = None, targets: Any = None) -> Tensor:
        """The mean loss as of `step`, without gradients."""
        executor, batches = self._begin(inputs, targets, self.loss_fn is not None)
        total = executor.evaluate(self.plans[1][self.group.index], batches.__getitem__)
        return self._end(total) / self.schedule.microbatches

    def forward(self, inputs: Any = None) -> Any:
        """The last module's outputs, joined along their first dimension, without gradients; None on
        ranks that do not hold the last stage."""
        executor, batches = self._begin(inputs, None, False)
        self.progress.wants_outputs = True
        try:
            executor.evaluate(self.plans[1][self.group.index], batches.__getitem__)
        finally:
            self.progress.wants_outputs = False
        outputs, self.progress.outputs = self.progress.outputs, {}
        self._end(torch.zeros((), dtype=torch.float64, device=self.device))
        if not self.is_last:
            return None
        parts = [outputs[m] for m in sorted(outputs)]
        if isinstance(parts[0], Tensor):
            return torch.cat(parts)
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """That of `nn.Sequential(*modules)`, whole on every rank; collective."""
        return whole_state_dict(super().state_dict(*args, **kwargs), self.group, self.device)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Takes this rank's part of a state dict of all modules."""
        own = load_own(state_dict, set(self._modules), self.of_modules)
        return super().load_state_dict(own, strict, assign)

    def _agree_on(self, asked: dict[str, Any]) -> None:
        """Raises UserError, on every rank, where ranks give different arguments."""
        said = {key: repr(value) for key, value in asked.items()}
        everyone = all_gather_json(said, self.group.handle, self.device)
        for index, theirs in enumerate(everyone):
            for key, value in theirs.items():
                if value != everyone[0][key]:
                    raise UserError(
                        f"Pipeline({key}={value}) on rank {self.group.ranks[index]} must be "
                        f"{everyone[0][key]} as on rank {self.group.ranks[0]}"
                    )

    def _begin(
        self, inputs: Any, targets: Any, wants_targets: bool, step: bool = False
    ) -> tuple[PlainExecutor, list[tuple]]:
        """Looks at the batch, with all ranks: what one of them cannot work with, all raise."""
        self.progress.failure = None
        count = self.schedule.microbatches
        xs: list[Any] = [None] * count
        ys: list[Any] = [None] * count
        number = -1
        try:
            if self.is_first:
                xs = cut(inputs, count, "inputs")
                number = self.numbers.get(repr(shapes_of(xs[0])), -1)
            if self.is_last and wants_targets:
                ys = cut(targets, count, "targets")
        except UserError as error:
            self.progress.fails("the batch", error)
        number = int(self._meet(float(number), step)[self.schedule.placement.place(0)[0]])
        if number < 0:
            number = len(self.executors)
            self.executors.append(self._executor(xs[0], step))
            if self.is_first:
                self.numbers[repr(shapes_of(xs[0]))] = number
        return self.executors[number], list(zip(xs, ys, range(count), strict=True))

    def _end(self, total: Tensor, step: bool = False) -> Tensor:
        """The sum of what the ranks have, unless one of them failed."""
        values = self._meet(float(total), step, last=True)
        return torch.tensor(values, dtype=torch.float64).sum()

    def _meet(self, value: float, step: bool, last: bool = False) -> list[float]:
        """Every rank's number, by rank; raises on every rank where one of them has failed.

        A step that fails, and one that ends, says so to the other replicas: once.
        """
        failure = self.progress.failure
        mine = torch.tensor([[value, float(failure is not None)]], dtype=torch.float64)
        facts = collectives.all_gather(mine.to(self.device), self.group).tolist()
        failed = any(flag for _, flag in facts)
        others = False
        if step and (failed or last) and self.dp.size > 1:
            flag = torch.tensor([float(failed)], device=self.device)
            others = bool(collectives.all_reduce(flag, self.dp)) and not failed
        if failed:
            self._raise(failure)
        if others:
            raise RuntimeError("another replica of the pipeline failed in this step")
        return [number for number, _ in facts]

    def _raise(self, failure: StageFailure | None) -> None:
        """What went wrong; collective over the group."""
        said = failure and [str(failure), isinstance(failure.error, UserError)]
        everyone = all_gather_json(said, self.group.handle, self.device)
        if failure is not None:
            raise failure.error
        index, (sentence, of_user) = next((i, s) for i, s in enumerate(everyone) if s)
        if of_user:
            raise UserError(sentence)
        raise RuntimeError(f"rank {self.group.ranks[index]}: {sentence}")

    def _executor(self, inputs: tuple[Tensor, ...] | None, step: bool) -> PlainExecutor:
        """One for micro-batches like this one: each stage runs once, on zeros, to tell the shapes
        of its results; collective."""
        placement, links = self.schedule.placement, {}
        stages = [self._stage(number, links) for number in self.mine]
        for number, (rank, chunk) in enumerate(placement.places[:-1]):
            word = None
            if rank == self.group.index:
                values = inputs if number == 0 else links[number - 1].zeros(self.device)
                try:
                    with torch.no_grad(), unchanged(self, self.device):
                        word = StageOutputs.of(stages[chunk].run(values), number).facts()
                except Exception as error:
                    self.progress.fails(f"stage {number} in a first look at its shapes", error)
            word = all_gather_json(word, self.group.handle, self.device)[rank]
            if word is None:
                self._meet(0.0, step)
            links[number] = StageOutputs.told(word)
        messages = [link.message(link.zeros(self.device)) for link in links.values()]
        boxes = None
        if messages:
            largest = max(messages, key=lambda message: message.nbytes)
            boxes = SharedMemoryP2P.of_plans(
                self.plans, placement, self.launch, self.group, largest.view(-1)
            )
        route = P2PRoute(self.group, placement)
        return PlainExecutor(stages, route, links, self.device, boxes, self.weight_gradients)

    def _stage(self, number: int, links: Mapping[int, StageOutputs]) -> PlainStage:
        last = self.schedule.placement.stages - 1
        return PlainStage(
            number,
            number == 0,
            number == last,
            self.mine[number],
            self.loss_fn,
            self.schedule.splits_backward,
            links,
            self.progress,
            self.device,
        )


def _nothing() -> None:
    """Nobody waits for the last backward: gradients are averaged when the step has ended."""
