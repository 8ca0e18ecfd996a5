"""Peak memory of parallel3d's own code, from the configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallel3d.blueprint.blueprint import Blueprint, StageBlueprint
from parallel3d.blueprint.buckets import LOOKUP_TOKENS, PIECE
from parallel3d.blueprint.in_flight import states_of
from parallel3d.blueprint.ops import Op, kept, widths
from parallel3d.blueprint.parameters import TABLE
from parallel3d.blueprint.rank import PipelineRank, flat_shards
from parallel3d.config.schema import Config
from parallel3d.estimate.search import LayoutChoice, configure, planned
from parallel3d.schedules.actions import Kind
from parallel3d.schedules.messages import OFFLOADED_BYTES, SLAB_BYTES


def peak_stage(config: Config) -> tuple[int, RankMemory]:
    """Returns (index along pp, peak memory) of the rank that needs most.

    Ranks between the ends differ by layers and by micro-batches in flight, of which earlier ones
    have more: only the ends, the middle, and the first rank of most layers are looked at.
    """
    blueprint = planned(config)
    pp = blueprint.layout.pp
    counts = [sum(len(stage.layers) for stage in blueprint.stages_of(i)) for i in range(pp)]
    most = counts.index(max(counts))
    seen = sorted({0, min(1, pp - 1), pp // 2, pp - 1, most})
    found = zip(seen, peak_memories(config, seen), strict=True)
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


WIDE = 4  # bytes of statistics and sums: fp32
_OF_TOKEN = 17  # bytes of a token's ids, labels and mask on the device
PHASES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward"}


class RankMemory(NamedTuple):
    """Bytes of one rank at its peak, by kind as `dryrun` names them."""

    parameters: float = 0.0
    gradients: float = 0.0
    masters: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    buffers: float = 0.0
    phase: str = ""

    @property
    def total(self) -> float:
        return sum(self[:-1])

    def plus(self, other: RankMemory) -> RankMemory:
        return RankMemory._make((*map(add, self[:-1], other[:-1]), self.phase))


def peak_memory(config: Config, index: int) -> RankMemory:
    """Returns the peak memory of rank `index` along pp, as `dryrun` finds it.

    `config` is checked, with dp and a named schedule. Dropout of attention probabilities and
    document masks are not modelled. Raises UserError if a stage would be empty.
    """
    return peak_memories(config, [index])[0]


def peak_memories(config: Config, indices: Sequence[int]) -> list[RankMemory]:
    """Returns `peak_memory` of some ranks of a pipeline."""
    blueprint = planned(config)
    ranks = [PipelineRank(blueprint, index) for index in indices]
    layer, head, found = layer_bytes(ranks[0]), head_bytes(ranks[0]), []
    for rank in ranks:
        peaks = [*_peaks(rank, layer, head), _of_optimizer(rank)]
        found.append(max(peaks, key=lambda peak: peak.total).plus(_state(rank)))
    return found


def _of_optimizer(rank: PipelineRank) -> RankMemory:
    """Returns the memory beside the state while the optimizer steps: of states in bf16 those of a
    piece in fp32, and random bits."""
    if rank.blueprint.optim.state != "bf16":
        return RankMemory()
    widest = max((s.numel for s in flat_shards(rank)), default=0)
    return RankMemory(buffers=3.0 * WIDE * min(PIECE, widest), phase="optimizer")


def _state(rank: PipelineRank) -> RankMemory:
    """Returns the memory between steps, and during them under zero 0 and 1."""
    blueprint, item, wide, dp = rank.blueprint, rank.item, rank.grad_item, rank.replicas
    numel = rank.layer_numel * rank.layer_count + rank.end_numel
    cut, spread = dp if blueprint.data.zero > 0 else 1, dp if blueprint.data.zero > 1 else 1
    moments_ = 1 if blueprint.optim.name == "sgd" else 2
    moment = 2 if blueprint.optim.state == "bf16" else wide
    average = wide * (blueprint.optim.ema_decay is not None)
    return RankMemory(
        parameters=0.0 if spread > 1 else float(item * numel),
        gradients=wide * numel / spread,
        masters=0.0 if item >= WIDE and spread == 1 else wide * numel / cut,
        optimizer=(moments_ * moment + average) * numel / cut,
        buffers=rotary_bytes(blueprint) * blueprint.pipeline.chunks,
    )


def _peaks(rank: PipelineRank, layer: LayerBytes, head: HeadBytes) -> Iterator[RankMemory]:
    """Yields the peaks of each kind of action on each stage, beside the state."""
    stream, sharded = rank.stream, rank.fully_sharded
    end = head.kept + sharded * _cast_table(rank)  # each forward computes its gradient
    kept = [_kept(stage, layer) for stage in rank.stages]
    held = [n + end * stage.last for n, stage in zip(kept, rank.stages, strict=True)]
    waits = [len(stage.layers) * layer.deferred for stage in rank.stages]
    message = stream / (rank.layout.tp if rank.sends_slices else 1)
    left = _left_by_backwards(rank) if sharded else {}
    extras = [fsdp_memory(rank, stage) if sharded else {} for stage in rank.stages]
    for (kind, chunk), seen in states_of(rank.blueprint, rank.index).items():
        if kind == Kind.W:  # no peak
            continue
        stage = rank.stages[chunk]
        reads = _OF_TOKEN * rank.tokens if stage.first or stage.last else 0.0
        base = seen.live @ held + seen.deferred @ waits + seen.in_flight * message
        fullest = int(base.argmax())
        for moment, more in _temporary(rank, stage, kind, kept[chunk], layer, head).items():
            phase = "head and loss" if moment in ("head", "cast") else PHASES[kind]
            logits = head.logits if moment == "head" else 0.0
            at, beside = fullest, extras[chunk].get(moment)
            if beside is not None:
                begun = seen.begun
                if moment in BEHIND or moment.startswith("next"):
                    # This backward has added to the sums, or freed the input.
                    begun = (begun | (np.arange(len(held)) == chunk)) & rank.accumulates
                total = base + sum(begun[:, c] * left[c].total for c in left)
                if moment in REDUCES and rank.accumulates:
                    total = np.where(seen.final, total, -1.0)
                at = int(total.argmax())
                for c in left:
                    beside = beside.plus(left[c]) if begun[at, c] else beside
            most = float(base[at]) + more
            peak = RankMemory(activations=most, logits=logits, buffers=reads, phase=phase)
            yield peak if beside is None else peak.plus(beside)


def _kept(stage: StageBlueprint, layer: LayerBytes) -> float:
    """Returns the activation bytes of a stage's layers between a micro-batch's forward and
    backward, on the device."""
    kept = stage.recomputed * layer.kept + (len(stage.layers) - stage.recomputed) * layer.plain
    return kept - sum(_moved(stage, layer))


def _moved(stage: StageBlueprint, layer: LayerBytes, turns: bool = False) -> list[float]:
    """Returns the bytes that each offloaded layer copies to the host; `turns`: the micro-batch's
    backward follows its forward, and the stage's last layer stays."""
    away = min(stage.offloaded, len(stage.layers) - turns)
    return [layer.moved if i < stage.recomputed else layer.moved_plain for i in range(away)]


def _temporary(
    rank: PipelineRank,
    stage: StageBlueprint,
    kind: Kind,
    kept: float,
    layer: LayerBytes,
    head: HeadBytes,
) -> dict[str, float]:
    """Returns the temporary activations of an action on a stage, by moment. `kept`: what its layers
    keep of a micro-batch."""
    stream, whole, sp, layers = rank.stream, rank.hidden, rank.sp, len(stage.layers)
    # Of offloaded layers the one that computes and its neighbour are on the device, and unless the
    # backward follows its forward one of the next action.
    one, whole_stage = max(_moved(stage, layer), default=0.0), stage.offloaded == layers
    ahead = 0.0 if turns_around(rank, stage) else one
    if kind == Kind.F:
        near = one * max(0, min(2, 2 - layers + stage.offloaded, stage.offloaded))
        found = {"forward": kept + near + ahead + layer.forward}
        if stage.last:
            states = kept + one * whole_stage + ahead + head.states
            found |= {"cast": states, "head": states}
        return found
    near = one * min(1 + whole_stage, stage.offloaded)
    received = stream if stage.last else 0.0  # computed and kept by the head
    before = kept / layers  # of a layer whose backward is done
    if kind == Kind.B:
        begins = near + ahead + layer.again
        found = {"backward": begins + layer.backward - received}
        if rank.fully_sharded:  # elsewhere a weight's gradient is added in place
            matmuls = (1 + 2 * sp) * whole - layer.inner
            found |= {
                "matmuls": begins + matmuls,
                "attention": begins + layer.attention - received,
                "next backward": begins + layer.backward - before,
                "next matmuls": begins + matmuls - before,
                "next attention": begins + layer.attention - before,
                "made": near + stream - before,
                "reduction": near + stream - before,
                "later": near + stream - min(2, layers) * before,
                **dict.fromkeys(ENDS, stream - kept - head.kept * stage.last),
            }
    else:
        late = (layers - 1) * (layer.deferred - before)
        found = {
            "backward": near + layer.halved + layer.again - received + max(late, 0.0),
            "first layer": near + layers * layer.deferred - kept + whole + 2 * stream,
        }
    if stage.first:
        # The look-up's backward, after all layers: gathered; of a part of the tokens masked, and
        # cast to the table's fp32.
        part = min(1.0, LOOKUP_TOKENS / rank.tokens)
        table = stream + sp * whole + part * whole * (1 + WIDE / rank.item * (rank.item < WIDE))
        found["look-up"] = layers * layer.deferred * (kind == Kind.I) - kept + table
    return found


# Memory of FSDP2 in addition to shards, by moment of a step (`data_parallel/fully_sharded.py`).

# Moments of a layer's backward, and the weight whose gradient there is from then on.
GRADIENTS = {"backward": "mlp.down", "matmuls": "mlp.up", "attention": "attention.out"}
REDUCES = ("reduction", "later")  # of the layers; where gradients accumulate in the last backward
# Of the embedding and the head: the sum of a tied table's two gradients; the input of the
# reduce-scatter of all, in fp32; and its result beside it.
ENDS = ("tied", "ends", "ends' shard")
# After a backward's first gradients, as is each "next …".
BEHIND = (*REDUCES, *ENDS)


def _cast_table(rank: PipelineRank) -> float:
    """Returns the bytes of the head's weight in the compute type, as its gradient is before its
    reduction; 0 on ranks without the head."""
    model = rank.blueprint.model
    return rank.item * (model.padded_vocab_size // rank.layout.tp * model.hidden_size) * rank.last


def _left_by_backwards(rank: PipelineRank) -> dict[int, RankMemory]:
    """Returns, by chunk, what its first backward leaves until the last one: sums of gradients, or
    the input of the last reduce-scatter, which the next one frees, and of several chunks the units
    that had no backward."""
    one, found = rank.layer_numel, {}
    for chunk, stage in enumerate(rank.stages):
        ends = sum(p.numel for p in rank.ends_read(stage))
        if rank.accumulates:
            if stage.first and not stage.last and rank.last and rank.table.tied:
                ends -= rank.table.numel  # the last stage's backward is before
            found[chunk] = RankMemory(gradients=float(WIDE * (one * len(stage.layers) + ends)))
        elif rank.blueprint.microbatches > 1 and len(rank.stages) == 1:
            found[chunk] = RankMemory(buffers=float(WIDE * (ends or one)))
    return found


def fsdp_memory(rank: PipelineRank, stage: StageBlueprint) -> dict[str, RankMemory]:
    """Returns FSDP2's bytes by moment of an action on a stage."""
    blueprint, item, dp, layers = rank.blueprint, rank.item, rank.replicas, len(stage.layers)
    one, first = rank.layer_numel, stage.first
    ends = sum(p.numel for p in rank.ends_read(stage))
    weights = {
        op.name: item * op.inputs * op.outputs for op in rank.layer.plain if op.kind == "gemm"
    }
    cast = float(_cast_table(rank) * stage.last)
    once = blueprint.microbatches == 1
    sums, own = float(WIDE * one), float(item * one)
    gathered = own if blueprint.data.zero == 3 else 0.0
    # Stage 2 frees a layer after its last backward: the first ones reduce it while it is whole.
    stays = own if blueprint.data.zero == 2 and not once and not rank.accumulates else 0.0
    others = 0 if blueprint.data.zero == 3 else one * (rank.layer_count - 1)
    whole = float(item * (others + rank.end_numel))
    ahead, late = gathered * (layers > 1), gathered * (layers > 2)
    head = whole + own - gathered
    wide = 0.0 if rank.accumulates else own  # the layer's gradients, before the cast to fp32
    last = own if blueprint.data.zero == 3 or once else 0.0
    found = {
        "forward": RankMemory(whole + own, buffers=last),
        "head": RankMemory(head, buffers=last, activations=2 * cast),
        "cast": RankMemory(head, buffers=last, activations=3 * cast),
    }
    # Tied: two gradients, of which the head's is kept; their sum is made before all are reduced.
    both = first and stage.last and all(p.name != TABLE for p in rank.ends)
    cast = 0.0 if both else cast
    of_layers = {
        "reduction": (whole + stays, ahead + wide + sums),
        "made": (whole + own, ahead + own),
    }
    made = 0.0
    for moment, name in GRADIENTS.items():
        made += weights[name]
        of_layers[moment] = whole + own, ahead + made
        if layers > 1 and not rank.accumulates:  # while the layer before is reduced
            of_layers[f"next {moment}"] = whole + gathered + stays, late + made + sums
    if layers > 1:
        later = late + wide + sums * (not rank.accumulates)
        of_layers["later"] = whole + gathered + stays, later
    for moment, (parameters, buffers) in of_layers.items():
        found[moment] = RankMemory(parameters, buffers=buffers, activations=cast)
    model = blueprint.model
    table = item * model.hidden_size * model.padded_vocab_size / rank.layout.tp * first
    start = 0.0 if once else head
    if both:
        found["tied"] = RankMemory(
            item * rank.end_numel if once else head,
            buffers=0.0 if rank.accumulates else sums,
            activations=2 * table,
        )
    if rank.accumulates:  # the last micro-batch has freed the reduced gradients
        found["look-up"] = RankMemory(whole + own, activations=table)
        found["ends"] = RankMemory(whole + own, activations=cast + table)
        return found
    found["ends"] = RankMemory(start, buffers=float(WIDE * ends), activations=cast + table)
    # A gradient of the table is freed before the shard is allocated, unless the look-up is the
    # only reader: autograd holds what its last node returned.
    if first:
        freed = table * (len(rank.ends_read(stage)) > 1)
    else:
        freed = float(_cast_table(rank)) * (rank.first and rank.table.tied)
    found["ends' shard"] = found["ends"].plus(
        RankMemory(buffers=WIDE * ends / dp, activations=-freed)
    )
    return found


# Bytes of one layer and of the head for one micro-batch. What stays until the backward is summed
# over the layer's operations; temporary tensors are in the order in which `models/transformer.py`
# and `tensor_parallel/` create them on an accelerator. `benchmarks/plan_dryrun.py` compares both
# with `parallel3d dryrun`, which runs that code.


def bytes_kept(rank: PipelineRank, ops: Sequence[Op]) -> float:
    """Returns the bytes of a micro-batch that these operations keep until their backward."""
    elements, statistics = kept(ops)
    return rank.tokens * (rank.item * elements + WIDE * statistics)


def bytes_moved(rank: PipelineRank, ops: Sequence[Op]) -> float:
    """Returns the bytes of `bytes_kept` that are in tensors large enough to be offloaded."""
    sizes = [rank.tokens * rank.item * op.keeps for op in ops]
    sizes += [rank.tokens * WIDE * op.statistics for op in ops]
    return sum(size for size in sizes if size >= OFFLOADED_BYTES)


def turns_around(rank: PipelineRank, stage: StageBlueprint) -> bool:
    """Whether a micro-batch's backward on the stage follows its forward."""
    return stage.last and rank.blueprint.pipeline.name != "gpipe"


def host_memory(config: Config, index: int) -> float:
    """Returns the bytes of pinned memory that rank `index` along pp offloads activations to."""
    rank = PipelineRank(planned(config), index)
    layer, waiting, running = layer_bytes(rank), [], []
    for stage in rank.stages:
        turns = turns_around(rank, stage)
        slabs = [math.ceil(n / SLAB_BYTES) for n in _moved(stage, layer, turns)]
        waiting.append(sum(slabs))
        # One layer of the backward, or of the next action, is on its way back.
        back = -max(slabs, default=0)
        forward = sum(slabs) + back * (not turns)
        running.append({Kind.F: forward, Kind.B: back, Kind.I: back, Kind.W: 0})
    seen = states_of(rank.blueprint, index).items()
    most = max((s.live @ waiting).max() + running[chunk][kind] for (kind, chunk), s in seen)
    return SLAB_BYTES * float(most)


class LayerBytes(NamedTuple):
    """Bytes of one layer and micro-batch.

    Attributes:
        kept: from its forward to its backward; plain: of a layer that repeats nothing.
        moved, moved_plain: of these, what is offloaded.
        deferred: of deferred weight gradients, from I to W (`parameters/gradients.py`).
        forward, backward, halved: temporary, at the peak of the stage's last layer: in the forward,
            in a whole backward, and in I.
        attention: temporary beside `again` in the backward of its attention.
        again: recomputed before that backward.
        inner: the output of the activation function.
    """

    kept: float
    plain: float
    moved: float
    moved_plain: float
    deferred: float
    forward: float
    backward: float
    halved: float
    attention: float
    again: float
    inner: float


def layer_bytes(rank: PipelineRank) -> LayerBytes:
    """Returns the bytes of one layer with the run's recomputation."""
    layer, sp, copies, row = rank.layer, rank.sp, rank.copies, rank.tokens * rank.item
    whole, stream = rank.hidden, rank.stream
    twice = {op.name: op for op in layer.repeated}
    up, inner = (row * op.outputs for op in layer.plain if op.name in ("mlp.up", "mlp.activation"))
    # The MLP's segment, with its norm if the two are one segment.
    mlp = [op for op in layer.repeated if op.name.startswith("mlp.")]
    norm = [twice["mlp_norm"]] if "mlp_norm" in twice and "mlp.up" in twice else []
    again, made = bytes_kept(rank, [*mlp, *norm]), bytes_kept(rank, mlp)
    # Operands of the weight gradients, and the gradients of their outputs.
    deferred = sum(
        stream + row * op.outputs if op.split == "column" else row * op.inputs + whole
        for op in layer.ops
        if op.kind == "gemm"
    )
    scattered = whole * (1 + copies) + stream * (1 + copies) if sp else whole
    # The last GEMM's result with its reduction, then the sum with the stream.
    activation = inner * ("mlp.activation" in twice)
    ending = stream + max(activation + scattered, (stream if sp else whole) + stream)
    if "attention.out" in twice:  # the whole layer
        forward = 3 * stream + inner + max(up, scattered)
        again = bytes_kept(rank, layer.repeated)
    else:
        forward = max(ending, stream + made)
    first = max(
        (whole + inner) * sp, up, (stream * copies + (2 + copies) * whole + stream) * sp - inner
    )
    halved = whole * sp + inner + up
    if rank.mlp_chunks > 1 and not rank.blueprint.recompute_layers:
        # Results, or gradients, of all chunks beside one chunk's tensors; or attention's q, k, v,
        # result and all of their gradients, or that of its input, gathered and not yet reduced.
        sizes = {op.name: row * op.outputs for op in layer.plain}
        qkv, gathering = sizes["attention.qkv"], ((2 + copies) * whole + stream) * sp
        attention = max(2 * (qkv + sizes["attention"]), qkv + gathering)
        whole_again = again
        again, first, inner, made = (n / rank.mlp_chunks for n in (again, first, inner, made))
        forward = max(2 * stream + made, stream + attention / 2, ending)
        first = max(stream + first, attention - again)
        halved += whole_again - again  # deferred weight gradients keep those of all chunks
    kept, plain = bytes_kept(rank, layer.kept), bytes_kept(rank, layer.plain)
    moved, moved_plain = bytes_moved(rank, layer.kept), bytes_moved(rank, layer.plain)
    first, halved = stream + first, stream + halved
    at = next(i for i, op in enumerate(layer.ops) if op.kind == "attention")
    qkv, queries = row * layer.ops[at].inputs, row * layer.ops[at].outputs
    later = layer.ops[at + 1 :]
    split = ContextBytes(0.0, 0.0, qkv + queries)
    if rank.blueprint.layout.cp > 1:
        split = context_bytes(rank)
        plain, moved_plain = plain + split.kept, moved_plain + split.kept
        if "attention" not in twice:
            kept, moved = kept + split.kept, moved + split.kept
    if "attention.out" in twice:
        here = stream + split.backward - bytes_kept(rank, later)
        again += split.gathered + split.kept
    else:
        free = bytes_kept(rank, [op for op in later if op in layer.kept])
        before = [op for op in layer.repeated if op.name.startswith("attention")]
        here = stream + split.backward + split.gathered - free - again
        here += bytes_kept(rank, before) + qkv * bool(before)
    if rank.blueprint.layout.cp > 1:
        first, halved = max(first, here), max(halved, here)
    return LayerBytes(
        kept, plain, moved, moved_plain, deferred, forward, first, halved, here, again, inner
    )


class ContextBytes(NamedTuple):
    """Bytes of one layer's attention over context-parallel ranks (context_parallel/attention.py).

    Attributes:
        kept: more than one rank's attention from its forward to its backward.
        gathered: keys and values that a repeated forward keeps for the backward.
        backward: temporary, without `gathered`.
    """

    kept: float
    gathered: float
    backward: float


def context_bytes(rank: PipelineRank) -> ContextBytes:
    blueprint, wide = rank.blueprint, max(WIDE, rank.item)
    w = widths(blueprint.model, rank.layout.tp)
    token = rank.tokens * rank.item
    queries, own, times = token * w.queries, 2 * token * w.keys, wide / rank.item
    result = times * queries + wide * rank.tokens * w.heads  # merged in fp32 or better
    if blueprint.layer.cp_style == "heads":  # kept with parts of the heads too
        copies = max(blueprint.layout.cp / w.key_heads, 1)
        return ContextBytes(queries + (copies - 1) * own, 0.0, 3 * queries)
    if blueprint.layer.cp_style == "ring":
        return ContextBytes(0.0, 0.0, result + queries + 3 * (1 + times) * own)
    some, several = blueprint.layout.cp * own / rank.head_groups, rank.head_groups > 1
    keeps = any(op.kind == "attention" for op in rank.layer.repeated)
    gathered = blueprint.layout.cp * own * keeps
    # Some in rank order, the next, some in order, their gradients, and those in rank order.
    backward = (1 + several + 2 * times + (2 + several) * (not keeps)) * some
    return ContextBytes(0.0, gathered, result + queries + own + backward)


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


def head_bytes(rank: PipelineRank) -> HeadBytes:
    """Returns the bytes of `tensor_parallel/loss.py`: the last chunk's logits and the gradient."""
    whole, stream, sp, chunk = rank.hidden, rank.stream, rank.sp, max(rank.loss_chunks)
    statistics = chunk * (25 + 24 * rank.layout.tp)
    norm = bytes_kept(rank, [op for op in rank.layer.plain if op.name == "mlp_norm"])
    held = norm + stream  # the norm's input, statistics and gradient
    states = held + sp * whole + whole + rank.copies * whole
    logits = rank.item * chunk * rank.columns + statistics + (stream if sp else 0.0)
    return HeadBytes(held, states, logits)


def rotary_bytes(blueprint: Blueprint) -> float:
    """Returns the bytes of one stage's cos and sin, fp32."""
    model = blueprint.model
    if model.position_embedding != "rope":
        return 0.0
    rotated = int(model.head_size * model.rotary_percent) // 2
    return 2.0 * WIDE * model.seq_length * rotated
