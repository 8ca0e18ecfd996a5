"""Provides pipeline parallelism for plain modules: `p3d.Pipeline([block1, head], groups.pp)`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.comm import collectives
from parallel3d.comm.exchange import all_gather_json, check_agreement, dtype_of
from parallel3d.comm.group import SINGLE, Group, GroupLike, group_of
from parallel3d.data_parallel.broadcast import broadcast_all
from parallel3d.data_parallel.gradient_mean import GradientMean
from parallel3d.device.accelerator import is_accelerator
from parallel3d.errors import UserError
from parallel3d.library.split_backward import SplitBackward
from parallel3d.parameters.state import state_of
from parallel3d.pipeline.executor import Executor, StageFailure
from parallel3d.pipeline.p2p import P2PRoute, SharedP2P, StageOutputs
from parallel3d.private_names import tables_of
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import LOOPED, V_SHAPED, Schedule, make

LossFn = Callable[..., Tensor]
Weight = Callable[..., Tensor | float]  # a function of a micro-batch's targets
CPU = torch.device("cpu")


class Pipeline(nn.Module):
    """Splits consecutive modules into pipeline stages on the ranks of a group.

    Every rank passes the whole list of modules and keeps its own stages. The names of parameters
    and the state dicts are those of `nn.Sequential(*modules)`. All methods are collective over the
    group. Stages send a tensor, or a tuple of tensors of one floating-point type, whose shapes are
    the same for all micro-batches of a step.

    Args:
        modules: the modules in order; each is called with the output of the previous one.
        group: `groups.pp`, a group of torch.distributed, or None for all ranks.
        loss_fn: function of the last module's output and the targets that returns a mean over the
            samples. If it is None, the last module returns the loss.
        weight: function of a micro-batch's targets that returns the number by which loss_fn divides
            its sum, for a loss_fn that ignores some targets: `lambda targets: (targets !=
            -100).sum()`. The loss is then the mean over all counted targets of the batch, and the
            gradients are those of the mean over all replicas. If it is None, it follows from
            loss_fn where that is torch's cross_entropy or nll_loss, as a function, module or
            partial; for another loss_fn, all micro-batches have the same weight.
        schedule: gpipe, 1f1b, interleaved, zb_h1, interleaved_zb, zbv or v_half.
        num_microbatches: number of micro-batches in a batch.
        vpp: number of stages of each rank; None stands for 2 if the schedule needs several, else 1.
        split: number of modules in each stage; None splits them evenly over the ranks.
        dp: `groups.dp`, whose pipelines are replicas. All replicas start with the weights of the
            first one, and gradients are averaged over them.
        shared_memory: whether CPU ranks of one host exchange tensors through shared memory.
        timeout_s: timeout of a message through shared memory, in seconds.

    Raises:
        UserError: on every rank, if arguments differ between ranks, if there are fewer modules than
            stages, if the schedule is unknown, or if stages of two ranks share a parameter.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        group: GroupLike = None,
        *,
        loss_fn: LossFn | None = None,
        weight: Weight | None = None,
        schedule: str = "1f1b",
        num_microbatches: int = 8,
        vpp: int | None = None,
        split: Sequence[int] | None = None,
        dp: GroupLike = SINGLE,
        shared_memory: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        self.gathers_state = True  # see `sharded_state_dict`
        self.group = group_of(group)
        self.dp = group_of(dp)
        modules = list(modules)
        self.device = next((p.device for m in modules for p in m.parameters()), CPU)
        if vpp is None:
            vpp = 2 if schedule in (*LOOPED, *V_SHAPED) else 1
        arguments = {
            "schedule": schedule,
            "num_microbatches": num_microbatches,
            "vpp": vpp,
            "split": split and list(split),
            "number of modules": len(modules),
            "weight": weight is not None,
        }
        check_agreement("Pipeline", arguments, self.group.handle, self.device)
        if not isinstance(num_microbatches, int) or num_microbatches < 1:
            raise UserError(
                f"Pipeline(num_microbatches={num_microbatches!r}) must be a whole number from 1 "
                "on; the nearest is num_microbatches=1"
            )
        self.schedule: Schedule = make(schedule, self.group.size, num_microbatches, vpp)
        self.programs = self.schedule.program(), self.schedule.forwards()
        self.loss_fn = loss_fn
        self.weight = weight or divisor_of(loss_fn)
        self.num_modules = len(modules)
        self.shared_memory = shared_memory
        self.timeout_s = timeout_s
        assignment = self.schedule.assignment
        parts = stages_of(modules, assignment, split)
        refuse_sharing(modules, parts, assignment)
        stages = []
        for chunk in range(assignment.chunks):
            number = assignment.stage(self.group.index, chunk)
            own = [modules[i] for i in parts[number]]
            last = number == assignment.stages - 1
            stages.append(ModuleStage(own, last, self.schedule.splits_backward))
            for i in parts[number]:
                self.add_module(str(i), modules[i])
        self.stages, route = stages, P2PRoute(self.group, assignment)
        self.executor = Executor(stages, route, [], self.device, keeps_failures=True)
        # Connections between stages; `numbers` maps each shape of the inputs to its connection.
        self.connections: list[Connection] = []
        self.numbers: dict[str, int] = {}
        if self.dp.size > 1 and next(fully_sharded(modules), None) is not None:
            raise UserError(
                "Pipeline(dp=…) must be without modules under fully_shard, which averages their "
                "gradients already; give no dp, or modules without fully_shard"
            )
        self._mark()
        if self.dp.size > 1:  # every replica starts with the first one's values
            values = [*(p.detach() for p in self.parameters()), *self.buffers()]
            broadcast_all(values, 0, self.dp)
        self.mean: GradientMean | None = None  # created in the first step with dp

    def _mark(self) -> None:
        """Stores the group in the parameters' state, where `clip_grad_norm_` finds it.

        This is repeated after each step, since copies and FSDP2 create new parameters.
        """
        for parameter in self.parameters():
            state_of(parameter).pp = self.group

    @property
    def is_first(self) -> bool:
        """Returns whether this rank has the first stage, which reads the inputs."""
        return self.schedule.assignment.place(0)[0] == self.group.index

    @property
    def is_last(self) -> bool:
        """Returns whether this rank has the last stage, which reads targets and returns outputs."""
        return self.schedule.assignment.places[-1][0] == self.group.index

    def step(self, inputs: Any = None, targets: Any = None) -> Tensor:
        """Runs forward and backward of a batch, and adds the gradients of its mean loss to `.grad`.

        Args:
            inputs: a batch (a tensor or a tuple of tensors), or a list of micro-batches. Only the
                rank of the first stage reads it.
            targets: the targets of loss_fn in the same form. Only the rank of the last stage reads
                them.

        Returns:
            The mean loss over the batch in float64, which is the same on all ranks of the group.

        Raises:
            UserError: on every rank, if num_microbatches does not divide the batch, or if shapes
                differ between micro-batches; without `weight` also, if loss_fn is not torch's own,
                if the numbers of ignored targets differ between micro-batches.
            RuntimeError: another rank or another replica failed, so the gradients are incomplete.
                The failed rank itself raises its modules' exception.
        """
        loss = self._run(inputs, targets, trains=True)
        if self.dp.size > 1:
            self._average_gradients()
        self._mark()
        return loss

    def _average_gradients(self) -> None:
        if self.mean is None:
            trained = [p for p in self.parameters() if p.requires_grad]
            if not trained:
                return
            self.mean = GradientMean(trained, self.dp)
        self.mean.average()

    def evaluate(self, inputs: Any = None, targets: Any = None) -> Tensor:
        """Returns the mean loss of a batch like `step`, but computes no gradients."""
        return self._run(inputs, targets)

    def forward(self, inputs: Any = None) -> Any:
        """Returns the last module's outputs for the whole batch, without gradients.

        Ranks that do not have the last stage return None.
        """
        outputs: dict[int, Any] = {}
        self._run(inputs, None, outputs=outputs)
        if not self.is_last:
            return None
        parts = [outputs[m] for m in sorted(outputs)]
        if isinstance(parts[0], Tensor):
            return torch.cat(parts)
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state dict of all modules on every rank; collective over the group.

        Raises UserError, on every rank, if an entry is not a tensor.
        """
        if not self.gathers_state or self.group.size == 1:
            return super().state_dict(*args, **kwargs)
        own = super().state_dict(*args, **kwargs)
        return in_order_of_modules(dict(of_all_stages(own, self.group, self.device)))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads the state of this rank's modules from a state dict of all modules."""
        _, own_modules = tables_of(self)
        others = {str(i) for i in range(self.num_modules)} - set(own_modules)
        own = {k: v for k, v in state_dict.items() if k.partition(".")[0] not in others}
        return super().load_state_dict(own, strict, assign)

    def _run(
        self,
        inputs: Any,
        targets: Any,
        trains: bool = False,
        outputs: dict[int, Any] | None = None,
    ) -> Tensor:
        """Runs a batch and returns its mean loss; fills `outputs` by micro-batch if it is given."""
        count, rank = self.schedule.microbatches, self.group.index
        wants_targets = self.loss_fn is not None and outputs is None
        xs, ys, shares = self._connect(inputs, targets, wants_targets, trains)

        def load(m: int) -> tuple[Any, ...]:
            end = partial(self._loss, ys[m], shares.of_microbatch[m])
            return xs[m], end if outputs is None else partial(self._keep, outputs, m)

        if trains:
            scale = torch.ones((), dtype=torch.float64, device=self.device) / count
            scale *= shares.of_replica
            total = self.executor.train_step(self.programs[0][rank], load, scale)
        else:
            total = self.executor.evaluate(self.programs[1][rank], load)
        losses = self._exchange(float(total), trains, last=True)
        return torch.tensor(losses, dtype=torch.float64).sum() / count

    def _loss(self, targets: tuple[Tensor, ...] | None, share: float, out: Any) -> Tensor:
        """Returns the loss of a micro-batch, multiplied by `share`."""
        if share == 0:  # a mean over no targets would be NaN
            outputs = out if isinstance(out, tuple | list) else (out,)
            return torch.stack([0 * output.sum() for output in outputs]).sum()
        loss = out if self.loss_fn is None else self.loss_fn(out, *(targets or ()))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"{tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"the pipeline's loss must be one number for each micro-batch, not {kind}; give a "
                "loss_fn that takes the mean"
            )
        return loss.reshape(()) if share == 1 else share * loss.reshape(())

    def _keep(self, outputs: dict[int, Any], microbatch: int, out: Any) -> Tensor:
        outputs[microbatch] = out
        return torch.zeros((), device=self.device)

    def _connect(
        self, inputs: Any, targets: Any, wants_targets: bool, trains: bool
    ) -> tuple[list[Any], list[Any], LossWeights]:
        """Cuts the batch into micro-batches, and connects the stages for its shapes.

        Returns the inputs and the targets of each micro-batch, and the shares. An error is raised
        on all ranks.
        """
        self.executor.failure = None
        count = self.schedule.microbatches
        xs: list[Any] = [None] * count
        ys: list[Any] = [None] * count
        number, shares, weights = -1, LossWeights([1.0] * count), [0.0] * count
        try:
            if self.is_first:
                xs = cut(inputs, count, "inputs")
                number = self.numbers.get(repr(shapes_of(xs[0])), -1)
            if self.is_last and wants_targets:
                ys = cut(targets, count, "targets")
                if self.weight is None:
                    refuse_uneven(ys, self.loss_fn, self.dp.size)
                else:
                    weights = weights_of(self.weight, ys)
            elif self.is_last and self.weight is not None and trains:
                raise UserError(
                    "Pipeline(weight=…) reads the targets of loss_fn, which must be given with it; "
                    "without loss_fn all micro-batches have the same weight"
                )
        except UserError as error:
            self.executor.failure = StageFailure("the batch", error)
        except Exception as error:  # the user's function raised the error
            self.executor.failure = StageFailure("Pipeline(weight=…)", error)
        if self.weight is not None and self.is_last and wants_targets:
            shares = self._shares(weights, trains)
        number = int(self._exchange(float(number), trains)[self.schedule.assignment.place(0)[0]])
        if number < 0:
            number = len(self.connections)
            sends = self._sends(xs[0], trains)
            self.connections.append((sends, self._channel(sends)))
            if self.is_first:
                self.numbers[repr(shapes_of(xs[0]))] = number
        self.executor.sends, self.executor.channel = self.connections[number]
        return xs, ys, shares

    def _shares(self, weights: list[float], trains: bool) -> LossWeights:
        """Returns the factors that make the loss a mean over all targets.

        Since gradients are later averaged over replicas with equal weights, the replica's factor
        corrects for its number of targets. In training, the call is collective over dp.
        """
        own = sum(weights)
        everyone = torch.tensor(own, dtype=torch.float64, device=self.device)
        if trains and self.dp.size > 1:  # also after a failure, as the other replicas wait here
            everyone = collectives.all_reduce(everyone, self.dp)
        total = float(everyone)
        if not total and self.executor.failure is None:
            error = UserError(
                "Pipeline(weight=…) is 0 for all micro-batches, but must be above 0 for one of "
                "them: nothing of this batch would be learned; leave the batch out"
            )
            self.executor.failure = StageFailure("the batch", error)
        if not own or not total:
            return LossWeights([0.0] * len(weights), 0.0)
        return LossWeights([w * len(weights) / own for w in weights], own * self.dp.size / total)

    def _sends(self, inputs: tuple[Any, ...] | None, trains: bool) -> list[StageOutputs]:
        """Runs every stage but the last once to find the shapes that stages send.

        The call is collective over the group.
        """
        sends: list[StageOutputs] = []
        for number, (rank, chunk) in enumerate(self.schedule.assignment.places[:-1]):
            facts = None
            if rank == self.group.index:
                values = sends[-1].zeros(self.device) if number else inputs
                try:
                    with torch.no_grad(), unchanged(self, self.device):
                        made = StageOutputs.of(self.stages[chunk].run(values), number)
                    facts = made.shapes, str(made.dtype)
                except Exception as error:
                    where = f"stage {number} in a first look at its shapes"
                    self.executor.failure = StageFailure(where, error)
            facts = all_gather_json(facts, self.group.handle, self.device)[rank]
            if facts is None:
                self._exchange(0.0, trains)
            shapes, dtype = facts
            sends.append(StageOutputs(tuple(map(tuple, shapes)), dtype_of(dtype)))
        return sends

    def _channel(self, sends: Sequence[StageOutputs]) -> SharedP2P | None:
        if not sends or not self.shared_memory:
            return None
        messages = [sent.empty_message(self.device) for sent in sends]
        largest = max(messages, key=lambda message: message.nbytes)
        return SharedP2P.of_programs(self.programs, self.executor.route, largest, self.timeout_s)

    def _exchange(self, value: float, trains: bool, last: bool = False) -> list[float]:
        """Returns the `value` of every rank. Raises on all ranks and replicas if a rank failed."""
        failure = self.executor.failure
        mine = torch.tensor([[value, float(failure is not None)]], dtype=torch.float64)
        values, flags = collectives.all_gather(mine.to(self.device), self.group).t().tolist()
        failed, others = any(flags), False
        if trains and (failed or last) and self.dp.size > 1:
            flag = torch.tensor([float(failed)], device=self.device)
            others = bool(collectives.all_reduce(flag, self.dp))
        if failed:
            self._raise(failure)
        if others:
            raise RuntimeError("another replica of the pipeline failed in this step")
        return values

    def _raise(self, failure: StageFailure | None) -> None:
        mine = failure and [str(failure), isinstance(failure.error, UserError)]
        everyone = all_gather_json(mine, self.group.handle, self.device)
        if failure is not None:
            raise failure.error
        index, (sentence, of_user) = next((i, s) for i, s in enumerate(everyone) if s)
        if of_user:
            raise UserError(sentence)
        raise RuntimeError(f"rank {self.group.ranks[index]}: {sentence}")


Connection = tuple[list[StageOutputs], SharedP2P | None]


@dataclass(frozen=True)
class LossWeights:
    """Weights of the losses; all are 1 if all micro-batches count equally.

    Attributes:
        of_microbatch: weight of each micro-batch in its replica's batch.
        of_replica: weight of the replica's batch in the gradients.
    """

    of_microbatch: list[float]
    of_replica: float = 1.0


def fully_sharded(modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Yields the parameters of the modules to which PyTorch's `fully_shard` was applied."""
    # Importing FSDP2 takes a second; if it is in use, it has been imported already.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for part in (part for module in modules for part in module.modules()):
        if fsdp is not None and isinstance(part, fsdp.FSDPModule):
            yield from part.parameters()


@dataclass
class ModuleStage:
    """Stage of consecutive modules; with `splits`, the schedule defers their weight gradients."""

    modules: Sequence[nn.Module]
    last: bool
    splits: bool

    def parameters(self) -> list[nn.Parameter]:
        """Returns the parameters whose weight gradients may be deferred."""
        # FSDP2 reduces gradients in the backward, so a gradient that is added later would be lost.
        sharded = set(fully_sharded(self.modules))
        own = (p for module in self.modules for p in module.parameters())
        return [p for p in own if p not in sharded]

    def run(self, values: Any) -> Any:
        for module in self.modules:
            values = module(*values) if isinstance(values, tuple | list) else module(values)
        return values

    def __call__(
        self,
        x: Any,
        inputs: tuple[Any, ...] | None,
        end: Callable[[Any], Tensor],
        scale: Tensor | None,
    ) -> Any:
        """Runs the stage.

        Args:
            x: the tensors from the preceding stage; None on the first stage.
            inputs: the inputs of a micro-batch, for the first stage.
            end: function of the last stage's outputs that returns the loss.
            scale: factor of the loss; not used here.
        """
        with SplitBackward() if self.splits and torch.is_grad_enabled() else nullcontext():
            out = self.run(inputs if x is None else x)
            return end(out) if self.last else out


def stages_of(
    modules: Sequence[nn.Module], assignment: StageAssignment, split: Sequence[int] | None
) -> list[range]:
    count, stages = len(modules), assignment.stages
    for i, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise UserError(f"module {i} of the pipeline must be an nn.Module, not {module!r}")
    if count < stages:
        raise UserError(
            f"the pipeline's {count} modules must be at least as many as its {stages} stages "
            f"({assignment.ranks} ranks × {assignment.chunks}): cut them finer, or use fewer ranks"
        )
    fair = even_split(count, assignment)
    counts = fair if split is None else list(split)
    if len(counts) != stages or min(counts) < 1 or sum(counts) != count:
        raise UserError(
            f"Pipeline(split={counts}) must give each of {stages} stages at least one of the "
            f"{count} modules and leave none out; the nearest is split={fair}"
        )
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    return [range(end - size, end) for size, end in zip(counts, ends, strict=True)]


def even_split(count: int, assignment: StageAssignment) -> list[int]:
    """Splits `count` modules evenly into stages; the remainder goes to those near the middle."""
    stages, middle = range(assignment.stages), assignment.stages - 1
    ranks = [rank for rank, _ in assignment.places]
    counts, held = [1] * assignment.stages, [assignment.chunks] * assignment.ranks
    for given in range(assignment.stages, count):
        stage = min(
            (s for s in stages if held[ranks[s]] <= given // assignment.ranks),
            key=lambda s: (counts[s], abs(2 * s - middle), s),
        )
        counts[stage] += 1
        held[ranks[stage]] += 1
    return counts


def refuse_sharing(
    modules: Sequence[nn.Module], stages: Sequence[range], assignment: StageAssignment
) -> None:
    """Raises UserError if two ranks share a parameter, as their copies would drift apart."""
    seen: dict[nn.Parameter, tuple[int, str]] = {}
    for stage, members in enumerate(stages):
        rank = assignment.places[stage][0]
        for i in members:
            for name, parameter in modules[i].named_parameters():
                first, known = seen.setdefault(parameter, (rank, f"{i}.{name}"))
                if first != rank:
                    raise UserError(
                        f"{i}.{name} is the same parameter as {known}, but lies on another rank "
                        "of the pipeline: a shared parameter must lie on one"
                    )


@contextmanager
def unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restores the module's buffers and the random number generators on exit."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    on_device = [device] if is_accelerator(device) else []
    with torch.random.fork_rng(on_device, device_type=device.type if on_device else "cuda"):
        try:
            yield
        finally:
            for buffer, before in kept:
                buffer.copy_(before)


def of_all_stages(
    own: Mapping[str, Any], group: Group, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in the state dicts of all stages, one by one, on every rank.

    The call is collective over `group`. Tensors of this rank are those in `own`; tensors of other
    ranks are on `device`. Raises UserError, on every rank, if an entry is not a tensor.
    """
    facts = [
        [name, list(v.shape), str(v.dtype)]
        if isinstance(v, Tensor)
        else [name, None, type(v).__name__]
        for name, v in own.items()
    ]
    everyone = all_gather_json(facts, group.handle, device)
    for name, shape, kind in chain.from_iterable(everyone):
        if shape is None:
            raise UserError(
                f"the state {name} of a Pipeline is a {kind}, but must be a tensor to be sent to "
                "other ranks; keep it in a buffer instead"
            )
    for index, theirs in enumerate(everyone):
        for name, shape, kind in theirs:
            if index == group.index:
                value = own[name]
                sent = value.detach().to(device).contiguous()
            else:
                value = sent = torch.empty(shape, dtype=dtype_of(kind), device=device)
            if sent.numel():
                collectives.broadcast(sent.view(-1).view(torch.uint8), index, group)
            yield name, value


def in_order_of_modules(state: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(state.items(), key=lambda item: int(item[0].partition(".")[0])))


def cut(given: Any, count: int, what: str) -> list[tuple[Tensor, ...]]:
    """Returns `count` micro-batches of equal shapes.

    Args:
        given: a batch to be cut along its first dimension (a tensor, or a tuple of tensors of the
            same length), or a list of micro-batches.
        count: number of micro-batches.
        what: "inputs" or "targets", for messages.

    Raises:
        UserError: `count` does not divide the batch, or shapes differ between micro-batches.
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
                "micro-batch 0 has: the shapes of a pipeline are fixed"
            )
    return parts


def weights_of(weight: Weight, targets: Sequence[tuple[Tensor, ...]]) -> list[float]:
    """Returns the weight of each micro-batch. Raises UserError for an invalid weight."""
    made = [torch.as_tensor(weight(*part)) for part in targets]
    for given in made:
        if given.numel() != 1:
            raise UserError(
                f"Pipeline(weight=…) gave a tensor of shape {tuple(given.shape)}, but must give "
                "one number for a micro-batch's targets; give (targets != -100).sum()"
            )
    weights = torch.stack([given.detach().reshape(()).double() for given in made]).tolist()
    for number in weights:
        if not 0 <= number < float("inf"):
            raise UserError(
                f"Pipeline(weight=…) gave {number}, but must give a number from 0 on: the number "
                "of the micro-batch's targets over which loss_fn takes the mean"
            )
    return weights


IGNORED = -100  # `ignore_index` of torch's losses
MEANS_BY_CLASS = (nn.CrossEntropyLoss, nn.NLLLoss)


def options_of(loss_fn: LossFn | None) -> tuple[Any, dict[str, Any]]:
    """Returns the function or module inside partials, and its known options by name."""
    named: dict[str, Any] = {}
    while isinstance(loss_fn, partial):
        named, loss_fn = loss_fn.keywords | named, loss_fn.func
    if isinstance(loss_fn, MEANS_BY_CLASS):
        of_module = {
            name: getattr(loss_fn, name) for name in ("ignore_index", "reduction", "weight")
        }
        named = of_module | named
    return loss_fn, named


def divisor_of(loss_fn: LossFn | None) -> Weight | None:
    """Returns the function that gives the number by which torch's own mean of a loss divides.

    Returns None for any other loss_fn, which may divide by something else.
    """
    function, named = options_of(loss_fn)
    by_class = isinstance(function, MEANS_BY_CLASS) or function in (F.cross_entropy, F.nll_loss)
    if not by_class or named.get("reduction", "mean") != "mean":
        return None

    def divisor(targets: Tensor) -> Tensor:
        if not is_whole(targets.dtype):  # probabilities of the classes, none of which is ignored
            return torch.ones(())
        # A module's class weights may have moved to another device since the pipeline was made.
        _, named = options_of(loss_fn)
        kept, of_class = targets != named.get("ignore_index", IGNORED), named.get("weight")
        if of_class is None:
            return kept.sum()
        return (of_class[targets.masked_fill(~kept, 0)] * kept).sum()

    return divisor


def refuse_uneven(
    targets: Sequence[tuple[Tensor, ...]], loss_fn: LossFn | None, replicas: int
) -> None:
    """Raises UserError if micro-batches have different numbers of targets that loss_fn ignores.

    With several replicas, any ignored target is refused, since a replica does not know the targets
    of the others.
    """
    _, named = options_of(loss_fn)
    ignored = named.get("ignore_index", IGNORED)
    if named.get("reduction", "mean") != "mean":
        return
    whole = [[t for t in part if isinstance(t, Tensor) and is_whole(t.dtype)] for part in targets]
    if not whole[0]:
        return
    # One transfer from the device serves all micro-batches.
    left_out = torch.stack([sum((t == ignored).sum() for t in part) for part in whole]).tolist()
    if any(left_out) and (replicas > 1 or len(set(left_out)) > 1):
        counts = ", ".join(map(str, left_out[:8]))
        if len(left_out) > 8:
            counts += ", …"
        raise UserError(
            f"the micro-batches have {counts} targets of {ignored}, which the loss leaves out, so "
            "their losses may be means over different numbers of targets, and the mean of these "
            "losses is not the batch's mean; give "
            f"Pipeline(weight=lambda targets: (targets != {ignored}).sum()), or "
            "weight=lambda *targets: 1 where loss_fn divides by the same number each time"
        )


def is_whole(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def shapes_of(values: Sequence[Any]) -> list[list]:
    """Returns the shape and dtype of each tensor, and the type of other values."""
    return [
        [list(v.shape), str(v.dtype)] if isinstance(v, Tensor) else [[], type(v).__name__]
        for v in values
    ]
