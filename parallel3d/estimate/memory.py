"""Computes a safe upper bound on a rank's peak memory from the configuration alone.

States and the activations of micro-batches in flight are counted exactly. Temporary tensors are not
listed one by one: their peak is derived from the widths of a layer's operations, and a margin is
added. `benchmarks/planner/plan_dryrun.py` compares the bound with the memory that
`parallel3d dryrun` measures. `plan` applies the bound to its best rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from parallel3d.blueprint.blueprint import Blueprint, StageBlueprint
from parallel3d.blueprint.buckets import PIECE
from parallel3d.blueprint.in_flight import states_of
from parallel3d.blueprint.ops import LayerOps, Op, kept, most_load, widths
from parallel3d.blueprint.rank import PipelineRank, flat_shards
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.estimate.attention_traffic import halo_tokens
from parallel3d.estimate.search import (
    NEARLY_FULL,
    SAME,
    TIGHT,
    LayoutChoice,
    PricedLayouts,
    configure,
    planned,
    ranked,
)
from parallel3d.models.declared import LayerKind
from parallel3d.run_config import Config
from parallel3d.schedules.actions import Kind
from parallel3d.schedules.messages import OFFLOADED_BYTES, SLAB_BYTES

FP32 = 4  # bytes per element of statistics, and of gradients during their reduction
MARGIN = 0.05  # share of activations and temporary tensors that is added for uncounted tensors
ENDS = "gradients of embedding and head"


class RankMemory(NamedTuple):
    """Bytes that one rank uses at its peak, by purpose.

    Attributes:
        parameters, gradients: parameters, and gradients that exist between actions of a step.
        masters: master weights.
        optimizer: states of the optimizer, including the average of the weights.
        activations: tensors that micro-batches in flight keep for their backward.
        temporary: other tensors at the peak, including the parameters that FSDP2 has gathered.
        margin: allowance for tensors that are not counted.
        phase: name of the phase of the step in which the peak occurs.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    masters: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    temporary: float = 0.0
    margin: float = 0.0
    phase: str = ""

    @property
    def total(self) -> float:
        return sum(self[:-1])


NEAR = 0.9  # a rank may be the fullest if its bound exceeds this share of the largest bound


def peak_stage(blueprint: Blueprint) -> tuple[int, RankMemory]:
    """Returns (index along pp, peak memory) of the rank that needs the most memory."""
    return max(_fullest(blueprint), key=lambda pair: pair[1].total)


def nearly_fullest(config: Config) -> list[int]:
    """Returns the indices along pp of the ranks that may need the most memory, fullest first."""
    found = sorted(_fullest(planned(config)), key=lambda pair: -pair[1].total)
    return [index for index, peak in found if peak.total >= NEAR * found[0][1].total]


def _fullest(blueprint: Blueprint) -> list[tuple[int, RankMemory]]:
    """Returns (index along pp, peak memory) of the ranks that may be the fullest.

    Ranks between the ends differ only in their layers and in their micro-batches in flight, which
    are more numerous on earlier ranks. The candidates are therefore the first two ranks, the middle
    one, the last one, and the first one with the most layers.
    """
    pp = blueprint.layout.pp
    counts = [0] * pp
    for (index, _), layers in zip(
        blueprint.assignment.places, blueprint.layers_per_stage, strict=True
    ):
        counts[index] += layers
    most = counts.index(max(counts))
    seen = sorted({0, min(1, pp - 1), pp // 2, pp - 1, most})
    return [*zip(seen, peak_memories(blueprint, seen), strict=True)]


def memories(
    config: Config,
    choices: Sequence[LayoutChoice],
    reserve: float,
    tell: Callable[[str], None] | None = None,
    load: float = 1.0,
) -> NDArray[np.float64]:
    """Returns the bytes of each layout's fullest GPU, including `reserve`.

    `reserve`: bytes that tensors cannot use. `tell` is called with messages about the progress.
    `load`: see `memory_of`.
    """
    totals = []
    for done, choice in enumerate(choices):
        if tell is not None:
            tell(f"layout {done} of {len(choices)}")
        totals.append(memory_of(config, choice, load))
    return np.array(totals) + reserve


def memory_of(config: Config, choice: LayoutChoice, load: float = 1.0) -> float:
    """Returns the bytes of a layout's fullest GPU.

    `load`: rows of that GPU's experts in each layer, relative to the mean over all ranks.
    """
    return peak_stage(loaded(planned(configure(config, choice)), load))[1].total


def bounded(
    config: Config,
    priced: PricedLayouts,
    rows: int,
    most: float,
    reserve: float,
    load: float = 1.0,
    tell: Callable[[str], None] | None = None,
) -> PricedLayouts:
    """Returns the priced layouts, with the memory of all layouts that can be among the best rows.

    Memory is computed from the fastest layout on, until no further layout can be among the best
    `rows` rows of layouts that fit into `most` bytes. Memory that is already known is kept.

    Args:
        reserve: bytes that tensors cannot use.
        load: see `memory_of`.
        tell: called with messages about the progress.
    """
    memory, seconds = np.array(priced.memory), priced.seconds
    found: dict[tuple[int, ...], float] = {}
    for done, i in enumerate(np.argsort(seconds, kind="stable").tolist()):
        last = sorted(found.values())[rows - 1 : rows]
        if not math.isfinite(seconds[i]) or (last and seconds[i] > SAME * last[0]):
            break
        choice = priced.choices[i]
        if math.isnan(memory[i]):
            if tell is not None:
                tell(f"layout {done} of {len(priced.choices)}")
            memory[i] = memory_of(config, choice, load) + reserve
        if memory[i] <= most:
            risked = float(seconds[i]) * (TIGHT if memory[i] > NEARLY_FULL * most else 1.0)
            found[choice.row] = min(risked, found.get(choice.row, math.inf))
    return ranked(priced.choices, priced.time, memory, most)


def loaded(blueprint: Blueprint, load: float) -> Blueprint:
    """Returns the blueprint of a rank whose experts get `load` times the mean number of rows."""
    return blueprint if load == blueprint.load else replace(blueprint, load=load)


def load_that_fits(config: Config, choice: LayoutChoice, room: float) -> float:
    """Returns the largest load of a rank's experts with which a layout still fits into memory.

    `room`: bytes that the layout may need beyond its memory with a load of 1. The result is
    infinity if the layout fits even when one rank of each expert-parallel group has all rows.
    """
    most, least = most_load(config.model, choice.ep), 1.0
    even = memory_of(config, choice)
    if memory_of(config, choice, most) - even <= room:
        return math.inf
    while most - least > 0.005:
        middle = (least + most) / 2
        fits = memory_of(config, choice, middle) - even <= room
        least, most = (middle, most) if fits else (least, middle)
    return least


def peak_memory(config: Config, index: int, load: float = 1.0) -> RankMemory:
    """Returns an upper bound on the peak memory of rank `index` along pp.

    `config` must be checked and have dp and a named schedule. `load`: see `memory_of`. Dropout of
    attention probabilities and document masks are not modelled. Raises UserError if a stage would
    be empty.
    """
    return peak_memories(loaded(planned(config), load), [index])[0]


def peak_memories(blueprint: Blueprint, indices: Sequence[int]) -> list[RankMemory]:
    """Returns the `peak_memory` of several ranks of a pipeline."""
    ranks = [PipelineRank(blueprint, index) for index in indices]
    layers = layers_of(ranks[0])
    return [_peak(rank, layers) for rank in ranks]


def _peak(rank: PipelineRank, layers: Layers) -> RankMemory:
    found = max(_Moments(rank, layers).all(), key=lambda peak: peak.total)
    return _state(rank)._replace(
        activations=found.activations,
        temporary=found.temporary,
        margin=MARGIN * found.total,
        phase=found.phase,
    )


def _state(rank: PipelineRank) -> RankMemory:
    """Returns the memory of the states that exist throughout a step."""
    blueprint = rank.blueprint
    item = rank.item
    wide = rank.grad_item
    of_experts = sum(rank.numels[of.kind][0] * of.layers for of in rank.kinds)
    others = sum(rank.numels[of.kind][1] * of.layers for of in rank.kinds)
    zero, optim = blueprint.data.zero, blueprint.optim
    frozen = rank.frozen_numel()
    trained = of_experts - frozen[0], others + rank.end_numel - frozen[1]

    def divided(each: int, divides: bool, numel: tuple[int, int] = trained) -> float:
        """Returns the bytes of a state with `each` bytes per element.

        `divides`: whether data-parallel ranks divide the state among themselves.
        """
        data, experts = (rank.replicas, rank.layout.edp) if divides else (1, 1)
        return each * numel[1] / data + each * numel[0] / experts

    moments = 1 if optim.name == "sgd" else 2
    moment = 2 if optim.state == "bf16" else wide
    average = wide * (optim.ema_decay is not None)
    spread = rank.fully_sharded
    return RankMemory(
        parameters=divided(item, zero == 3 and spread, frozen)
        + (0.0 if spread else divided(item, False)),
        gradients=divided(wide, spread),
        masters=0.0 if item >= FP32 and not spread else divided(wide, zero > 0),
        optimizer=divided(moments * moment + average, zero > 0),
    )


def bytes_kept(rank: PipelineRank, ops: Sequence[Op]) -> float:
    """Returns the bytes that these operations keep for the backward of one micro-batch."""
    elements, statistics = kept(ops)
    return rank.tokens * (rank.item * elements + FP32 * statistics)


def bytes_moved(rank: PipelineRank, ops: Sequence[Op]) -> float:
    """Returns the part of `bytes_kept` in tensors that are large enough to be offloaded."""
    sizes = [rank.tokens * rank.item * op.keeps for op in ops]
    sizes += [rank.tokens * FP32 * op.statistics for op in ops]
    return sum(size for size in sizes if size >= OFFLOADED_BYTES)


class LayerBytes:
    """Bytes of a layer for one micro-batch, from the operations of its kind of layer.

    Attributes:
        kept: tensors that are kept from the forward to the backward.
        plain: `kept` of a layer that recomputes nothing.
        moved, moved_plain: parts of `kept` and `plain` that can be offloaded.
        forward: peak of the forward, without the tensors that it keeps.
        deferred: operands of weight gradients, which are kept from I, the backward of the inputs,
            to W, the backward of the weights (`parameters/gradients.py`).
    """

    def __init__(self, rank: PipelineRank, kind: LayerKind, ops: LayerOps) -> None:
        self.rank = rank
        self.ops = ops
        self.again = {op.name for op in ops.repeated}
        self.over_cp = context_bytes(rank, kind, "attention" in self.again)
        self.plain = bytes_kept(rank, ops.plain) + self.over_cp.kept
        self.kept = bytes_kept(rank, ops.kept)
        if "attention" not in self.again:
            self.kept += self.over_cp.kept
        self.moved = bytes_moved(rank, ops.kept)
        self.moved_plain = bytes_moved(rank, ops.plain)
        self.forward = max(self._forward())
        self.deferred = sum(self._operands(op) for op in ops.ops)

    @functools.cached_property
    def backward(self) -> float:
        """Returns the peak of the backward, without the tensors that the forward has kept."""
        return max(self._backward(defers=False))

    @functools.cached_property
    def before_mlp(self) -> float:
        """Returns the peak of the backward in the operations that precede the MLP or experts."""
        every = zip(reversed(self.ops.ops), self._backward(defers=False), strict=True)
        return max(more for op, more in every if not op.name.startswith("mlp"))

    @functools.cached_property
    def without_backward(self) -> float:
        """Returns the peak of the forward of a layer that has no backward.

        The code refers to four tensors of the residual stream until the end of the forward. The
        results inside attention or the MLP come on top.
        """
        most = made = 0.0
        part = ""
        for op in self.ops.plain:
            mine = "mlp" if op.name.startswith("mlp") else "attention"
            made, part = (made, part) if mine == part else (0.0, mine)
            result = self._row(op) * (op.rows * op.outputs + op.inside)
            most = max(most, made + 4 * self.rank.stream + result + self._gathered(op))
            made += self._row(op) * op.keeps
        return most

    @functools.cached_property
    def halved(self) -> float:
        """Returns the peak of I, the half of the backward that defers the weight gradients.

        Tensors that the forward has kept do not count.
        """
        return max(self._backward(defers=True))

    def _operands(self, op: Op) -> float:
        """Returns the bytes of a GEMM's saved input and its result's gradient; 0 for other ops."""
        row = self.rank.tokens * self.rank.item
        if op.kind != "gemm":
            return 0.0
        if op.operands is not None:
            return row * op.operands
        if op.split == "column":
            return self.rank.stream + row * op.outputs
        return row * op.inputs + self.rank.hidden

    def _gathered(self, op: Op) -> float:
        """Returns the bytes of the gathered input if sequence parallelism gathers it, else 0.

        A micro-batch of several sequences needs another copy, which puts them in order.
        """
        gathers = op.split == "column" and self.rank.sp
        return self.rank.hidden * (1 + self.rank.copies) if gathers else 0.0

    def _row(self, op: Op) -> float:
        """Returns the bytes of one element per token of the micro-batch or of the MLP's chunk."""
        row, mlp = self.rank.tokens * self.rank.item, op.name.startswith("mlp.")
        cut = mlp and op.name != "mlp.residual" and not self.rank.blueprint.recompute_layers
        return row / self.rank.mlp_chunks if cut else row

    def _part(self, op: Op) -> str:
        """Returns the name of the part of the layer that is recomputed together with `op`."""
        if "attention.out" in self.again:
            return "layer"
        return "mlp" if op.name.startswith("mlp") else "attention"

    def _forward(self) -> Iterator[float]:
        """Yields the bytes of the forward at each operation.

        They are the residual stream, the result, the gathered input, and earlier results of the
        same part of the layer that are not kept for the backward.
        """
        made, part = 0.0, ""
        for op in self.ops.ops:
            if self._part(op) != part:
                made, part = 0.0, self._part(op)
            more = self._row(op) * (op.rows * op.outputs + op.inside)
            yield made + self.rank.stream + more + self._gathered(op)
            if op.name in self.again:
                made += self._row(op) * op.keeps

    def _backward(self, defers: bool) -> Iterator[float]:
        """Yields the bytes of the backward at each operation, from the last operation to the first.

        They are the gradients of the operation's result, of its input and of the residual stream,
        and the recomputed results of its part of the layer, minus the tensors that the backward of
        later operations has freed. `defers`: whether operands of weight gradients are kept.
        """
        rank = self.rank
        ops = self.ops
        more = 0.0
        part = ""
        for op in reversed(ops.ops):
            if self._part(op) != part:
                part = self._part(op)
                more += bytes_kept(rank, [o for o in ops.repeated if self._part(o) == part])
                more += self.over_cp.again if part != "mlp" else 0.0
            summed = 0.0
            # With FSDP2, a weight's gradient needs extra memory; else the GEMM adds it in place.
            if op.kind == "gemm" and rank.fully_sharded:
                more += rank.item * op.numel
                if op.matrices > 1:  # gradients of experts are summed in fp32 and then rounded
                    summed = float(FP32 * op.numel)
            attends = self.over_cp.backward if op.kind == "attention" else 0.0
            results = self._row(op) * (op.rows * (op.inputs + op.outputs) + op.inside_backward)
            if op.kind != "attention":
                more -= bytes_kept(rank, [op])
            yield more + rank.stream + results + self._gathered(op) + attends + summed
            if op.kind == "attention":
                more -= bytes_kept(rank, [op])
            if defers:
                more += self._operands(op)


Layers: TypeAlias = Mapping[LayerKind, LayerBytes]


def layers_of(rank: PipelineRank) -> Layers:
    """Returns kind → bytes of a layer, for every kind of layer in the model."""
    return {kind: LayerBytes(rank, kind, ops) for kind, ops in rank.ops.items()}


class ContextBytes(NamedTuple):
    """Bytes that context parallelism adds to one layer's attention.

    Attributes:
        kept: tensors that are kept from the forward to the backward.
        again: tensors that a recomputed forward keeps for the backward.
        backward: results in fp32, and the keys and values of other ranks with their gradients.
    """

    kept: float = 0.0
    again: float = 0.0
    backward: float = 0.0


def context_bytes(rank: PipelineRank, kind: LayerKind, repeats: bool) -> ContextBytes:
    """Returns the bytes that context parallelism adds to a layer of this kind.

    `repeats`: whether the backward recomputes attention.
    """
    w = widths(rank.blueprint.model, rank.layout.tp)
    cp = rank.layout.cp
    style = rank.blueprint.layer.cp_style
    if cp == 1:
        return ContextBytes()
    row, wide = rank.tokens * rank.item, max(FP32 / rank.item, 1.0)
    keys, queries = 2 * row * w.keys, row * w.queries  # `keys` includes the values
    if style == "heads":
        kept = queries + (max(cp / w.key_heads, 1) - 1) * keys
        return ContextBytes(kept, kept if repeats else 0.0, 2 * queries + keys)
    if kind.window is not None and not rank.blueprint.model.dropout:
        # Keys and values with their halo exist twice, in sequence order and in the order of the
        # ranks, each with gradients.
        split, samples = SequenceSplit.of_run(rank.blueprint, 0), rank.blueprint.micro_batch_size
        _, received = halo_tokens(split, samples, kind.window)
        with_halo = keys * (1 + max(received) / rank.tokens)
        return ContextBytes(backward=2 * (1 + wide) * with_halo)
    if style == "ring":
        return ContextBytes(backward=wide * queries + 3 * (1 + wide) * keys)
    gathered, sets = cp * keys, 2 + 2 * wide + (0 if repeats else 2)
    backward = wide * queries + sets * gathered / rank.head_groups
    return ContextBytes(0.0, gathered if repeats else 0.0, backward)


class _BackwardPlace(NamedTuple):
    """Bytes of one layer of a stage in the order of the backward, and elements of its gradients.

    Attributes:
        backward: peak of its backward, without the tensors that the forward has kept.
        before_mlp: the same in the operations before its MLP or experts.
        kept: tensors that its forward has kept.
        alone: parameters that FSDP2 has gathered for it, with those of embedding and head.
        gathered: `alone`, with the parameters of the layer before it.
        beside_experts: these, while FSDP2 reduces the gradients of its experts.
        trained: number of trained elements.
        apart: number of elements of experts that FSDP2 shards as a unit of their own.
        reducing: gradients of these experts while they are reduced.
    """

    backward: float
    before_mlp: float
    kept: float
    alone: float
    gathered: float
    beside_experts: float
    trained: int
    apart: int
    reducing: float


class _Moments:
    """Finds the moments of a step at which a rank uses the most memory, without its states."""

    def __init__(self, rank: PipelineRank, layers: Layers) -> None:
        self.rank = rank
        self.layers = layers
        self.kept = [_kept(rank, stage.backward, layers) for stage in rank.stages]
        self.once = rank.blueprint.microbatches == 1
        # With FSDP2, the gradient of a table is in the compute dtype until it is reduced.
        model, cut = rank.blueprint.model, rank.layout.tp
        table = rank.item * (model.padded_vocab_size // cut * model.hidden_size)
        reduces = rank.fully_sharded and not (rank.last and rank.table.frozen)
        self.table = float(table) if reduces else 0.0
        # The head's forward also computes the gradients of its table, and of its input before and
        # after the norm.
        self.states = 2 * rank.stream
        self.head = self.states + self.table * rank.last

    def all(self) -> Iterator[RankMemory]:
        """Yields the peak of each kind of action of each stage, and that of the optimizer."""
        rank = self.rank
        held = [n + self.head * s.last for n, s in zip(self.kept, rank.stages, strict=True)]
        waits = [self._deferred(stage) for stage in rank.stages]
        message = rank.stream / (rank.layout.tp if rank.sends_slices else 1)
        left = np.array([self._left(stage) for stage in rank.stages])
        for (kind, chunk), seen in states_of(rank.blueprint, rank.index).items():
            if kind == Kind.W:  # W only frees memory, so it is never the peak
                continue
            stage, kept = rank.stages[chunk], self.kept[chunk]
            if kind != Kind.F and not stage.has_backward:
                continue
            live = seen.live @ held + seen.deferred @ waits + seen.in_flight * message
            most = float((live + seen.begun @ left).max())
            of_action = self._forward(stage, kept)
            if kind != Kind.F:
                of_action = {"backward": self._backward(stage, kind, kept)}
            if rank.blueprint.pipeline.overlaps:
                beside = self._beside(stage, kind, kept)
                of_action = {phase: more + beside for phase, more in of_action.items()}
            for phase, more in of_action.items():
                yield RankMemory(activations=most, temporary=more, phase=phase)
            if kind != Kind.F and rank.fully_sharded:
                # This backward has already added to the sums, or freed the last reduction's input.
                begun = (seen.begun | (np.arange(len(left)) == chunk)) & rank.accumulates
                behind = live + begun @ left
                last = behind[seen.final] if rank.accumulates else behind
                for phase, more in self._reduction(stage, kept).items():
                    most = float((behind if phase == ENDS else last).max(initial=-math.inf))
                    yield RankMemory(activations=most, temporary=more, phase=phase)
        if rank.blueprint.optim.state == "bf16":  # a piece has fp32 states and random bits
            widest = max((s.numel for s in flat_shards(rank)), default=0)
            yield RankMemory(temporary=3.0 * FP32 * min(PIECE, widest), phase="optimizer")

    def _away(self, stage: StageBlueprint) -> float:
        """Returns the bytes of offloaded layers that are on the device at the same time.

        They belong to the layer that computes, a neighbour, and a layer that the next action
        fetches.
        """
        near = min(2, stage.offloaded) + (not turns_around(self.rank, stage))
        return near * max(_moved(self.rank, stage.backward, self.layers), default=0.0)

    def _deferred(self, stage: StageBlueprint) -> float:
        """Returns the bytes that a stage keeps from I to W for its weight gradients."""
        kinds = self.rank.kinds_of(stage.backward)
        return sum(each.layers * self.layers[each.kind].deferred for each in kinds)

    def _most(self, stage: StageBlueprint, of: Callable[[LayerBytes], float]) -> float:
        """Returns the largest value of `of` over a stage's layers."""
        kinds = [each.kind for each in self.rank.kinds_of(stage) if each.layers]
        return max((of(self.layers[kind]) for kind in kinds), default=0.0)

    def _gathered(self, layers: int) -> float:
        """Returns the bytes of the parameters that FSDP2 has gathered.

        They belong to embedding and head, and to `layers` layers with zero=3 or to all layers with
        zero=2.
        """
        rank = self.rank
        if not rank.fully_sharded:
            return 0.0
        return self._gathered_with(max(self._adjacent(stage, layers) for stage in rank.stages))

    def _gathered_with(self, numel: int) -> float:
        """Returns the bytes that FSDP2 has gathered with these elements of layers.

        With zero=2, all layers are gathered instead.
        """
        rank = self.rank
        if rank.blueprint.data.zero == 2:
            numel = sum(sum(rank.numels[of.kind]) * of.layers for of in rank.kinds)
            numel -= sum(rank.frozen_numel())  # frozen parameters are whole on every rank
        return rank.item * float(numel + rank.end_numel)

    def _places(self, stage: StageBlueprint, kept: float) -> list[_BackwardPlace]:
        """Returns a stage's layers in the order of the backward.

        If layers are equal, the first two of them stand for all. With offloaded layers or frozen
        parameters, and without FSDP2, they have the largest values of any layer.
        """
        rank, count = self.rank, len(stage.layers)
        unequal = len(rank.kinds_of(stage)) > 1 and rank.fully_sharded
        if unequal and not stage.offloaded and not rank.blueprint.frozen:
            return self._unequal_places(stage)
        one = rank.most_trained(stage)
        apart = self._experts_apart(one)
        backward = self._most(stage.backward, lambda layer: layer.backward)
        before_mlp = self._most(stage.backward, lambda layer: layer.before_mlp)
        return [
            _BackwardPlace(
                backward,
                before_mlp,
                kept / count,
                self._gathered(1),
                self._gathered(min(2, left)),
                self._gathered(min(2, count - 1)),
                one,
                apart,
                float(FP32 * apart),
            )
            for left in range(count, max(count - 2, 0), -1)
        ]

    def _unequal_places(self, stage: StageBlueprint) -> list[_BackwardPlace]:
        rank = self.rank
        found = []
        for place, number in reversed([*enumerate(stage.layers)]):
            kind = LayerKind.of(rank.blueprint.model, number)
            layer, (experts, others), previous = self.layers[kind], rank.numels[kind], 0
            if place:
                previous = sum(rank.numels[LayerKind.of(rank.blueprint.model, number - 1)])
            found.append(
                _BackwardPlace(
                    layer.backward,
                    layer.before_mlp,
                    layer.kept if place < stage.recomputed else layer.plain,
                    self._gathered_with(experts + others),
                    self._gathered_with(experts + others + previous),
                    self._gathered_with(others + previous),
                    experts + others,
                    experts,
                    FP32 * experts * (1 + 1 / rank.layout.edp),  # with the rank's sums
                )
            )
        return found

    def _adjacent(self, stage: StageBlueprint, layers: int) -> int:
        """Returns the largest number of elements in `layers` adjacent layers of a stage."""
        rank, model = self.rank, self.rank.blueprint.model
        if len({sum(numels) for numels in rank.numels.values()}) == 1 or len(stage.layers) < layers:
            return rank.layer_numel(rank.kinds) * layers
        each = [sum(rank.numels[LayerKind.of(model, layer)]) for layer in stage.layers]
        return max(sum(each[i : i + layers]) for i in range(len(each)))

    def _ties(self, stage: StageBlueprint) -> bool:
        """Returns whether the stage uses a tied table twice, so that two gradients are summed."""
        return stage.first and stage.last and self.rank.table.tied

    def _forward(self, stage: StageBlueprint, kept: float) -> dict[str, float]:
        """Returns phase → bytes of a forward, for a layer and for the head with the loss."""
        rank = self.rank
        layer = self._most(stage, lambda layer: layer.forward) + self._away(stage)
        layer += self._gathered(min(2, rank.layer_count))
        found = {"forward": kept + layer if stage.backward.layers else 0.0}
        if stage.without_backward:  # these layers come before all layers that keep tensors
            without = self._most(stage, lambda layer: layer.without_backward)
            without += self._gathered(min(2, rank.layer_count))
            found["forward"] = max(found["forward"], without)
        if not stage.last:
            return found
        logits = rank.item * max(rank.loss_chunks) * rank.columns
        states = self.states + 2 * rank.hidden + (rank.hidden + rank.stream if rank.sp else 0)
        tables = 2 * self.table + max(logits, self.table)
        head = states + tables + self._gathered(1)
        return found | {"head and loss": kept + head}

    def _backward(self, stage: StageBlueprint, kind: Kind, kept: float) -> float:
        """Returns the bytes of a layer's backward.

        The peak of I is in the first layer, when the operands of all other layers' weight gradients
        are kept.
        """
        more = self._away(stage) + self._of_head(stage)
        if kind == Kind.I:
            more += self._gathered(min(2, len(stage.layers)))
            more += self._most(stage.backward, lambda layer: layer.halved)
            return more + max(0.0, self._others_deferred(stage, kept))
        freed, of_layers = 0.0, []
        for place in self._places(stage, kept):
            of_layers.append(place.gathered + place.backward - freed)
            freed += place.kept
        return more + max(of_layers)

    def _of_head(self, stage: StageBlueprint) -> float:
        """Returns the bytes that the head adds to the backward of a stage's layers.

        The backward begins with the gradient of the head's input, and that of its table is kept.
        """
        return self._cast(stage) - self.rank.stream if stage.last else 0.0

    def _cast(self, stage: StageBlueprint) -> float:
        """Returns the bytes of the head's gradient before it is reduced, unless its table is tied
        to the embedding of the same stage."""
        return self.table if stage.last and not self._ties(stage) else 0.0

    def _beside(self, stage: StageBlueprint, kind: Kind, kept: float) -> float:
        """Returns the bytes that the other pass adds while a forward and a backward take turns.

        For each layer whose tensors the backward frees, the forward keeps the tensors of one layer,
        so the passes stay within two layers of each other. If the backward also repeats exchanges
        of tokens, it waits more often and falls further behind.
        """
        if kind == Kind.F:
            most = self._most(stage.backward, lambda layer: layer.backward)
        else:
            most = self._most(stage, lambda layer: layer.forward)
        apart = 2 * self._most(stage.backward, lambda layer: layer.kept)
        again = sum(name in self._repeated(stage) for name in ("mlp.dispatch", "mlp.combine"))
        return most + apart + kept * again / (2 + again)

    def _repeated(self, stage: StageBlueprint) -> set[str]:
        """Returns the names of the operations that the backward of the stage's layers repeats."""
        kinds = [each.kind for each in self.rank.kinds_of(stage.backward)]
        return {name for kind in kinds for name in self.layers[kind].again}

    def _others_deferred(self, stage: StageBlueprint, kept: float) -> float:
        """Returns the bytes that all layers but the first defer, minus the bytes that they kept."""
        layers, kinds = len(stage.layers), self.rank.kinds_of(stage)
        if len(kinds) == 1:
            return (layers - 1) * (self._deferred(stage) / layers - kept / layers)
        first = self.layers[LayerKind.of(self.rank.blueprint.model, stage.layers[0])]
        kept_first = first.kept if stage.recomputed else first.plain
        return self._deferred(stage) - first.deferred - (kept - kept_first)

    # FSDP2 reduces a layer's gradients during the next layer's backward, or accumulates them.

    def _completed(self, stage: StageBlueprint) -> int:
        """Returns the elements of embedding and head whose gradients a stage's backward completes.

        The first stage's backward does not complete a tied table if the rank has the last stage
        too.
        """
        rank = self.rank
        adds = stage.first and not stage.last and rank.last and rank.table.tied
        numel = sum(p.numel for p in rank.ends_read(stage) if not p.frozen)
        return numel - (rank.table.numel if adds and not rank.table.frozen else 0)

    def _left(self, stage: StageBlueprint) -> float:
        """Returns the bytes that remain after a stage's backward with FSDP2.

        They are sums of gradients, or the input of the last reduction.
        """
        rank = self.rank
        if rank.accumulates:
            return float(FP32 * (rank.trained_numel(stage) + self._completed(stage)))
        if rank.fully_sharded and not self.once and len(rank.stages) == 1:
            return float(FP32 * (self._completed(stage) or rank.most_trained(stage)))
        return 0.0

    def _experts_apart(self, one: int) -> int:
        """Returns the elements of a layer's experts if FSDP2 shards them as a unit, else 0.

        The result is also 0 unless all layers of the rank have equal sizes and `one` trained
        elements each.
        """
        numels = [self.rank.numels[of.kind] for of in self.rank.kinds]
        alike = len(numels) == 1 and sum(numels[0]) == one and self.rank.layout.edp > 1
        return numels[0][0] if alike else 0

    def _reduction(self, stage: StageBlueprint, kept: float) -> dict[str, float]:
        """Returns phase → bytes after a layer's backward with FSDP2.

        The phases are the reduction of the layer's gradients, the next layer's backward during that
        reduction, and the reduction of the gradients of embedding and head.
        """
        rank, sums = self.rank, not self.rank.accumulates
        frees = rank.blueprint.data.zero == 2 and (self.once or rank.accumulates)
        cast, always = self._cast(stage), self._away(stage) + self._of_head(stage)
        places = self._places(stage, kept)
        after, during = [], []
        freed = 0.0  # bytes that the layers had kept and that their backwards have freed
        for place, following in zip_longest(places, places[1:]):
            if place.apart and sums and len(stage.layers) > 1:
                # FSDP2 reduces a layer's experts during the backward of the layer's attention, and
                # the rest of the layer during the backward of the next layer's experts.
                outside = always + place.beside_experts + place.before_mlp
                during.append(outside + place.reducing - frees * rank.item * place.trained - freed)
            freed += place.kept
            wide = sums * FP32 * place.trained
            if frees:  # zero=2 frees a layer's parameters after its last backward
                wide -= rank.item * place.trained
            alone = self._gathered_with(0) if following is None else following.alone
            after.append(
                rank.stream + cast + alone + wide + sums * rank.item * place.trained - freed
            )
            if following is not None and sums:
                beside = always + following.gathered + following.backward
                during.append(beside + wide - FP32 * place.apart - freed)
        found = {"reduction": max(after)}
        if during:
            found["backward during a reduction"] = max(during)
        table = self.table if stage.first else 0.0
        ends = rank.stream - kept - self.states * stage.last + cast + table
        ends += 0.0 if self.once else self._gathered(0)
        if sums:
            input, several = FP32 * self._completed(stage), len(rank.ends_read(stage)) > 1
            shared = stage.first or (rank.first and rank.table.tied)
            freed = self.table if several and shared else 0.0
            ends += input + max(0.0, input / rank.replicas - freed)
        found[ENDS] = ends
        return found


def _kept(rank: PipelineRank, stage: StageBlueprint, layers: Layers) -> float:
    kept = 0.0
    for kind, count, recomputed in rank.kinds_of(stage):
        layer = layers[kind]
        kept += recomputed * layer.kept + (count - recomputed) * layer.plain
    return kept - sum(_moved(rank, stage, layers)) - _unread(rank, stage)


# Operation → the GEMM that follows, whose weight gradient is the only reason to keep the result.
INPUTS = {"input_norm": "attention.qkv", "mlp_norm": "mlp.up", "mlp.activation": "mlp.down"}


def _unread(rank: PipelineRank, stage: StageBlueprint) -> float:
    """Returns the bytes that a stage's layers do not keep, as only frozen GEMMs would read them.

    Offloaded layers do not count. The layer with the most such bytes does not count either, because
    its backward may be running.
    """
    if not rank.blueprint.frozen:
        return 0.0
    found = []
    for place, layer in enumerate(stage.layers[stage.offloaded :], stage.offloaded):
        ops = rank.ops[LayerKind.of(rank.blueprint.model, layer)]
        weights = rank.gradients(layer).weights
        unread = [
            op._replace(statistics=0)
            for op, reader in pairwise(ops.plain)
            if INPUTS.get(op.name) == reader.name and reader.name not in weights
        ]
        again = {op.name for op in ops.repeated} if place < stage.recomputed else set()
        found.append(bytes_kept(rank, [op for op in unread if op.name not in again]))
    return sum(found) - max(found, default=0.0)


def _moved(
    rank: PipelineRank, stage: StageBlueprint, layers: Layers, turns: bool = False
) -> list[float]:
    """Returns the bytes that each offloaded layer copies to the host.

    `turns`: whether the backward follows the forward of the same micro-batch directly, so that the
    stage's last layer stays on the device.
    """
    away = min(stage.offloaded, len(stage.layers) - turns)
    found = []
    for i, number in enumerate(stage.layers[:away]):
        layer = layers[LayerKind.of(rank.blueprint.model, number)]
        found.append(layer.moved if i < stage.recomputed else layer.moved_plain)
    return found


def turns_around(rank: PipelineRank, stage: StageBlueprint) -> bool:
    """Returns whether each micro-batch's backward on the stage directly follows its forward."""
    return stage.last and rank.blueprint.pipeline.name != "gpipe"


def host_memory(config: Config, index: int) -> float:
    """Returns the bytes of pinned memory for offloaded activations of rank `index` along pp."""
    rank = PipelineRank(planned(config), index)
    layers, waiting, running = layers_of(rank), [], []
    for stage in (stage.backward for stage in rank.stages):
        turns = turns_around(rank, stage)
        slabs = [math.ceil(n / SLAB_BYTES) for n in _moved(rank, stage, layers, turns)]
        waiting.append(sum(slabs))
        # The slabs of one layer are already on their way back to the device.
        back = -max(slabs, default=0)
        forward = sum(slabs) + back * (not turns)
        running.append({Kind.F: forward, Kind.B: back, Kind.I: back, Kind.W: 0})
    seen = states_of(rank.blueprint, index).items()
    most = max((s.live @ waiting).max() + running[chunk][kind] for (kind, chunk), s in seen)
    return SLAB_BYTES * float(most)
