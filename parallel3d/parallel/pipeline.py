"""Provides pipelines of plain modules: `p3d.Pipeline([block1, block2, head], groups.pp)`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parallel3d.comm import collectives
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.group import SINGLE, Group, GroupLike, group_of
from parallel3d.comm.step_timer import StepTimer
from parallel3d.config.schema import LaunchConfig
from parallel3d.data_parallel.averager import GradientAverager
from parallel3d.device.accelerator import is_accelerator
from parallel3d.errors import UserError
from parallel3d.parallel.replicated import start_equal
from parallel3d.parameters.gradients import add_gradient, deferred_queue
from parallel3d.parameters.sharding import WeightGradients, state_of
from parallel3d.pipeline.executor import Executor
from parallel3d.pipeline.p2p import P2PRoute, SharedMemoryP2P
from parallel3d.schedules.actions import Action, Kind
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import LOOPED, V_SHAPED, Schedule, make
from parallel3d.tensor_parallel.linear_ops import ColumnNode

LossFn = Callable[..., Tensor]
CPU = torch.device("cpu")


class Pipeline(nn.Module):
    """Cuts consecutive modules into stages on the ranks of a group.

    Every rank passes the whole list and keeps its own stages; names of parameters and state dicts
    are those of `nn.Sequential(*modules)`. All methods are collective over the group. Stages send a
    tensor, or a tuple of tensors of one floating-point type, whose shapes are the same for all
    micro-batches of a step.

    Args:
        modules: each is called with the result of the one before.
        group: `groups.pp`, a group of torch.distributed, or None for all ranks.
        loss_fn: of the last module's output and the targets, a mean over the samples; None: the
            last module returns the loss.
        schedule: gpipe, 1f1b, interleaved, zb_h1, interleaved_zb, zbv or v_half.
        num_microbatches: of a batch.
        vpp: stages of each rank; None: 2 for schedules with several, else 1.
        split: how many modules each stage gets; None: ranks get as many, or one more.
        dp: `groups.dp`, whose pipelines are replicas: they start with the first one's weights, and
            gradients are averaged over them.
        shared_memory: CPU ranks of one host exchange through it.
        timeout_s: of a message through shared memory.

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
        self._check_agreement(
            {
                "schedule": schedule,
                "num_microbatches": num_microbatches,
                "vpp": vpp,
                "split": split and list(split),
                "number of modules": len(modules),
            }
        )
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
        self.num_modules = len(modules)
        self.launch = LaunchConfig(shared_memory=shared_memory, timeout_s=timeout_s)
        self.loss_fn = loss_fn
        self.numbers: dict[str, int] = {}  # shapes of inputs → index in `executors`
        self.mine: dict[int, list[nn.Module]] = {}  # stage → its modules
        for chunk in range(placement.chunks):
            stage = placement.stage(self.group.index, chunk)
            self.mine[stage] = [modules[i] for i in stages[stage]]
            for i in stages[stage]:
                self.add_module(str(i), modules[i])
        self.progress, self.weight_gradients = Progress(), WeightGradients()
        self.executors: list[PlainExecutor] = []
        self._mark()
        start_equal(self, self.dp)
        self.averager: GradientAverager | None = None  # over dp; from the first step on

    def _mark(self) -> None:
        """Lets `clip_grad_norm_` know the group; copies and FSDP2 bring new parameters."""
        for parameter in self.parameters():
            state_of(parameter).pp = self.group

    @property
    def is_first(self) -> bool:
        """Whether this rank reads the inputs."""
        return self.schedule.placement.place(0)[0] == self.group.index

    @property
    def is_last(self) -> bool:
        """Whether this rank reads the targets and has the outputs."""
        return self.schedule.placement.places[-1][0] == self.group.index

    def step(self, inputs: Any = None, targets: Any = None) -> Tensor:
        """Runs forwards and backwards of a batch: adds the gradients of the mean loss to `.grad`.

        Args:
            inputs: a batch (a tensor or a tuple of tensors), or a list of micro-batches; read on
                the rank of the first stage alone.
            targets: the same for the loss, read on the rank of the last stage alone.

        Returns: the mean loss over the batch, the same on all ranks of the group; float64.

        Raises:
            UserError: on every rank alike, a batch that the micro-batches do not divide, or shapes
                that change between micro-batches.
            RuntimeError: another rank, or another replica, failed; gradients are incomplete. The
                failed rank raises its modules' exception.
        """
        executor, batches = self._begin(inputs, targets, self.loss_fn is not None, step=True)
        microbatches = self.schedule.microbatches
        scale = torch.ones((), dtype=torch.float64, device=self.device) / microbatches
        total = executor.train_step(
            self.plans[0][self.group.index], batches.__getitem__, scale, _nothing
        )
        loss = self._end(total, step=True) / microbatches
        if self.dp.size > 1:
            self._average_gradients()
        self._mark()
        return loss

    def _average_gradients(self) -> None:
        if self.averager is None:
            named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
            if not named:
                return
            names, parameters = zip(*named, strict=True)
            self.averager = GradientAverager(names, parameters, self.dp, measure=False, watch=False)
        self.averager.average()

    def evaluate(self, inputs: Any = None, targets: Any = None) -> Tensor:
        """Returns the mean loss as of `step`, without gradients."""
        executor, batches = self._begin(inputs, targets, self.loss_fn is not None)
        total = executor.evaluate(self.plans[1][self.group.index], batches.__getitem__)
        return self._end(total) / self.schedule.microbatches

    def forward(self, inputs: Any = None) -> Any:
        """Returns the last module's outputs for the whole batch, without gradients.

        Ranks without the last stage get None.
        """
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

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the full state dict of all modules on every rank; collective."""
        return whole_state_dict(super().state_dict(*args, **kwargs), self.group, self.device)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads this rank's modules from a state dict of all."""
        own = load_own(state_dict, set(self._modules), self.num_modules)
        return super().load_state_dict(own, strict, assign)

    def _check_agreement(self, arguments: dict[str, Any]) -> None:
        mine = {key: repr(value) for key, value in arguments.items()}
        everyone = all_gather_json(mine, self.group.handle, self.device)
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
        """Checks and cuts the batch; an error of one rank is raised on all."""
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
        number = int(self._exchange(float(number), step)[self.schedule.placement.place(0)[0]])
        if number < 0:
            number = len(self.executors)
            self.executors.append(self._executor(xs[0], step))
            if self.is_first:
                self.numbers[repr(shapes_of(xs[0]))] = number
        return self.executors[number], list(zip(xs, ys, range(count), strict=True))

    def _end(self, total: Tensor, step: bool = False) -> Tensor:
        values = self._exchange(float(total), step, last=True)
        return torch.tensor(values, dtype=torch.float64).sum()

    def _exchange(self, value: float, step: bool, last: bool = False) -> list[float]:
        """Returns every rank's number; raises on all ranks, and replicas, if one has failed."""
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
        mine = failure and [str(failure), isinstance(failure.error, UserError)]
        everyone = all_gather_json(mine, self.group.handle, self.device)
        if failure is not None:
            raise failure.error
        index, (sentence, of_user) = next((i, s) for i, s in enumerate(everyone) if s)
        if of_user:
            raise UserError(sentence)
        raise RuntimeError(f"rank {self.group.ranks[index]}: {sentence}")

    def _executor(self, inputs: tuple[Tensor, ...] | None, step: bool) -> PlainExecutor:
        """Returns an executor; runs each stage once, on zeros, for its shapes; collective."""
        placement = self.schedule.placement
        links: dict[int, StageOutputs] = {}
        stages = [self._stage(number, links) for number in self.mine]
        for number, (rank, chunk) in enumerate(placement.places[:-1]):
            facts = None
            if rank == self.group.index:
                values = links[number - 1].zeros(self.device) if number else inputs
                assert values is not None  # the rank of the first stage has cut the batch
                try:
                    with torch.no_grad(), unchanged(self, self.device):
                        facts = StageOutputs.of(stages[chunk].run(values), number).facts()
                except Exception as error:
                    self.progress.fails(f"stage {number} in a first look at its shapes", error)
            facts = all_gather_json(facts, self.group.handle, self.device)[rank]
            if facts is None:
                self._exchange(0.0, step)
            links[number] = StageOutputs.from_facts(facts)
        messages = [link.message(link.zeros(self.device)) for link in links.values()]
        shared_memory = None
        if messages:
            largest = max(messages, key=lambda message: message.nbytes)
            shared_memory = SharedMemoryP2P.of_plans(
                self.plans, placement, self.launch, self.group, largest.view(-1)
            )
        route = P2PRoute(self.group, placement)
        return PlainExecutor(
            stages, route, links, self.device, shared_memory, self.weight_gradients
        )

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
    """Does nothing at the last backward: gradients are averaged after the step."""


def stages_of(
    modules: Sequence[nn.Module], placement: StageAssignment, split: Sequence[int] | None
) -> list[range]:
    count, stages = len(modules), placement.stages
    for i, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise UserError(f"module {i} of the pipeline must be an nn.Module, not {module!r}")
    if count < stages:
        raise UserError(
            f"the pipeline's {count} modules must be at least as many as its {stages} stages "
            f"({placement.ranks} ranks × {placement.chunks}): cut them finer, or take fewer ranks"
        )
    fair = even_split(count, placement)
    counts = fair if split is None else list(split)
    if len(counts) != stages or min(counts) < 1 or sum(counts) != count:
        raise UserError(
            f"Pipeline(split={counts}) must give each of {stages} stages at least one of the "
            f"{count} modules and leave none out; the nearest is split={fair}"
        )
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    return [range(end - size, end) for size, end in zip(counts, ends, strict=True)]


def even_split(count: int, placement: StageAssignment) -> list[int]:
    """Returns how many modules each stage gets: an equal share, the rest closest to the middle."""
    stages, middle = range(placement.stages), placement.stages - 1
    ranks = [rank for rank, _ in placement.places]
    counts, left = [1] * placement.stages, count - placement.stages
    held, least = [placement.chunks] * placement.ranks, count // placement.ranks
    for given in range(left):
        # First every rank gets the same number, then some get one more.
        most = least + (given >= least * placement.ranks - placement.stages)
        stage = min(
            (s for s in stages if held[ranks[s]] < most),
            key=lambda s: (counts[s], abs(2 * s - middle), s),
        )
        counts[stage] += 1
        held[ranks[stage]] += 1
    return counts


def refuse_sharing(
    modules: Sequence[nn.Module], stages: Sequence[range], placement: StageAssignment
) -> None:
    """Raises UserError for a parameter on two ranks: their copies would drift apart."""
    seen: dict[nn.Parameter, tuple[int, str]] = {}
    for stage, members in enumerate(stages):
        rank = placement.places[stage][0]
        for i in members:
            for name, parameter in modules[i].named_parameters():
                first, known = seen.setdefault(parameter, (rank, f"{i}.{name}"))
                if first != rank:
                    raise UserError(
                        f"{i}.{name} is the same parameter as {known}, but lies on another rank "
                        "of the pipeline: what is shared must lie on one"
                    )


def whole_state_dict(own: Mapping[str, Any], group: Group, device: torch.device) -> dict[str, Any]:
    """Returns the full state dict, in the modules' order, on every rank; collective."""
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    facts = [[name, list(t.shape), str(t.dtype)] for name, t in tensors.items()]
    whole: dict[str, Any] = {}
    for index, theirs in enumerate(all_gather_json(facts, group.handle, device)):
        for name, shape, kind in theirs:
            if index == group.index:
                mine = tensors[name].detach().contiguous()
                whole[name] = tensors[name]
            else:
                dtype = getattr(torch, kind.removeprefix("torch."))
                mine = whole[name] = torch.empty(shape, dtype=dtype, device=device)
            if math.prod(shape):
                collectives.broadcast(mine.view(-1).view(torch.uint8), index, group)
    return {name: whole[name] for name in sorted(whole, key=lambda n: int(n.partition(".")[0]))}


def load_own(state_dict: Mapping[str, Any], mine: set[str], count: int) -> dict[str, Any]:
    others = {str(i) for i in range(count)} - mine
    return {k: v for k, v in state_dict.items() if k.partition(".")[0] not in others}


@dataclass
class StageFailure:
    where: str
    error: Exception

    def __str__(self) -> str:
        if isinstance(self.error, UserError):
            return str(self.error)
        return f"{self.where} raised {type(self.error).__name__}: {self.error}"


@dataclass
class Progress:
    """Holds the state of a rank's stages in a step; `outputs` of the last stage by micro-batch."""

    failure: StageFailure | None = None
    wants_outputs: bool = False
    outputs: dict[int, Any] = field(default_factory=dict)

    def fails(self, where: str, error: Exception) -> None:
        """Keeps the first failure: later ones are its consequences."""
        if self.failure is None:
            self.failure = StageFailure(where, error)


@dataclass
class PlainStage:
    """Runs some consecutive modules as a stage of the pipeline.

    A stage that raises must not leave its neighbours waiting. So the failure is kept, the stage
    goes on with zeros in the shapes that the others expect, and the ranks exchange failures at the
    end of the step.

    Attributes:
        number: of the stage in the pipeline.
        links: by stage, the outputs that it sends.
        loss_fn: of the last stage's output and the targets; None: the output is the loss.
        splits: the schedule defers weight gradients.
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
    """Restores buffers and the state of random number generators on exit."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    on_device = [device] if is_accelerator(device) else []
    with torch.random.fork_rng(on_device, device_type=device.type if on_device else "cuda"):
        try:
            yield
        finally:
            for buffer, before in kept:
                buffer.copy_(before)


class PlainExecutor(Executor):
    """Executes plans whose messages differ in shape and type between stages."""

    stages: Sequence[PlainStage]

    def __init__(
        self,
        stages: Sequence[PlainStage],
        route: P2PRoute,
        links: Mapping[int, StageOutputs],
        device: torch.device,
        shared_memory: SharedMemoryP2P | None,
        weight_gradients: WeightGradients,
    ) -> None:
        super().__init__(stages, route, (), torch.float32, device, shared_memory, StepTimer())
        self.links, self.progress = links, stages[0].progress
        self.weight_gradients = weight_gradients
        for stage in stages:
            for parameter in stage.parameters():
                state_of(parameter).weight_gradients = weight_gradients

    def alloc_recv_buffer(self, action: Action) -> Tensor:
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
        if x is not None and x.grad is None:  # unused by the stage, or the stage failed
            x.grad = torch.zeros_like(x)

    def _weights(self, step: Action) -> None:
        if self.progress.failure is not None:
            self.deferred.pop((step.microbatch, step.chunk), None)
        else:
            super()._weights(step)


# Tensors that travel between stages


StageValues = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class StageOutputs:
    """Describes the outputs of a stage; `single`: a tensor, not a tuple of one type."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    single: bool

    @classmethod
    def of(cls, values: Any, stage: int) -> StageOutputs:
        """Describes `values`. Raises UserError for results that cannot be sent."""
        several = values if isinstance(values, tuple | list) else (values,)
        rule = f"stage {stage} of the pipeline must return a tensor or a tuple of them"
        if not several or not all(isinstance(value, Tensor) for value in several):
            raise UserError(f"{rule}, not {type(values).__name__}")
        kinds = {value.dtype for value in several}
        if len(kinds) > 1 or not several[0].is_floating_point():
            names = " and ".join(sorted(str(kind) for kind in kinds))
            raise UserError(f"{rule} of one floating-point type, not {names}")
        shapes = tuple(tuple(value.shape) for value in several)
        return cls(shapes, several[0].dtype, isinstance(values, Tensor))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0] if self.single else (sum(map(math.prod, self.shapes)),)

    def zeros(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=self.dtype, device=device) for shape in self.shapes)

    def message(self, values: StageValues) -> Tensor:
        if isinstance(values, Tensor) or self.single:
            (values,) = values if isinstance(values, tuple | list) else (values,)
            return values.contiguous()
        return torch.cat([value.reshape(-1) for value in values])

    def values(self, message: Tensor) -> tuple[Tensor, ...]:
        if self.single:
            return (message,)
        parts = message.split([math.prod(shape) for shape in self.shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True))

    def facts(self) -> list:
        return [self.shapes, str(self.dtype), self.single]

    @classmethod
    def from_facts(cls, facts: Sequence) -> StageOutputs:
        shapes, dtype, single = facts
        kind = getattr(torch, dtype.removeprefix("torch."))
        return cls(tuple(map(tuple, shapes)), kind, single)

    def __str__(self) -> str:
        return " and ".join(f"{self.dtype}{list(shape)}" for shape in self.shapes)


def cut(given: Any, count: int, what: str) -> list[tuple[Tensor, ...]]:
    """Returns `count` micro-batches of equal shapes.

    Args:
        given: a batch to be cut along its first dimension (a tensor, or a tuple of tensors of the
            same length), or a list of micro-batches.
        what: inputs or targets.

    Raises:
        UserError: a batch that does not divide, shapes that differ between micro-batches.
    """
    if isinstance(given, list):
        if len(given) != count:
            raise UserError(
                f"{what} is a list of {len(given)} micro-batches, which must be "
                f"num_microbatches={count}"
            )
        parts = [part if isinstance(part, tuple) else (part,) for part in given]
    else:
        tensors = given if isinstance(given, tuple) else (given,)
        sizes = {t.shape[0] if isinstance(t, Tensor) and t.dim() else 0 for t in tensors}
        size = min(sizes, default=0)
        if len(sizes) != 1 or not size or size % count:
            near = max(1, round(size / count)) * count
            raise UserError(
                f"{what} with {' and '.join(map(str, sorted(sizes)))} samples must be tensors of a "
                f"length that num_microbatches={count} divides; the nearest is {near}"
            )
        parts = list(zip(*(tensor.chunk(count) for tensor in tensors), strict=True))
    first = shapes_of(parts[0])
    for number, part in enumerate(parts):
        if shapes_of(part) != first:
            raise UserError(
                f"micro-batch {number} of {what} has {shapes_of(part)}, but must have {first} as "
                "micro-batch 0: the shapes of a pipeline are fixed"
            )
    return parts


def shapes_of(values: Sequence[Any]) -> list[list]:
    """Returns shape and type of each tensor; for another value its type."""
    return [
        [list(v.shape), str(v.dtype)] if isinstance(v, Tensor) else [[], type(v).__name__]
        for v in values
    ]


# Deferred weight gradients of plain modules, for schedules that split the backward


CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


class SplitBackward(TorchFunctionMode):
    """Makes linear layers and convolutions of a forward defer their weight gradients.

    Other layers (norms, embeddings, recurrent layers, `nn.MultiheadAttention`, whatever is
    compiled, checkpointed or under autocast) compute both gradients at once, which changes no
    result.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            arguments = _by_name(("input", "weight", "bias"), args, kwargs)
            if _can_defer(arguments):
                x, weight, bias = (arguments.get(key) for key in ("input", "weight", "bias"))
                return ColumnNode.apply(x, weight, bias, SINGLE, None)
        elif func in CONVOLUTIONS:
            arguments = _by_name(CONVOLUTION, args, kwargs)
            dims, padding = CONVOLUTIONS[func], arguments.get("padding", 0)
            if not isinstance(padding, str) and _can_defer(arguments, dims + 2):
                how = (
                    _each(arguments.get("stride", 1), dims),
                    _each(padding, dims),
                    _each(arguments.get("dilation", 1), dims),
                    arguments.get("groups", 1),
                )
                return _Convolution.apply(
                    arguments["input"], arguments["weight"], arguments.get("bias"), how
                )
        return func(*args, **kwargs)


def _by_name(names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | kwargs


def _each(size: int | tuple[int, ...], dims: int) -> list[int]:
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes * dims if len(sizes) == 1 else sizes


def _can_defer(arguments: dict[str, Any], dims: int = 0) -> bool:
    """Returns whether weight is a stage's parameter in the type of its input (`dims` 0: any)."""
    x, weight = arguments["input"], arguments["weight"]
    if not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
        return False
    if weight._backward_hooks:  # autograd would not call them for a deferred gradient
        return False
    # The recompute of a checkpointed forward runs outside of this mode and must save the same
    # tensors as the first forward.
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooked is not None or torch.compiler.is_compiling():
        return False
    if state_of(weight).weight_gradients is None or torch.is_autocast_enabled(x.device.type):
        return False
    return x.dtype == weight.dtype and (x.dim() == dims if dims else x.dim() > 1)


class _Convolution(torch.autograd.Function):
    """Computes a convolution; `how` is stride, padding, dilation and groups."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: tuple) -> Tensor:
        ctx.how, ctx.biases = how, None if bias is None else list(bias.shape)
        ctx.weight = weight
        ctx.save_for_backward(x)
        return torch.convolution(x, weight, bias, *_aten_arguments(how))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        weight, biases, how = ctx.weight, ctx.biases, _aten_arguments(ctx.how)

        def gradients(*wanted: bool) -> tuple:
            found = torch.ops.aten.convolution_backward(grad, x, weight, biases, *how, wanted)
            return tuple(found)

        def add() -> None:
            add_gradient(weight, gradients(False, True, False)[1])

        jobs = deferred_queue(weight)
        needs_x, with_bias = ctx.needs_input_grad[0], biases is not None
        if jobs is None:
            return *gradients(needs_x, True, with_bias), None
        jobs.append(add)
        x_grad, _, bias_grad = gradients(needs_x, False, with_bias)
        return x_grad, None, bias_grad, None


def _aten_arguments(how: tuple) -> tuple:
    stride, padding, dilation, groups = how
    return stride, padding, dilation, False, [0] * len(stride), groups
