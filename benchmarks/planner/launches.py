"""Counts kernel launches of a rank in a step, line by line as in the code.

`benchmarks/planner/plan_dryrun.py` compares them with `parallel3d dryrun`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.blueprint.buckets import PIECE
from parallel3d.blueprint.ops import NORMS, Op, widths
from parallel3d.blueprint.parameters import TABLES, LocalParameter
from parallel3d.blueprint.rank import (
    FlatShard,
    PipelineRank,
    buckets_of,
    flat_shards,
)
from parallel3d.estimate.search import planned
from parallel3d.estimate.traffic import transfers
from parallel3d.run_config import Config

# number of elements of a chunk, and of chunks in one multi-tensor launch
_CHUNK, _CHUNKS = 65536, 320
# maximum number of tensors in one multi-tensor launch
_LISTS = {"norm": 110, "adamw": 36, "sgd": 48, "ema": 64}


def launches(config: Config, index: int, data_rank: int = 0) -> dict[str, float]:
    """Returns launches of rank `index` along pp, with tp and cp rank 0, by the parts of `dryrun`.

    `config` is checked. Launches of dropout, label smoothing and z-loss are not counted.
    """
    blueprint = planned(config)
    layout = blueprint.layout
    rank = PipelineRank(blueprint, index, data_rank)
    count, copies, sharded = blueprint.microbatches, int(rank.copies), rank.fully_sharded
    calls = _calls(rank)
    found = {
        "gemm_layers": count * _of_layers(rank, "gemm", forward=1, backward=2),
        "attention": count * _of_layers(rank, "attention", forward=calls, backward=calls),
        "blocks": count * (_blocks(rank, copies) + _split_attention(rank)),
        "other": _other(rank, copies),
        "optimizer": _optimizer(rank),
        "communication": sum(
            x.count * (1 + (x.op == "send_recv"))
            for x in transfers(config, layout, index, data_rank)
        ),
    }
    if rank.last:
        chunks = sum(rank.loss_chunks.values())
        found["loss"] = count * (5 + 21 * chunks + 4 * copies + 2 * sharded)
        found["gemm_head"] = count * 3 * chunks
    if sharded:
        found["sharding"] = _sharding(rank)
    return {name: float(value) for name, value in found.items()}


def _calls(rank: PipelineRank) -> int:
    """Counts the kernel calls in one forward of a layer's attention. One call serves consecutive
    queries whose keys do not overlap: the second part of a sequence and the first part of the next
    one."""
    blueprint = rank.blueprint
    style = blueprint.layer.cp_style
    if blueprint.layout.cp == 1 or style == "heads":
        return 1
    first = blueprint.micro_batch_size + 1
    if style == "ring":
        return first + (blueprint.layout.cp - 1) * blueprint.micro_batch_size
    return first * rank.head_groups


def _split_attention(rank: PipelineRank) -> int:
    """Counts the launches around these calls in one micro-batch: copies for the other ranks and
    into the order of positions, merging of results, and positions."""
    blueprint, style, calls = rank.blueprint, rank.blueprint.layer.cp_style, _calls(rank)
    if blueprint.layout.cp == 1:
        return 0
    repeats, kept = blueprint.repeats_attention, 0
    if style == "gather":
        forward = 3 * rank.head_groups + 2 * calls + 1
        backward = 7 * rank.head_groups + 5 * calls + 2
        kept = 3 * rank.head_groups
    elif style == "ring":
        more = (blueprint.layout.cp - 1) * blueprint.micro_batch_size  # merged
        forward, backward = 2 * calls + 7 * more + 2, 5 * calls + 2 * blueprint.layout.cp + 4
    else:
        w, several = widths(blueprint.model, blueprint.layout.tp), blueprint.micro_batch_size > 1
        repeats_heads = w.key_heads < blueprint.layout.cp
        forward = 5 + 2 * repeats_heads
        backward = 7 + 2 * (w.key_heads > blueprint.layout.cp) + several
        if repeats_heads:  # the gradients of a head's copies are summed
            backward = 8 + (w.heads > blueprint.layout.cp) + several
    again = rank.recomputed_layers * repeats * (forward - kept)
    # Positions of the shard with their cos and sin; the embedding looks learned positions up.
    positions = 3 * len(rank.stages) * (blueprint.model.position_embedding == "rope")
    positions += len(rank.stages) * (blueprint.model.query_temperature > 0)
    return rank.layer_count * (forward + backward) + again + positions


def _of_layers(rank: PipelineRank, kind: str, forward: int, backward: int) -> int:
    """Counts the launches of GEMMs or attention in one micro-batch, given the launches of one
    operation."""
    found = 0
    for kind_of_layer, layers, recomputed in rank.kinds:
        ops = rank.ops[kind_of_layer]
        every, again = (
            sum(op.calls for op in ops if op.kind == kind) for ops in (ops.ops, ops.repeated)
        )
        found += layers * every * (forward + backward) + recomputed * again * forward
    return found


def _blocks(rank: PipelineRank, copies: int) -> int:
    """Counts the launches of one micro-batch between GEMMs, with the contiguous copies around
    them."""
    model, found = rank.blueprint.model, 0
    for kind, layers, more in rank.kinds:
        ops = rank.ops[kind]
        again = _forward(ops.repeated, copies)
        found += more * (_forward(ops.ops, copies) + _backward(ops.ops, copies) + again)
        plain = _forward(ops.plain, copies) + _backward(ops.plain, copies)
        found += (layers - more) * plain
    learned, norm = _adds_positions(rank.blueprint), NORMS[model.norm]
    last = norm.forward + norm.backward + rank.fully_sharded  # the norm of the head
    # FSDP2's gradients of experts are summed in fp32 and rounded; the auxiliary loss's are copied
    # for several sequences.
    several = rank.blueprint.balance.aux_loss > 0 and rank.blueprint.micro_batch_size > 1
    found += _expert_layers(rank) * (4 * rank.fully_sharded + several)
    # A deferred gradient of experts computes its activations and gathers its rows again.
    found += _expert_layers(rank) * 2 * rank.blueprint.pipeline.schedule().splits_backward
    if rank.sp and rank.blueprint.layout.cp == 1:  # positions of the tokens in each forward
        for of in rank.kinds:
            again = any(op.name == "mlp.router" for op in rank.ops[of.kind].repeated)
            found += of.kind.experts * (of.layers + again * of.recomputed)
    found -= _reads(rank)  # counted as other
    return int(found) + last * rank.last + 2 * (learned + copies) * rank.first


def _forward(ops: Sequence[Op], copies: int) -> int:
    return sum(op.forward + 2 * copies * bool(op.split) for op in ops)


def _backward(ops: Sequence[Op], copies: int) -> int:
    return sum(op.backward + 3 * copies * bool(op.split) for op in ops)


def _other(rank: PipelineRank, copies: int) -> int:
    """Counts the launches of batch, embedding, executor and trainer."""
    blueprint, learned = rank.blueprint, rank.blueprint.model.position_embedding == "learned"
    each = 3 * len(rank.stages) + 2 * rank.last + (4 if rank.first or rank.last else 1)
    each += (7 + 10 * learned * rank.first) * (blueprint.layout.cp > 1)
    if rank.first:
        each += 10 + learned + 2 * copies + 2 * (blueprint.model.embedding_scale != 1.0)
    each += _reads(rank)
    if rank.sends_slices:
        each += rank.neighbours(1) + rank.neighbours(-1)  # each message copies its slice
    return blueprint.microbatches * each + 10 + rank.last + _balance(rank)


def _balance(rank: PipelineRank) -> int:
    """Counts launches for the experts' balance outside their layers."""
    blueprint, settings = rank.blueprint, rank.blueprint.balance
    layers = _expert_layers(rank)
    if not blueprint.model.num_experts:
        return 0
    found = 1 + 2 * layers  # the sums of all layers
    if layers:  # lengths of each micro-batch, and the scales of its losses
        each = 1 + (settings.aux_loss > 0) + 3 * (settings.z_loss > 0)
        found += blueprint.microbatches * each + 1 + (settings.z_loss > 0)
    each = 10 + 4 * (rank.data_rank == 0)  # the first rank also reports the range of the biases
    return found + each * layers * blueprint.model.router_bias


def _reads(rank: PipelineRank) -> int:
    """Counts the layers of experts whose numbers of rows are copied to the host."""
    x = rank.blueprint.experts
    return 0 if x is None or (x.ep == 1 and x.is_grouped) else _expert_layers(rank)


def _expert_layers(rank: PipelineRank) -> int:
    return sum(of.layers for of in rank.kinds if of.kind.experts)


def _sharding(rank: PipelineRank) -> int:
    """Counts FSDP2's copies of parameters into flat buffers and out of them, and of gradients."""
    blueprint, layers, count = rank.blueprint, rank.layer_count, rank.blueprint.microbatches
    all_of, ends, sparse = len(rank.parameters), len(rank.ends), _expert_layers(rank)
    every = blueprint.data.every_microbatch

    def gathers(parameters: int, units: int, shards: int) -> int:
        return parameters + 2 * units if shards > 1 else 2 * parameters

    def reductions(units: int, shards: int) -> int:
        return units if shards > 1 else 3 * units

    of_layers = gathers(all_of - ends - 2 * sparse, layers, rank.shards)
    of_layers += gathers(2 * sparse, sparse, rank.expert_shards)
    root = gathers(ends, 1, rank.shards) if ends else 0
    all_gathers = 2 * count * of_layers + root if blueprint.data.zero == 3 else of_layers + root
    widened = 0 if every or count == 1 else all_of
    # The two ends of a V have one backward each: a tied table gets two gradients, and if each
    # backward reduces, there are two reductions.
    apart = rank.first and rank.last and len(rank.stages) > 1
    gradients = all_of + (apart and rank.table.tied)
    of_experts = reductions(sparse, rank.expert_shards)
    several = every or count == 1
    units = reductions(layers + (ends > 0) + apart * several, rank.shards) + of_experts
    return all_gathers + count * gradients + widened + (count if several else 1) * units


def _optimizer(rank: PipelineRank) -> int:
    """Counts the launches that zero, sum and norm gradients, update, and write the parameters
    back."""
    blueprint, segments = rank.blueprint, flat_shards(rank)
    groups = len({segment.decays for segment in segments})  # step counters
    found = 8 + groups + rank.is_tied_to_another
    found += _steps(rank, segments)
    shared = sum(s.shared > 0 for s in segments)
    found += 2 + shared if shared else 0
    replicated = sum(s.replicated for s in segments)
    if rank.fully_sharded:
        return found + 1 + (_expert_layers(rank) > 0) + rank.sp * (1 + replicated)
    # The matmul or the look-up does so.
    in_place = (p.columns > 1 and not p.name.endswith(".shared_gate") for p in rank.parameters)
    by_autograd = len(rank.parameters) - sum(in_place) + rank.first * _adds_positions(blueprint)
    copies = len(segments) if rank.item < rank.grad_item else 0
    found += len(buckets_of(rank)) + copies + blueprint.microbatches * by_autograd
    return found + (1 + replicated if rank.sp and replicated else 0)


def _steps(rank: PipelineRank, segments: Sequence[FlatShard]) -> int:
    """Counts the launches of the norm and of the update over lists of tensors."""
    blueprint, found = rank.blueprint, 0
    for counts in (True, False):
        mine = [s.numel for s in segments if s.tied != counts]
        # For each list: its norms, their stack and its sum of squares; the sum of an empty list is
        # a fill.
        found += (_over(mine, _LISTS["norm"]) + 1 + 3 * (not counts)) if mine else 0
    for decays in (True, False):
        mine = [s.numel for s in segments if s.decays == decays]
        if mine and blueprint.optim.state == "bf16":
            # Pieces are widened, updated and rounded, with random bits for each tensor in them.
            each = 6 if blueprint.optim.name == "adamw" else 4
            cut = (_pieces(rank, segment) for segment in segments if segment.decays == decays)
            found += sum(each * pieces + chunks for pieces, chunks in cut)
        elif mine:
            found += _over(mine, _LISTS[blueprint.optim.name])
        if mine and blueprint.optim.ema_decay is not None:
            found += _over(mine, _LISTS["ema"])
    return found


def _pieces(rank: PipelineRank, segment: FlatShard) -> tuple[int, int]:
    """Counts the pieces of a segment and the chunks of full tensors in them, as
    `parameters/rounding.py` cuts them."""
    pieces, chunks, offset = 1, 0, 0
    start: int | None = None  # first element of the first chunk in the last piece
    for p, first, count in segment.spans:
        for at, rows, columns in _chunks(p, _full_rows(rank, p), first, count):
            step = max(1, PIECE // columns)
            for row in range(0, rows, step):
                begin = offset + at + row * columns
                end = begin + min(step, rows - row) * columns
                start = begin if start is None else start
                if end - start > PIECE and begin > start:
                    pieces, start = pieces + 1, begin
                chunks += 1
        offset += count
    return pieces, chunks


def _full_rows(rank: PipelineRank, p: LocalParameter) -> Sequence[int]:
    """Returns the rows of each full tensor in a parameter of tp rank 0."""
    model, w = rank.blueprint.model, widths(rank.blueprint.model, rank.layout.tp)
    if ".attention.qkv." in p.name:
        return w.queries, w.keys, w.keys
    if ".mlp.up." in p.name:
        return (w.ffn,) * (1 + w.gated)
    if ".shared.up." in p.name:
        return (model.shared_expert_size // rank.layout.tp,) * (1 + w.gated)
    if ".experts." in p.name:
        rows = model.hidden_size if p.name.endswith("down") else model.expert_size
        return (rows,) * (p.numel // p.columns // rows)
    rows = p.numel // p.columns
    return (min(rows, model.vocab_size) if p.name in TABLES else rows,)


def _chunks(
    p: LocalParameter, full_rows: Sequence[int], first: int, count: int
) -> Iterator[tuple[int, int, int]]:
    """Yields (first element, rows, columns) of the parts of a range of a parameter: the rest of a
    row, whole rows, and the beginning of a row."""
    begin, width = 0, p.columns
    for rows in full_rows:
        low, high = max(first, begin), min(first + count, begin + rows * width)
        begin += rows * width
        if low < high:
            whole = min(high, -(-low // width) * width), max(low, high // width * width)
            for a, b in pairwise(sorted((low, *whole, high))):
                if a < b:
                    yield a - first, max((b - a) // width, 1), min(b - a, width)


def _over(sizes: Iterable[int], tensors_a_launch: int) -> int:
    kept = list(sizes)
    chunks = sum(-(-size // _CHUNK) for size in kept)
    return max(-(-len(kept) // tensors_a_launch), -(-chunks // _CHUNKS))


def _adds_positions(blueprint: Blueprint) -> bool:
    """Returns whether learned positions are added without a look-up; with cp they are looked up."""
    return blueprint.model.position_embedding == "learned" and blueprint.layout.cp == 1
