"""Kernels that a rank of parallel3d launches in a step, by part: counted line by line in the code.

`parallel3d dryrun` counts them as they are launched; `benchmarks/plan_dryrun.py` compares.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from parallel3d.config.schema import Config, ModelConfig
from parallel3d.plan.own.layer import Tensors, tensors
from parallel3d.sizes.buckets import assign, padded_numel
from parallel3d.sizes.local_shapes import LocalParameter
from parallel3d.sizes.loss_chunks import loss_chunk_counts
from parallel3d.sizes.traffic import TIED_TABLES, pipeline_ranks, transfers
from parallel3d.sizes.transfer import PipelineRank
from parallel3d.topology.layout import layout_of

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
    """The buckets of one chunk (`data_parallel/buckets.py`)."""
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
