"""What every rank sends in one optimizer step, by arithmetic on the configuration alone.

The list mirrors the code call by call; `tests/distributed/test_traffic.py` runs real steps and
compares every call and byte. Evaluation, checkpoints and the start of a run are not part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from parallel3d.config.schema import Config
from parallel3d.sizes.buckets import assign, compressed_rank, padded_numel
from parallel3d.sizes.local_shapes import LocalParameter, word_table_numel
from parallel3d.sizes.loss_chunks import loss_chunks
from parallel3d.sizes.stages import layers_of_stages
from parallel3d.sizes.transfer import SCALAR_BYTES, Stage, Transfer, group_size, wire_bytes
from parallel3d.topology.layout import Layout

TIED_TABLES = ("embedding.word.weight", "head.table")
DIMS = ("tp", "pp", "dp", "embedding", "world")


def transfers(config: Config, layout: Layout, stage: int | None = None) -> list[Transfer]:
    """All that one rank sends in a step: of `stage`, or of the busiest stage of each dimension.

    Stages differ in layers, embedding and head. Without `stage`, each dimension is that of the
    stage that sends most along it, except pp: there both directions of one boundary are listed,
    forward and back, also where pp=2 and no single stage sends both.

    Args:
        config: checked; only its sizes are read. tp, pp and dp are the layout's.
        stage: pipeline stage, 0 to pp − 1.

    Raises:
        ValueError: no such stage, or cp > 1, which the trainer does not know yet.
        UserError: `schedule.layers_per_stage` does not fit the model.
    """
    if layout.cp > 1:
        raise ValueError(f"cp={layout.cp}: context parallelism sends nothing yet")
    if stage is not None and not 0 <= stage < layout.pp:
        raise ValueError(f"stage {stage} is outside of 0..{layout.pp - 1}")
    config = replace(config, tp=layout.tp, pp=layout.pp, dp=layout.dp)
    layers = layers_of_stages(config)
    if stage is not None:
        return _of_stage(Stage(config, layout, stage, layers[stage]))
    # Stages between the ends differ by their number of layers alone.
    inner = {len(layers[p]): p for p in range(1, layout.pp - 1)}
    chosen = sorted({0, layout.pp - 1, *inner.values()})
    lists = [_of_stage(Stage(config, layout, p, layers[p])) for p in chosen]
    found: list[Transfer] = []
    for dim in DIMS:
        if dim == "pp":
            # A set in order: all messages of a step have one size, only the direction differs.
            found += dict.fromkeys(t for sent in lists for t in sent if t.dim == dim)
            continue
        mine = [[t for t in sent if t.dim == dim] for sent in lists]
        n = group_size(dim, layout)
        found += max(mine, key=lambda sent: sum(wire_bytes(t, n) for t in sent))
    return found


def _of_stage(stage: Stage) -> list[Transfer]:
    groups = (_tensor, _pipeline, _data, _tied, _scalars)
    found = [transfer for make in groups for transfer in make(stage)]
    return [t for t in found if t.count and group_size(t.dim, stage.layout) > 1]


def _layers(stage: Stage) -> Iterator[Transfer]:
    """tensor_parallel/linear_nodes.py: a layer has two column- and two row-parallel GEMMs."""
    whole, what = stage.hidden, "activations of the layers"
    layers = len(stage.layers) * stage.config.num_microbatches
    # Recomputation repeats the forward up to the second row-parallel GEMM.
    again = 1 if stage.config.recompute == "full" else 0
    if stage.config.tensor_parallel.attention == "gather_qk":
        model, tp = stage.config.model, stage.layout.tp
        heads = model.num_attention_heads + max(model.kv_heads, tp)  # of q and k, copies too
        every = stage.tokens * heads * model.head_dim * stage.item
        yield Transfer("tp", "all_gather", every, (1 + again) * layers, "q and k of all heads")
        yield Transfer("tp", "reduce_scatter", every, layers, "gradients of q and k")
    if not stage.sp:
        yield Transfer("tp", "all_reduce", whole, (4 + again) * layers, what)
        return
    # The backward of a column-parallel GEMM gathers the shard that was kept and scatters its
    # gradient, both in one.
    yield Transfer("tp", "all_gather", whole, 2 * layers, what)
    yield Transfer("tp", "reduce_scatter", whole, 2 * layers, what)
    # In pieces: the forward gathers for column- and scatters for row-parallel ones, and the
    # backward of the row-parallel ones gathers.
    chunks = stage.config.tensor_parallel.chunks
    piece, pieces = whole // chunks, chunks * layers
    yield Transfer("tp", "all_gather", piece, (4 + 2 * again) * pieces, what)
    yield Transfer("tp", "reduce_scatter", piece, (2 + again) * pieces, what)


def _tensor(stage: Stage) -> Iterator[Transfer]:
    """The layers, the embedding, the head; optim/optimizer.py for sp."""
    microbatches, whole = stage.config.num_microbatches, stage.hidden
    yield from _layers(stage)
    if stage.first and stage.config.model.embedding == "vocab_parallel":
        if stage.sp:
            yield Transfer("tp", "reduce_scatter", whole, microbatches, "embedding")
            yield Transfer("tp", "all_gather", whole, microbatches, "embedding's gradient")
        else:
            yield Transfer("tp", "all_reduce", whole, microbatches, "embedding")
    if stage.last:
        yield from _head(stage)
    model, tp = stage.config.model, stage.layout.tp
    if tp > model.kv_heads:  # each head on several ranks, and a place for each head in the sum
        rows = 2 * model.kv_heads * model.head_dim * len(stage.layers)
        shared = rows * (model.hidden_size + int(model.bias)) * stage.grad_item
        yield Transfer("tp", "all_reduce", shared, 1, "gradients of shared key-value heads")
    if stage.sp:
        shards = stage.layout.dp if stage.config.zero > 1 else 1
        partial = sum(_sharded_numel(p, shards) for p in stage.parameters if p.replicated)
        nbytes = partial * stage.grad_item
        yield Transfer("tp", "all_reduce", nbytes, 1, "gradients of replicated parameters")


def _head(stage: Stage) -> Iterator[Transfer]:
    """tensor_parallel/head_loss.py, over tp."""
    model, microbatches, whole = stage.config.model, stage.config.num_microbatches, stage.hidden
    tp, loss, columns = stage.layout.tp, stage.config.loss, model.padded_vocab_size
    if stage.sp:
        yield Transfer("tp", "all_gather", whole, microbatches, "head's input")
        yield Transfer("tp", "reduce_scatter", whole, microbatches, "head's input gradient")
    else:
        yield Transfer("tp", "all_reduce", whole, microbatches, "head's input gradient")
        if model.tie_embeddings and model.embedding == "replicated":
            table = columns * model.hidden_size * stage.item
            yield Transfer("tp", "all_gather", table, microbatches, "replicated table's gradient")
    if model.parallel_output:
        # Maximum, sum of exponentials and target of each token, and for label smoothing the sum,
        # from every rank, fp32 or better.
        columns //= tp
        token, what = tp * (4 if loss.label_smoothing else 3) * max(4, stage.item), "loss"
    else:
        token, what = columns * stage.item, "logits"
    # Where the run has yet to find out (device=auto), a topology is one of accelerators.
    on_accelerator = stage.config.device != "cpu"
    sizes = loss_chunks(
        stage.tokens, columns, loss.chunk_tokens, item=stage.item, on_accelerator=on_accelerator
    )
    for tokens, count in Counter(sizes).items():
        yield Transfer("tp", "all_gather", token * tokens, count * microbatches, what)


def _pipeline(stage: Stage) -> Iterator[Transfer]:
    """pipeline/executor.py: one message a micro-batch, direction and boundary."""
    nbytes = stage.hidden // (stage.layout.tp if stage.sp else 1)
    count = stage.config.num_microbatches
    if not stage.last:
        yield Transfer("pp", "send_recv", nbytes, count, "activations to the next stage")
    if not stage.first:
        yield Transfer("pp", "send_recv", nbytes, count, "gradients to the previous stage")


def _data(stage: Stage) -> Iterator[Transfer]:
    """data_parallel/reducer.py: every bucket once; trainer.py: token count and loss."""
    config, dp = stage.config, stage.layout.dp
    if stage.last:
        yield Transfer("dp", "all_reduce", SCALAR_BYTES, 1, "token count")
    if config.zero > 1:
        yield from _fully_sharded(stage)
        return
    ready = list(reversed(stage.parameters))
    shards = dp if config.zero else 1
    sizes = [p.numel * stage.grad_item for p in ready]
    tied = config.model.tie_embeddings and stage.layout.pp > 1
    alone = [i for i, p in enumerate(ready) if tied and p.name in TIED_TABLES]
    accelerated = config.device != "cpu"  # a plan for `auto` is one for a cluster of GPUs
    buckets = assign(sizes, config.ddp.bucket_cap_mb, alone, accelerated)
    bucketed = [[ready[i] for i in members] for members in buckets]
    if config.ddp.comm_hook == "powersgd":
        yield from _low_rank(stage, bucketed)
    else:
        numels = Counter(padded_numel(sum(p.numel for p in b), shards) for b in bucketed)
        for numel, count in numels.items():
            yield from _buckets(stage, numel, count)


def _fully_sharded(stage: Stage) -> Iterator[Transfer]:
    """data_parallel/fully_sharded.py: a unit a block and one for the rest, rows padded to dp.

    With ddp.shard_size this is an upper bound: fewer ranks gather, and a sum over copies follows.
    """
    config, dp, microbatches = stage.config, stage.layout.dp, stage.config.num_microbatches
    every = microbatches if config.ddp.reduces_every_microbatch(config.zero) else 1
    numels: Counter[str] = Counter()
    for p in stage.parameters:
        block = p.name.startswith("layers.")
        unit = ".".join(p.name.split(".")[:2]) if block else "rest"
        numels[unit] += dp * _sharded_numel(p, dp)
    for unit, numel in numels.items():
        times = 2 * microbatches if config.zero == 3 and unit != "rest" else 1
        yield Transfer("dp", "all_gather", numel * stage.item, times, "parameters")
        yield Transfer("dp", "reduce_scatter", numel * stage.grad_item, every, "gradients")


def _sharded_numel(parameter: LocalParameter, shards: int) -> int:
    """Elements of the first of `shards` parts, cut along the rows: none is larger."""
    rows = parameter.numel // parameter.columns
    return -(-rows // shards) * parameter.columns


def _buckets(stage: Stage, numel: int, count: int) -> Iterator[Transfer]:
    """data_parallel/reducer.py, bucketed.py and compressed.py: `count` buckets of `numel`."""
    if stage.config.ddp.comm_hook == "bf16":
        half = 2 * padded_numel(numel, stage.layout.dp)
        yield Transfer("dp", "all_to_all", half, count, "gradient buckets")
        yield Transfer("dp", "all_gather", half, count, "gradient buckets")
        return
    op = "reduce_scatter" if stage.config.zero else "all_reduce"
    yield Transfer("dp", op, numel * stage.grad_item, count, "gradient buckets")
    if stage.config.zero:
        yield Transfer("dp", "all_gather", numel * stage.item, count, "stepped parameters")


def _low_rank(stage: Stage, buckets: list[list[LocalParameter]]) -> Iterator[Transfer]:
    """data_parallel/powersgd.py, once it has begun: P and what is left whole, then Q."""
    for bucket in buckets:
        first = second = 0
        for p in bucket:
            rows = p.numel // p.columns
            rank = compressed_rank(rows, p.columns, stage.config.ddp.powersgd_rank)
            first += rank * rows or p.numel
            second += rank * p.columns
        for numel in filter(None, (first, second)):
            nbytes = numel * stage.grad_item
            yield Transfer("dp", "all_reduce", nbytes, 1, "factors of gradient buckets")


def _tied(stage: Stage) -> Iterator[Transfer]:
    """optim/optimizer.py: the table that first and last stage both hold."""
    model = stage.config.model
    if model.tie_embeddings and (stage.first or stage.last):
        dp, whole = stage.layout.dp, word_table_numel(model, stage.layout.tp)
        shards = dp if stage.config.zero else 1
        numel = padded_numel(whole, shards) // shards
        if stage.config.zero > 1:
            numel = -(-whole // model.hidden_size // dp) * model.hidden_size
        table = numel * stage.grad_item
        yield Transfer("embedding", "all_reduce", SCALAR_BYTES, 1, "meeting ahead of that table")
        yield Transfer("embedding", "all_reduce", table, 1, "gradient of the tied table")


def _scalars(stage: Stage) -> Iterator[Transfer]:
    """trainer.py: loss, token count, squared gradient norm and whether to stop."""
    yield Transfer("world", "all_reduce", 4 * SCALAR_BYTES, 1, "loss and gradient norm")
