"""Finds the likely cause of a difference that `verify` has found in a user's own model.

Before anything is compared, one process calls each part of the model (embedding, blocks, head and
loss) again with the same samples, and with each sample alone (`findings_of_one_process`). After a
difference, the layout and one process train again, and the outputs of their parts and the gradients
of their parameters are compared rank by rank (`causes`): the first part whose output differs, or a
pattern in the gradients, leads to the cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel3d.blueprint.layout import Layout
from parallel3d.build import Trainer
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.fields import with_values
from parallel3d.data_parallel.keys import DataParallelConfig
from parallel3d.errors import UserError, said_in_full
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.own_loss import checked_count, checked_sum
from parallel3d.models.own_model import EMBEDDING, HEAD
from parallel3d.models.own_stage import OwnStage
from parallel3d.parameters.gather import gather_shards
from parallel3d.parameters.spec import ShardSpec
from parallel3d.run_config import Config, single_process

MakeTrainer = Callable[[Config, ProcessGroups], Trainer]
LOSS = "loss"  # the last part, after the head
SAME = 1e-9  # largest relative difference of values that are computed in fp64 in two ways
# The same of what a part or the loss returns, which may compute in fp32 inside (`x.float()`).
SAME_OUTPUT = 1e-5
ALIKE = 1e-6  # the same of gradients, which are found as differences of weights
LEAST = 1e-13  # changes of weights below this are rounding
SHOWN = 3  # most names and ranks in a sentence


class ModelFinding(NamedTuple):
    """A sentence about the model in one process.

    Attributes:
        fails: whether the training depends on the layout for this reason, or cannot begin.
        stops: whether the layout cannot be compared.
    """

    sentence: str
    fails: bool = True
    stops: bool = False


# One process


def findings_of_one_process(make: MakeTrainer, config: Config) -> list[ModelFinding]:
    """Calls each part of a user's own model several times in this process, and compares.

    `config` is that of the layout, in fp64.
    """
    batch = config.global_batch_size
    size = config.micro_batch_size
    if size == 1 and batch % 2 == 0:
        size = 2
    alone = {"micro_batch_size": size, "zero": 0, "ddp": DataParallelConfig()}
    try:
        trainer = make(single_process(with_values(config, alone)), ProcessGroups.single())
        (stage,) = trainer.stages
        assert isinstance(stage, OwnStage)
        inputs = trainer.train_batches.micro_batch(0, 0).inputs
        stage.train()
        return [*_Calls(stage, inputs, size).findings(crosses=config.pp * config.vpp > 1)]
    except UserError as error:
        return [ModelFinding(str(error), stops=True)]
    except Exception as error:
        return [ModelFinding(f"one process fails with {said_in_full(error)}", stops=True)]


class _Calls:
    """The parts of a model, called with a micro-batch of `size` samples and with each of them."""

    def __init__(self, stage: OwnStage, inputs: LayerInputs, size: int) -> None:
        self.stage, self.inputs = stage, inputs
        self.singles = []
        if size > 1 and inputs.documents is None:
            self.singles = [_one_sample(inputs, i) for i in range(size)]
        self.parts = dict(parts_of_stage(stage))

    def findings(self, crosses: bool) -> Iterator[ModelFinding]:
        """Yields what is found, up to the first part whose output is not a function of a sample.

        `crosses`: whether parts lie on several stages.
        """
        whole: Any = None
        alone: list[Any] = [None] * len(self.singles)
        for part, module in self.parts.items():
            given = _detached(whole)
            whole = self._call(part, given, self.inputs)
            if sentence := self._foreign(part, whole):
                yield ModelFinding(sentence, fails=crosses, stops=crosses)
            if sentence := self._of_no_part(part, whole):
                yield ModelFinding(sentence, stops=crosses)
            whole = _detached(whole)
            if not _close(whole, _detached(self._call(part, given, self.inputs))):
                yield ModelFinding(_drawing(part, module))
                return
            alone = [
                _detached(self._call(part, x, one))
                for x, one in zip(alone, self.singles, strict=True)
            ]
            if alone and (why := _depends(whole, alone)):
                yield ModelFinding(_mixing(part, module, why, len(alone)))
                return
        yield from self._loss(whole, alone, crosses)

    def _call(self, part: str, x: Any, inputs: LayerInputs) -> Any:
        return self.stage.run_part(part, self.parts[part], inputs, x=x)

    def _foreign(self, part: str, out: Any) -> str | None:
        """Returns a sentence if a part computes with a parameter of another part, else None.

        The loss may compute with those of the head, with which it is on one rank.
        """
        used = parameters_behind(tensors_in(out))
        own = HEAD if part == LOSS else part
        for name, parameter in self.stage.named_parameters():
            if parameter in used and not name.startswith(f"{own}."):
                owner = next(other for other in self.parts if name.startswith(f"{other}."))
                return (
                    f"{_said(part)} computes with {name}, a parameter of {owner}, held by a "
                    "closure or an attribute: with pp above 1 the two may lie on different ranks; "
                    f"give {own} a module of its own"
                )
        return None

    def _of_no_part(self, part: str, out: Any) -> str | None:
        """Returns a sentence if a part computes with a trained tensor that no part holds."""
        strange = parameters_behind(tensors_in(out)) - set(self.stage.parameters())
        if not strange:
            return None
        shapes = _listed(sorted({str(tuple(tensor.shape)) for tensor in strange}))
        return (
            f"{_said(part)} computes with a tensor of shape {shapes} that requires a gradient but "
            "belongs to no part, as one that the model's object holds: it is neither trained nor "
            "saved, and ranks without the part that made it do not have it; make it a parameter "
            f"of {HEAD if part == LOSS else part}"
        )

    def _loss(self, whole: Any, alone: Sequence[Any], crosses: bool) -> Iterator[ModelFinding]:
        """Yields what is found about the loss: above all, if it is not the sum of those of each."""
        loss = self.stage.run_loss(whole, self.inputs)
        if sentence := self._foreign(LOSS, loss.sum):
            yield ModelFinding(sentence, fails=crosses, stops=crosses)
        if sentence := self._of_no_part(LOSS, loss.sum):
            yield ModelFinding(sentence, stops=crosses)
        total, count = _numbers(loss)
        again = _numbers(self.stage.run_loss(whole, self.inputs))
        if not (_near(total, again[0]) and _near(count, again[1])):
            yield ModelFinding(
                "the loss returns other values when it is called twice with the same outputs and "
                "samples: it draws random numbers, or keeps something of the call before, which "
                "differs between layouts; compute them from inputs.samples and inputs.batch"
            )
            return
        if not alone:
            return
        of_each = zip(alone, self.singles, strict=True)
        each = [_numbers(self.stage.run_loss(x, one)) for x, one in of_each]
        totals, counts = (math.fsum(numbers) for numbers in zip(*each, strict=True))
        if _near(total, totals) and _near(count, counts):
            return
        means_agree = count > 0 < counts and _near(total / count, totals / counts)
        size = len(alone)
        yield ModelFinding(
            f"the loss is no sum over samples: for {size} samples together it returns the sum "
            f"{total:.6g} of {count:g} items, and for each of them alone {totals:.6g} of "
            f"{counts:g} in all. It averages over a micro-batch; return p3d.Loss with the sum over "
            "all items, as with reduction='sum', and their number"
            + (
                ", because the mean is only right while all micro-batches have as many items"
                if means_agree
                else ", as the gradients depend on micro_batch_size otherwise"
            ),
            fails=not means_agree,
        )


def _said(part: str) -> str:
    return "the loss" if part == LOSS else part


def _numbers(loss: Any) -> tuple[float, float]:
    """Returns the sum and the count of a loss."""
    total = checked_sum(loss).detach()
    return float(total), float(checked_count(loss.count, total))


def parts_of_stage(stage: OwnStage) -> Iterator[tuple[str, nn.Module]]:
    """Yields the names and modules of the parts that a stage holds, in their order."""
    if stage.embedding is not None:
        yield EMBEDDING, stage.embedding
    for number, block in stage.layers.items():
        yield f"layers.{number}", block
    if stage.head is not None:
        yield HEAD, stage.head


def _one_sample(inputs: LayerInputs, i: int) -> LayerInputs:
    samples = None if inputs.samples is None else inputs.samples[i : i + 1]
    batch = {name: field[i : i + 1] for name, field in inputs.batch.items()}
    return replace(inputs, samples=samples, batch=batch)


def _drawing(part: str, module: nn.Module) -> str:
    dropouts = [
        f"{part}.{name}" if name else part
        for name, inner in module.named_modules()
        if isinstance(inner, _DROPOUTS) and inner.p > 0
    ]
    why = "it draws random numbers, or keeps something of the call before"
    if dropouts:
        why = f"{_listed(dropouts)} draws from the generator of the process"
    return (
        f"{part} returns other values when it is called twice with the same samples: {why}, which "
        "differs between layouts; use "
        "parallel.dropout(name, p), which is called as module(x, inputs)"
    )


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _mixing(part: str, module: nn.Module, why: str, size: int) -> str:
    named = [
        f"{part}.{name}" if name else part
        for name, inner in module.named_modules()
        if isinstance(inner, _STATISTICS)
    ]
    by = f", as {_listed(named)} does," if named else ""
    return (
        f"{part} computes a sample's values from the other samples of its micro-batch{by} because "
        f"{why} for {size} samples together and for each alone: a statistic over the micro-batch "
        "depends on its size and on dp; compute it within a sample, as nn.LayerNorm and "
        "nn.GroupNorm do"
    )


def _depends(whole: Any, alone: Sequence[Any]) -> str | None:
    """Returns how a part's output for several samples differs from those for each, or None."""
    parts = [tensors_in(each) for each in alone]
    for i, together in enumerate(tensors_in(whole)):
        each = [part[i] for part in parts if i < len(part)]
        if len(each) < len(parts):
            return "it returns another number of tensors"
        if all(one.shape == together.shape for one in each):  # it has no dimension of samples
            if all(_close(one, together) for one in each) or _close(sum(each), together):
                continue
            return "its output, which has no dimension of samples, is not the same"
        joined = [*_joined(each, together.shape)]
        if not joined:
            shapes = {tuple(one.shape) for one in each}
            return f"its output has shape {tuple(together.shape)} and {_listed(map(str, shapes))}"
        if not any(_close(one, together) for one in joined):
            return "its output differs"
    return None


def _joined(each: Sequence[Tensor], shape: torch.Size) -> Iterator[Tensor]:
    """Yields the tensors of this shape in which samples follow each other along a dimension.

    The samples may have a dimension of their own, or share one with what is theirs: (b·s, h) as
    well as (s·b, h).
    """
    if len({one.shape for one in each}) > 1 or each[0].dim() != len(shape):
        return
    for dim in range(len(shape)):
        joined = torch.cat([*each], dim)
        if joined.shape == shape:
            yield joined
            yield torch.stack([*each], dim + 1).flatten(dim, dim + 1)


def parameters_behind(outputs: Iterable[Tensor]) -> set[Tensor]:
    """Returns the leaves of the autograd graphs of tensors."""
    waiting: list[Any] = [out.grad_fn for out in outputs if out.grad_fn is not None]
    seen, found = set(waiting), set()
    while waiting:
        node = waiting.pop()
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(leaf)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = [value[key] for key in value]
    if isinstance(value, tuple | list):
        return [tensor for inner in value for tensor in tensors_in(inner)]
    return []


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _detached(inner) for key, inner in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_detached, value))
    if isinstance(value, tuple | list):
        return type(value)(map(_detached, value))
    return value


def _close(a: Any, b: Any) -> bool:
    of_a, of_b = tensors_in(a), tensors_in(b)
    return len(of_a) == len(of_b) and all(
        x.shape == y.shape and _apart(x.double(), y.double()) <= SAME_OUTPUT
        for x, y in zip(of_a, of_b, strict=True)
    )


def _apart(a: Tensor, b: Tensor) -> float:
    """Returns the largest difference, relative to the largest magnitude; NaN counts as inf."""
    if not a.numel():
        return 0.0
    scale = torch.maximum(a.abs().max(), b.abs().max())
    return float(((a - b).abs().max() / scale.clamp(min=1e-300)).nan_to_num(math.inf))


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= SAME_OUTPUT * max(abs(a), abs(b), 1e-300)


# The layout


class Print(NamedTuple):
    """A fingerprint of a part's output for one sample; sums over the slices of tp add up.

    After a norm the total and the squares hardly depend on the values, but the magnitudes do.
    """

    numel: int
    total: float
    magnitudes: float
    squares: float

    def differs(self, other: Print, limit: float = SAME) -> bool:
        scale = math.sqrt(max(other.numel * other.squares, 1e-300))
        return not (
            self.numel == other.numel
            and abs(self.total - other.total) <= limit * scale
            and abs(self.magnitudes - other.magnitudes) <= limit * scale
            and abs(self.squares - other.squares) <= limit * max(other.squares, 1e-300)
        )

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Print:
        found = [each.detach().double() for each in tensors]
        return cls(
            sum(each.numel() for each in found),
            math.fsum(float(each.sum()) for each in found),
            math.fsum(float(each.abs().sum()) for each in found),
            math.fsum(float(each.square().sum()) for each in found),
        )


Prints = dict[tuple[str, int], Print]  # by part and sample


@contextmanager
def _printing(stages: Sequence[nn.Module]) -> Iterator[Prints]:
    """Collects the fingerprints of all parts in a block, those of the loss by its first sample."""
    found: Prints = {}

    def hook(part: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, given: Any, out: Any) -> None:
            inputs = next((each for each in given if isinstance(each, LayerInputs)), None)
            if inputs is None or inputs.samples is None:
                return
            numbers = inputs.samples.tolist()
            tensors = tensors_in(out)
            if part == LOSS:
                found[part, numbers[0]] = Print.of(tensors)
                return
            for i, number in enumerate(numbers):
                mine = [t[i] if t.dim() and len(t) == len(numbers) else t for t in tensors]
                found[part, number] = Print.of(mine)

        return record

    with ExitStack() as hooks:
        for stage in stages:
            assert isinstance(stage, OwnStage)
            parts = dict(parts_of_stage(stage)) | ({LOSS: stage} if stage.last else {})
            for part, module in parts.items():
                hooks.callback(module.register_forward_hook(hook(part)).remove)
        yield found


Shards = list[tuple[int, ShardSpec, Tensor]]


def causes(make: MakeTrainer, config: Config, groups: ProcessGroups, step: int) -> list[str]:
    """Trains again up to the step that differed, and returns sentences about the cause on rank 0.

    Step 0 is the comparison before the first. Other ranks get []. The call is collective.
    """
    name = config.precision.name
    if step and name != "fp64":  # which was compared before
        sentence = (
            f"all steps agree in fp64, so they differ in {name} by rounding, which something in "
            "the model enlarges, such as a long sum, or a softmax or a loss below fp32; compute it "
            "in fp32, or choose another precision.name"
        )
        return [sentence] if groups.rank == 0 else []
    trainer, layout = make(config, groups), groups.layout
    single = None
    if groups.rank == 0:
        single = make(single_process(config), ProcessGroups.single())
    for _ in range(step - 1):
        trainer.train_step()
        if single is not None:
            single.train_step()
    before = _shards(trainer, groups)
    full = {} if single is None else single.full_parameters()
    if step == 0:
        return [] if single is None else list(_of_initial_values(before, full, layout))
    with _printing(trainer.stages) as prints:
        trainer.train_step()
    rows = [[part, sample, *each] for (part, sample), each in prints.items()]
    everyones = all_gather_json(rows, groups.world.handle, groups.device)
    after = _shards(trainer, groups)
    if single is None:
        return []
    with _printing(single.stages) as expected:
        single.train_step()
    of_ranks = [{(row[0], row[1]): Print(*row[2:]) for row in of_rank} for of_rank in everyones]
    changes = [
        _Change(rank, spec, old - new)
        for (rank, spec, old), (_, _, new) in zip(before, after, strict=True)
    ]
    later = single.full_parameters()
    wanted = {name: values - later[name] for name, values in full.items()}
    unused = _unused(changes, wanted, layout)
    if found := _first_difference(of_ranks, expected, layout):
        return [found + unused]
    is_sgd = config.optim.name == "sgd"
    return [*_of_gradients(changes, wanted, layout, is_sgd)]


def _shards(trainer: Trainer, groups: ProcessGroups) -> Shards:
    trainer.data_parallel.wait_for_all_gathers()
    # Rank 0's own shards are views of its parameters.
    shards = gather_shards(trainer.parameters.values(), groups)
    return [(rank, spec, values.clone()) for rank, spec, values in shards]


def _of_initial_values(shards: Shards, full: Mapping[str, Tensor], layout: Layout) -> Iterator[str]:
    off: dict[str, list[int]] = {}
    for rank, spec, values in shards:
        if _apart(values, spec.of_full(full[spec.name])) > SAME:
            off.setdefault(spec.name, []).append(rank)
    if off:
        ranks = {rank for each in off.values() for rank in each}
        yield (
            f"the initial values of {_listed(off)} on {_ranks(ranks, layout)} are not those of one "
            "process: they depend on the rank, or on a generator of the model's own; draw them "
            "with torch's functions while the part is built, which are seeded alike on every rank"
        )


def _first_difference(of_ranks: Sequence[Prints], expected: Prints, layout: Layout) -> str | None:
    """Returns a sentence about the first part, in the order of a forward, whose output differs."""
    for part in dict.fromkeys(part for part, _ in expected):
        off: dict[int, int] = {}  # rank → a sample that differs
        disagree = False  # whether ranks of one tp group return different values
        rounds = True  # whether all differences are as small as rounding in fp32
        for (name, sample), wanted in expected.items():
            if name != part:
                continue
            holders = [rank for rank, prints in enumerate(of_ranks) if (part, sample) in prints]
            for rank in holders:
                mine = of_ranks[rank][part, sample]
                peers = [of_ranks[r][part, sample] for r in layout.group_of(rank, "tp")]
                if mine.numel * layout.tp == wanted.numel and layout.tp > 1:  # a slice
                    mine = Print(*map(sum, zip(*peers, strict=True)))
                elif any(mine.differs(peer) for peer in peers):
                    disagree = True
                if mine.differs(wanted):
                    off.setdefault(rank, sample)
                    rounds = rounds and not mine.differs(wanted, SAME_OUTPUT)
        if off and rounds:
            return (
                f"{_output_of(part)} is the first to differ from one process, by rounding alone: "
                "something in it computes in fp32 or less in a run in fp64, as x.float() "
                "does, or enlarges rounding; keep the dtype of x"
            )
        if off:
            return _of_outputs(part, off, disagree, layout)
    return None


def _output_of(part: str) -> str:
    return "the loss of a micro-batch" if part == LOSS else f"the output of {part}"


def _of_outputs(part: str, off: Mapping[int, int], disagree: bool, layout: Layout) -> str:
    what = _output_of(part)
    first = next(iter(off))
    place = (
        f"{what} is the first to differ from one process, on {_ranks(off, layout)} for sample "
        f"{off[first]}, with equal weights and inputs"
    )
    if layout.tp > 1 and not disagree and len(off) > 1:
        if part == LOSS:
            return (
                f"{place}: the loss computes with this rank's part of the outputs alone, or with "
                "the number of ranks"
            )
        return (
            f"{place}, and the ranks of tp agree: it computes over the features, heads or tokens "
            "of one rank as if they were all, as a norm, a softmax or a mean between two split "
            "layers does; compute it per head, or outside of the split layers"
        )
    return (
        f"{place}: something in it depends on the rank, such as random numbers of a generator of "
        "its own (use parallel.dropout), a module that only some ranks call, or the number of the "
        "rank; every rank must compute the same function"
    )


class _Change(NamedTuple):
    """How a step changed a shard on a rank; under SGD this is the gradient times a factor."""

    rank: int
    spec: ShardSpec
    values: Tensor

    def off(self, wanted: Mapping[str, Tensor]) -> bool:
        return not _alike(self.values, self.spec.of_full(wanted[self.spec.name]))


def _alike(a: Tensor, b: Tensor) -> bool:
    scale = max(float(a.abs().max()), float(b.abs().max())) if a.numel() else 0.0
    return scale < LEAST or float((a - b).abs().max()) <= ALIKE * scale + LEAST


def _unused(changes: Sequence[_Change], wanted: Mapping[str, Tensor], layout: Layout) -> str:
    """Returns the end of a sentence about parameters that no gradient reached on some ranks."""
    names: dict[str, set[int]] = {}
    moved = {change.spec.name for change in changes if float(change.values.abs().max()) > LEAST}
    for change in changes:
        name = change.spec.name
        still = float(change.values.abs().max()) <= LEAST
        there = float(change.spec.of_full(wanted[name]).abs().max()) > LEAST
        if still and (there or name in moved):
            names.setdefault(name, set()).add(change.rank)
    if not names:
        return ""
    ranks = set().union(*names.values())
    return f"; no gradient reaches {_listed(names)} on {_ranks(ranks, layout)}"


def _of_gradients(
    changes: Sequence[_Change], wanted: Mapping[str, Tensor], layout: Layout, is_sgd: bool
) -> Iterator[str]:
    """Yields sentences about gradients that differ although all outputs agree."""
    off = [change for change in changes if change.off(wanted)]
    if not off:
        return
    if not is_sgd:
        yield (
            "all outputs agree, and so do the steps of SGD: the optimizer's step depends on how "
            "parameters are divided over ranks, or it enlarges the rounding of a gradient that is "
            "zero otherwise, as with a small optim.eps"
        )
        return
    factors = [factor_of(change.values, change.spec, wanted) for change in changes]
    known = [factor for factor in factors if factor is not None]
    if len(off) == len(known) > 1 and all(abs(f - known[0]) <= ALIKE * known[0] for f in known):
        yield (
            f"all gradients are {known[0]:.6g} times those of one process, although all outputs "
            "agree: the loss or its count is multiplied by a number of ranks. Under tp every rank "
            "returns the same loss, which is not summed over tp, and under dp each rank counts its "
            "own items"
        )
        return
    lacking, twice, others = [], [], []
    for name in dict.fromkeys(change.spec.name for change in off):
        mine = [change for change in changes if change.spec.name == name]
        if layout.tp > 1 and all(_is_partial(change, mine, wanted, layout) for change in mine):
            lacking.append(name)
        elif all(_is_multiple(change, wanted, layout.tp) for change in mine):
            twice.append(name)
        else:
            others.append(name)
    if lacking:
        module = lacking[0].rpartition(".")[0]
        others_there = {n for n in wanted if n.startswith(f"{module}.")} - set(lacking)
        where = (lacking[0], "") if others_there else (module, " for its module")
        yield (
            f"each rank of tp has a part of the gradient of {_listed(lacking)}, and the sum of the "
            "parts is the gradient of one process: the parameter lies between two split layers and "
            "sees a part of the features, heads or tokens. Call "
            f"p3d.sum_gradients_over({where[0]}, parallel.tp){where[1]}"
        )
    if twice:
        module = twice[0].rpartition(".")[0]
        yield (
            f"the gradient of {_listed(twice)} is {layout.tp} times that of one process: each rank "
            "of tp has the whole gradient, which is summed over them once too often. "
            f"Leave out p3d.sum_gradients_over for {module}"
        )
    if others:
        ranks = {change.rank for change in off if change.spec.name in others}
        yield (
            f"the gradient of {_listed(others)} differs on {_ranks(ranks, layout)} although all "
            "outputs agree: a backward of the model's own (an autograd.Function, a hook, detach()) "
            "depends on the rank, or a split layer's input is not the whole input on every rank"
        )


def factor_of(values: Tensor, spec: ShardSpec, wanted: Mapping[str, Tensor]) -> float | None:
    """Returns k if a change is k times that of one process; None if it is no multiple, or zero."""
    full = spec.of_full(wanted[spec.name])
    norm = float(full.square().sum())
    if math.sqrt(norm) < LEAST:
        return None
    factor = float((values * full).sum()) / norm
    return factor if factor and _alike(values, factor * full) else None


def _is_partial(
    change: _Change, mine: Sequence[_Change], wanted: Mapping[str, Tensor], layout: Layout
) -> bool:
    """Returns whether the changes of a tp group add up to that of one process."""
    spec = change.spec
    ranks = layout.group_of(change.rank, "tp")
    parts = [each.values for each in mine if each.rank in ranks and each.spec.start == spec.start]
    return len(parts) > 1 and _alike(sum(parts[1:], parts[0]), spec.of_full(wanted[spec.name]))


def _is_multiple(change: _Change, wanted: Mapping[str, Tensor], tp: int) -> bool:
    factor = factor_of(change.values, change.spec, wanted)
    return tp > 1 and factor is not None and abs(factor - tp) <= ALIKE * tp


def _ranks(ranks: Iterable[int], layout: Layout) -> str:
    """Names ranks with their coordinates."""
    all_of = sorted(ranks)
    shown = [f"{rank} ({layout.named(rank)})" for rank in all_of[:SHOWN]]
    more = f" and {len(all_of) - SHOWN} more" if len(all_of) > SHOWN else ""
    return f"rank {', '.join(shown)}{more}"


def _listed(names: Iterable[str]) -> str:
    all_of = list(names)
    more = f" and {len(all_of) - SHOWN} more" if len(all_of) > SHOWN else ""
    return f"{', '.join(all_of[:SHOWN])}{more}"
