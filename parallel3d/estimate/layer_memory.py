"""Bytes of a layer for one micro-batch: what it keeps, and the peaks of its passes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from parallel3d.blueprint.blueprint import StageBlueprint
from parallel3d.blueprint.ops import LayerOps, Op, kept, widths
from parallel3d.blueprint.rank import PipelineRank
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.estimate.attention_traffic import halo_tokens
from parallel3d.models.declared import LayerKind
from parallel3d.schedules.messages import OFFLOADED_BYTES

FP32 = 4  # bytes per element of statistics, and of gradients during their reduction


class LayerMemory(NamedTuple):
    """Bytes of a layer for one micro-batch.

    Attributes:
        kept: tensors that its forward keeps for its backward, and its result.
        large: the part of them that is large enough to be offloaded.
        forward: peak of the forward, above its start.
        inert: peak of the forward of a layer that has no backward, above its start.
        backward: peak of the backward, above its start, when the tensors in `kept` exist.
        before_experts: the same in the operations that precede the experts.
        halved: peak of I, the half of the backward that defers the weight gradients.
        deferred: what is kept from I to W, the backward of the weights.
        exchanged_again: number of exchanges of tokens that the backward repeats.
    """

    kept: float
    large: float
    forward: float
    inert: float
    backward: float
    before_experts: float
    halved: float
    deferred: float
    exchanged_again: int


def layers_of_stage(rank: PipelineRank, stage: StageBlueprint) -> list[LayerMemory]:
    """Returns the bytes of each layer of a stage."""
    model, found = rank.blueprint.model, []
    made: dict[object, LayerMemory] = {}
    for place, number in enumerate(stage.layers):
        kind, again = LayerKind.of(model, number), place < stage.recomputed
        gradients = rank.gradients(number) if rank.blueprint.frozen else None
        key = kind, again, gradients
        if key not in made:
            ops = rank.ops[kind]
            if not again:
                ops = LayerOps(ops.plain, ops.plain, [], ops.plain)
            layer = LayerBytes(rank, kind, ops)
            names = layer.again
            unread = 0.0 if gradients is None else _unread(rank, kind, names, gradients.weights)
            made[key] = LayerMemory(
                layer.kept - unread,
                layer.moved,
                layer.kept + layer.forward - rank.stream,
                layer.without_backward - 2 * rank.stream,
                layer.backward,
                layer.before_mlp,
                layer.halved,
                layer.deferred,
                sum(name in names for name in ("mlp.dispatch", "mlp.combine")),
            )
        found.append(made[key])
    return found


def _unread(rank: PipelineRank, kind: LayerKind, again: set[str], weights: frozenset[str]) -> float:
    """Returns the bytes that a layer does not keep, as only frozen GEMMs would read them."""
    unread = [
        op._replace(statistics=0)
        for op, reader in pairwise(rank.ops[kind].plain)
        if INPUTS.get(op.name) == reader.name and reader.name not in weights
    ]
    return bytes_kept(rank, [op for op in unread if op.name not in again])


# Operation → the GEMM that follows, whose weight gradient is the only reason to keep the result.
INPUTS = {"input_norm": "attention.qkv", "mlp_norm": "mlp.up", "mlp.activation": "mlp.down"}


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
        self.kept = bytes_kept(rank, ops.kept)
        if "attention" not in self.again:
            self.kept += self.over_cp.kept
        self.moved = bytes_moved(rank, ops.kept)
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
