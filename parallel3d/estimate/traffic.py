"""Lists the collectives and messages of a pipeline rank in a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product

from parallel3d.blueprint.buckets import Home, homes, is_hidden, padded_numel
from parallel3d.blueprint.collectives import Transfer, wire_bytes
from parallel3d.blueprint.dispatch import ALL_TO_ALL
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.ops import ExpertWidths, split_counts, widths
from parallel3d.blueprint.parameters import WORD_TABLE
from parallel3d.blueprint.rank import (
    Gradients,
    LayersOfKind,
    PipelineRank,
    bucket_numel,
    buckets_of,
    flat_shards,
    sharded_numel,
)
from parallel3d.config.schema import Config, full_shapes_of
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.estimate.attention_traffic import Sent, halo_sends, halo_tokens, sends
from parallel3d.estimate.search import planned
from parallel3d.schedules.orders import StageAssignment

SCALAR_BYTES = 8  # losses, token counts and squared norms are float64
STATISTIC_BYTES = 4  # norms' statistics are fp32 or better
WHOLE_BYTES = 8  # numbers of experts and of tokens are int64


def group_size(dim: str, layout: Layout) -> int:
    """Returns the number of ranks in the group that a `Transfer` names."""
    if dim == "world":
        return layout.world_size
    if dim == "embedding":
        return min(2, layout.pp)
    return layout.size(dim)


# Communication volume: every collective and message of one optimizer step.


def layer_transfers(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the tp collectives around the GEMMs of a rank's layers.

    The forward gathers the input of column-parallel GEMMs (with sp) and sums the output of
    row-parallel ones; the backward does the reverse, without the gradients of frozen weights and
    of the inputs of layers before which all is frozen. With `mlp_chunks` these are an upper bound.
    """
    for of, gradients in rank.layers_alike():
        yield from _of_kind(rank, of, gradients)


def _of_kind(rank: PipelineRank, of: LayersOfKind, gradients: Gradients) -> Iterator[Transfer]:
    whole, what = rank.hidden, "activations of the layers"
    microbatches, ops = rank.blueprint.microbatches, rank.ops[of.kind]
    layers = of.layers * microbatches
    recomputed = of.recomputed * microbatches
    columns, rows = split_counts(ops.ops)
    of_inputs = split_counts([op for op in ops.ops if op.name in gradients.inputs])
    weights = gradients.weights, gradients.weights - gradients.inputs
    of_columns, of_rows_alone = (
        split_counts([op for op in ops.ops if op.name in names])[row]
        for row, names in enumerate(weights)
    )
    columns_again, rows_again = split_counts(ops.repeated)
    if rank.blueprint.layer.gather_qk:
        model, tp = rank.blueprint.model, rank.layout.tp
        heads = model.num_attention_heads + max(model.kv_heads, tp)  # heads of q and k, with copies
        every = rank.tokens * heads * model.head_size * rank.item
        twice = recomputed * any(op.name == "attention.qkv" for op in ops.repeated)
        yield Transfer("tp", "all_gather", every, layers + twice, "q and k of all heads")
        back = layers * _has_gradient(gradients, "attention.qkv")
        yield Transfer("tp", "reduce_scatter", every, back, "gradients of q and k")
    if rank.blueprint.model.qk_norm_width == "full":
        # one for q and one for k, for each token
        sums = 2 * rank.tokens * max(rank.item, STATISTIC_BYTES)
        twice = recomputed * any(op.name == "attention.qk_norm" for op in ops.repeated)
        twice += layers * _has_gradient(gradients, "attention.out")
        yield Transfer("tp", "all_reduce", sums, layers + twice, "norms of q and k")
    cut = rank.mlp_chunks
    apart = recomputed if cut > 1 else 0  # MLPs whose two GEMMs communicate in chunks
    if not rank.sp:
        sums = (of_inputs[0] + rows) * layers + rows_again * recomputed - 2 * apart
        yield Transfer("tp", "all_reduce", whole, sums, what)
        if apart:
            yield Transfer("tp", "all_reduce", whole // cut, 2 * apart * cut, what)
        return
    if apart:
        yield Transfer("tp", "all_gather", whole // cut, 4 * apart * cut, what)
        yield Transfer("tp", "reduce_scatter", whole // cut, 2 * apart * cut, what)
    # The backward of a column-parallel GEMM gathers the saved shard and scatters its gradient
    # whole.
    gathers = (of_columns + of_rows_alone) * layers - apart
    yield Transfer("tp", "all_gather", whole, gathers, what)
    yield Transfer("tp", "reduce_scatter", whole, of_inputs[0] * layers - apart, what)
    # All others are split into chunks that overlap with the GEMM.
    chunks = rank.blueprint.layer.chunks
    each = whole // chunks
    gathers = (columns + of_inputs[1]) * layers + columns_again * recomputed - 3 * apart
    scatters = rows * layers + rows_again * recomputed - apart
    yield Transfer("tp", "all_gather", each, chunks * gathers, what)
    yield Transfer("tp", "reduce_scatter", each, chunks * scatters, what)


def _has_gradient(gradients: Gradients, name: str) -> bool:
    """Returns whether the result of a GEMM has a gradient."""
    return name in gradients.inputs | gradients.weights


def _experts(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the traffic of layers of experts (experts/dispatch.py, experts/balance.py).

    All-to-all sends as many tokens to each rank as experts chosen at random need.
    """
    blueprint = rank.blueprint
    sparse = [(of, gradients) for of, gradients in rank.layers_alike() if of.kind.experts]
    if sparse:
        yield from _balance(rank, sum(of.layers for of, _ in sparse) * blueprint.microbatches)
    x = blueprint.experts
    if x is not None and x.way:
        for of, gradients in sparse:
            yield from _dispatch(rank, of, gradients, x)


def _balance(rank: PipelineRank, layers: int) -> Iterator[Transfer]:
    """Yields the sums of counts over whole sequences, and of the number of tokens without
    padding."""
    blueprint, settings = rank.blueprint, rank.blueprint.balance
    counts = WHOLE_BYTES * blueprint.micro_batch_size * blueprint.model.num_experts
    if settings.aux_loss:
        for dim in ("tp", "cp"):
            yield Transfer(dim, "all_reduce", counts, layers, "tokens of each expert")
    if settings.z_loss:
        yield Transfer("dp", "all_reduce", SCALAR_BYTES, 1, "routed tokens")


def _dispatch(
    rank: PipelineRank, of: LayersOfKind, gradients: Gradients, x: ExpertWidths
) -> Iterator[Transfer]:
    """Yields the way of tokens to their experts and back, and of their gradients."""
    microbatches, ops = rank.blueprint.microbatches, rank.ops[of.kind]
    layers, recomputed = of.layers * microbatches, of.recomputed * microbatches
    again = {op.name for op in ops.repeated}
    there = layers + recomputed * ("mlp.dispatch" in again)
    back = layers + recomputed * ("mlp.combine" in again)
    of_tokens = layers * ("mlp.experts.up" in gradients.inputs)
    of_weights = layers * _has_gradient(gradients, "mlp.router")
    trained = {"mlp.experts.up", "mlp.experts.down"} & gradients.weights
    of_results = layers if trained else of_weights
    own = rank.tokens // (rank.layout.tp if rank.sp else 1)
    tokens = x.ep * (round(own * x.share_sent) if x.way == ALL_TO_ALL else own)
    states = tokens * rank.blueprint.model.hidden_size * rank.item
    choices, weights = (tokens * x.chosen * n for n in (WHOLE_BYTES, max(4, rank.item)))
    if x.way == ALL_TO_ALL:
        counts = WHOLE_BYTES * (x.ep + rank.blueprint.model.num_experts)
        yield Transfer("ep", "all_to_all", counts, layers, "numbers of tokens and rows")
        yield Transfer("ep", "all_to_all", choices, layers, "choices of experts")
        yield Transfer("ep", "all_to_all", weights, there + of_weights, "weights of experts")
        moved = there + back + of_tokens + of_results
        yield Transfer("ep", "all_to_all", states, moved, "tokens of experts")
        return
    yield Transfer("ep", "all_gather", choices, layers, "choices of experts")
    yield Transfer("ep", "all_gather", weights, there, "weights of experts")
    yield Transfer("ep", "reduce_scatter", weights, of_weights, "gradients of weights of experts")
    yield Transfer("ep", "all_gather", states, there + of_results, "tokens of experts")
    yield Transfer("ep", "reduce_scatter", states, back + of_tokens, "results of experts")


# The list mirrors the code call by call; `tests/distributed/test_traffic.py` compares it with real
# steps. Evaluation, checkpoints and start-up are not counted.
DIMS = ("tp", "cp", "ep", "pp", "dp", "dp_cp", "edp", "embedding", "world")


def transfers(
    config: Config, layout: Layout, stage: int | None = None, data_rank: int = 0
) -> list[Transfer]:
    """Lists the calls of one rank in a step: of `stage`, or of the busiest rank of each dimension.

    Ranks of a pipeline differ in layers, embedding and head. Without `stage` each dimension has the
    calls of its busiest rank, except pp, which has the traffic between the two neighbouring ranks
    that exchange most, in both directions.

    Args:
        config: a checked configuration; tp, cp, pp and dp are taken from `layout`.
        layout: the layout.
        stage: index along pp, 0 to pp − 1, with all of its chunks.
        data_rank: index along dp_cp.

    Raises:
        ValueError: no such stage.
        UserError: `schedule.layers_per_stage` does not fit the model.
    """
    if stage is not None and not 0 <= stage < layout.pp:
        raise ValueError(f"stage {stage} is outside of 0..{layout.pp - 1}")
    blueprint = planned(config, layout)
    ranks = [PipelineRank(blueprint, index, data_rank) for index in range(layout.pp)]
    if stage is not None:
        return _of_rank(ranks[stage])
    # Ranks between the ends differ only in their numbers of layers.
    inner = {tuple(len(s.layers) for s in rank.stages): rank.index for rank in ranks[1:-1]}
    lists = [_of_rank(ranks[i]) for i in sorted({0, layout.pp - 1, *inner.values()})]
    found: list[Transfer] = []
    for dim in DIMS:
        if dim == "pp":
            boundaries = _most_boundaries(ranks[0].assignment)
            found += _messages(ranks[0], boundaries, boundaries)
            continue
        mine = [[t for t in sent if t.dim == dim] for sent in lists]
        if dim == "cp" and config.model.sliding_window is not None:  # halos differ between ranks
            places = product(range(layout.pp), range(layout.cp))
            every = (_context(PipelineRank(blueprint, *place)) for place in places)
            mine = [[t for t in sent if t.count] for sent in every]
        n = group_size(dim, layout)
        found += max(mine, key=lambda sent: sum(wire_bytes(t, n) for t in sent))
    return found


def _most_boundaries(assignment: StageAssignment) -> int:
    """Returns the largest number of stage boundaries between any two ranks."""
    ranks = [rank for rank, _ in assignment.places]
    between = Counter(frozenset(pair) for pair in pairwise(ranks) if pair[0] != pair[1])
    return max(between.values(), default=0)


def _of_rank(rank: PipelineRank) -> list[Transfer]:
    groups = (_tensor, _context, _experts, _pipeline, _data, _tied, _scalars, _muon)
    found = [transfer for make in groups for transfer in make(rank)]
    return [t for t in found if t.count and group_size(t.dim, rank.layout) > 1]


def _tensor(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields calls of layers, embedding and head, and sums of partial gradients over tp."""
    microbatches, whole = rank.blueprint.microbatches, rank.hidden
    yield from layer_transfers(rank)
    if rank.first and rank.blueprint.model.embedding == "vocab_parallel":
        if rank.sp:
            yield Transfer("tp", "reduce_scatter", whole, microbatches, "embedding")
            back = 0 if WORD_TABLE in rank.blueprint.frozen else microbatches
            yield Transfer("tp", "all_gather", whole, back, "embedding's gradient")
        else:
            yield Transfer("tp", "all_reduce", whole, microbatches, "embedding")
    if rank.last:
        yield from _head(rank)
    shards = flat_shards(rank)
    shared = sum(s.shared for s in shards) * rank.grad_item
    what = "gradients of shared key-value heads and of norms of heads"
    yield Transfer("tp", "all_reduce", shared, int(shared > 0), what)
    if rank.sp:
        partial = sum(s.numel for s in shards if s.replicated)
        nbytes, what = partial * rank.grad_item, "gradients of replicated parameters"
        yield Transfer("tp", "all_reduce", nbytes, int(partial > 0), what)


def _context(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the cp traffic of attention (context_parallel/attention.py), and sums of gradients for
    the noise scale."""
    blueprint = rank.blueprint
    every = [(of, _has_gradient(by, "attention.qkv")) for of, by in rank.layers_alike()]
    for window in dict.fromkeys(of.kind.window for of, _ in every):
        alike = [(of, back) for of, back in every if of.kind.window == window]
        layers = sum(of.layers for of, _ in alike)
        with_backward = sum(of.layers for of, back in alike if back)
        recomputed = sum(of.recomputed for of, back in alike if back)
        groups, calls = _attention(rank, window)
        for sent in calls:
            count = layers * (sent.count - sent.backward) + with_backward * sent.backward
            count += blueprint.repeats_attention * recomputed * sent.again
            count *= blueprint.microbatches * groups
            yield Transfer("cp", sent.op, int(sent.nbytes) // groups, int(count), sent.what)
    if blueprint.noise_scale:
        for p in rank.parameters:
            yield Transfer("cp", "all_reduce", p.numel * rank.grad_item, 1, "noise scale")


def _attention(rank: PipelineRank, window: int | None) -> tuple[int, Iterator[Sent]]:
    """Returns the cp calls of one layer's attention, and the number of parts of each call."""
    blueprint, w = rank.blueprint, widths(rank.blueprint.model, rank.layout.tp)
    style, drops, cp = blueprint.layer.cp_style, blueprint.model.dropout > 0, rank.layout.cp
    if window is None or drops or style == "heads":
        groups = rank.head_groups if style == "gather" and not drops else 1
        return groups, sends(style, w, rank.tokens, rank.item, cp, drops)
    split = SequenceSplit.of_run(blueprint, 0)
    halo = halo_tokens(split, blueprint.micro_batch_size, window)
    here = rank.data_rank % cp
    sent, received = (tokens[here] for tokens in halo)
    return 1, halo_sends(w, sent, received, rank.item)


def _head(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the tp collectives of the head and its loss (tensor_parallel/loss.py)."""
    model, microbatches, whole = rank.blueprint.model, rank.blueprint.microbatches, rank.hidden
    norms = [p for p in rank.ends if p.name.startswith("head.norm.")]
    reached = rank.blueprint.first_trained < model.num_layers or not all(p.frozen for p in norms)
    back = microbatches * reached
    if rank.sp:
        yield Transfer("tp", "all_gather", whole, microbatches, "head's input")
        yield Transfer("tp", "reduce_scatter", whole, back, "head's input gradient")
    else:
        yield Transfer("tp", "all_reduce", whole, back, "head's input gradient")
        if rank.table.replicated and not rank.table.frozen:
            table, what = rank.table.numel * rank.item, "replicated table's gradient"
            yield Transfer("tp", "all_gather", table, microbatches, what)
    if model.parallel_output:
        # Maximum, sum of exponentials, target logit (and sum, with label smoothing) of each token
        # from every rank, in fp32 or better unless the loss is in half precision.
        item = 2 if rank.blueprint.half_loss else max(4, rank.item)
        numbers = 4 if rank.blueprint.loss.label_smoothing else 3
        token, what = rank.layout.tp * numbers * item, "loss"
    else:
        token, what = rank.columns * rank.item, "logits"
    for tokens, count in rank.loss_chunks.items():
        yield Transfer("tp", "all_gather", token * tokens, count * microbatches, what)


def _pipeline(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields a message per micro-batch, direction and boundary (pipeline/executor.py)."""
    after, before = rank.neighbours(1), rank.neighbours(-1)
    back = rank.neighbours(-1, with_backward=True)
    yield from _messages(rank, after, back)
    if rank.sends_slices:
        count = rank.blueprint.microbatches * (before + rank.neighbours(1, with_backward=True))
        yield Transfer("tp", "all_gather", rank.hidden, count, "parts of messages")


def _messages(rank: PipelineRank, forward: int, back: int) -> Iterator[Transfer]:
    """Yields activations over `forward` boundaries and gradients over `back` ones."""
    nbytes = rank.hidden // (rank.layout.tp if rank.sp or rank.sends_slices else 1)
    count = rank.blueprint.microbatches
    ways = (forward, "activations to the next stage"), (back, "gradients to the previous stage")
    for boundaries, what in ways:
        if boundaries:
            yield Transfer("pp", "send_recv", nbytes, count * boundaries, what)


def _data(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the buckets (data_parallel/reducer.py) and the token count."""
    blueprint = rank.blueprint
    if rank.last:
        yield Transfer("dp", "all_reduce", SCALAR_BYTES, 1, "token count")
    if blueprint.data.zero > 1:
        yield from _fully_sharded(rank)
        return
    buckets = buckets_of(rank)
    numels = Counter((bucket[0].expert, bucket_numel(bucket, rank)) for bucket in buckets)
    for (experts, numel), count in numels.items():
        yield from _buckets(rank, experts, numel, count)


def _muon(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the exchanges around Newton-Schulz (optim/muon.py) of tp rank 0.

    With HSDP, or frozen matrices beside trained ones of a GEMM, these are an upper bound.
    """
    if rank.blueprint.optim.name == "muon":
        for experts in (False, True):
            yield from _muon_of(rank, experts)


def _muon_of(rank: PipelineRank, experts: bool) -> Iterator[Transfer]:
    """Yields the exchanges of the experts' matrices, which are whole on the ranks of edp, or of all
    others."""
    blueprint, layout = rank.blueprint, rank.layout
    table = [p for p in rank.trained if p.expert is experts]
    if not table:
        return
    here, shards = rank.index_of(table[0]), rank.shards_of(table[0])
    tp, dp, dim = layout.tp, rank.replicas, layout.replica_dim
    if experts:
        tp, dp, dim = 1, layout.edp, "edp"
    layers = {f"layers.{layer}" for stage in rank.stages for layer in stage.layers}
    shapes = {
        name: shape
        for name, shape in full_shapes_of(blueprint.model).items()
        if is_hidden(name, len(shape))
        and not blueprint.optim.treatment(name).frozen
        and ".".join(name.split(".")[:2]) in layers
        and (".experts." in name) is experts
        and (not experts or int(name.split(".")[4]) in rank.experts_here)
    }
    keys, shared = ("attention.k.weight", "attention.v.weight"), min(tp, blueprint.model.kv_heads)

    def parts(name: str) -> int:
        return shared if name.endswith(keys) else 1 if name.endswith("shared_gate.weight") else tp

    local = {name: math.prod(shape) // parts(name) for name, shape in shapes.items()}
    home, sharded = homes(shapes, tp, dp), shards > 1
    column = sum(n for name, n in local.items() if home[name].dp == here)
    whole = tp * sum(n for name, n in local.items() if home[name] == Home(0, here))
    dtype = blueprint.optim.muon_dtype
    half = dtype == "bf16" or (dtype, rank.item) == ("auto", 2)
    item, what = 2 if half else rank.grad_item, "Muon's updates"
    if sharded:
        own = sum(shard.hidden for shard in flat_shards(rank) if shard.experts is experts)
        yield Transfer(dim, "all_to_all", item * own, 1, what)
    if not experts:
        yield Transfer("tp", "all_to_all", item * column, 1, what)
        yield Transfer("tp", "all_to_all", item * whole, 1, what)
    yield Transfer(dim, "all_to_all", item * column * (1 if sharded else dp), 1, what)


def _fully_sharded(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the collectives of FSDP units: one unit per block, one inside it for its experts, and
    one for all other parameters.

    Rows are padded to dp · cp. A backward reduces only the gradients that it has, so that the two
    ends of a V are reduced separately.

    With ddp.shard_size (HSDP) this is an upper bound: fewer ranks gather, and an all-reduce
    follows.
    """
    blueprint, microbatches = rank.blueprint, rank.blueprint.microbatches
    every = microbatches if blueprint.data.every_microbatch else 1
    whole = blueprint.data.zero == 2  # whether ranks hold frozen parameters whole
    gathered: Counter[tuple[str, bool]] = Counter()
    numels: Counter[tuple[str, bool]] = Counter()
    for p in rank.parameters:
        block = p.name.startswith("layers.")
        unit = ".".join(p.name.split(".")[:2]) if block else "rest"
        dp = rank.shards_of(p)
        numel = dp * sharded_numel(p, dp)
        numels[unit, p.expert] += 0 if p.frozen else numel
        gathered[unit, p.expert] += 0 if p.frozen and whole else numel
    waiting = {f"layers.{n}" for s in rank.stages for n in s.layers[: s.without_backward]}
    for (unit, experts), numel in numels.items():
        dim = "edp" if experts else rank.layout.replica_dim
        times = 1
        if not whole and unit != "rest":
            times = microbatches * (1 if unit in waiting else 2)
        if inputs := gathered[unit, experts]:
            yield Transfer(dim, "all_gather", inputs * rank.item, times, "parameters")
        if not numel:
            continue
        # With a single micro-batch, too, each backward's gradients are reduced separately.
        apart = unit == "rest" and every == microbatches
        read, dp = map(rank.ends_read, rank.stages), rank.shards
        trained = [[p for p in mine if not p.frozen] for mine in read]
        ends = [dp * sum(sharded_numel(p, dp) for p in mine) for mine in trained if mine]
        for reduced in ends if apart else [numel]:
            yield Transfer(dim, "reduce_scatter", reduced * rank.grad_item, every, "gradients")


def _buckets(rank: PipelineRank, experts: bool, numel: int, count: int) -> Iterator[Transfer]:
    """Yields `count` buckets of `numel` elements (reducer.py, bucketed.py, comm_hooks.py)."""
    dim = "edp" if experts else rank.layout.replica_dim
    if rank.blueprint.data.comm_hook == "bf16":
        half = 2 * padded_numel(numel, group_size(dim, rank.layout))
        yield Transfer(dim, "all_to_all", half, count, "gradient buckets")
        yield Transfer(dim, "all_gather", half, count, "gradient buckets")
        return
    op = "reduce_scatter" if rank.blueprint.data.zero else "all_reduce"
    yield Transfer(dim, op, numel * rank.grad_item, count, "gradient buckets")
    if rank.blueprint.data.zero:
        yield Transfer(dim, "all_gather", numel * rank.item, count, "stepped parameters")


def _tied(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the all-reduce of a tied weight of the first and last stage."""
    if rank.is_tied_to_another:
        numel = bucket_numel([rank.table], rank) // rank.shards
        if rank.blueprint.data.zero > 1:
            numel = sharded_numel(rank.table, rank.shards)
        table = numel * rank.grad_item
        yield Transfer("embedding", "all_reduce", SCALAR_BYTES, 1, "rendezvous of the tied ranks")
        yield Transfer("embedding", "all_reduce", table, 1, "gradient of the tied table")


def _scalars(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the sums of loss, tokens, squared norm and stop flag, of two more norms for the noise
    scale, and of figures of all layers with experts: tokens of each expert, two losses, the entropy
    and the range of the bias."""
    model = rank.blueprint.model
    numbers = 6 if rank.blueprint.noise_scale else 4
    numbers += len(model.expert_layers) * (model.num_experts + 5)
    yield Transfer("world", "all_reduce", numbers * SCALAR_BYTES, 1, "loss and gradient norm")
