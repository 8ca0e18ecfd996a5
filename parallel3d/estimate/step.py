"""Seconds of a training step by closed formulas: layer, head, embedding, pipeline, gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from parallel3d.estimate import rates
from parallel3d.estimate.rates import Constants, from_odds
from parallel3d.estimate.work import Number, StepWork, pipeline_time


def tokens(work: StepWork) -> Any:
    """Returns the tokens of a micro-batch on one context rank."""
    return work.micro_batch * work.seq / work.cp


def sizes(work: StepWork) -> tuple[Any, Any, Any]:
    """Returns a tensor rank's outputs of the fused q, k, v; of q alone; of up (and gate)."""
    queries = work.heads * work.head_size / work.tp
    keys = np.maximum(work.kv_heads / work.tp, 1) * work.head_size
    return queries + 2 * keys, queries, work.ffn * (1 + work.gated) / work.tp


def layer_parameters(work: StepWork) -> Any:
    """Returns the elements of one layer's matrices on a tensor rank (its own experts)."""
    qkv, queries, up = sizes(work)
    local = np.where(work.experts > 1, work.experts / work.ep, 1.0)
    return work.hidden * (qkv + queries + local * (up + work.ffn / work.tp))


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer: the GPU's by kind, forward and backward, and the host's launches."""

    parts: dict[str, Number]
    host: Number
    power: float

    @property
    def total(self) -> Any:
        """The GPU's time, or the host's if launches take longer."""
        device: Any = sum(self.parts.values())
        return rates.smooth_max(device, self.host, self.power)


def layer(work: StepWork, c: Constants) -> LayerTime:
    """Returns the seconds of one layer's forward and backward."""
    forward, backward = matmuls(work, c)
    attend, back = rates.attention(work, c)
    rows = _elementwise(work, c)
    waits = _tensor_parallel(work, c) + _context_parallel(work, c) + _experts(work, c)
    parts = {
        "matmuls": forward + backward,
        "attention": attend + back,
        "element-wise": 3 * rows,
        "recomputed": recomputed_seconds(work, c, forward + attend + rows),
        "tp collectives": waits,
    }
    return LayerTime(parts, _host(work, c), c["launch.power"])


def recomputed_seconds(work: StepWork, c: Constants, forward: Any) -> Any:
    """Returns the recomputed seconds of a layer's backward; `forward`: all of its forward."""
    up, mlp = sizes(work)[2], work.recompute_mlp
    routed = tokens(work) * np.where(work.experts > 1, work.active_experts, 1.0)
    parts = work.recompute_attention * rates.attention(work, c)[0]
    parts = parts + mlp * rates.gemm(work, c, routed, up, work.hidden)
    share = np.where(work.sequence_parallel > 0, work.tp, 1.0)
    width = work.recompute_norm * 8 * work.hidden / share  # two norms read and write it
    width = width + np.maximum(work.recompute_activation, mlp) * _activation(work)
    return np.where(work.full_recompute > 0, forward, parts + _moved(work, c, width))


def matmuls(work: StepWork, c: Constants) -> tuple[Any, Any]:
    """Returns seconds of the four GEMMs forward, and of their input and weight gradients."""
    rows, h = tokens(work), work.hidden
    qkv, queries, up = sizes(work)
    routed = np.where(work.experts > 1, rows * work.active_experts, rows)
    forward, backward = 0.0, 0.0
    for m, n, k in (
        (rows, qkv, h),
        (rows, h, queries),
        (routed, up, h),
        (routed, h, work.ffn / work.tp),
    ):
        forward = forward + rates.gemm(work, c, m, n, k)
        backward = backward + rates.gemm(work, c, m, k, n) + rates.gemm(work, c, k, n, m)
    share = np.where(work.sequence_parallel > 0, work.tp, 1.0)  # cast before the all-gather
    operands = rows * (2 * h / share + queries + work.ffn / work.tp)
    cast = rates.move(work, c, operands * c["fp8.cast_bytes"]) * work.fp8
    weights = rates.move(work, c, layer_parameters(work) * 3 / work.microbatches) * work.fp8
    return forward + cast + weights, backward + cast


def _elementwise(work: StepWork, c: Constants) -> Any:
    """Returns seconds of norms, residuals, dropout, activation, rotary and transposes."""
    share = np.where(work.sequence_parallel > 0, work.tp, 1.0)
    whole = work.hidden * (20 + 4 * work.dropout) / share
    return _moved(work, c, whole + 4 * sizes(work)[0] + _activation(work))


def _activation(work: StepWork) -> Any:
    """Returns the bytes a token that the MLP's activation reads and writes."""
    return (2 * sizes(work)[2] + 2 * work.ffn / work.tp) * work.active_experts


def _moved(work: StepWork, c: Constants, width: Any) -> Any:
    """Returns seconds of passes over `width` bytes a token."""
    factor = c["memory.width"] * np.where(work.compiled > 0, c["memory.compiled"], 1.0)
    return rates.move(work, c, tokens(work) * width * factor)


def _tensor_parallel(work: StepWork, c: Constants) -> Any:
    """Returns seconds of the tp collectives that no GEMM hides."""
    bytes = 2 * tokens(work) * work.hidden
    one = rates.gather(work, c, bytes, work.tp, 1)
    both = np.where(work.sequence_parallel > 0, 2 * one, rates.reduce(work, c, bytes, work.tp, 1))
    pairs = 2 - work.parallel_block  # of gather and reduce-scatter, i.e. all-reduces
    forward = pairs * both
    again = np.where(work.full_recompute > 0, forward, work.recompute_mlp * one)
    again = np.where(work.sequence_parallel + work.full_recompute > 0, again, 0.0)
    gathered = work.sequence_parallel * pairs * one * 0.5  # inputs, during the GEMM of dX
    shown = 1 - work.overlap_tp * from_odds(c.of("engine", "tp_hidden", work.engine))
    return shown * (2 * forward + again + gathered)


def _context_parallel(work: StepWork, c: Constants) -> Any:
    """Returns exposed seconds of keys and values over cp, forward and backward."""
    width = 2 * np.maximum(work.kv_heads / work.tp, 1) * work.head_size
    bytes = 2 * work.micro_batch * work.seq * width
    return 3 * rates.gather(work, c, bytes, work.cp, work.tp) * c["cp.exposed"]


def _experts(work: StepWork, c: Constants) -> Any:
    """Returns seconds of tokens to their experts and back, forward and backward."""
    bytes = 2 * tokens(work) * work.hidden * work.active_experts / work.tp
    every = rates.gather(work, c, bytes, np.maximum(work.ep, 1), work.tp)
    return np.where(work.experts > 1, 4 * every, 0.0)


def _host(work: StepWork, c: Constants) -> Any:
    """Returns the host's seconds for a layer's launches: more with tp, and more again where
    pipeline messages and tp's collectives share the threads that drive the network."""
    launches = 1 + work.full_recompute / 3
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
    rows, columns = tokens(work), work.vocab / work.tp
    h = work.hidden
    matmuls = (
        rates.gemm(work, c, rows, columns, h)
        + rates.gemm(work, c, rows, h, columns)
        + rates.gemm(work, c, h, columns, rows)
    )
    wide = 1 + work.fp8 * (work.peak / work.peak_attention - 1)  # the head stays in 16 bits
    return matmuls * wide + rates.move(work, c, rows * columns * c["head.bytes"])


def _ends(work: StepWork, c: Constants) -> Any:
    """Returns the seconds of head and embedding on the first stage, those between and the last."""
    top, single = head(work, c), work.pp == 1
    first = embedding(work, c) + np.where(single, top, 0.0)
    return np.stack(np.broadcast_arrays(first, 0.0, np.where(single, 0.0, top)))


def embedding(work: StepWork, c: Constants) -> Any:
    """Returns seconds of the look-up and its gradient."""
    share = np.where(work.sequence_parallel > 0, work.tp, 1.0)
    return rates.move(work, c, tokens(work) * work.hidden * 16 / share) + 2e-5


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part; `compute` is the slowest stage's, with exposed tp collectives."""

    compute: Number
    bubble: Number
    messages: Number
    gradients: Number
    optimizer: Number
    fixed: Number

    @property
    def total(self) -> Any:
        parts = (self.messages, self.gradients, self.optimizer, self.fixed)
        return self.compute + self.bubble + sum(parts)


def step(work: StepWork, c: Constants) -> StepTime:
    """Returns the seconds of one step by part. Fields may be arrays: see `StepWork`."""
    ends = _ends(work, c)
    batch = 1e-6 * c.of("engine", "batch_us", work.engine) * np.where(work.graph > 0, 0.1, 1.0)
    each = _gathered(work, c, layer(work, c).total)
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
    each = layer_parameters(work)
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
    one = rates.gather(work, c, 2 * layer_parameters(work), ranks, stride)
    ring = rates.latency(work, c, ranks, stride, ranks - 1) * np.where(ranks > 1, 1.0, 0.0)
    wire = 3 * (one + ring * c.of("engine", "dp_messages", work.engine))
    both = rates.smooth_max(each, wire * c["fsdp.contention"], 4)
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
    one, ends = layer(work, c), _ends(work, c)
    stages = np.stack([work.first, work.middle, work.last])
    busiest = int(np.argmax((stages * one.total + ends)[:, 0]))
    count = float(work.microbatches[0])
    layers = count * float(stages[busiest, 0])
    found = {kind: layers * float(np.ravel(value)[0]) for kind, value in one.parts.items()}
    found["head and embedding"] = count * float(ends[busiest, 0])
    rest = compute - sum(found.values())
    if rest < 0:  # no host time is exposed, and kernels overlap a little
        found = {kind: value * compute / sum(found.values()) for kind, value in found.items()}
    return found | {"launches": max(rest, 0.0)}
