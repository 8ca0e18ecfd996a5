"""Which parameters share a gradient bucket: arithmetic without torch, for reducer and price."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from parallel3d.config.schema import Config, ModelConfig
from parallel3d.schedules.orders import StageAssignment
from parallel3d.sizes.balance import layers_of_stages, placement_of
from parallel3d.sizes.model import (
    LocalParameter,
    collectives_again,
    loss_chunk_counts,
    word_table_numel,
)
from parallel3d.sizes.transfer import (
    SCALAR_BYTES,
    PipelineRank,
    Transfer,
    group_size,
    wire_bytes,
)
from parallel3d.topology.layout import Layout

MIB = 1024 * 1024
FIRST_BUCKET_MIB = 1.0
CPU_CAP_MIB = 25.0
# NVLink and InfiniBand come near their rate at a hundred MiB and more, where TCP long has its own.
ACCELERATOR_CAP_MIB = 128.0
SHARD_ALIGNMENT = 32  # elements: a shard of fp32 begins at a multiple of 128 bytes


def padded_numel(numel: int, shards: int) -> int:
    """Elements of a bucket that is cut into `shards` equal parts; unsharded ones are not padded."""
    unit = shards * SHARD_ALIGNMENT if shards > 1 else 1
    return -(-numel // unit) * unit


def caps_of(bucket_cap_mb: float | Sequence[float] | None, accelerated: bool) -> Sequence[float]:
    """MiB at which each bucket closes, the last number for all that follow."""
    if bucket_cap_mb is None:
        return [FIRST_BUCKET_MIB, ACCELERATOR_CAP_MIB if accelerated else CPU_CAP_MIB]
    return bucket_cap_mb if isinstance(bucket_cap_mb, Sequence) else [bucket_cap_mb]


def cap_bytes(bucket_cap_mb: float | Sequence[float] | None, accelerated: bool) -> int:
    """The largest of them, in bytes."""
    return int(max(caps_of(bucket_cap_mb, accelerated)) * MIB)


def assign(
    sizes: Iterable[int],
    bucket_cap_mb: float | Sequence[float] | None,
    alone: Collection[int] = (),
    accelerated: bool = False,
) -> list[list[int]]:
    """Groups parameters, given by their bytes in the order of readiness, into buckets.

    As PyTorch's DDP means `bucket_cap_mb`: parameters are never split, and a bucket closes with
    the parameter that makes it reach the cap. With None the first bucket closes at 1 MiB, so that
    communication starts early, and the others at 25 MiB (Li et al. 2020, §3.2.3), or at 128 MiB
    where the parameters are on an accelerator (`accelerated`). There the first bucket ends, since
    parameters are not split, with the first matrix of the backward: one call more for a start that
    is a layer earlier. Several numbers are for one bucket each, the last for all that follow. The
    parameters numbered in `alone` get buckets of their own: a tied table's two copies must be cut
    alike.
    """
    caps = caps_of(bucket_cap_mb, accelerated)
    buckets: list[list[int]] = []
    current: list[int] = []
    filled = 0
    for i, size in enumerate(sizes):
        if i in alone and current:
            buckets.append(current)
            current, filled = [], 0
        current.append(i)
        filled += size
        if i in alone or filled >= caps[min(len(buckets), len(caps) - 1)] * MIB:
            buckets.append(current)
            current, filled = [], 0
    if current:
        buckets.append(current)
    return buckets


def compressed_rank(rows: int, columns: int, rank: int) -> int:
    """The rank at which PowerSGD sends a gradient of this shape; 0: as it is.

    Compressed only if both factors together are less than half of the matrix (PyTorch's rule).
    """
    rank = min(rank, rows, columns)
    return rank if 2 * rank * (rows + columns) < rows * columns else 0


# What the layers of a rank send over tp in one step (see `traffic`).


def layer_transfers(rank: PipelineRank) -> Iterator[Transfer]:
    """tensor_parallel/linear_ops.py: a layer has two column- and two row-parallel GEMMs."""
    whole, what = rank.hidden, "activations of the layers"
    microbatches = rank.config.num_microbatches
    layers = rank.layer_count * microbatches
    recomputed = rank.recomputed_layers * microbatches
    again = collectives_again(rank.recompute)
    if rank.config.tensor_parallel.attention == "gather_qk":
        model, tp = rank.config.model, rank.layout.tp
        heads = model.num_attention_heads + max(model.kv_heads, tp)  # of q and k, copies too
        every = rank.tokens * heads * model.head_size * rank.item
        twice = recomputed * ("layer" in rank.recompute)
        yield Transfer("tp", "all_gather", every, layers + twice, "q and k of all heads")
        yield Transfer("tp", "reduce_scatter", every, layers, "gradients of q and k")
    if not rank.sp:
        yield Transfer("tp", "all_reduce", whole, 4 * layers + again.sums * recomputed, what)
        return
    # The backward of a column-parallel GEMM gathers the shard that was kept and scatters its
    # gradient, both in one.
    yield Transfer("tp", "all_gather", whole, 2 * layers, what)
    yield Transfer("tp", "reduce_scatter", whole, 2 * layers, what)
    # In pieces: the forward gathers for column- and scatters for row-parallel ones, and the
    # backward of the row-parallel ones gathers.
    chunks = rank.config.tensor_parallel.chunks
    piece = whole // chunks
    gathers = 4 * layers + again.gathers * recomputed
    scatters = 2 * layers + again.scatters * recomputed
    yield Transfer("tp", "all_gather", piece, chunks * gathers, what)
    yield Transfer("tp", "reduce_scatter", piece, chunks * scatters, what)


# What every rank sends in one optimizer step, by arithmetic on the configuration alone.
#
# The list mirrors the code call by call; `tests/distributed/test_traffic.py` runs real steps and
# compares every call and byte. Evaluation, checkpoints and the start of a run are not part of it.


TIED_TABLES = ("embedding.word.weight", "head.table")
DIMS = ("tp", "pp", "dp", "embedding", "world")


def transfers(config: Config, layout: Layout, stage: int | None = None) -> list[Transfer]:
    """All that one rank sends in a step: of `stage`, or of the busiest rank of each dimension.

    Ranks of a pipeline differ in layers, embedding and head. Without `stage`, each dimension is
    that of the rank that sends most along it, except pp: there it is what passes between two
    neighbouring ranks, those with the most, in both directions.

    Args:
        config: checked; only its sizes are read. tp, pp and dp are the layout's.
        stage: index along pp, 0 to pp − 1; the rank there sends for all of its chunks.

    Raises:
        ValueError: no such stage, or cp > 1, which the trainer does not know yet.
        UserError: `schedule.layers_per_stage` does not fit the model.
    """
    if layout.cp > 1:
        raise ValueError(f"cp={layout.cp}: context parallelism sends nothing yet")
    if stage is not None and not 0 <= stage < layout.pp:
        raise ValueError(f"stage {stage} is outside of 0..{layout.pp - 1}")
    ranks = pipeline_ranks(config, layout)
    if stage is not None:
        return _of_rank(ranks[stage])
    # Ranks between the ends differ by their numbers of layers alone.
    inner = {tuple(map(len, rank.layers)): rank.index for rank in ranks[1:-1]}
    lists = [_of_rank(ranks[i]) for i in sorted({0, layout.pp - 1, *inner.values()})]
    found: list[Transfer] = []
    for dim in DIMS:
        if dim == "pp":
            boundaries = _most_boundaries(ranks[0].placement)
            found += _messages(ranks[0], boundaries, boundaries)
            continue
        mine = [[t for t in sent if t.dim == dim] for sent in lists]
        n = group_size(dim, layout)
        found += max(mine, key=lambda sent: sum(wire_bytes(t, n) for t in sent))
    return found


def pipeline_ranks(config: Config, layout: Layout) -> list[PipelineRank]:
    """The ranks of a pipeline by their index along pp; tp, pp and dp are the layout's."""
    config = replace(config, tp=layout.tp, pp=layout.pp, dp=layout.dp)
    placement, split = placement_of(config), layers_of_stages(config)
    return [PipelineRank(config, layout, i, placement, split) for i in range(layout.pp)]


def _most_boundaries(placement: StageAssignment) -> int:
    """The most boundaries of stages that any two ranks have between them."""
    ranks = [rank for rank, _ in placement.places]
    between = Counter(frozenset(pair) for pair in pairwise(ranks) if pair[0] != pair[1])
    return max(between.values(), default=0)


def _of_rank(rank: PipelineRank) -> list[Transfer]:
    groups = (_tensor, _pipeline, _data, _tied, _scalars)
    found = [transfer for make in groups for transfer in make(rank)]
    return [t for t in found if t.count and group_size(t.dim, rank.layout) > 1]


def _tensor(rank: PipelineRank) -> Iterator[Transfer]:
    """The layers, the embedding, the head; optim/optimizer.py for sp."""
    microbatches, whole = rank.config.num_microbatches, rank.hidden
    yield from layer_transfers(rank)
    if rank.first and rank.config.model.embedding == "vocab_parallel":
        if rank.sp:
            yield Transfer("tp", "reduce_scatter", whole, microbatches, "embedding")
            yield Transfer("tp", "all_gather", whole, microbatches, "embedding's gradient")
        else:
            yield Transfer("tp", "all_reduce", whole, microbatches, "embedding")
    if rank.last:
        yield from _head(rank)
    model, tp = rank.config.model, rank.layout.tp
    shards = rank.layout.dp if rank.config.zero > 1 else 1
    shared = _shared_elements(model, tp, shards) * rank.layer_count * rank.grad_item
    if shared:
        what = "gradients of shared key-value heads and of norms of heads"
        yield Transfer("tp", "all_reduce", shared, 1, what)
    if rank.sp:
        partial = sum(_sharded_numel(p, shards) for p in rank.parameters if p.replicated)
        nbytes = partial * rank.grad_item
        yield Transfer("tp", "all_reduce", nbytes, 1, "gradients of replicated parameters")


def _shared_elements(model: ModelConfig, tp: int, shards: int) -> int:
    """Counts the elements that `all_reduce_shared_kv_grads` sums for a layer, by part."""
    found = 0
    if tp > model.kv_heads:  # each head on several ranks
        rows = 2 * model.kv_heads * model.head_size
        found += rows * (model.hidden_size + int(model.qkv_bias))
    if tp > 1 and model.qk_norm:
        found += 2 * -(-model.head_size // shards)
    return found


def _head(rank: PipelineRank) -> Iterator[Transfer]:
    """tensor_parallel/loss.py, over tp."""
    model, microbatches, whole = rank.config.model, rank.config.num_microbatches, rank.hidden
    tp, loss, columns = rank.layout.tp, rank.config.loss, model.padded_vocab_size
    if rank.sp:
        yield Transfer("tp", "all_gather", whole, microbatches, "head's input")
        yield Transfer("tp", "reduce_scatter", whole, microbatches, "head's input gradient")
    else:
        yield Transfer("tp", "all_reduce", whole, microbatches, "head's input gradient")
        if model.tie_embeddings and model.embedding == "replicated":
            table = columns * model.hidden_size * rank.item
            yield Transfer("tp", "all_gather", table, microbatches, "replicated table's gradient")
    if model.parallel_output:
        # Maximum, sum of exponentials and target of each token, and for label smoothing the sum,
        # from every rank, fp32 or better unless the loss is in half precision.
        columns //= tp
        item = 2 if rank.config.precision.lm_cross_entropy == "fp16" else max(4, rank.item)
        token, what = tp * (4 if loss.label_smoothing else 3) * item, "loss"
    else:
        token, what = columns * rank.item, "logits"
    # Where the run has yet to find out (device=auto), a topology is one of accelerators.
    on_accelerator = rank.config.device != "cpu"
    chunks = loss_chunk_counts(
        rank.tokens, columns, loss.chunk_tokens, item=rank.item, on_accelerator=on_accelerator
    )
    for tokens, count in chunks.items():
        yield Transfer("tp", "all_gather", token * tokens, count * microbatches, what)


def _pipeline(rank: PipelineRank) -> Iterator[Transfer]:
    """pipeline/executor.py: one message a micro-batch, direction and boundary between ranks."""
    after, before = rank.neighbours(1), rank.neighbours(-1)
    yield from _messages(rank, after, before)
    if rank.sends_slices:
        count = rank.config.num_microbatches * (after + before)
        yield Transfer("tp", "all_gather", rank.hidden, count, "parts of messages")


def _messages(rank: PipelineRank, forward: int, back: int) -> Iterator[Transfer]:
    """Activations over `forward` boundaries and gradients over `back` ones."""
    nbytes = rank.hidden // (rank.layout.tp if rank.sp or rank.sends_slices else 1)
    count = rank.config.num_microbatches
    if forward:
        what = "activations to the next stage"
        yield Transfer("pp", "send_recv", nbytes, count * forward, what)
    if back:
        what = "gradients to the previous stage"
        yield Transfer("pp", "send_recv", nbytes, count * back, what)


def _data(rank: PipelineRank) -> Iterator[Transfer]:
    """data_parallel/reducer.py: every bucket once; trainer.py: token count and loss."""
    config, dp = rank.config, rank.layout.dp
    if rank.last:
        yield Transfer("dp", "all_reduce", SCALAR_BYTES, 1, "token count")
    if config.zero > 1:
        yield from _fully_sharded(rank)
        return
    shards = dp if config.zero else 1
    bucketed = [bucket for chunk in reversed(rank.chunks) for bucket in _bucketed(rank, chunk)]
    if config.ddp.comm_hook == "powersgd":
        yield from _low_rank(rank, bucketed)
    else:
        numels = Counter(padded_numel(sum(p.numel for p in b), shards) for b in bucketed)
        for numel, count in numels.items():
            yield from _buckets(rank, numel, count)


def _bucketed(rank: PipelineRank, chunk: list[LocalParameter]) -> list[list[LocalParameter]]:
    """The buckets of one chunk, whose backward makes the gradients of its last parameter first."""
    config, ready = rank.config, chunk[::-1]
    sizes = [p.numel * rank.grad_item for p in ready]
    tied = rank.is_tied_to_another
    alone = [i for i, p in enumerate(ready) if tied and p.name in TIED_TABLES]
    accelerated = config.device != "cpu"  # a plan for `auto` is one for a cluster of GPUs
    buckets = assign(sizes, config.ddp.bucket_cap_mb, alone, accelerated)
    return [[ready[i] for i in members] for members in buckets]


def _fully_sharded(rank: PipelineRank) -> Iterator[Transfer]:
    """data_parallel/fully_sharded.py: a unit a block and one for the rest, rows padded to dp.

    With ddp.shard_size this is an upper bound: fewer ranks gather, and a sum over copies follows.
    """
    config, dp, microbatches = rank.config, rank.layout.dp, rank.config.num_microbatches
    every = microbatches if config.ddp.reduces_every_microbatch(config.zero) else 1
    numels: Counter[str] = Counter()
    for p in rank.parameters:
        block = p.name.startswith("layers.")
        unit = ".".join(p.name.split(".")[:2]) if block else "rest"
        numels[unit] += dp * _sharded_numel(p, dp)
    for unit, numel in numels.items():
        times = 2 * microbatches if config.zero == 3 and unit != "rest" else 1
        yield Transfer("dp", "all_gather", numel * rank.item, times, "parameters")
        yield Transfer("dp", "reduce_scatter", numel * rank.grad_item, every, "gradients")


def _sharded_numel(parameter: LocalParameter, shards: int) -> int:
    """Elements of the first of `shards` parts, cut along the rows: none is larger."""
    rows = parameter.numel // parameter.columns
    return -(-rows // shards) * parameter.columns


def _buckets(rank: PipelineRank, numel: int, count: int) -> Iterator[Transfer]:
    """data_parallel/reducer.py, bucketed.py and compressed.py: `count` buckets of `numel`."""
    if rank.config.ddp.comm_hook == "bf16":
        half = 2 * padded_numel(numel, rank.layout.dp)
        yield Transfer("dp", "all_to_all", half, count, "gradient buckets")
        yield Transfer("dp", "all_gather", half, count, "gradient buckets")
        return
    op = "reduce_scatter" if rank.config.zero else "all_reduce"
    yield Transfer("dp", op, numel * rank.grad_item, count, "gradient buckets")
    if rank.config.zero:
        yield Transfer("dp", "all_gather", numel * rank.item, count, "stepped parameters")


def _low_rank(rank: PipelineRank, buckets: list[list[LocalParameter]]) -> Iterator[Transfer]:
    """data_parallel/comm_hooks.py, once it has begun: P and what is left whole, then Q."""
    for bucket in buckets:
        first = second = 0
        for p in bucket:
            rows = p.numel // p.columns
            kept = compressed_rank(rows, p.columns, rank.config.ddp.powersgd_rank)
            first += kept * rows or p.numel
            second += kept * p.columns
        for numel in filter(None, (first, second)):
            nbytes = numel * rank.grad_item
            yield Transfer("dp", "all_reduce", nbytes, 1, "factors of gradient buckets")


def _tied(rank: PipelineRank) -> Iterator[Transfer]:
    """optim/optimizer.py: the table of which first and last stage hold a copy on two ranks."""
    model = rank.config.model
    if rank.is_tied_to_another:
        dp, whole = rank.layout.dp, word_table_numel(model, rank.layout.tp)
        shards = dp if rank.config.zero else 1
        numel = padded_numel(whole, shards) // shards
        if rank.config.zero > 1:
            numel = -(-whole // model.hidden_size // dp) * model.hidden_size
        table = numel * rank.grad_item
        yield Transfer("embedding", "all_reduce", SCALAR_BYTES, 1, "meeting ahead of that table")
        yield Transfer("embedding", "all_reduce", table, 1, "gradient of the tied table")


def _scalars(rank: PipelineRank) -> Iterator[Transfer]:
    """trainer.py: loss, tokens, squared norm, whether to stop; the two norms of the noise scale."""
    numbers = 6 if rank.config.train.noise_scale else 4
    yield Transfer("world", "all_reduce", numbers * SCALAR_BYTES, 1, "loss and gradient norm")
