"""Memory of every layout of a search, by what parallel3d's own code holds."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parallel3d.config.schema import Config, ModelConfig
from parallel3d.config.sections import parts_of
from parallel3d.plan.memory import MemoryEstimate
from parallel3d.plan.search import LayoutChoice
from parallel3d.schedules.actions import Kind
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import LOOPED, Schedule, make
from parallel3d.sizes.balance import (
    balance_chunks,
    head_cost,
    layer_cost,
    layers_of_stages,
    placement_of,
    sends_slices,
)
from parallel3d.sizes.model import LocalParameter, loss_chunk_counts, recomputing, stage_parameters
from parallel3d.sizes.traffic import TIED_TABLES, assign, padded_numel, pipeline_ranks, transfers
from parallel3d.sizes.transfer import ACTIVATION_BYTES, PipelineRank
from parallel3d.topology.layout import layout_of

STATE = ("parameters", "gradients", "masters", "optimizer")


def configure(config: Config, choice: LayoutChoice) -> Config:
    """The configuration with a choice in it, and sequence parallelism where there is tp."""
    return replace(
        config,
        tp=choice.tp, pp=choice.pp, dp=choice.dp, vpp=choice.vpp, zero=choice.zero,
        sp=choice.tp > 1, micro_batch_size=choice.micro_batch, recompute=choice.recompute,
        schedule=replace(config.schedule, name=choice.schedule),
    )  # fmt: skip


def fullest_stage(config: Config) -> tuple[int, Held]:
    """(index along pp, what it holds) of the rank that holds most.

    Ranks between the ends differ by layers and by micro-batches under way, of which earlier ones
    have more: looked at are the ends, the middle, and the first ones of most layers.
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
) -> MemoryEstimate:
    """Bytes of each choice's fullest GPU, with `reserve` bytes that no tensor gets; `tell` is
    called with how far they are."""
    rows = []
    for done, choice in enumerate(choices):
        if tell is not None:
            tell(f"layout {done} of {len(choices)}")
        rows.append(fullest_stage(configure(config, choice)))
    index = np.array([i for i, _ in rows])
    total = np.array([h.total for _, h in rows]) + reserve
    state = np.array([sum(getattr(h, name) for name in STATE) for _, h in rows])
    activations = np.array([h.activations + h.buffers for _, h in rows])
    logits = np.array([h.logits for _, h in rows])
    last = np.array([choice.pp - 1 for choice in choices])
    stage = np.where(index == 0, 0, np.where(index == last, 2, 1))
    return MemoryEstimate(total, state, activations, logits, stage, total)


def least_memory(
    config: Config,
    choices: Sequence[LayoutChoice],
    reserve: float,
    enough: float,
    tell: Callable[[str], None] | None = None,
) -> float:
    """The least of `memories`' totals, or one that is `enough`, without looking at all choices.

    Those that cannot hold little come last, and not at all where another holds less than they must.
    """
    configs = [configure(config, choice) for choice in choices]
    bounds = [held_at_least(one) * (1 - 1e-9) + reserve for one in configs]  # sums are rounded
    found = math.inf
    for done, i in enumerate(sorted(range(len(configs)), key=bounds.__getitem__)):
        if found <= enough or found <= bounds[i]:
            break
        if tell is not None:
            tell(f"layout {done} of {len(configs)}")
        found = min(found, fullest_stage(configs[i])[1].total + reserve)
    return found


# What FSDP2 holds beside the shards, by moment of a step (`data_parallel/fully_sharded.py`).
#
# Its last all-gather's buffer lives until the next one; the input of its last reduce-scatter too.


Extra = dict[str, dict[str, float]]  # moment → kind of memory → bytes


@dataclass(frozen=True)
class Parameters:
    """Elements of a rank: of one layer, of the largest product, and all; of what is no layer."""

    layer: int
    ends: int
    table: int
    all: int


def added(extra: Extra, name: str, begun: bool) -> dict[str, float]:
    """What FSDP2 adds at a moment: what it always does, and behind the step's first backward."""
    found: dict[str, float] = {}
    behind = begun or name in ("reduction", "later", "ends", "out")
    for key in (name, "begun" if behind else ""):
        for kind, nbytes in extra.get(key, {}).items():
            found[kind] = found.get(kind, 0.0) + nbytes
    return found


def sharded(config: Config, parameters: Parameters, layers: int, first: bool) -> Extra:
    """Of a stage of `layers`, the `first` one or not: what it adds at each moment."""
    item, one, ends = ACTIVATION_BYTES[config.precision.name], parameters.layer, parameters.ends
    model, tp, dp = config.model, config.tp, config.dp or 1
    down = item * model.hidden_size * model.ffn_size // tp
    up = down * (2 if model.activation == "swiglu" else 1)
    cast = float(item * parameters.table)  # the table's gradient, until its reduction
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
    before = reduced if every else 0.0  # counted behind the first backward, and free by then
    head = whole + own - gathered
    wide = item * one if every or once else 0.0  # of the layer, before they are widened
    last = float(item * one) if config.zero == 3 or once else 0.0
    found["forward"] = {"parameters": whole + own, "buffers": last}
    found["head"] = {"parameters": head, "buffers": last, "activations": 2 * cast}
    found["cast"] = {"parameters": head, "buffers": last, "activations": 3 * cast}
    both = first and model.tie_embeddings and cast > 0  # one table: its gradients meet at the end
    cast = 0.0 if both else cast
    for name, products in (("backward", down), ("products", down + up)):
        found[name] = {
            "parameters": whole + own,
            "buffers": ahead + products,
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
    if config.zero == 2 and not once:  # the last micro-batch has freed what is reduced
        return found
    table = item * model.hidden_size * model.padded_vocab_size / tp * first
    scattered = reduced / dp if ends else 0.0
    start = {"parameters": 0.0 if once else head, "buffers": (reduced if ends else 0.0) - before}
    found["ends"] = start | {"activations": cast + (1 + both) * table}
    # The gradients are copied and free, the scattered sums are there.
    found["out"] = start | {"activations": min(cast, table) + both * table}
    found["out"]["buffers"] += scattered
    if not first:  # autograd holds them until its last node is done
        found["ends"]["buffers"] += scattered
    return found


# Bytes of one layer, and of the head, for one micro-batch: line by line what the code keeps.
#
# Each sum names tensors in the order in which `models/transformer.py` and `tensor_parallel/` make
# them on an accelerator. `parallel3d dryrun` plays that code; `benchmarks/plan_dryrun.py` compares.


WIDE = 4  # bytes of statistics and sums: fp32
_OF_TOKEN = 17  # bytes of a token's ids, labels and mask on the device


class Tensors(NamedTuple):
    """Bytes on one rank of what a micro-batch passes through in a layer.

    Attributes:
        whole: hidden states of all tokens; stream: what stands between blocks, 1/tp of them under
            sequence parallelism.
        qkv, attended, up, inner: the four GEMMs' other ends.
        sums: attention's log-sum-exp. norm: what a norm keeps beside its input.
        head_norms: what norms of q and k keep.
        copies: 1 where a sequence is not contiguous to collectives (sp, micro-batches of several).
        sp: 0 or 1. sent: a message to the next stage.
    """

    whole: float
    stream: float
    qkv: float
    attended: float
    up: float
    inner: float
    sums: float
    norm: float
    head_norms: float
    copies: int
    sp: int
    sent: float


def tensors(config: Config) -> Tensors:
    """Of the configuration's model, layout and micro-batch."""
    model, tp, b = config.model, config.tp, config.micro_batch_size
    item, rows = ACTIVATION_BYTES[config.precision.name], b * model.seq_length
    sp = int(config.sp and tp > 1)
    share = tp if sp else 1
    queries = model.num_attention_heads * model.head_size / tp
    keys = max(model.kv_heads / tp, 1) * model.head_size
    inner = item * rows * model.ffn_size / tp
    qkv = item * rows * (queries + 2 * keys)
    heads = (queries + keys) / model.head_size
    stream = item * rows * model.hidden_size / share
    slices = tp if sends_slices(config, on_accelerator=config.device != "cpu") else 1
    return Tensors(
        whole=item * rows * model.hidden_size,
        stream=stream,
        qkv=qkv,
        attended=item * rows * queries,
        up=inner * (2 if model.activation == "swiglu" else 1),
        inner=inner,
        sums=WIDE * rows * model.num_attention_heads / tp,
        norm=WIDE * rows / share * (2 if model.norm == "layernorm" else 1),
        head_norms=qkv + WIDE * rows * heads if model.qk_norm else 0.0,
        copies=int(sp and b > 1),
        sp=sp,
        # A part of a single sequence is a view, which keeps the whole.
        sent=stream / slices if b > 1 else stream,
    )


class LayerBytes(NamedTuple):
    """Bytes of one layer and micro-batch.

    Attributes:
        kept: from its forward to its backward.
        deferred: of weight gradients that wait, from I to W (`parameters/gradients.py`).
        forward, backward, halved: beside all that is kept, at the fullest moment of the stage's
            last layer: in the forward, in the backward that comes to it first, and in its half I.
        again: what recomputation makes before that backward.
    """

    kept: float
    deferred: float
    forward: float
    backward: float
    halved: float
    again: float


def layer_bytes(t: Tensors, parts: Collection[str]) -> LayerBytes:
    """With what `recompute` names made again."""
    norms = 2 * (t.stream + t.norm)  # their results and statistics
    attention = t.attended + t.sums + t.head_norms  # made again from the projection
    activation, mlp = t.inner * bool({"activation", "mlp"} & {*parts}), t.up * ("mlp" in parts)
    whole = 2 * t.stream + norms + t.qkv + attention + t.up + t.inner
    kept = whole - norms * ("norm" in parts) - attention * ("attention" in parts)
    kept -= activation + mlp
    deferred = 2 * t.stream + t.qkv + t.attended + t.up + t.inner + 2 * t.whole
    scattered = t.whole * (1 + t.copies) + t.stream * (1 + t.copies) if t.sp else t.whole
    gathered = t.whole * (1 + t.copies) if t.sp else 0.0
    # attention's result, the last GEMM's with its reduction, then the sum with the stream
    ending = t.stream + max(activation + scattered, (t.stream if t.sp else t.whole) + t.stream)
    if "layer" in parts:
        inside = 3 * t.stream + max(gathered + t.up, t.up + t.inner, t.inner + scattered)
        forward = max(inside, ending + t.stream + t.inner)
        kept, again = t.stream, whole - t.stream
    else:
        forward = max(ending, t.stream + activation + mlp)
        again = activation + mlp + norms / 2 * ({"norm", "mlp"} <= {*parts})
    received = t.stream
    first = max(
        (t.whole + max(t.inner, t.copies * t.whole, t.copies * t.stream)) * t.sp,
        t.inner,
        t.up,
        (t.stream * t.copies + (2 + t.copies) * t.whole + t.stream) * t.sp - t.inner,
    )
    kept_whole = t.whole if t.sp else 0.0
    halved = max(first, kept_whole + t.inner + t.up)
    return LayerBytes(kept, deferred, forward, received + first, received + halved, again)


class HeadBytes(NamedTuple):
    """Bytes of the last stage's end for one micro-batch.

    Attributes:
        kept: from the forward, which makes the gradients, to the backward.
        states: hidden states and their gradient at the fullest moment of the forward.
        logits: at that moment, with their statistics.
    """

    kept: float
    states: float
    logits: float


def head_bytes(config: Config, t: Tensors) -> HeadBytes:
    """`tensor_parallel/loss.py`: the last chunk's logits stand beside the gradient."""
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
    kept = t.stream + t.norm + t.stream  # the norm's input and the gradient of it
    states = t.stream + t.norm + t.stream + t.sp * t.whole + t.whole + t.copies * t.whole
    return HeadBytes(kept, states, item * chunk * columns + statistics + reduced)


def rotary_bytes(model: ModelConfig) -> float:
    """cos and sin of one stage, fp32."""
    if model.position_embedding != "rope":
        return 0.0
    rotated = int(model.head_size * model.rotary_percent) // 2
    return 2.0 * WIDE * model.seq_length * rotated


def batch_bytes(config: Config) -> float:
    """A micro-batch of the data, on ranks that read it."""
    return float(_OF_TOKEN * config.micro_batch_size * config.model.seq_length)


# What a rank of a pipeline holds when: the schedule's orders, walked once, as counts.
#
# A moment is an action with what is there when it begins. Bytes are a product with it, so that one
# walk serves every model, micro-batch and recomputation of a search.


SENDS = 8  # under way at a time: pipeline/executor.py
_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True)
class Moments:
    """Of one rank; a row is a moment, different from all others.

    Attributes:
        kind: index into F, B, I, W. chunk: of the action.
        live: by chunk, micro-batches between their forward and their (first half of the) backward.
        deferred: by chunk, those between I and W. sent: messages that nothing else holds.
        begun: whether a backward of this step is done.
    """

    kind: NDArray[np.int64]
    chunk: NDArray[np.int64]
    live: NDArray[np.float64]
    deferred: NDArray[np.float64]
    sent: NDArray[np.float64]
    begun: NDArray[np.bool_]


def few(name: str, pp: int, microbatches: int) -> int:
    """As many micro-batches as hold as much as all of them: more only repeat the steady state."""
    if name == "gpipe" or microbatches <= 4 * pp:
        return microbatches
    if name in LOOPED and microbatches % pp:
        return 3 * pp + microbatches % pp
    return 3 * pp + microbatches % pp


@functools.lru_cache(maxsize=64)
def _schedule(name: str, pp: int, vpp: int, microbatches: int) -> Schedule:
    return make(name, pp, microbatches, vpp)


@functools.lru_cache(maxsize=4096)
def moments(name: str, pp: int, vpp: int, microbatches: int, rank: int) -> Moments:
    """Of `rank` under the schedule `name`, one of schedules.FORMS, with `vpp` chunks."""
    schedule = _schedule(name, pp, vpp, few(name, pp, microbatches))
    placement = schedule.placement
    live, deferred = [0] * vpp, [0] * vpp
    under_way: deque[tuple[int, int]] = deque(maxlen=SENDS)  # (chunk, micro-batch), -1: a gradient
    done: set[tuple[int, int]] = set()  # forwards whose backward is done: their result is free
    seen: set[tuple[int, ...]] = set()
    sends = [_sends(placement, rank, chunk) for chunk in range(vpp)]
    begun = 0
    for step in schedule.orders[rank]:
        kind, chunk, mb = step.kind, step.chunk, step.microbatch
        lone = sum(m < 0 or (c, m) in done for c, m in under_way)
        seen.add((_KINDS.index(kind), chunk, lone, begun, *live, *deferred))
        if kind == Kind.F:
            live[chunk] += 1
            if sends[chunk][1]:
                under_way.append((chunk, mb))
        elif kind == Kind.W:
            deferred[chunk] -= 1
        else:
            live[chunk] -= 1
            deferred[chunk] += kind == Kind.I
            done.add((chunk, mb))
            begun = 1
            if sends[chunk][0]:
                under_way.append((chunk, -1))
    rows = np.array(sorted(seen))
    return Moments(
        rows[:, 0],
        rows[:, 1],
        rows[:, 4 : 4 + vpp].astype(float),
        rows[:, 4 + vpp :].astype(float),
        rows[:, 2].astype(float),
        rows[:, 3] > 0,
    )


def _sends(placement: StageAssignment, rank: int, chunk: int) -> tuple[bool, bool]:
    """Whether the stage before and the one after lie on other ranks."""
    before, after = (placement.neighbour(rank, chunk, offset) for offset in (-1, 1))
    return tuple(place is not None and place[0] != rank for place in (before, after))  # type: ignore[return-value]


# Kernels that a rank of parallel3d launches in a step, by part: counted line by line in the code.
#
# `parallel3d dryrun` counts them as they are launched; `benchmarks/plan_dryrun.py` compares.


_CHUNK, _CHUNKS = 65536, 320  # elements, and pieces of so many that one launch over lists takes
_LISTS = {"norm": 110, "adamw": 36, "sgd": 48}  # tensors of a launch


def launches(config: Config, index: int) -> dict[str, float]:
    """Launches of rank `index` along pp, by the parts of `dryrun`; its place in tp and dp is 0.

    `config` is checked. Dropout, label smoothing and z-loss add to it what is not counted here.
    """
    layout = layout_of(config)
    rank, t = pipeline_ranks(config, layout)[index], tensors(config)
    count, sharded = config.num_microbatches, config.zero > 1 and layout.dp > 1
    layers, again, parts = rank.layer_count, rank.recomputed_layers, rank.recompute
    products = 3 if "layer" in parts else int("mlp" in parts)
    attended = bool(parts & {"attention", "layer"})
    found = {
        "gemm_layers": count * (12 * layers + products * again),
        "attention": count * (2 * layers + attended * again),
        "blocks": count * _blocks(config, rank, t, layers, again, sharded),
        "other": _other(config, rank, t, count),
        "optimizer": _optimizer(config, rank, count, sharded),
        "communication": sum(
            x.count * (1 + (x.op == "send_recv")) for x in transfers(config, layout, index)
        ),
    }
    if rank.last:
        chunks = _chunks(config, rank)
        found["loss"] = count * (5 + 21 * chunks + 4 * t.copies + 2 * sharded)
        found["gemm_head"] = count * 3 * chunks
    if sharded:
        found["sharding"] = _sharding(config, rank, count, layers)
    return {name: float(value) for name, value in found.items()}


def _blocks(
    config: Config, rank: PipelineRank, t: Tensors, layers: int, again: int, sharded: bool
) -> int:
    """Between the GEMMs, of one micro-batch: a layer's norms, rotation, activation and sums, each
    with its backward; biases; copies that make a sequence contiguous. Less a sum that is in the
    kernel of its norm, and the gradients of both residuals, which are in those of the norms."""
    model = config.model
    rope, learned = (model.position_embedding == kind for kind in ("rope", "learned"))
    biased = model.out_bias + model.bias
    each = 11 + rope + 2 * model.qk_norm + model.qkv_bias + model.bias + 2 * biased + 20 * t.copies
    ends = (2 + sharded) * rank.last + 2 * (learned + t.copies) * rank.first
    fused = (layers - again * ("norm" in rank.recompute)) * (model.norm == "rmsnorm")
    return layers * each - 3 * fused + again * _again(model, t, rank.recompute) + ends


def _again(model: ModelConfig, t: Tensors, parts: Collection[str]) -> int:
    """Of a layer, those between the GEMMs that recomputation runs once more."""
    inside = (model.position_embedding == "rope") + model.qk_norm
    if "layer" in parts:
        apart = model.norm != "rmsnorm" or "norm" in parts
        return inside + 3 + apart + model.out_bias + 6 * t.copies
    activated = bool({"activation", "mlp"} & {*parts})
    gathered = 2 * t.copies * ("mlp" in parts)
    return inside * ("attention" in parts) + 2 * ("norm" in parts) + activated + gathered


def _other(config: Config, rank: PipelineRank, t: Tensors, count: int) -> int:
    """The batch, the embedding, the executor's own, and what the trainer does once."""
    placement, model = rank.placement, config.model
    each = 3 * placement.chunks + 2 * rank.last + (4 if rank.first or rank.last else 1)
    if rank.first:
        each += 10 + (model.position_embedding == "learned") + 2 * t.copies
    if rank.sends_slices and config.micro_batch_size > 1:
        # A part is cut out of each message, and two copies make one whole again.
        each += 3 * (rank.neighbours(1) + rank.neighbours(-1))
    return count * each + 11 + rank.last + rank.is_tied_to_another


def _chunks(config: Config, rank: PipelineRank) -> int:
    columns = config.model.padded_vocab_size
    columns //= config.tp if config.model.parallel_output else 1
    accelerated = config.device != "cpu"
    item, most = rank.item, config.loss.chunk_tokens
    counts = loss_chunk_counts(rank.tokens, columns, most, item=item, on_accelerator=accelerated)
    return sum(counts.values())


def _sharding(config: Config, rank: PipelineRank, count: int, layers: int) -> int:
    """What FSDP2 copies: a unit's parameters into a flat buffer and out of it, its gradients."""
    all_of = len(rank.parameters)
    ends = sum(not p.name.startswith("layers.") for p in rank.parameters)
    of_layers = all_of - ends + 2 * layers
    root = ends + 2 if ends else 0
    every = config.ddp.reduces_every_microbatch(config.zero)
    units = layers + (ends > 0)
    gathers = 2 * count * of_layers + root if config.zero == 3 else of_layers + root
    widened = 0 if every or count == 1 else all_of
    return gathers + count * all_of + widened + units * (count if every else 1)


def _optimizer(config: Config, rank: PipelineRank, count: int, sharded: bool) -> int:
    """Gradients zeroed, summed, normed; the update; the parameters written back."""
    fixed = 8 + 2 * (config.optim.name == "adamw")
    if sharded:
        dp = rank.layout.dp
        mine = [-(-p.numel // p.columns // dp) * p.columns for p in rank.parameters]
        decays = [p.columns > 1 for p in rank.parameters]
        replicated = sum(p.replicated for p in rank.parameters)
        return fixed + 1 + rank.sp * (1 + replicated) + _steps(config, mine, decays)
    buckets = [bucket for chunk in reversed(rank.chunks) for bucket in _bucketed(rank, chunk)]
    shards = rank.layout.dp if config.zero else 1
    pieces = [piece for bucket in buckets for piece in _segments(bucket, shards)]
    by_autograd = sum(not _is_added_in_place(p) for p in rank.parameters)
    copies = len(pieces) if rank.item < rank.grad_item else 0
    found = fixed + len(buckets) + copies + count * by_autograd
    if rank.sp:
        replicated = sum(alike for _, _, alike in pieces)
        found += 1 + replicated if replicated else 0
    if _shares(config):
        found += 2 + sum(not decay and not alike for _, decay, alike in pieces)
    sizes, decays = [numel for numel, _, _ in pieces], [decay for _, decay, _ in pieces]
    return found + _steps(config, sizes, decays)


def _steps(config: Config, sizes: Sequence[int], decays: Sequence[bool]) -> int:
    """Launches of the norm and of the update over lists of tensors."""
    found = _over(sizes, _LISTS["norm"]) + 1
    for kind in (True, False):
        mine = [size for size, decay in zip(sizes, decays, strict=True) if decay == kind]
        if mine:
            found += _over(mine, _LISTS[config.optim.name])
    return found


def _over(sizes: Iterable[int], tensors_a_launch: int) -> int:
    kept = list(sizes)
    chunks = sum(-(-size // _CHUNK) for size in kept)
    return max(-(-len(kept) // tensors_a_launch), -(-chunks // _CHUNKS))


def _bucketed(rank: PipelineRank, chunk: list[LocalParameter]) -> list[list[LocalParameter]]:
    """The buckets of one chunk (`data_parallel/reducer.py`)."""
    ready, tied = chunk[::-1], rank.is_tied_to_another
    alone = [i for i, p in enumerate(ready) if tied and p.name in TIED_TABLES]
    sizes = [p.numel * rank.grad_item for p in ready]
    accelerated = rank.config.device != "cpu"
    buckets = assign(sizes, rank.config.ddp.bucket_cap_mb, alone, accelerated)
    return [[ready[i] for i in members] for members in buckets]


def _segments(bucket: list[LocalParameter], shards: int) -> list[tuple[int, bool, bool]]:
    """(elements, decays, replicated) of the runs that the first of `shards` ranks steps."""
    own = padded_numel(sum(p.numel for p in bucket), shards) // shards
    runs: dict[tuple[bool, bool], int] = {}
    for p in bucket:
        kind = p.columns > 1, p.replicated
        runs[kind] = runs.get(kind, 0) + p.numel
    found, offset = [], 0
    for kind in sorted(runs):
        mine = min(offset + runs[kind], own) - min(offset, own)
        offset += runs[kind]
        if mine:
            found.append((mine, *kind))
    return found


def _is_added_in_place(p: LocalParameter) -> bool:
    """Whether its gradient goes to its bucket from where it is made (products, tables)."""
    return p.columns > 1 and p.name != "embedding.position"


def _shares(config: Config) -> bool:
    """Whether several tensor ranks hold equal parts whose gradients are summed."""
    model = config.model
    return config.tp > 1 and (model.qk_norm or config.tp > model.kv_heads)


# Bytes that a rank of parallel3d holds at the fullest moment of a step, and what they are.


PHASES = ("forward", "backward", "backward", "weight gradients")


@dataclass(frozen=True)
class Held:
    """Bytes of one rank at its fullest moment, by kind as `dryrun` names them."""

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
class Chunk:
    """One stage of a rank: its layers, how many of them recompute, and its ends."""

    layers: int
    recomputed: int
    first: bool
    last: bool
    turns: bool  # its input is what the rank's other chunk has made and keeps


def layers_by_stage(config: Config) -> Sequence[int]:
    """How many layers each stage has; a search asks often for the same."""
    if config.schedule.layers_per_stage is not None:
        return [len(layers) for layers in layers_of_stages(config)]
    model = config.model
    costs = layer_cost(model), head_cost(model)
    return _balanced(costs[0], model.num_layers, placement_of(config), 0.0, costs[1])


_balanced = functools.lru_cache(maxsize=1024)(balance_chunks)
_layer = functools.lru_cache(maxsize=1024)(layer_bytes)


def chunks_of(config: Config, index: int) -> list[Chunk]:
    """The stages of rank `index` along pp. Raises UserError where a stage would be empty."""
    placement, split = placement_of(config), layers_by_stage(config)
    made = []
    for chunk in range(placement.chunks):
        stage = placement.stage(index, chunk)
        count = split[stage]
        again = recomputing(config.recompute_layers, stage, count)
        before = placement.neighbour(index, chunk, -1)
        turns = before is not None and before[0] == index
        ends = stage == 0, stage == placement.stages - 1
        made.append(Chunk(count, again, *ends, turns))
    return made


def parameters_of(config: Config, chunks: Sequence[Chunk]) -> Parameters:
    """Elements that a rank with these stages holds."""
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
    return Parameters(layer, ends + head, table, layer * layers + ends + head)


def _count(
    model: ModelConfig, tp: int, layers: range, first: bool, last: bool, borrows: bool = False
) -> int:
    found = stage_parameters(model, tp, layers, first, last, borrows_table=borrows)
    return sum(p.numel for p in found)


def peak_memory(config: Config, index: int) -> Held:
    """Of rank `index` along pp, as `dryrun` would play it.

    `config` is checked, with dp and a schedule that has a name. Dropout of probabilities and
    documents are not known here.
    """
    chunks, t = chunks_of(config, index), tensors(config)
    parameters = parameters_of(config, chunks)
    layer, head = _layer(t, parts_of(config.recompute)), head_bytes(config, t)
    if config.zero > 1 and (config.dp or 1) > 1:  # each forward has made its table's gradient
        cast = ACTIVATION_BYTES[config.precision.name] * parameters.table
        head = head._replace(kept=head.kept + cast)
    name, pp, count = config.schedule.name, config.pp, config.num_microbatches
    seen = moments(name, pp, len(chunks), count, index)
    state = _state(config, parameters)
    extra = (
        sharded(config, parameters, chunks[0].layers, chunks[0].first)
        if config.zero > 1 and (config.dp or 1) > 1
        else {}
    )
    best: Held | None = None
    for chunk in range(len(chunks)):
        for made in _fullest(config, chunk, chunks, t, layer, head, seen, state, extra):
            if best is None or made.total > best.total:
                best = made
    assert best is not None
    return best


def held_at_least(config: Config) -> float:
    """Bytes that the fullest rank cannot hold less of: no more than `held` of it, and quick.

    The rank of most layers has their state, and before its first backward one micro-batch's
    activations in all of them.
    """
    layers = -(-config.model.num_layers // config.pp)
    one = _count(config.model, config.tp, range(1), False, False)
    kept = layers * _layer(tensors(config), parts_of(config.recompute)).kept
    return _state(config, Parameters(one, 0, 0, one * layers)).total + kept


def _state(config: Config, parameters: Parameters) -> Held:
    """What is there between steps, and in them under zero 0 and 1."""
    item = ACTIVATION_BYTES[config.precision.name]
    wide, dp = max(WIDE, item), config.dp or 1
    numel = parameters.all
    cut = dp if config.zero > 0 else 1
    spread = dp if config.zero > 1 else 1
    moments_ = {"adamw": 2, "sgd": 1}.get(config.optim.name, 2)
    return Held(
        parameters=0.0 if spread > 1 else float(item * numel),
        gradients=wide * numel / spread,
        masters=0.0 if item >= WIDE and spread == 1 else wide * numel / cut,
        optimizer=moments_ * wide * numel / cut,
        activations=0.0,
        logits=0.0,
        buffers=rotary_bytes(config.model) * config.vpp,
        phase="",
    )


def _kept(config: Config, chunk: Chunk, t: Tensors, head: HeadBytes) -> float:
    """Bytes of a chunk's activations between the forward and the backward of one micro-batch."""
    how = _layer(t, parts_of(config.recompute)).kept
    plain = _layer(t, ()).kept
    layers = chunk.recomputed * how + (chunk.layers - chunk.recomputed) * plain
    end = head.kept if chunk.last else t.stream
    return layers + end - (t.stream if chunk.turns else 0.0)


def _fullest(
    config: Config,
    index: int,
    chunks: Sequence[Chunk],
    t: Tensors,
    layer: LayerBytes,
    head: HeadBytes,
    seen: Moments,
    state: Held,
    extra: dict[str, dict[str, float]],
) -> list[Held]:
    """The fullest moment of each kind of action on one chunk."""
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
            for name, activations, logits in _inside(chunk, kind, inner, t, layer, head):
                more = added(extra, name, bool(begun))
                made.append(
                    Held(
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


def _inside(
    chunk: Chunk, kind: int, inner: float, t: Tensors, layer: LayerBytes, head: HeadBytes
) -> list[tuple[str, float, float]]:
    """(moment, activations, logits) beside all that is kept, of an action of `kind` on a chunk."""
    if kind == 0:
        found = [("forward", inner + layer.forward, 0.0)]
        if chunk.last:
            found.append(("head", inner + head.states, head.logits))
            found.append(("cast", inner + head.states, 0.0))
        return found
    received = t.stream if chunk.last else 0.0  # the head has made it and keeps it
    if kind == 1:
        return [
            ("backward", layer.backward + layer.again - received, 0.0),
            ("products", layer.again - t.inner + (1 + 2 * t.sp) * t.whole, 0.0),
            ("made", t.stream - inner / chunk.layers, 0.0),
            ("reduction", t.stream - inner / chunk.layers, 0.0),
            ("later", t.stream - min(2, chunk.layers) * inner / chunk.layers, 0.0),
            ("ends", 2 * t.stream - inner, 0.0),
            ("out", 2 * t.stream - inner, 0.0),
        ]
    late = (chunk.layers - 1) * (layer.deferred - inner / chunk.layers)
    return [("backward", layer.halved + layer.again - received + max(late, 0.0), 0.0)]
