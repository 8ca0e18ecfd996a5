"""Kernel launches of a rank in a step, counted line by line in the code.

`benchmarks/plan_dryrun.py` compares them with `parallel3d dryrun`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from parallel3d.config.schema import Config
from parallel3d.estimate.ops import (
    NORMS,
    LocalParameter,
    Op,
    layer_ops,
    loss_chunk_counts,
    repeated,
    widths,
)
from parallel3d.estimate.traffic import (
    FlatShard,
    PipelineRank,
    bucketed_parameters,
    flat_shards,
    pipeline_ranks,
    transfers,
)
from parallel3d.topology.layout import layout_of

_CHUNK, _CHUNKS = 65536, 320  # elements of a chunk, and chunks of one multi-tensor launch
_LISTS = {"norm": 110, "adamw": 36, "sgd": 48}  # tensors of one multi-tensor launch


def launches(config: Config, index: int, data_rank: int = 0) -> dict[str, float]:
    """Returns launches of rank `index` along pp, with tp rank 0, by the parts of `dryrun`.

    `config` is checked. Launches of dropout, label smoothing and z-loss are not counted.
    """
    layout = layout_of(config)
    rank = pipeline_ranks(config, layout, data_rank)[index]
    copies = int(rank.sp and config.micro_batch_size > 1)
    count, sharded = config.num_microbatches, config.zero > 1 and layout.dp > 1
    ops, layers = rank.layer_ops, rank.layer_count
    again = [op.kind for op in repeated(ops, rank.recompute)]
    kinds, more = Counter(op.kind for op in ops), rank.recomputed_layers
    found = {
        "gemm_layers": count * (3 * kinds["gemm"] * layers + again.count("gemm") * more),
        "attention": count * (2 * layers + again.count("attention") * more),
        "blocks": count * _blocks(rank, copies, sharded),
        "other": _other(config, rank, copies, count),
        "optimizer": _optimizer(config, rank, count, sharded),
        "communication": sum(
            x.count * (1 + (x.op == "send_recv")) for x in transfers(config, layout, index)
        ),
    }
    if rank.last:
        chunks = _chunks(config, rank)
        found["loss"] = count * (5 + 21 * chunks + 4 * copies + 2 * sharded)
        found["gemm_head"] = count * 3 * chunks
    if sharded:
        found["sharding"] = _sharding(config, rank, count, layers)
    return {name: float(value) for name, value in found.items()}


def _blocks(rank: PipelineRank, copies: int, sharded: bool) -> int:
    """Counts launches of one micro-batch between GEMMs, with contiguous copies around them."""
    model = rank.config.model
    each, plain = rank.layer_ops, layer_ops(widths(model, rank.layout.tp, rank.sp))
    again = _forward(repeated(each, rank.recompute), copies)
    found = rank.recomputed_layers * (_forward(each, copies) + _backward(each, copies) + again)
    unchanged = rank.layer_count - rank.recomputed_layers
    found += unchanged * (_forward(plain, copies) + _backward(plain, copies))
    learned, (_, _, forward, backward, _) = model.position_embedding == "learned", NORMS[model.norm]
    last = forward + backward + sharded  # the head's norm
    return int(found) + last * rank.last + 2 * (learned + copies) * rank.first


def _forward(ops: Sequence[Op], copies: int) -> int:
    return sum(op.forward + 2 * copies * (op.kind == "gemm") for op in ops)


def _backward(ops: Sequence[Op], copies: int) -> int:
    return sum(op.backward + 3 * copies * (op.kind == "gemm") for op in ops)


def _other(config: Config, rank: PipelineRank, copies: int, count: int) -> int:
    """Counts launches of batch, embedding, executor and trainer."""
    placement, model = rank.placement, config.model
    each = 3 * placement.chunks + 2 * rank.last + (4 if rank.first or rank.last else 1)
    if rank.first:
        each += 10 + (model.position_embedding == "learned") + 2 * copies
    if rank.sends_slices and config.micro_batch_size > 1:
        # A slice is cut out of each message, and two copies join the slices again.
        each += 3 * (rank.neighbours(1) + rank.neighbours(-1))
    return count * each + 11 + rank.last


def _chunks(config: Config, rank: PipelineRank) -> int:
    columns = config.model.padded_vocab_size
    columns //= config.tp if config.model.parallel_output else 1
    accelerated = config.device != "cpu"
    item, most = rank.item, config.loss.chunk_tokens
    counts = loss_chunk_counts(rank.tokens, columns, most, item=item, on_accelerator=accelerated)
    return sum(counts.values())


def _sharding(config: Config, rank: PipelineRank, count: int, layers: int) -> int:
    """Counts FSDP2's copies of parameters into flat buffers and out of them, and of gradients."""
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
    """Counts launches that zero, sum and norm gradients, step, and write the parameters back."""
    found = 8 + 2 * (config.optim.name == "adamw") + rank.is_tied_to_another
    segments = flat_shards(rank)
    shared = sum(s.shared > 0 for s in segments)
    found += 2 + shared if shared else 0
    replicated = sum(s.replicated for s in segments)
    if sharded:
        found += 1 + rank.sp * (1 + replicated)
        return found + _steps(config, segments)
    buckets = sum(len(bucketed_parameters(rank, chunk)) for chunk in rank.chunks)
    by_autograd = sum(not _is_added_in_place(p) for p in rank.parameters)
    copies = len(segments) if rank.item < rank.grad_item else 0
    found += buckets + copies + count * by_autograd
    if rank.sp:
        found += 1 + replicated if replicated else 0
    return found + _steps(config, segments)


def _steps(config: Config, segments: Sequence[FlatShard]) -> int:
    """Counts launches of the norm and of the update over lists of tensors."""
    found = 0
    for counts in (True, False):
        mine = [s.numel for s in segments if s.tied != counts]
        # A list's norms, their stack and its sum of squares; the sum of none is a fill.
        found += (_over(mine, _LISTS["norm"]) + 1 + 3 * (not counts)) if mine else 0
    for decays in (True, False):
        mine = [s.numel for s in segments if s.decays == decays]
        if mine:
            found += _over(mine, _LISTS[config.optim.name])
    return found


def _over(sizes: Iterable[int], tensors_a_launch: int) -> int:
    kept = list(sizes)
    chunks = sum(-(-size // _CHUNK) for size in kept)
    return max(-(-len(kept) // tensors_a_launch), -(-chunks // _CHUNKS))


def _is_added_in_place(p: LocalParameter) -> bool:
    """Whether its matmul adds to the bucket in place (linear layers and word embedding)."""
    return p.columns > 1 and p.name != "embedding.position"
