"""Seconds of a training step by closed formulas: layer, head, embedding, pipeline, gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel3d.estimate import rates
from parallel3d.estimate.ops import Op
from parallel3d.estimate.rates import Constants, from_odds
from parallel3d.estimate.work import OF_EXPERTS, Number, StepWork, pipeline_time

KINDS = {"gemm": "matmuls", "attention": "attention"}  # the others are element-wise


def layer(work: StepWork, c: Constants) -> tuple[dict[str, Number], Number]:
    """Returns a layer's seconds on the GPU by kind, forward and backward, sums over its operations,
    and in all: the host's, where its launches take longer."""
    parts: dict[str, Any] = dict.fromkeys(("matmuls", "attention", "element-wise", "recomputed"), 0)
    waits: Any = 0.0
    for op in work.ops:
        forward, backward = seconds(op, work, c)
        again = repeats(op, work)
        kind = KINDS.get(op.kind, "element-wise")
        parts[kind] = parts[kind] + forward + backward
        parts["recomputed"] = parts["recomputed"] + again * forward
        if op.split:
            waits = waits + _tensor_parallel(op, work, c, again)
    shown = 1 - work.overlap_tp * from_odds(c.of("engine", "tp_hidden", work.engine))
    waits = shown * waits * (1 - work.parallel_block / 2)
    parts["tp collectives"] = waits + _context_parallel(work, c) + _experts(work, c)
    return parts, rates.smooth_max(sum(parts.values()), _host(work, c))


def repeats(op: Op, work: StepWork) -> Any:
    """Returns 1 where a layer's backward repeats the operation, else 0."""
    flags = (getattr(work, f"recompute_{part}") for part in op.parts or ("end",))
    return functools.reduce(np.maximum, flags)


def seconds(op: Op, work: StepWork, c: Constants) -> tuple[Any, Any]:
    """Returns the GPU's seconds of an operation's forward and backward."""
    rows = work.tokens * (work.active_experts if op.name in OF_EXPERTS else 1.0)
    if op.kind == "attention":
        return rates.attention(work, c)
    if op.kind != "gemm":
        # A kernel reads and writes 2 bytes an element; dropout's masks are of the residual sums.
        width = 2 * (op.inputs + op.outputs + work.dropout * op.outputs * (op.name in RESIDUALS))
        factor = c["memory.width"] * np.where(work.compiled > 0, c["memory.compiled"], 1.0)
        moved = rates.move(work, c, rows * width * factor)
        return moved, 2 * moved
    forward, backward = _matmul(work, c, rows, op.inputs, op.outputs)
    # Operands are made fp8, before the all-gather, and the weights once a step.
    share = work.widths.share if op.split == "column" else 1.0
    cast = rates.move(work, c, work.tokens * op.inputs / share * c["fp8.cast_bytes"]) * work.fp8
    weights = 3 * work.held(op) / work.microbatches
    return forward + cast + rates.move(work, c, weights) * work.fp8, backward + cast


def _matmul(work: StepWork, c: Constants, rows: Any, inputs: Any, outputs: Any) -> tuple[Any, Any]:
    """Returns seconds of a GEMM, and of its input's and its weight's gradient."""
    forward, *backward = (
        rates.gemm(work, c, m, n, k)
        for m, n, k in ((rows, outputs, inputs), (rows, inputs, outputs), (inputs, outputs, rows))
    )
    return forward, sum(backward)


RESIDUALS = ("attention.residual", "mlp.residual")


def _tensor_parallel(op: Op, work: StepWork, c: Constants, again: Any) -> Any:
    """Returns seconds of a GEMM's tp collectives, forward, backward and recomputed.

    Under sequence parallelism the input of a column-parallel one is gathered, again for its weight
    gradient, half of that during the GEMM of the input's; else a row-parallel one's output is
    summed, and a column-parallel one's gradient.
    """
    bytes = 2 * work.tokens * work.hidden
    one = rates.gather(work, c, bytes, work.tp, 1)
    summed = rates.reduce(work, c, bytes, work.tp, 1)
    if op.split == "column":
        return work.sequence_parallel * (2.5 + again) * one + (1 - work.sequence_parallel) * summed
    return np.where(work.sequence_parallel > 0, 2 * one, summed) + again * np.where(
        work.sequence_parallel > 0, one, summed
    )


def _context_parallel(work: StepWork, c: Constants) -> Any:
    """Returns exposed seconds of keys and values over cp, forward and backward."""
    bytes = 4 * work.micro_batch * work.seq * work.widths.keys
    return 3 * rates.gather(work, c, bytes, work.cp, work.tp) * c["cp.exposed"]


def _experts(work: StepWork, c: Constants) -> Any:
    """Returns seconds of tokens to their experts and back, forward and backward."""
    bytes = 2 * work.tokens * work.hidden * work.active_experts / work.tp
    every = rates.gather(work, c, bytes, np.maximum(work.ep, 1), work.tp)
    return np.where(work.experts > 1, 4 * every, 0.0)


def _host(work: StepWork, c: Constants) -> Any:
    """Returns the host's seconds for a layer's launches: more with tp, and more again where
    pipeline messages and tp's collectives share the threads that drive the network."""
    launches = 1 + work.recompute_layer / 3
    own = c.of("engine", "launch_us", work.engine)
    tensor = np.where(work.tp > 1, c.of("engine", "launch_tp_us", work.engine), 0.0)
    tensor = tensor + c.of("engine", "slowest_us", work.engine) * (np.minimum(work.tp, 8) / 8) ** 2
    spread = (work.pp > 1) & (work.tp > 1) & (work.tp * work.pp * work.dp > work.gpus_per_node)
    wide = work.tp * np.sqrt(np.maximum(work.tp / work.gpus_per_node, 1.0))
    crowd = np.where(spread, c.of("network", "crowd_us", work.fabric) * wide, 0.0)
    host = launches * (own + tensor) + crowd
    return 1e-6 * host * np.where(work.graph > 0, 0.02, 1.0)


def head(work: StepWork, c: Constants) -> Any:
    """Returns seconds of the head and the loss, forward and backward."""
    rows, columns = work.tokens, work.vocab / work.tp
    matmuls = sum(_matmul(work, c, rows, work.hidden, columns))
    wide = 1 + work.fp8 * (work.peak / work.peak_attention - 1)  # the head stays in 16 bits
    return matmuls * wide + rates.move(work, c, rows * columns * c["head.bytes"])


def _ends(work: StepWork, c: Constants) -> Any:
    """Returns the seconds of head and embedding on the first stage, those between and the last."""
    top, single = head(work, c), work.pp == 1
    first = embedding(work, c) + np.where(single, top, 0.0)
    return np.stack(np.broadcast_arrays(first, 0.0, np.where(single, 0.0, top)))


def embedding(work: StepWork, c: Constants) -> Any:
    """Returns seconds of the look-up and its gradient."""
    return rates.move(work, c, work.tokens * work.hidden * 16 / work.widths.share) + 2e-5


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part; `compute` is the slowest stage's, with exposed tp collectives."""

    compute: Any  # each a number or an array
    bubble: Any
    messages: Any
    gradients: Any
    optimizer: Any
    fixed: Any

    @property
    def total(self) -> Any:
        parts = (self.messages, self.gradients, self.optimizer, self.fixed)
        return self.compute + self.bubble + sum(parts)


def step(work: StepWork, c: Constants) -> StepTime:
    """Returns the seconds of one step by part. Fields may be arrays: see `StepWork`."""
    ends = _ends(work, c)
    batch = 1e-6 * c.of("engine", "batch_us", work.engine) * np.where(work.graph > 0, 0.1, 1.0)
    each = _gathered(work, c, layer(work, c)[1])
    single = work.pp == 1
    first = work.first * each + ends[0] + batch
    middle = np.where(work.middle > 0, work.middle * each + batch, 0)
    last = np.where(single, first, work.last * each + ends[2] + batch)
    total = work.layers * each + head(work, c) + embedding(work, c) + batch * work.pp
    span = pipeline_time(first, middle, last, total, work.microbatches, work.chunks, work.split)
    busy = work.microbatches * np.maximum(np.maximum(first, middle), last)
    backward = (first if np.ndim(first) else np.asarray(first)) * 2 / 3
    return StepTime(
        busy,
        span - busy,
        _messages(work, c),
        _gradients(work, c, backward),
        _optimizer(work, c),
        c["step.fixed_us"] * 1e-6 + 0 * work.layers,
    )


def stage_parameters(work: StepWork) -> tuple[Any, Any, Any]:
    """Returns a tensor rank's elements of the first, the fullest middle and the last stage."""
    each = work.parameters
    table = work.vocab * work.hidden / work.tp
    single = work.pp == 1
    own_head = np.where(single & (work.tied > 0), 0, table)
    first = work.first * each + table + np.where(single, own_head, 0)
    return first, work.middle * each, np.where(single, first, work.last * each + table)


def largest_stage(work: StepWork) -> Any:
    """Returns the elements of the largest stage."""
    first, middle, last = stage_parameters(work)
    return np.maximum(np.maximum(first, middle), last)


def _gathered(work: StepWork, c: Constants, each: Number) -> Any:
    """Returns a layer's time with zero 3: two all-gathers of parameters, one of gradients."""
    ranks, stride = work.dp, work.tp * work.cp
    one = rates.gather(work, c, 2 * work.parameters, ranks, stride)
    ring = rates.latency(work, c, ranks, stride, ranks - 1) * np.where(ranks > 1, 1.0, 0.0)
    wire = 3 * (one + ring * c.of("engine", "dp_messages", work.engine))
    both = rates.smooth_max(each, wire)
    return np.where(work.zero >= 3, both, each)


def _messages(work: StepWork, c: Constants) -> Any:
    """Returns exposed seconds of pipeline messages: two a micro-batch and chunk, and the fill."""
    shown = c["pp.exposed"] * (1 - work.overlap_pp * from_odds(c["pp.hidden"]))
    trips = 2 * (work.microbatches * work.chunks + work.pp - 1)
    return trips * rates.hop(work, c) * shown


def _gradients(work: StepWork, c: Constants, backward: Number) -> Any:
    """Returns seconds of gradient reductions (and zero 1's all-gather) beyond a backward.

    Layers are reduced one by one, so each pays the latency of a ring over all ranks: with hundreds
    of ranks that is longer than the bytes take.
    """
    ranks, stride = work.dp * work.cp, work.tp
    elements = largest_stage(work)
    summed = rates.reduce(work, c, work.grad_bytes * elements, ranks, stride)
    cut = rates.gather(work, c, work.grad_bytes * elements, ranks, stride)
    back = rates.gather(work, c, 2 * elements, ranks, stride)
    layers = np.maximum(np.maximum(work.first, work.middle), work.last)
    ring = rates.latency(work, c, ranks, stride, ranks - 1) * np.where(ranks > 1, layers, 0.0)
    ring = ring * c.of("engine", "dp_messages", work.engine)
    odds = c.of("engine", "dp_hidden", work.engine)
    reduced = np.where(work.zero >= 3, 0.0, np.where(work.zero > 0, cut, summed) + ring)
    hidden = np.minimum(work.overlap_dp * from_odds(odds) * reduced, backward)
    returned = np.where((work.zero > 0) & (work.zero < 3), back + ring, 0.0)
    return reduced - hidden + returned * (1 - work.overlap_dp * from_odds(odds))


def _optimizer(work: StepWork, c: Constants) -> Any:
    ranks = np.where(work.zero > 0, work.dp * work.cp, 1.0)
    return rates.move(work, c, largest_stage(work) / ranks * c["optimizer.bytes"])


def breakdown(work: StepWork, c: Constants, compute: float) -> dict[str, float]:
    """Splits the busiest stage's seconds by kind, summing to `compute`; `work` has one row.

    The remainder after kernels and exposed collectives is the host's launches, or zero 3's gathers.
    """
    (kinds, total), ends = layer(work, c), _ends(work, c)
    stages = np.stack([work.first, work.middle, work.last])
    busiest = int(np.argmax((stages * total + ends)[:, 0]))
    count = float(work.microbatches[0])
    layers = count * float(stages[busiest, 0])
    found = {kind: layers * float(np.ravel(value)[0]) for kind, value in kinds.items()}
    found["head and embedding"] = count * float(ends[busiest, 0])
    rest = compute - sum(found.values())
    if rest < 0:  # no host time is exposed, and kernels overlap a little
        found = {kind: value * compute / sum(found.values()) for kind, value in found.items()}
    return found | {"launches": max(rest, 0.0)}
