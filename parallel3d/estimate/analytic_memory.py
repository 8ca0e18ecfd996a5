"""Peak memory of parallel3d's own code, from the configuration."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallel3d.config.schema import Config, ModelConfig
from parallel3d.config.sections import parts_of
from parallel3d.estimate.balance import (
    balance_chunks,
    head_cost,
    layers_of_stages,
    placement_of,
    sends_slices,
)
from parallel3d.estimate.ops import (
    Op,
    Widths,
    kept,
    layer_flops,
    layer_ops,
    loss_chunk_counts,
    recomputing,
    repeated,
    stage_parameters,
    widths,
)
from parallel3d.estimate.search import LayoutChoice, configure
from parallel3d.estimate.traffic import (
    ACTIVATION_BYTES,
)
from parallel3d.schedules.actions import Kind
from parallel3d.schedules.schedule import make


def peak_stage(config: Config) -> tuple[int, RankMemory]:
    """Returns (index along pp, peak memory) of the rank that needs most.

    Ranks between the ends differ by layers and by micro-batches in flight, of which earlier ones
    have more: only the ends, the middle, and the first rank of most layers are looked at.
    """
    split, placement = layers_by_stage(config), placement_of(config)
    counts = [0] * config.pp
    for stage, layers in enumerate(split):
        counts[placement.place(stage)[0]] += layers
    most = counts.index(max(counts))
    seen = {0, min(1, config.pp - 1), config.pp // 2, config.pp - 1, most}
    found = ((index, peak_memory(config, index)) for index in sorted(seen))
    return max(found, key=lambda pair: pair[1].total)


def memories(
    config: Config,
    choices: Sequence[LayoutChoice],
    reserve: float,
    tell: Callable[[str], None] | None = None,
) -> NDArray[np.float64]:
    """Returns the bytes of each choice's fullest GPU plus `reserve`, which no tensor can use;
    `tell` is called with the progress."""
    totals = []
    for done, choice in enumerate(choices):
        if tell is not None:
            tell(f"layout {done} of {len(choices)}")
        totals.append(peak_stage(configure(config, choice))[1].total)
    return np.array(totals) + reserve


def least_memory(
    config: Config,
    choices: Sequence[LayoutChoice],
    reserve: float,
    enough: float,
    tell: Callable[[str], None] | None = None,
) -> float:
    """Returns the least of `memories`' totals, or one of at most `enough`.

    Looks at choices by their lower bound, and stops where no other can need less.
    """
    configs = [configure(config, choice) for choice in choices]
    bounds = [memory_lower_bound(one) * (1 - 1e-9) + reserve for one in configs]  # sums are rounded
    found = math.inf
    for done, i in enumerate(sorted(range(len(configs)), key=bounds.__getitem__)):
        if found <= enough or found <= bounds[i]:
            break
        if tell is not None:
            tell(f"layout {done} of {len(configs)}")
        found = min(found, peak_stage(configs[i])[1].total + reserve)
    return found


PHASES = ("forward", "backward", "backward", "weight gradients")


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at its peak, by kind as `dryrun` names them."""

    parameters: float
    gradients: float
    masters: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    phase: str

    @property
    def total(self) -> float:
        kinds = (self.parameters, self.gradients, self.masters, self.optimizer)
        return sum(kinds) + self.activations + self.logits + self.buffers


@dataclass(frozen=True)
class ModelChunk:
    """One stage of a rank: its layers, how many of them recompute, and its ends."""

    layers: int
    recomputed: int
    first: bool
    last: bool
    turns: bool  # its input is the output of the rank's other chunk, which is kept there


def layers_by_stage(config: Config) -> Sequence[int]:
    """Returns the layers of each stage; cached, as a search asks often for the same."""
    if config.schedule.layers_per_stage is not None:
        return [len(layers) for layers in layers_of_stages(config)]
    model, cost, head = config.model, layer_flops(config.model), head_cost(config.model)
    return _balanced(cost, model.num_layers, placement_of(config), 0.0, head)


_balanced = functools.lru_cache(maxsize=1024)(balance_chunks)


def chunks_of(config: Config, index: int) -> list[ModelChunk]:
    """Returns the stages of rank `index` along pp. Raises UserError if a stage would be empty."""
    placement, split = placement_of(config), layers_by_stage(config)
    made = []
    for chunk in range(placement.chunks):
        stage = placement.stage(index, chunk)
        count = split[stage]
        again = recomputing(config.recompute_layers, stage, count)
        before = placement.neighbour(index, chunk, -1)
        turns = before is not None and before[0] == index
        ends = stage == 0, stage == placement.stages - 1
        made.append(ModelChunk(count, again, *ends, turns))
    return made


def parameters_of(config: Config, chunks: Sequence[ModelChunk]) -> ParameterCounts:
    """Counts the elements that a rank with these stages holds."""
    model, tp = config.model, config.tp
    first, last = (any(getattr(c, end) for c in chunks) for end in ("first", "last"))
    layer = _count(model, tp, range(1), False, False)
    ends = _count(model, tp, range(0), True, False) if first else 0
    head = 0
    if last:
        head = _count(model, tp, range(0), False, True, borrows=first and len(chunks) > 1)
        if first and len(chunks) == 1:
            head = _count(model, tp, range(0), True, True) - ends
    table = model.padded_vocab_size // tp * model.hidden_size if last else 0
    layers = sum(c.layers for c in chunks)
    return ParameterCounts(layer, ends + head, table, layer * layers + ends + head)


def _count(
    model: ModelConfig, tp: int, layers: range, first: bool, last: bool, borrows: bool = False
) -> int:
    found = stage_parameters(model, tp, layers, first, last, borrows_table=borrows)
    return sum(p.numel for p in found)


def peak_memory(config: Config, index: int) -> RankMemory:
    """Returns the peak memory of rank `index` along pp, as `dryrun` finds it.

    `config` is checked, with dp and a named schedule. Dropout of attention probabilities and
    document masks are not modelled.
    """
    chunks, t = chunks_of(config, index), tensors(config)
    parameters = parameters_of(config, chunks)
    layer, head = layer_bytes(t, parts_of(config.recompute)), head_bytes(config, t)
    if config.zero > 1 and (config.dp or 1) > 1:  # each forward computes its lm_head gradient
        cast = ACTIVATION_BYTES[config.precision.name] * parameters.table
        head = head._replace(kept=head.kept + cast)
    name, pp, count = config.schedule.name, config.pp, config.num_microbatches
    seen = moments(name, pp, len(chunks), count, index)
    state = _state(config, parameters)
    extra = (
        fsdp_memory(config, parameters, chunks[0].layers, chunks[0].first)
        if config.zero > 1 and (config.dp or 1) > 1
        else {}
    )
    best: RankMemory | None = None
    for chunk in range(len(chunks)):
        for made in _peaks(config, chunk, chunks, t, layer, head, seen, state, extra):
            if best is None or made.total > best.total:
                best = made
    assert best is not None
    return best


def memory_lower_bound(config: Config) -> float:
    """Returns a quick lower bound of the fullest rank's `peak_memory`.

    The state of the rank of most layers, and one micro-batch's activations in all of them.
    """
    layers = -(-config.model.num_layers // config.pp)
    one = _count(config.model, config.tp, range(1), False, False)
    kept = layers * layer_bytes(tensors(config), parts_of(config.recompute)).kept
    return _state(config, ParameterCounts(one, 0, 0, one * layers)).total + kept


def _state(config: Config, parameters: ParameterCounts) -> RankMemory:
    """Returns the memory between steps, and during them under zero 0 and 1."""
    item = ACTIVATION_BYTES[config.precision.name]
    wide, dp = max(WIDE, item), config.dp or 1
    numel = parameters.all
    cut = dp if config.zero > 0 else 1
    spread = dp if config.zero > 1 else 1
    moments_ = {"adamw": 2, "sgd": 1}.get(config.optim.name, 2)
    return RankMemory(
        parameters=0.0 if spread > 1 else float(item * numel),
        gradients=wide * numel / spread,
        masters=0.0 if item >= WIDE and spread == 1 else wide * numel / cut,
        optimizer=moments_ * wide * numel / cut,
        activations=0.0,
        logits=0.0,
        buffers=rotary_bytes(config.model) * config.vpp,
        phase="",
    )


def _kept(config: Config, chunk: ModelChunk, t: Tensors, head: HeadBytes) -> float:
    """Returns the activation bytes of a chunk between a micro-batch's forward and backward."""
    how = layer_bytes(t, parts_of(config.recompute)).kept
    plain = layer_bytes(t, ()).kept
    layers = chunk.recomputed * how + (chunk.layers - chunk.recomputed) * plain
    end = head.kept if chunk.last else t.stream
    return layers + end - (t.stream if chunk.turns else 0.0)


def _peaks(
    config: Config,
    index: int,
    chunks: Sequence[ModelChunk],
    t: Tensors,
    layer: LayerBytes,
    head: HeadBytes,
    seen: Moments,
    state: RankMemory,
    extra: Extra,
) -> list[RankMemory]:
    """Returns the peak of each kind of action on one chunk."""
    kept = np.array([_kept(config, chunk, t, head) for chunk in chunks])
    waits = np.array([chunk.layers * layer.deferred for chunk in chunks])
    base = seen.live @ kept + seen.deferred @ waits + seen.sent * t.sent
    chunk, made = chunks[index], []
    inner = kept[index] - (head.kept if chunk.last else t.stream)
    reads = batch_bytes(config) if chunk.first or chunk.last else 0.0
    for kind in range(3):
        rows = (seen.kind == kind) & (seen.chunk == index)
        if not rows.any():
            continue
        for begun in (False, True) if extra else (None,):
            mine = rows if begun is None else rows & (seen.begun == begun)
            if not mine.any():
                continue
            most = float(base[mine].max())
            for name, activations, logits in _temporary(chunk, kind, inner, t, layer, head):
                more = extra_memory(extra, name, bool(begun))
                made.append(
                    RankMemory(
                        parameters=state.parameters + more.get("parameters", 0.0),
                        gradients=state.gradients + more.get("gradients", 0.0),
                        masters=state.masters,
                        optimizer=state.optimizer,
                        activations=most + activations + more.get("activations", 0.0),
                        logits=logits,
                        buffers=state.buffers + more.get("buffers", 0.0) + reads,
                        phase="head and loss" if name in ("head", "cast") else PHASES[kind],
                    )
                )
    return made


def _temporary(
    chunk: ModelChunk, kind: int, inner: float, t: Tensors, layer: LayerBytes, head: HeadBytes
) -> list[tuple[str, float, float]]:
    """Returns (moment, activations, logits) of an action's temporary memory on a chunk."""
    if kind == 0:
        found = [("forward", inner + layer.forward, 0.0)]
        if chunk.last:
            found.append(("head", inner + head.states, head.logits))
            found.append(("cast", inner + head.states, 0.0))
        return found
    received = t.stream if chunk.last else 0.0  # computed and kept by the head
    # The look-up's backward, after all layers: gathered, masked and cast to the table's fp32.
    table = t.stream + t.sp * t.whole + t.whole * (1 + WIDE / t.item * (t.item < WIDE))
    if kind == 1:
        return [
            ("backward", layer.backward + layer.again - received, 0.0),
            ("matmuls", layer.again - t.inner + (1 + 2 * t.sp) * t.whole, 0.0),
            ("made", t.stream - inner / chunk.layers, 0.0),
            ("reduction", t.stream - inner / chunk.layers, 0.0),
            ("later", t.stream - min(2, chunk.layers) * inner / chunk.layers, 0.0),
            ("ends", 2 * t.stream - inner, 0.0),
            ("out", 2 * t.stream - inner, 0.0),
        ]
    late = (chunk.layers - 1) * (layer.deferred - inner / chunk.layers)
    found = [("backward", layer.halved + layer.again - received + max(late, 0.0), 0.0)]
    if chunk.first:
        found.append(("ends", chunk.layers * layer.deferred - inner + table, 0.0))
    return found


# Memory of FSDP2 in addition to shards, by moment of a step (`data_parallel/fully_sharded.py`). The
# buffer of its last all-gather and the input of its last reduce-scatter live until the next ones.

Extra = dict[str, dict[str, float]]  # moment → kind of memory → bytes


@dataclass(frozen=True)
class ParameterCounts:
    """Elements of a rank: of one layer, of the ends' unit, of the lm_head weight, and all."""

    layer: int
    ends: int
    table: int
    all: int


def extra_memory(extra: Extra, name: str, begun: bool) -> dict[str, float]:
    """Returns FSDP2's bytes at a moment, with those held after the step's first backward."""
    found: dict[str, float] = {}
    behind = begun or name in ("reduction", "later", "ends", "out")
    for key in (name, "begun" if behind else ""):
        for kind, nbytes in extra.get(key, {}).items():
            found[kind] = found.get(kind, 0.0) + nbytes
    return found


def fsdp_memory(config: Config, parameters: ParameterCounts, layers: int, first: bool) -> Extra:
    """Returns FSDP2's bytes by moment on a stage of `layers`, the `first` one or not."""
    item, one, ends = ACTIVATION_BYTES[config.precision.name], parameters.layer, parameters.ends
    model, tp, dp = config.model, config.tp, config.dp or 1
    down, up = (
        item * op.inputs * op.outputs
        for name in ("mlp.down", "mlp.up")
        for op in layer_ops(widths(model, tp))
        if op.name == name
    )
    cast = float(item * parameters.table)  # the weight's gradient, until its reduction
    every, once = config.ddp.reduces_every_microbatch(config.zero), config.num_microbatches == 1
    sums, reduced, found = float(WIDE * one), float(WIDE * (ends or one)), Extra()
    if every:
        found["begun"] = {"buffers": reduced}
    elif not once:
        found["begun"] = {"gradients": float(WIDE * parameters.all)}
    if config.zero == 2:
        whole, own = float(item * (parameters.all - one)), float(item * one)
        gathered = 0.0
    else:
        whole, own = float(item * ends), float(item * one)
        gathered = own
    ahead = gathered if layers > 1 else 0.0
    late = gathered if layers > 2 else 0.0
    before = reduced if every else 0.0  # included in "begun", and free by then
    head = whole + own - gathered
    wide = item * one if every or once else 0.0  # the layer's gradients, before the cast to fp32
    last = float(item * one) if config.zero == 3 or once else 0.0
    found["forward"] = {"parameters": whole + own, "buffers": last}
    found["head"] = {"parameters": head, "buffers": last, "activations": 2 * cast}
    found["cast"] = {"parameters": head, "buffers": last, "activations": 3 * cast}
    both = first and model.tie_embeddings and cast > 0  # tied: two gradients, summed at the end
    cast = 0.0 if both else cast
    for name, gradients in (("backward", down), ("matmuls", down + up)):
        found[name] = {
            "parameters": whole + own,
            "buffers": ahead + gradients,
            "activations": cast,
        }
    found["reduction"] = {
        "parameters": whole,
        "buffers": ahead + wide + sums - before,
        "activations": cast,
    }
    found["made"] = {"parameters": whole + own, "buffers": ahead + item * one, "activations": cast}
    if layers > 1:
        found["later"] = {
            "parameters": whole + gathered,
            "buffers": late + wide + (sums if every or once else 0.0) - before,
            "activations": cast,
        }
    if config.zero == 2 and not once:  # the last micro-batch has freed the reduced gradients
        return found
    table = item * model.hidden_size * model.padded_vocab_size / tp * first
    scattered = reduced / dp if ends else 0.0
    start = {"parameters": 0.0 if once else head, "buffers": (reduced if ends else 0.0) - before}
    found["ends"] = start | {"activations": cast + (1 + both) * table}
    # The gradients are copied and free, the scattered sums exist.
    found["out"] = start | {"activations": min(cast, table) + both * table}
    found["out"]["buffers"] += scattered
    if not first:  # autograd holds them until its last node is done
        found["ends"]["buffers"] += scattered
    return found


# Bytes of one layer and of the head for one micro-batch. What stays until the backward is summed
# over the layer's operations; temporary tensors are in the order in which `models/transformer.py`
# and `tensor_parallel/` create them on an accelerator. `benchmarks/plan_dryrun.py` compares both
# with `parallel3d dryrun`, which runs that code.


WIDE = 4  # bytes of statistics and sums: fp32
_OF_TOKEN = 17  # bytes of a token's ids, labels and mask on the device


class Tensors(NamedTuple):
    """Bytes on one rank of a micro-batch's tensors.

    Attributes:
        widths: of a layer, in elements a token. item: bytes of an element; rows: tokens.
        whole: hidden states of all tokens; stream: the residual stream, 1/tp of them under sequence
            parallelism.
        up, inner: outputs of up and of the activation function.
        copies: 1 if collectives need a contiguous copy (sp, several sequences a micro-batch).
        sp: 0 or 1. sent: a message to the next stage.
    """

    widths: Widths
    item: int
    rows: int
    whole: float
    stream: float
    up: float
    inner: float
    copies: int
    sp: int
    sent: float

    def kept(self, ops: Sequence[Op], recompute: Collection[str] = ()) -> float:
        """Returns the bytes that these operations keep until their backward."""
        elements, statistics = kept(ops, recompute)
        return self.rows * (self.item * elements + WIDE * statistics)


def tensors(config: Config) -> Tensors:
    """Returns the sizes for the configuration's model, layout and micro-batch."""
    model, tp, b = config.model, config.tp, config.micro_batch_size
    item, rows = ACTIVATION_BYTES[config.precision.name], b * model.seq_length
    sp = int(config.sp and tp > 1)
    w = widths(model, tp, bool(sp))
    stream = item * rows * model.hidden_size / w.share
    slices = tp if sends_slices(config, on_accelerator=config.device != "cpu") else 1
    return Tensors(
        w,
        item,
        rows,
        whole=item * rows * model.hidden_size,
        stream=stream,
        up=item * rows * w.ffn * (1 + w.gated),
        inner=item * rows * w.ffn,
        copies=int(sp and b > 1),
        sp=sp,
        # A slice of a single sequence is a view and keeps the full tensor alive.
        sent=stream / slices if b > 1 else stream,
    )


class LayerBytes(NamedTuple):
    """Bytes of one layer and micro-batch.

    Attributes:
        kept: from its forward to its backward.
        deferred: of deferred weight gradients, from I to W (`parameters/gradients.py`).
        forward, backward, halved: temporary, at the peak of the stage's last layer: in the forward,
            in a whole backward, and in I.
        again: recomputed before that backward.
    """

    kept: float
    deferred: float
    forward: float
    backward: float
    halved: float
    again: float


@functools.lru_cache(maxsize=1024)
def layer_bytes(t: Tensors, parts: Collection[str]) -> LayerBytes:
    """Returns the bytes of one layer under `recompute`'s parts."""
    ops = layer_ops(t.widths, parts)
    twice = repeated(ops, parts)
    # The MLP's segment, with its norm if the two are one segment.
    segment = [op for op in twice if op.name.startswith("mlp.")]
    if {"norm", "mlp"} <= {*parts}:
        segment += [op for op in twice if op.name == "mlp_norm"]
    again, inner = t.kept(segment), t.kept([op for op in segment if op.kind != "norm"])
    # Operands of the weight gradients, and the gradients of their outputs.
    deferred = sum(
        t.stream + t.rows * t.item * op.outputs
        if op.split == "column"
        else t.rows * t.item * op.inputs + t.whole
        for op in ops
        if op.kind == "gemm"
    )
    scattered = t.whole * (1 + t.copies) + t.stream * (1 + t.copies) if t.sp else t.whole
    gathered = t.whole * (1 + t.copies) if t.sp else 0.0
    # attention's output, the last GEMM's with its reduction, then the sum with the stream
    activation = t.inner * bool({"activation", "mlp"} & {*parts})
    ending = t.stream + max(activation + scattered, (t.stream if t.sp else t.whole) + t.stream)
    if "layer" in parts:
        inside = 3 * t.stream + max(gathered + t.up, t.up + t.inner, t.inner + scattered)
        forward = max(inside, ending + t.stream + t.inner)
        again = t.kept(twice)
    else:
        forward = max(ending, t.stream + inner)
    first = max(
        (t.whole + max(t.inner, t.copies * t.whole, t.copies * t.stream)) * t.sp,
        t.inner,
        t.up,
        (t.stream * t.copies + (2 + t.copies) * t.whole + t.stream) * t.sp - t.inner,
    )
    kept_whole = t.whole if t.sp else 0.0
    halved = max(first, kept_whole + t.inner + t.up)
    return LayerBytes(
        t.kept(ops, parts), deferred, forward, t.stream + first, t.stream + halved, again
    )


class HeadBytes(NamedTuple):
    """Bytes of the last stage's head and loss for one micro-batch.

    Attributes:
        kept: from the forward, which computes the gradients, to the backward.
        states: hidden states and their gradient at the peak of the forward.
        logits: at that peak, with their statistics.
    """

    kept: float
    states: float
    logits: float


def head_bytes(config: Config, t: Tensors) -> HeadBytes:
    """Returns the bytes of `tensor_parallel/loss.py`: the last chunk's logits and the gradient."""
    model, tp = config.model, config.tp
    item, rows = ACTIVATION_BYTES[config.precision.name], config.micro_batch_size * model.seq_length
    columns = model.padded_vocab_size // (tp if model.parallel_output else 1)
    chunk = max(
        loss_chunk_counts(
            rows, columns, config.loss.chunk_tokens, item=item,
            on_accelerator=config.device != "cpu",
        )
    )  # fmt: skip
    statistics = chunk * (25 + 24 * tp)
    reduced = t.stream if t.sp else 0.0
    norm = t.kept([op for op in layer_ops(t.widths) if op.name == "mlp_norm"])
    held = norm + t.stream  # the norm's input, statistics and gradient
    states = held + t.sp * t.whole + t.whole + t.copies * t.whole
    return HeadBytes(held, states, item * chunk * columns + statistics + reduced)


def rotary_bytes(model: ModelConfig) -> float:
    """Returns the bytes of one stage's cos and sin, fp32."""
    if model.position_embedding != "rope":
        return 0.0
    rotated = int(model.head_size * model.rotary_percent) // 2
    return 2.0 * WIDE * model.seq_length * rotated


def batch_bytes(config: Config) -> float:
    """Returns the bytes of a micro-batch of data, on ranks that read it."""
    return float(_OF_TOKEN * config.micro_batch_size * config.model.seq_length)


# Micro-batches in flight: the schedule's orders walked once, as counts. Bytes are a matmul with the
# counts, so that one walk serves every model, micro-batch size and recomputation of a search.


SENDS = 8  # sends in flight: pipeline/executor.py
_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True)
class Moments:
    """States of one rank before an action; each row is a different one.

    Attributes:
        kind: index into F, B, I, W. chunk: of the action.
        live: by chunk, micro-batches between their forward and their backward (or I).
        deferred: by chunk, micro-batches between I and W. sent: sends that alone hold their tensor.
        begun: whether a backward of this step is done.
    """

    kind: NDArray[np.int64]
    chunk: NDArray[np.int64]
    live: NDArray[np.float64]
    deferred: NDArray[np.float64]
    sent: NDArray[np.float64]
    begun: NDArray[np.bool_]


def enough_microbatches(name: str, pp: int, microbatches: int) -> int:
    """Returns as many micro-batches as reach the peak: more only repeat the steady state."""
    if name == "gpipe" or microbatches <= 4 * pp:
        return microbatches
    return 3 * pp + microbatches % pp


_schedule = functools.lru_cache(maxsize=64)(make)


@functools.lru_cache(maxsize=4096)
def moments(name: str, pp: int, vpp: int, microbatches: int, rank: int) -> Moments:
    """Returns the states of `rank` under the schedule `name` with `vpp` chunks.

    They follow from the rank's own order: a walk of all ranks would cost a search too much.
    """
    made = _schedule(name, pp, enough_microbatches(name, pp, microbatches), vpp)
    live, deferred = [0] * vpp, [0] * vpp
    in_flight: deque[tuple[int, int]] = deque(maxlen=SENDS)  # (chunk, micro-batch); -1: a gradient
    done: set[tuple[int, int]] = set()  # forwards whose backward is done: their output is free
    seen: set[tuple[int, ...]] = set()
    around = made.placement.around(rank)
    for step in made.orders[rank]:
        kind, chunk, mb = step.kind, step.chunk, step.microbatch
        lone = sum(m < 0 or (c, m) in done for c, m in in_flight)
        seen.add((_KINDS.index(kind), chunk, lone, bool(done), *live, *deferred))
        _, before, after = around[chunk]
        if kind == Kind.W:
            deferred[chunk] -= 1
            continue
        forward = kind == Kind.F
        live[chunk] += 1 if forward else -1
        deferred[chunk] += kind == Kind.I
        if not forward:
            done.add((chunk, mb))
        reader = after if forward else before
        if reader is not None and reader[0] != rank:
            in_flight.append((chunk, mb if forward else -1))
    rows = np.array(sorted(seen))
    sent, counts = rows[:, 2].astype(float), rows[:, 4:].astype(float)
    return Moments(rows[:, 0], rows[:, 1], counts[:, :vpp], counts[:, vpp:], sent, rows[:, 3] > 0)
