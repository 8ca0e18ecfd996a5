"""Predicts the seconds of a step of a user's own model from traces of its parts.

Products, attention, other operators and collectives of each part are those that its trace has
(`trace/own_trace.py`), priced by the rates of the transformer's. Pipeline, gradients, optimizer and
messages have the transformer's formulas (`fitted_cost.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from parallel3d.errors import UserError
from parallel3d.estimate.fitted_cost import (
    Constants,
    Number,
    StepTime,
    StepWork,
    assembled,
    attention_rate,
    gather,
    gemm,
    move,
    reduce,
    smooth_max,
)
from parallel3d.models.survey import OwnModelConfig
from parallel3d.parameters.declaration import Held
from parallel3d.trace.layer_trace import Pass
from parallel3d.trace.own_trace import ModelTrace, PartTrace

# Kernels in the forward and the backward of the layers to which the fitted time of launches belongs
# (`launch_us`): a dense layer of the transformer, traced.
KERNELS = 25


@dataclass(frozen=True)
class OwnWork(StepWork):
    """The sizes of a step of a user's own model.

    Attributes:
        embedding_elements, head_elements: elements of these parts on a rank.
    """

    embedding_elements: Number = field(default_factory=partial(np.zeros, ()))
    head_elements: Number = field(default_factory=partial(np.zeros, ()))

    @property
    def ends(self) -> tuple[Any, Any]:
        return (
            self.embedding_trained * self.embedding_elements,
            self.head_trained * self.head_elements,
        )


def own_work(work: StepWork, model: OwnModelConfig) -> OwnWork:
    """Returns the work with the sizes of a model's ends, and without those of the transformer."""
    survey = model.survey
    assert survey is not None
    given = {f.name: getattr(work, f.name) for f in fields(StepWork)}
    ends = (elements_by_rank(held, work.tp) for held in (survey.embedding, survey.head))
    embedding, head = ends
    return OwnWork(**given, embedding_elements=embedding, head_elements=head)


def elements_by_rank(held: Held, tp: Number) -> Number:
    """Returns the elements of a part on one of `tp` ranks, for each row."""
    shapes = [tensor for tensors in held.values() for tensor in tensors]
    found = {
        size: sum(math.prod(tensor.local_shape(int(size))) for tensor in shapes)
        for size in np.unique(tp).tolist()
    }
    return np.array([float(found[size]) for size in np.ravel(tp).tolist()])


class _Seconds(NamedTuple):
    """Seconds of a micro-batch's forward and backward, and the bytes of a block's result."""

    kinds: list[float]
    embedding: float
    head: float
    message: float


def own_step(
    work: OwnWork,
    c: Constants,
    model: OwnModelConfig,
    kind_of: Sequence[int],
    trace: Callable[[int, int], ModelTrace],
) -> StepTime:
    """Returns the seconds of one step by part, with an element for each row of `work`.

    Rows whose parts cannot run take infinitely long.

    Args:
        kind_of: index of the kind of each layer, in the order of `work.kinds`.
        trace: returns the traces for a number of tensor-parallel ranks and a micro-batch size.

    Raises:
        UserError: if no row can run.
    """
    keys = [
        *zip(
            work.tp.tolist(), work.micro_batch.tolist(), work.recompute_layer.tolist(), strict=True
        )
    ]
    found: dict[tuple[float, ...], _Seconds] = {}
    refused: UserError | None = None
    for key in dict.fromkeys(keys):
        row = keys.index(key)
        try:
            of_parts = trace(int(key[0]), int(key[1]))
        except UserError as error:
            refused = refused or error
            none = [math.inf] * len(work.kinds)
            found[key] = _Seconds(none, math.inf, math.inf, 0.0)
            continue
        one = _row(work, row)
        blocks: list[list[float]] = [[] for _ in work.kinds]
        again = bool(key[2])
        known: dict[int, float] = {}
        for kind, part in zip(kind_of, of_parts.blocks, strict=True):
            if id(part) not in known:
                known[id(part)] = seconds_of(part, one, c, again)
            blocks[kind].append(known[id(part)])
        first, last = (seconds_of(part, one, c) for part in (of_parts.embedding, of_parts.head))
        sent = max((sum(part.y) for part in of_parts.blocks), default=0)
        kinds = [sum(each) / max(1, len(each)) for each in blocks]
        found[key] = _Seconds(kinds, first, last, float(sent))
    if refused is not None and all(math.isinf(each.head) for each in found.values()):
        raise refused
    rows = [found[key] for key in keys]
    layers = [np.array([row.kinds[kind] for row in rows]) for kind in range(len(work.kinds))]
    embedding, head, message = (
        np.array([getattr(row, name) for row in rows]) for name in ("embedding", "head", "message")
    )
    tokens = work.item * work.micro_batch * work.seq / work.cp
    # Every rank of tp sends the whole message.
    sized = replace(work, hidden=message / tokens, sequence_parallel=np.zeros_like(work.tp))
    return assembled(sized, c, layers, embedding, head)


def _row(work: OwnWork, row: int) -> OwnWork:
    """Returns one row of the work, without its layers."""
    given: dict[str, Any] = {
        f.name: np.asarray(value)[row : row + 1]
        for f in fields(work)
        if isinstance(value := getattr(work, f.name), np.ndarray) and value.ndim == 1
    }
    return replace(work, **given, kinds=({},), products=())


def seconds_of(part: PartTrace, work: OwnWork, c: Constants, again: bool = False) -> float:
    """Returns the seconds of a part's forward and backward.

    `work` has one row. `again`: whether the backward repeats the forward.
    """
    passes = [part.passes.forward, part.passes.backward] + [part.passes.forward] * again
    device = sum(_of_pass(each, work, c) for each in passes)
    kernels = sum(each.launches + sum(sent.count for sent in each.sent) for each in passes)
    host = 1e-6 * work.software(c, "launch_us") * kernels / KERNELS
    return float(np.ravel(smooth_max(device, host, c["launch.power"]))[0])


def _of_pass(done: Pass, work: OwnWork, c: Constants) -> Any:
    """Returns the seconds of a pass on the GPU, with its exposed collectives."""
    found: Any = move(work, c, np.array([done.other_bytes]))
    for each in done.products:
        m, n, k = (np.array([size]) for size in (each.rows, each.columns, each.inner))
        found = found + each.count * gemm(work, c, m, n, k, each.groups)
    for call in done.attentions:
        rate = attention_rate(work, c) * work.software(c, "flash")
        moved = move(work, c, np.array([call.count * call.nbytes]))
        found = found + np.maximum(call.flops / rate, moved)
        found = found + 3e-6 * c["gemm.gap_us"] * call.count
    for sent in done.sent:
        ranks, nbytes = np.array([float(sent.ranks)]), np.array([sent.nbytes])
        if sent.op == "all_reduce":
            each_call = reduce(work, c, nbytes, ranks, 1)
        else:
            each_call = gather(work, c, nbytes, ranks, 1, sent.op)
        found = found + sent.count * each_call * work.shown_tensor_parallel(c)
    return found


def flops_of(trace: ModelTrace) -> float:
    """Returns the FLOPs of a forward and a backward of all parts, over a traced micro-batch."""
    parts = trace.embedding, *trace.blocks, trace.head
    return sum(part.passes.forward.flops + part.passes.backward.flops for part in parts)
