"""Lists the collectives and messages of a rank in one optimizer step."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain, pairwise, product

from parallel3d.blueprint.buckets import Home, homes, padded_numel
from parallel3d.blueprint.collectives import Transfer, wire_bytes
from parallel3d.blueprint.dispatch import ALL_TO_ALL, chosen_way, share_sent
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.parameters import TABLES, LocalParameter
from parallel3d.blueprint.rank import (
    LayersOfKind,
    PipelineRank,
    bucket_numel,
    buckets_of,
    flat_shards,
    rank_with_most_sums,
    sharded_numel,
)
from parallel3d.blueprint.sizes import Number
from parallel3d.context_parallel.split import SequenceSplit
from parallel3d.estimate.attention_traffic import (
    HeadWidths,
    SentCalls,
    halo_sends,
    halo_tokens,
    sends,
)
from parallel3d.estimate.search import planned
from parallel3d.models.declared import (
    ATTENTION,
    WORD_EMBEDDING,
    LayerKind,
    heads_of,
    parameters_of_layers,
)
from parallel3d.models.products import (
    COLUMN,
    ROUTED,
    ROW,
    Gradients,
    LayerProduct,
    norms_over_tp,
    products_of,
    repeated_products,
)
from parallel3d.models.survey import OwnModelConfig
from parallel3d.run_config import Config
from parallel3d.schedules.orders import StageAssignment
from parallel3d.trace.table import layer_traces

SCALAR_BYTES = 8  # losses, token counts and squared norms are float64
STATISTIC_BYTES = 4  # norms' statistics are fp32 or better
WHOLE_BYTES = 8  # expert indices and token counts are int64
# The exchanges of hidden states, which `moe.overlap` hides (experts/route.py).
TOKENS, RESULTS = "tokens of experts", "results of experts"
OVERLAPPED = TOKENS, RESULTS


def group_size(dim: str, layout: Layout) -> int:
    """Returns the number of ranks in a group of the dimension `dim` of a `Transfer`."""
    if dim == "world":
        return layout.world_size
    if dim == "embedding":
        return min(2, layout.pp)
    return layout.size(dim)


# Collectives and messages of one optimizer step, by dimension


def layer_transfers(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the tp collectives around the GEMMs of a rank's layers.

    The forward gathers the input of column-parallel GEMMs (with sp) and sums the output of
    row-parallel GEMMs; the backward does the reverse. The backward omits the gradients of frozen
    weights, and those of activations that no trained weight precedes. With `mlp_chunks`, the calls
    are an upper bound.
    """
    for of, gradients in rank.layers_alike():
        yield from _of_kind(rank, of, gradients)


def _of_kind(rank: PipelineRank, of: LayersOfKind, gradients: Gradients) -> Iterator[Transfer]:
    """Yields the tp collectives of layers of one kind with the same gradients."""
    whole, what = rank.hidden, "activations of the layers"
    blueprint, repeats = rank.blueprint, rank.blueprint.layer.repeats
    layers = of.layers * blueprint.microbatches
    recomputed = of.recomputed * blueprint.microbatches
    products = products_of(blueprint.model, of.kind)
    again = repeated_products(blueprint.model, of.kind, repeats, rank.layout.ep)
    columns, rows = _split(products)
    of_inputs = _split([each for each in products if each.name in gradients.inputs])
    weights = gradients.weights, gradients.weights - gradients.inputs
    of_columns, of_rows_alone = (
        _split([each for each in products if each.name in names])[row]
        for row, names in enumerate(weights)
    )
    columns_again, rows_again = _split(again)
    attends = of.kind.mixer == ATTENTION
    if blueprint.layer.gather_qk and attends:
        # Size of all heads of q and k, including copies of shared key-value heads
        size = sum(rank.layout.tp * dim.local(rank.layout.tp) for dim in heads_of(of.kind))
        every = rank.tokens * size * rank.item
        twice = recomputed * repeats.layer
        yield Transfer("tp", "all_gather", every, layers + twice, "q and k of all heads")
        back = layers * _reaches_queries(products, gradients)
        yield Transfer("tp", "reduce_scatter", every, back, "gradients of q and k")
    for module, numbers in norms_over_tp(blueprint.model, of.kind).items():
        sums = numbers * rank.tokens * max(rank.item, STATISTIC_BYTES)
        twice = recomputed * _repeats_attention(rank, products, gradients)
        twice += layers * (module in gradients.norms)
        yield Transfer("tp", "all_reduce", sums, layers + twice, "norms over split dimensions")
    cut = rank.mlp_chunks
    apart = recomputed if cut > 1 else 0  # number of MLPs whose two GEMMs communicate in chunks
    if not rank.sp:
        sums = (of_inputs[0] + rows) * layers + rows_again * recomputed - 2 * apart
        yield Transfer("tp", "all_reduce", whole, sums, what)
        if apart:
            yield Transfer("tp", "all_reduce", whole // cut, 2 * apart * cut, what)
        return
    if apart:
        yield Transfer("tp", "all_gather", whole // cut, 4 * apart * cut, what)
        yield Transfer("tp", "reduce_scatter", whole // cut, 2 * apart * cut, what)
    # The backward of a column-parallel GEMM gathers the saved shard of the input and
    # reduce-scatters the input's gradient, both without chunks.
    gathers = (of_columns + of_rows_alone) * layers - apart
    yield Transfer("tp", "all_gather", whole, gathers, what)
    yield Transfer("tp", "reduce_scatter", whole, of_inputs[0] * layers - apart, what)
    # All other collectives are split into chunks that overlap with the GEMM.
    chunks = rank.blueprint.layer.chunks
    each = whole // chunks
    gathers = (columns + of_inputs[1]) * layers + columns_again * recomputed - 3 * apart
    scatters = rows * layers + rows_again * recomputed - apart
    yield Transfer("tp", "all_gather", each, chunks * gathers, what)
    yield Transfer("tp", "reduce_scatter", each, chunks * scatters, what)


def _reaches_queries(products: Sequence[LayerProduct], gradients: Gradients) -> bool:
    """Returns whether the queries of a layer's attention have a gradient."""
    return any(each.outputs == "queries" and gradients.reach(each) for each in products)


def _keeps_results(products: Sequence[LayerProduct], gradients: Gradients) -> bool:
    """Returns whether the product with the results of a layer's attention keeps them."""
    return any(each.inputs == "queries" and each.name in gradients.weights for each in products)


def _repeats_attention(
    rank: PipelineRank, products: Sequence[LayerProduct], gradients: Gradients
) -> bool:
    """Returns whether the attention of a layer with a recomputation is repeated.

    By itself, it is only repeated for its own backward, or for the product with its results.
    """
    repeats = rank.blueprint.layer.repeats
    needed = _reaches_queries(products, gradients) or _keeps_results(products, gradients)
    return repeats.layer or (repeats.attention and needed)


def _split(products: Sequence[LayerProduct]) -> tuple[int, int]:
    """Counts the column- and the row-parallel products."""
    column, row = (sum(each.split == split for each in products) for split in (COLUMN, ROW))
    return column, row


def _experts(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the traffic of layers with experts (experts/route.py, experts/balance.py).

    The sizes of an all-to-all assume that tokens choose their experts at random.
    """
    blueprint = rank.blueprint
    sparse = [(of, gradients) for of, gradients in rank.layers_alike() if of.kind.experts]
    if sparse:
        yield from _balance(rank, sum(of.layers for of, _ in sparse) * blueprint.microbatches)
    if rank.layout.ep > 1:
        for of, gradients in sparse:
            yield from _dispatch(rank, of, gradients)


def _balance(rank: PipelineRank, layers: int) -> Iterator[Transfer]:
    """Yields the all-reduces that the balancing loss and the z-loss of experts need.

    They sum the number of tokens of each expert in every whole sequence, and the number of tokens
    that are not padding.
    """
    blueprint, settings = rank.blueprint, rank.blueprint.balance
    counts = WHOLE_BYTES * blueprint.micro_batch_size * blueprint.model.num_experts
    if settings.aux_loss:
        for dim in ("tp", "cp"):
            yield Transfer(dim, "all_reduce", counts, layers, "tokens of each expert")
    if settings.z_loss:
        yield Transfer("dp", "all_reduce", SCALAR_BYTES, 1, "routed tokens")


def _dispatch(rank: PipelineRank, of: LayersOfKind, gradients: Gradients) -> Iterator[Transfer]:
    """Yields the transfers of tokens to their experts and back, and those of their gradients."""
    blueprint, ep = rank.blueprint, rank.layout.ep
    model, repeats = blueprint.model, blueprint.layer.repeats
    layers, recomputed = (n * blueprint.microbatches for n in (of.layers, of.recomputed))
    # A repetition of the experts ends before their results travel back, unless a norm follows.
    there = layers + recomputed * (repeats.mlp or repeats.layer)
    back = layers + recomputed * (repeats.layer and of.kind.norm_position != "before")
    products = products_of(model, of.kind)
    of_experts = [product for product in products if product.of_experts]
    of_tokens = layers * any(
        product.inputs == "hidden" and product.name in gradients.inputs for product in of_experts
    )
    of_weights = layers * any(p.outputs == ROUTED and gradients.reach(p) for p in products)
    trained = {product.name for product in of_experts} & gradients.weights
    of_results = layers if trained else of_weights
    own = rank.tokens // (rank.layout.tp if rank.sp else 1)
    chosen = model.num_experts, model.experts_per_token, ep
    way = chosen_way(blueprint.layer.dispatch, *chosen)
    tokens = ep * (round(own * share_sent(*chosen)) if way == ALL_TO_ALL else own)
    states = tokens * model.hidden_size * rank.item
    choices, weights = (
        tokens * model.experts_per_token * n for n in (WHOLE_BYTES, max(4, rank.item))
    )
    if way == ALL_TO_ALL:
        counts = WHOLE_BYTES * (ep + model.num_experts)
        yield Transfer("ep", "all_to_all", counts, layers, "numbers of tokens and rows")
        yield Transfer("ep", "all_to_all", choices, layers, "choices of experts")
        yield Transfer("ep", "all_to_all", weights, there + of_weights, "weights of experts")
        moved = there + back + of_tokens + of_results
        yield Transfer("ep", "all_to_all", states, moved, TOKENS)
        return
    yield Transfer("ep", "all_gather", choices, layers, "choices of experts")
    yield Transfer("ep", "all_gather", weights, there, "weights of experts")
    yield Transfer("ep", "reduce_scatter", weights, of_weights, "gradients of weights of experts")
    yield Transfer("ep", "all_gather", states, there + of_results, TOKENS)
    yield Transfer("ep", "reduce_scatter", states, back + of_tokens, RESULTS)


# `transfers` mirrors the code call by call, and `tests/distributed/test_traffic.py` compares it
# with real steps. Evaluation, checkpoints and start-up are not counted.
DIMS = ("tp", "cp", "ep", "pp", "dp", "dp_cp", "edp", "embedding", "world")


def transfers(
    config: Config, layout: Layout, stage: int | None = None, data_rank: int = 0
) -> list[Transfer]:
    """Lists the collectives and messages of one rank in a step.

    Args:
        config: a checked configuration.
        layout: the layout to use instead of the configuration's tp, cp, pp, dp and ep.
        stage: index of the rank along pp, 0 to pp − 1. If it is None, each dimension has the calls
            of the busiest rank in this dimension, except pp, which has the traffic in both
            directions between the two neighbouring ranks that exchange most.
        data_rank: index of the rank along dp_cp, which counts if there is a stage. Without one,
            Muon's exchanges are those of this rank.

    Raises:
        ValueError: if there is no such stage.
        UserError: if `schedule.layers_per_stage` does not fit the model.
    """
    if stage is not None and not 0 <= stage < layout.pp:
        raise ValueError(f"stage {stage} is outside of 0..{layout.pp - 1}")
    blueprint = planned(config, layout)
    ranks = [PipelineRank(blueprint, index, data_rank) for index in range(layout.pp)]
    if stage is not None:
        return _of_rank(ranks[stage])
    inner = {_between(rank): rank.index for rank in ranks[1:-1]}
    ends = sorted({0, layout.pp - 1, *inner.values()})
    lists = [_of_rank(ranks[i]) for i in ends]
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
        if dim == "tp":  # under ZeRO, the gradients that tp ranks sum differ along dp_cp
            others = (rank_with_most_sums(ranks[i]) for i in ends)
            more = (_of_rank(other) for other in others if other.data_rank != data_rank)
            mine += [[t for t in sent if t.dim == dim] for sent in more]
        n = group_size(dim, layout)
        found += max(mine, key=lambda sent: sum(wire_bytes(t, n) for t in sent))
    return found


def _between(rank: PipelineRank) -> Hashable:
    """Returns what distinguishes the traffic of ranks between the ends of the pipeline."""
    model, every = rank.blueprint.model, len(rank.blueprint.kinds) > 1
    stages = tuple(
        (
            stage.recomputed,
            stage.without_backward,
            tuple(LayerKind.of(model, i) for i in stage.layers) if every else len(stage.layers),
        )
        for stage in rank.stages
    )
    frozen = [p.frozen for p in rank.parameters] if rank.blueprint.frozen else ()
    return stages, tuple(frozen)


def _most_boundaries(assignment: StageAssignment) -> int:
    """Returns the largest number of stage boundaries that any two ranks share."""
    ranks = [rank for rank, _ in assignment.places]
    between = Counter(frozenset(pair) for pair in pairwise(ranks) if pair[0] != pair[1])
    return max(between.values(), default=0)


def _of_rank(rank: PipelineRank) -> list[Transfer]:
    """Returns all transfers of a rank in dimensions of more than one rank."""
    groups: tuple[Callable[[PipelineRank], Iterator[Transfer]], ...]
    groups = (_tensor, _context, _experts, _pipeline, _data, _tied, _scalars, _muon)
    if isinstance(rank.blueprint.model, OwnModelConfig):
        groups = (_of_own_layers, _data, _scalars)
    found = [transfer for make in groups for transfer in make(rank)]
    return [t for t in found if t.count and group_size(t.dim, rank.layout) > 1]


def _of_own_layers(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields tp collectives and messages of a user's own model, whose sizes are estimated.

    Only its code knows what its parts send. A block with split parameters counts as one pair of
    split layers, with two sums in each direction.
    """
    count = rank.blueprint.microbatches
    split = {
        n
        for stage in rank.stages
        for n in stage.layers
        if any(not p.replicated for p in rank.held(stage, range(n, n + 1)))
    }
    yield Transfer("tp", "all_reduce", _own_message(rank), 2 * len(split) * count, "split layers")
    yield from _messages(rank, rank.neighbours(1), rank.neighbours(-1, with_backward=True))


def _own_message(rank: PipelineRank) -> int:
    """Estimates the bytes of x in a user's own model: a vector for each token of a sample.

    It is as long as the narrowest matrix of the rank's parameters has columns.
    """
    blueprint = rank.blueprint
    width = min((p.columns for p in rank.parameters if p.columns > 1), default=1)
    return rank.item * blueprint.micro_batch_size * blueprint.local_seq_length * width


def _tensor(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the tp collectives of layers, embedding and head, and those that sum gradients."""
    microbatches, whole = rank.blueprint.microbatches, rank.hidden
    yield from layer_transfers(rank)
    if rank.first and rank.blueprint.model.embedding == "vocab_parallel":
        if rank.sp:
            yield Transfer("tp", "reduce_scatter", whole, microbatches, "embedding")
            back = 0 if WORD_EMBEDDING in rank.blueprint.frozen else microbatches
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
    """Yields the cp traffic of attention (context_parallel/attention.py), and of other mixers."""
    blueprint = rank.blueprint
    alike: dict[Hashable, list[tuple[LayersOfKind, Gradients]]] = defaultdict(list)
    for of, by in rank.layers_alike():
        if of.kind.mixer == ATTENTION:
            alike[of.kind.window, heads_of(of.kind), of.kind.head_size].append((of, by))
    for layers in alike.values():
        groups, calls = _attention(rank, layers[0][0].kind)
        for sent in calls:
            count = sum(_attention_calls(rank, sent, of, by) for of, by in layers)
            count *= blueprint.microbatches * groups
            yield Transfer("cp", sent.op, int(sent.nbytes) // groups, int(count), sent.what)
    if rank.layout.cp > 1:
        yield from _traced_mixers(rank)


def _attention_calls(
    rank: PipelineRank, sent: SentCalls, of: LayersOfKind, gradients: Gradients
) -> Number:
    """Returns the number of these calls in attention of some layers, for a micro-batch."""
    products = products_of(rank.blueprint.model, of.kind)
    forward, again = sent.count - sent.backward, sent.again
    reached = _reaches_queries(products, gradients)
    if not reached:
        again = forward  # all of it, since no backward follows
    elif sent.of_results and not rank.blueprint.layer.repeats.layer:
        again *= _keeps_results(products, gradients)
    again *= _repeats_attention(rank, products, gradients)
    return of.layers * (forward + reached * sent.backward) + of.recomputed * again


def _traced_mixers(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the cp traffic of mixers other than attention, as their traces say."""
    blueprint = rank.blueprint
    others = [of for of in rank.kinds if of.kind.mixer not in (ATTENTION, None)]
    traces = layer_traces(blueprint) if others else {}
    for of in others:
        counts = of.layers - of.recomputed, of.recomputed
        for layers, trace in zip(counts, traces[of.kind], strict=True):
            passes = trace.at(blueprint.micro_batch_size)
            sent = (passes.forward.sent, passes.repeated.sent, passes.backward.sent)
            for each in chain(*sent):
                if each.group == "cp":
                    count = each.count * layers * blueprint.microbatches
                    yield Transfer("cp", each.op, int(each.nbytes), count, "tokens of a mixer")


def _attention(rank: PipelineRank, kind: LayerKind) -> tuple[int, Iterator[SentCalls]]:
    """Returns (number of parts into which each call is split, cp calls) of a layer's attention."""
    blueprint, window = rank.blueprint, kind.window
    w = HeadWidths.of(kind, rank.layout.tp)
    style, drops, cp = blueprint.layer.cp_style, blueprint.model.dropout > 0, rank.layout.cp
    if window is None or drops or style == "heads":
        groups = rank.groups_of_heads(kind) if style == "gather" and not drops else 1
        return groups, sends(style, w, rank.tokens, rank.item, cp, drops)
    split = SequenceSplit.of_run(blueprint, 0)
    halo = halo_tokens(split, blueprint.micro_batch_size, window)
    here = rank.data_rank % cp
    sent, received = (tokens[here] for tokens in halo)
    return 1, halo_sends(w, sent, received, rank.item)


def _head(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the tp collectives of the head and its loss (tensor_parallel/loss.py)."""
    model, microbatches, whole = rank.blueprint.model, rank.blueprint.microbatches, rank.hidden
    norms = [p for p in rank.ends if p.name.startswith("head.") and p.name not in TABLES]
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
        # For each token, every rank contributes the maximum, the sum of exponentials, the target
        # logit and, with label smoothing, the sum of the logits. They are in fp32 or fp64 unless
        # the loss is computed in half precision.
        item = 2 if rank.blueprint.half_loss else max(4, rank.item)
        numbers = 4 if rank.blueprint.loss.label_smoothing else 3
        token, what = rank.layout.tp * numbers * item, "loss"
    else:
        token, what = rank.columns * rank.item, "logits"
    for tokens, count in rank.loss_chunks.items():
        yield Transfer("tp", "all_gather", token * tokens, count * microbatches, what)


def _pipeline(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the messages between stages, one per micro-batch, boundary and direction.

    If messages are sent in slices, all-gathers over tp put them together (pipeline/executor.py).
    """
    after, before = rank.neighbours(1), rank.neighbours(-1)
    back = rank.neighbours(-1, with_backward=True)
    yield from _messages(rank, after, back)
    if rank.sends_slices:
        count = rank.blueprint.microbatches * (before + rank.neighbours(1, with_backward=True))
        yield Transfer("tp", "all_gather", rank.hidden, count, "parts of messages")


def _messages(rank: PipelineRank, forward: int, back: int) -> Iterator[Transfer]:
    """Yields the messages of activations over `forward` and of gradients over `back` boundaries."""
    nbytes = rank.hidden // (rank.layout.tp if rank.sp or rank.sends_slices else 1)
    if isinstance(rank.blueprint.model, OwnModelConfig):
        nbytes = _own_message(rank)
    count = rank.blueprint.microbatches
    ways = (forward, "activations to the next stage"), (back, "gradients to the previous stage")
    for boundaries, what in ways:
        if boundaries:
            yield Transfer("pp", "send_recv", nbytes, count * boundaries, what)


def _data(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the collectives of gradient buckets or FSDP units, and that of the token counts.

    See data_parallel/reducer.py.
    """
    if rank.last:
        yield Transfer("dp", "all_reduce", SCALAR_BYTES, 1, "token count")
    if rank.fully_sharded:
        yield from _fully_sharded(rank)
    # Alike are buckets whose first parameters are, and that have as many elements.
    alike: dict[tuple[bool, bool, int], list[LocalParameter]] = {}
    for bucket in buckets_of(rank):
        like, numel = bucket[0], bucket_numel(bucket, rank)
        alike.setdefault((like.expert, like.wide, numel), []).append(like)
    for (_, _, numel), of in alike.items():
        yield from _buckets(rank, of[0], numel, len(of))


def _muon(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the exchanges of matrices for Newton-Schulz (optim/muon.py) on tp rank 0.

    They are an upper bound with HSDP, or if a GEMM has both frozen and trained matrices.
    """
    if rank.blueprint.optim.name == "muon":
        for experts in (False, True):
            yield from _muon_of(rank, experts)


def _muon_of(rank: PipelineRank, experts: bool) -> Iterator[Transfer]:
    """Yields the exchanges of expert matrices if `experts`, else of all other matrices.

    Expert matrices are not split over tp, so they are only exchanged over edp.
    """
    blueprint, layout = rank.blueprint, rank.layout
    table = [p for p in rank.trained if p.expert is experts and not p.wide]
    if not table:
        return
    here, shards = rank.index_of(table[0]), rank.shards_of(table[0])
    tp, dp, dim = layout.tp, rank.replicas, layout.replica_dim
    if experts:
        tp, dp, dim = 1, layout.edp, "edp"
    shapes: dict[str, tuple[int, ...]] = {}
    local: dict[str, int] = {}
    numbers = rank.experts_here if experts else range(0)
    layers = (layer for stage in rank.stages for layer in stage.layers)
    for _, tensors in parameters_of_layers(blueprint.model, layers):
        for tensor in tensors:
            if not tensor.muon or (tensor.experts > 0) is not experts:
                continue
            for name in tensor.names_of(numbers):
                if not blueprint.optim.treatment(name).frozen:
                    shapes[name] = tensor.shape
                    local[name] = math.prod(tensor.local_shape(tp))
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
    """Yields the collectives of FSDP units.

    Each block is a unit, its experts are another unit inside it, and all other parameters form the
    last unit. Rows are padded to a multiple of dp · cp. A backward reduces only the gradients that
    it has computed. In a V schedule, one rank has the first and the last stage, so it reduces the
    parameters of embedding and head separately.

    With ddp.shard_size (HSDP), the result is an upper bound: fewer ranks gather, and an all-reduce
    follows.
    """
    blueprint, microbatches = rank.blueprint, rank.blueprint.microbatches
    every = microbatches if blueprint.data.every_microbatch else 1
    whole = blueprint.data.zero == 2  # whether frozen parameters are whole on every rank
    gathered: Counter[tuple[str, bool]] = Counter()
    numels: Counter[tuple[str, bool]] = Counter()
    for p in filter(rank.is_fully_sharded, rank.parameters):
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
        # Even with a single micro-batch, the gradients of each backward are reduced separately.
        apart = unit == "rest" and every == microbatches
        read, dp = map(rank.ends_read, rank.stages), rank.shards
        trained = [[p for p in mine if not p.frozen and rank.is_fully_sharded(p)] for mine in read]
        ends = [dp * sum(sharded_numel(p, dp) for p in mine) for mine in trained if mine]
        for reduced in ends if apart else [numel]:
            yield Transfer(dim, "reduce_scatter", reduced * rank.grad_item, every, "gradients")


def _buckets(
    rank: PipelineRank, like: LocalParameter, numel: int, count: int
) -> Iterator[Transfer]:
    """Yields the collectives of `count` gradient buckets of `numel` elements each.

    All of them hold parameters like `like`. See reducer.py, engine.py and comm_hooks.py in
    `data_parallel`.
    """
    dim = "edp" if like.expert else rank.layout.replica_dim
    if rank.blueprint.data.comm_hook == "bf16":
        half = 2 * padded_numel(numel, group_size(dim, rank.layout))
        yield Transfer(dim, "all_to_all", half, count, "gradient buckets")
        yield Transfer(dim, "all_gather", half, count, "gradient buckets")
        return
    sharded = rank.blueprint.data.zero > 0 and not rank.fully_sharded
    op = "reduce_scatter" if sharded else "all_reduce"
    yield Transfer(dim, op, numel * rank.grad_item, count, "gradient buckets")
    if sharded:
        nbytes = numel * rank.item_of(like)
        yield Transfer(dim, "all_gather", nbytes, count, "stepped parameters")


def _tied(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the all-reduces for a table that the first and the last stage share."""
    if rank.is_tied_to_another:
        numel = bucket_numel([rank.table], rank) // rank.shards
        if rank.blueprint.data.zero > 1:
            most = sharded_numel(rank.table, rank.shards)  # the last shards may have fewer rows
            numel = max(0, min(most, rank.table.numel - most * (rank.data_rank % rank.shards)))
        table = numel * rank.grad_item
        yield Transfer("embedding", "all_reduce", SCALAR_BYTES, 1, "rendezvous of the tied ranks")
        yield Transfer("embedding", "all_reduce", table, 1, "gradient of the tied table")


def _scalars(rank: PipelineRank) -> Iterator[Transfer]:
    """Yields the all-reduce of all scalars over the world.

    The scalars are the loss, the number of tokens, the squared norm and the stop flag. Each layer
    with experts adds the tokens of each expert, two losses, the entropy and the range of the bias.
    """
    model = rank.blueprint.model
    numbers = 4 + len(model.expert_layers) * (model.num_experts + 5)
    yield Transfer("world", "all_reduce", numbers * SCALAR_BYTES, 1, "loss and gradient norm")
