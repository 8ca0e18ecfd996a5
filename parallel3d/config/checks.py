"""Cross-checks of a whole configuration: one sentence for an error, before any process group.

Library callers who build a `Config` get the same checks. Without torch, so that they take
milliseconds.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from parallel3d.config.fields import (
    all_keys,
    check_fields,
    fits_64_bits,
    show,
    spell,
    values_of,
    with_values,
)
from parallel3d.config.nccl import GROUP_KINDS, parse_nccl_env, parse_nccl_settings
from parallel3d.config.parameters import check_treatment
from parallel3d.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    DataParallelConfig,
    LaunchConfig,
    LoggerConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    ProfileConfig,
    ScheduleConfig,
    TrainConfig,
)
from parallel3d.config.values import (
    CUDNN,
    HALF_PRECISION,
    NARROW,
    PACKAGES,
    BatchSizes,
    parts_of,
    spelled,
)
from parallel3d.errors import UserError, closest, nearest, nearest_hint
from parallel3d.schedules.choose import check_search, wanted
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import NAMED_SCHEDULES, check_vpp, make

# Keys of which one is given.
ALTERNATIVES = (
    ("train.steps", "train.tokens", "train.epochs"),
    ("optim.lr_warmup_fraction", "optim.lr_warmup_steps"),
)
MOST_STAGES = 256  # up to which an even split is proposed
PADDED = "the rows of the padded vocabulary"
WITH_SP = "(as sp=true) model.seq_length"
BYTE_VOCABULARY = 257  # 256 bytes and the end of text
LAST_STEP = 2**63 - 1  # of train.epochs, until the data is open
LONGEST_RUN_NAME = 200  # bytes; file systems allow 255, and a sweep adds the job's number


def check_config(
    config: Config,
    world_size: int | None = None,
    *,
    own_samples: bool = False,
    goes_on: bool = False,
) -> Config:
    """Checks a whole configuration and returns it with derived values filled in.

    Filled in: `dp` (by `world_size` ranks; 1 where that is None), `model.num_query_groups`,
    `model.ffn_hidden_size`, `model.max_position_embeddings`, `data.valid_fraction`, `train.steps`
    unless tokens or epochs are given; a list of `recompute` becomes text. The argument is not
    changed; a checked configuration passes unchanged. `own_samples`: the caller has samples, and
    `data` is not checked. `goes_on`: of a run that may have begun with another global batch, steps
    that follow from `train.tokens` are not known yet: `check_schedule_of_rate` is called later.

    Raises UserError: one sentence with the key, its value, what is allowed and the nearest choice.
    """
    if not isinstance(config, Config):
        kind = type(config).__name__
        raise UserError(f"a {kind} is not a Config; make one by OmegaConf.to_object or Config().")
    check_fields(config)
    check_plain(config)
    _check_given(config.layout, config.launch.ranks)
    model, schedule, train, optim = config.model, config.schedule, config.train, config.optim
    tp, cp, pp, vpp, zero = config.tp, config.cp, config.pp, config.vpp, config.zero
    tensor, batch = config.tensor_parallel, config.global_batch_size
    check_model(model)
    check_tensor_parallel(model, tensor.chunks, tp=tp, cp=cp, sp=config.sp)
    _check_mlp_chunks(config.mlp_chunk_tokens, config.recompute, tensor.chunks, config.compile)
    dp = _data_parallel_size(world_size, tp=tp, pp=pp, cp=cp, dp=config.dp)
    replica = Replicas(config.micro_batch_size, dp)
    _check_no_count(schedule.num_microbatches, replica)
    check_batch(batch, replica)
    _check_whole_backwards(schedule.name, zero, dp * cp)
    layers = LayerCounts(
        num_layers=model.num_layers,
        layers_per_stage=schedule.layers_per_stage,
        recompute=config.recompute,
        recompute_layers=config.recompute_layers,
        offload_layers=config.offload_layers,
    )
    _check_schedule(schedule, layers, pp=pp, vpp=vpp, count=batch // replica.multiple)
    if train.batch_schedule is not None:
        check_batch_schedule(train.batch_schedule, batch, replica)
        _check_schedule_of_batches(train.batch_schedule, schedule.name, pp, vpp, replica)
    style = config.context_parallel.style
    check_context_parallel(model, style, tensor.attention, tp=tp, cp=cp)
    if not own_samples:
        check_samples(config.data, model.vocab_size)
        check_validation(config.data, train, optim.ema_decay, config.run)
    check_length(train, optim, config.data.name)
    check_init(config.init_from, config.init_optimizer)
    is_open = train.epochs is not None or (goes_on and train.tokens is not None)
    steps = None if is_open else config.train_steps
    check_learning_rate(optim, steps)
    check_treatment(optim, model)
    _check_gather_qk(tensor.attention, config.compile)
    precision, device = config.precision, config.device
    check_attention(config.attention_kernel, precision.name, device, config.data.document_mask)
    check_precision(precision, device)
    check_data_parallel(config.ddp, zero, dp=dp, cp=cp)
    if train.noise_scale:
        hiding, micro = zero if dp * cp > 1 else 0, config.micro_batch_size
        _check_noise_scale(hiding, optim.freeze, config.batch_sizes, train.batch_schedule, micro)
    is_known = world_size is not None or config.dp is not None
    check_profile(config.profile, steps, config.replica_size * dp if is_known else None)
    check_run_name(config.run, config.runs_dir)
    check_groups(config.launch, config.cluster, config.placement, config.rank_file)
    values = {"dp": dp, "recompute": spelled(config.recompute)}
    return with_values(with_derived_keys(config), values)


def with_derived_keys(config: Config) -> Config:
    """Returns the configuration with the keys that follow from others, where they are null."""
    model, train = config.model, config.train
    values = {
        "model.num_query_groups": model.kv_heads,
        "model.ffn_hidden_size": model.ffn_size,
        "model.max_position_embeddings": model.max_positions,
        "data.valid_fraction": config.data.held_out,
    }
    if train.tokens is None and train.epochs is None:
        values["train.steps"] = config.train_steps
    return with_values(config, values)


def _check_given(layout: str, ranks: int | None) -> None:
    """Raises UserError for layout=auto, which `parallel3d train` replaces before its check."""
    if layout != "given":
        raise UserError(
            f"layout={layout} must be given but for parallel3d train, which asks the "
            "planner; the nearest is parallel3d plan, which lists the best layouts."
        )
    if ranks is not None:
        raise UserError(
            f"launch.ranks={ranks} must be left out but with layout=auto: tp, pp and "
            f"dp say how many ranks there are; the nearest is dp={ranks}."
        )


def check_communication(config: Config, world_size: int | None) -> Config:
    """Checks what `bench comm` needs: at least two ranks that add up, and sizes to measure.

    Returns the configuration with `dp`. Neither data nor model is checked.
    """
    check_fields(config)
    check_plain(config)
    tp, pp, cp = config.tp, config.pp, config.cp
    dp = _data_parallel_size(world_size, tp=tp, pp=pp, cp=cp, dp=config.dp)
    check_run_name(config.run, config.runs_dir)
    check_groups(config.launch, config.cluster, config.placement, config.rank_file)
    if config.replica_size * dp == 1:
        raise UserError(
            f"tp={tp}, pp={pp} and dp={dp} are one rank, and one rank sends nothing; "
            "bench comm needs at least 2, as in dp=2."
        )
    sizes, file = config.bench.sizes, config.bench.json
    if not sizes or min(sizes) < 4:
        raise UserError(
            f"bench.sizes={show(sizes)} must name at least one size, and none below 4 bytes; the "
            f"nearest is bench.sizes={show([max(4, size) for size in sizes] or [4])}."
        )
    if file is not None and not Path(file).parent.is_dir():
        raise UserError(
            f"bench.json={show(file)}: there is no folder {Path(file).parent}; make it, or leave "
            "bench.json=null, which writes into the run directory."
        )
    return dataclasses.replace(config, dp=dp)


# Ranks and batch


class Replicas(NamedTuple):
    """The data-parallel ranks of a run.

    Attributes:
        micro_batch_size: sequences of a micro-batch.
        dp: how many ranks there are.
    """

    micro_batch_size: int
    dp: int

    @property
    def multiple(self) -> int:
        """Divides every global batch."""
        return self.micro_batch_size * self.dp


def _data_parallel_size(
    world_size: int | None, *, tp: int, pp: int, cp: int, dp: int | None
) -> int:
    """Returns dp, given or derived; raises UserError if the ranks do not add up."""
    if world_size is None:
        return dp or 1
    if type(world_size) is not int or world_size < 1 or not fits_64_bits(world_size):
        raise UserError(
            f"a world size of {show(world_size)} must be a whole number, at least 1 and of 64 "
            "bits; the nearest is 1."
        )
    replica = tp * pp * cp
    if world_size == replica * (dp or max(1, world_size // replica)):
        return world_size // replica
    factors = f"tp={tp}, pp={pp}, cp={cp}"
    if dp is None:
        wrong = f"must be a multiple of {replica}, the product of {factors}"
        fewer = max(replica, world_size // replica * replica)
    else:
        fewer = replica * dp
        wrong = f"must be {fewer}, the product of {factors} and dp={dp}"
    near = f"dp={world_size // replica} or " if dp and world_size % replica == 0 else ""
    raise UserError(f"a world size of {world_size} {wrong}; what fits is {near}{fewer} ranks.")


def _check_no_count(count: int | None, replica: Replicas) -> None:
    """Raises UserError for `schedule.num_microbatches`, which only `parallel3d schedule` takes."""
    if count is not None:
        raise UserError(
            f"schedule.num_microbatches={count} must be null but for `parallel3d schedule` alone: "
            f"here global_batch_size={count * replica.multiple} makes as many."
        )


def check_batch(batch: int, replica: Replicas) -> None:
    """Raises UserError unless the global batch is whole micro-batches of every rank."""
    micro, dp = replica
    if batch % (micro * dp) == 0:
        return
    choices = [f"global_batch_size={nearest_multiple(batch, micro * dp)}"]
    if batch % dp == 0:
        share = batch // dp
        close = closest(micro, lambda n: share % n == 0, share) or 1
        choices.append(f"micro_batch_size={close}")
    raise UserError(
        f"global_batch_size={batch} must be a multiple of {micro * dp}, the product of "
        f"micro_batch_size={micro} and dp={dp}; the nearest is {' or '.join(choices)}."
    )


# The model, and its split over tp and cp


def _check_gather_qk(attention: str, compiled: bool) -> None:
    if attention == "gather_qk" and compiled:
        raise UserError(
            "tensor_parallel.attention=gather_qk is for comparison and is not compiled; the "
            "nearest is tensor_parallel.attention=heads, or compile=false."
        )


def check_attention(kernel: str, precision: str, device: str, document_mask: bool) -> None:
    """Raises UserError for a kernel that device, type or mask exclude; `models.attention_kernel`
    checks the device itself."""
    if device == "cpu" and kernel in (CUDNN, *PACKAGES):
        raise UserError(
            f"attention_kernel={kernel} is a kernel of GPUs, but device=cpu has flash and math; "
            "the nearest is attention_kernel=flash."
        )
    on_gpus = device not in ("auto", "cpu")
    if on_gpus and kernel in NARROW and precision not in HALF_PRECISION:
        raise UserError(
            f"attention_kernel={kernel} takes bf16 and fp16 alone on GPUs, but precision="
            f"{precision}; the nearest is attention_kernel=auto, or precision=bf16."
        )
    if kernel == CUDNN and document_mask:
        raise UserError(
            "attention_kernel=cudnn has no kernel for documents of any length, but "
            "data.document_mask=true; the nearest is attention_kernel=flash."
        )


def check_model(model: ModelConfig) -> None:
    hidden, heads, kv_heads = model.hidden_size, model.num_attention_heads, model.kv_heads
    if model.head_dim is None and hidden % heads:
        raise UserError(
            f"model.hidden_size={hidden} must be a multiple of model.num_attention_heads={heads}; "
            f"the nearest is model.hidden_size={nearest_multiple(hidden, heads)}."
        )
    if heads % kv_heads:
        close = closest(kv_heads, lambda n: heads % n == 0, heads) or 1
        raise UserError(
            f"model.num_query_groups={kv_heads} must divide model.num_attention_heads={heads}; "
            f"the nearest is model.num_query_groups={close}."
        )
    if model.position_embedding == "learned" and model.seq_length > model.max_positions:
        raise UserError(
            f"model.seq_length={model.seq_length} must be at most "
            f"model.max_position_embeddings={model.max_positions} with learned positions; the "
            f"nearest is model.seq_length={model.max_positions}."
        )
    if model.position_embedding == "rope" and int(model.head_size * model.rotary_percent) < 2:
        # Rounded up, so that its product with head_dim is not just below 2.
        least = f"model.rotary_percent={math.ceil(2 / model.head_size * 1e4) / 1e4:g}"
        raise UserError(
            f"model.rotary_percent={show(model.rotary_percent)} leaves RoPE, which rotates pairs, "
            f"fewer than 2 of the {model.head_size} dimensions of a head; the nearest is "
            f"{least if model.head_size > 1 else 'model.head_dim=2'}."
        )
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    if model.rope_scaling_factor > 1 and low >= high:
        raise UserError(
            f"model.rope_low_freq_factor={show(low)} must be below model.rope_high_freq_factor="
            f"{show(high)}; the nearest is model.rope_low_freq_factor={show(high / 4)}."
        )


def _tp_dividends(model: ModelConfig, *, cp: int, sp: bool) -> dict[str, int]:
    """Returns the sizes that tp must divide, by what they are called in a sentence.

    Context parallelism pads the sequence (`Config.padded_seq_length`).
    """
    sizes = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.hidden_size": model.hidden_size,
        "model.ffn_hidden_size": model.ffn_size,
        PADDED: model.padded_vocab_size,
    }
    if sp and cp == 1:
        sizes[WITH_SP] = model.seq_length
    return sizes


def _tp_splits(model: ModelConfig, sizes: Collection[int]) -> Callable[[int], bool]:
    """Returns the function that tells whether a tensor-parallel size splits this model, with the
    `sizes` that it must divide."""
    common = math.gcd(*sizes)
    return lambda tp: common % tp == 0 and _splits_key_value_heads(model, tp)


def _splits_key_value_heads(model: ModelConfig, tp: int) -> bool:
    """Returns whether each rank has whole key-value heads, or each head equally many ranks."""
    return model.kv_heads % tp == 0 or tp % model.kv_heads == 0


def check_tensor_parallel(model: ModelConfig, chunks: int, *, tp: int, cp: int, sp: bool) -> None:
    """Raises UserError unless tp, sp and the chunks of sp split the model evenly."""
    sizes = _tp_dividends(model, cp=cp, sp=sp)
    wrong = [f"{name}={size}" for name, size in sizes.items() if size % tp]
    if not _splits_key_value_heads(model, tp):
        wrong.append(f"model.num_query_groups={model.kv_heads} (or be a multiple of it)")
    if wrong:
        fits = _tp_splits(model, sizes.values())
        close = closest(tp, fits, min(sizes.values())) or 1  # 1 splits everything
        other = {
            WITH_SP: f", or model.seq_length={nearest_multiple(model.seq_length, tp)}",
            PADDED: f", or model.vocab_multiple={math.lcm(model.vocab_multiple, tp)}",
        }
        near = other.get(wrong[0].rpartition("=")[0], "") if len(wrong) == 1 else ""
        raise UserError(
            f"tp={tp} must divide {' and '.join(wrong)}; the nearest that fits this model is "
            f"tp={close}{near}."
        )
    if chunks > 1 and not sp:
        raise UserError(
            f"tensor_parallel.chunks={chunks} needs sp=true, as it cuts what sequence parallelism "
            "gathers and scatters; without sp the nearest is tensor_parallel.chunks=1."
        )
    local = model.seq_length // tp
    if sp and cp == 1 and local % chunks:
        near = f"tensor_parallel.chunks={closest(chunks, lambda n: local % n == 0, local) or 1}"
        raise UserError(
            f"tensor_parallel.chunks={chunks} must divide model.seq_length / tp = {local}; the "
            f"nearest is {near}."
        )


def check_context_parallel(
    model: ModelConfig, style: str, attention: str, *, tp: int, cp: int
) -> None:
    """Raises UserError for a style of context parallelism that does not fit the model.

    `attention`: how tensor parallelism splits it (`tensor_parallel.attention`).
    """
    if cp == 1:
        return
    if attention == "gather_qk":
        raise UserError(
            f"tensor_parallel.attention=gather_qk reads whole sequences, and cp={cp} splits them; "
            "the nearest is tensor_parallel.attention=heads."
        )
    near = "the nearest is context_parallel.style=gather"
    if style == "ring" and model.dropout:
        raise UserError(
            f"context_parallel.style=ring merges parts of the softmax, of which model.dropout="
            f"{show(model.dropout)} would drop probabilities; {near}."
        )
    heads, kv_heads = model.num_attention_heads // tp, max(1, model.kv_heads // tp)
    if style == "heads" and (heads % cp or (kv_heads % cp and cp % kv_heads)):
        raise UserError(
            f"context_parallel.style=heads needs cp={cp} to divide the {heads} query heads and "
            f"{kv_heads} key-value heads of a tensor-parallel rank; {near}, for any heads."
        )


def nearest_multiple(value: int, unit: int) -> int:
    """Returns the multiple of `unit`, at least one, closest to `value` (ties: the smaller)."""
    below = value // unit * unit
    return max(unit, below if value - below <= below + unit - value else below + unit)


# Pipeline and layers


class LayerCounts(NamedTuple):
    """Holds what the keys say of layers: all of the model's, and how many each stage computes,
    recomputes and offloads."""

    num_layers: int
    layers_per_stage: list[int] | None
    recompute: Any
    recompute_layers: list[int] | None
    offload_layers: list[int] | None


def _check_whole_backwards(schedule: str, zero: int, ranks: int) -> None:
    """Raises UserError for a searched schedule with sharded gradients. `ranks`: dp · cp."""
    if zero > 1 and ranks > 1 and schedule == "auto":
        raise UserError(
            f"zero={zero} reduces gradients within whole backwards, and schedule=auto must split "
            "them to be what it is chosen for; the nearest is zero=1, or schedule=1f1b."
        )


def _check_schedule(
    keys: ScheduleConfig, layers: LayerCounts, *, pp: int, vpp: int, count: int
) -> None:
    """Checks stages, search and file against the schedule of `count` micro-batches; raises
    UserError."""
    check_work(keys.costs)
    if keys.name == "auto":  # `PipelineSettings.schedule` later finds what fits the model
        check_search(pp, count, vpp, 1.0 if keys.memory is None else keys.memory)
        _check_layers(layers, 1)  # the number of stages is not known yet
        given = len(keys.layers_per_stage or ()) // pp
        _check_stages(layers, StageAssignment(pp, given if given in (1, 2, vpp) else 1))
    elif keys.name in NAMED_SCHEDULES and keys.file is None:
        check_vpp(keys.name, vpp)
        _check_stages(layers, StageAssignment(pp, vpp))
    else:
        _check_stages(layers, wanted(keys.name, pp, count, vpp, keys.file).assignment)


def check_work(costs: list[float]) -> None:
    """Raises UserError unless `schedule.costs` are three positive numbers."""
    if len(costs) != 3 or not all(0 < cost < float("inf") for cost in costs):
        raise UserError(
            f"schedule.costs={show(costs)} must be three positive numbers: forward, gradient of "
            "the input, gradient of the weights; the default is schedule.costs=[1.0,1.0,1.0]."
        )


def _check_mlp_chunks(tokens: int | None, recompute: Any, chunks: int, compiled: bool) -> None:
    """Checks `mlp_chunk_tokens` against what it cannot go with; raises UserError."""
    if tokens is None:
        return
    name = f"mlp_chunk_tokens={tokens}"
    if "mlp" not in parts_of(recompute):
        raise UserError(
            f"{name} cuts an MLP that the backward makes again, and needs mlp in recompute, not "
            f"recompute={spelled(recompute)}; the nearest is recompute=[norm,attention,mlp]."
        )
    for other, value, off in (
        ("tensor_parallel.chunks", chunks, 1),
        ("compile", compiled, False),
    ):
        if value != off:
            raise UserError(
                f"{name} cuts the sequence of a whole MLP, which {spell(other, value)} does not "
                f"allow; the nearest is {spell(other, off)}."
            )


def _check_layers(layers: LayerCounts, stages: int) -> None:
    """Checks `recompute_layers` and `offload_layers` against the stages; raises UserError."""
    if layers.recompute_layers is not None and not parts_of(layers.recompute):
        raise UserError(
            f"recompute_layers={show(layers.recompute_layers)} says how many layers recompute, but "
            "recompute=none; the nearest is recompute_layers=null, or recompute=full."
        )
    for key in ("recompute_layers", "offload_layers"):
        if (given := getattr(layers, key)) is not None:
            _check_counts(key, given, layers.num_layers, stages)


def _check_counts(key: str, given: list[int], layers: int, stages: int) -> None:
    name = f"{key}={show(given)}"
    if not given or min(given) < 0 or max(given) > layers:
        near = [min(max(0, count), layers) for count in given] or [layers]
        raise UserError(
            f"{name} must be numbers of layers, from 0 to model.num_layers={layers}; the nearest "
            f"is {key}={show(near)}."
        )
    if len(given) not in (1, stages):
        each = f" for all stages or {stages}, one a stage" if stages > 1 else ""
        raise UserError(f"{name} must have 1 entry{each}; the nearest is {key}={show(given[:1])}.")


def _check_stages(counts: LayerCounts, assignment: StageAssignment) -> None:
    layers, given = counts.num_layers, counts.layers_per_stage
    pp, stages, chunks = assignment.ranks, assignment.stages, assignment.chunks
    _check_layers(counts, stages)
    times = f"pp={pp}" if chunks == 1 else f"pp={pp} times {chunks} chunks of a rank (vpp)"
    if stages > layers:
        near = f"pp={max(1, layers // chunks)}"
        if pp <= layers < stages:
            near += f", or vpp={layers // pp}"
        raise UserError(
            f"{times} must be at most model.num_layers={layers}, as no stage may be empty; the "
            f"nearest is {near}."
        )
    if given is None:
        return
    name = "schedule.layers_per_stage"
    if len(given) != stages:
        wrong = f"has {len(given)} entries for {times} stages"
    elif min(given) < 1:
        wrong = "has a stage with no layer, and each needs at least 1"
    elif sum(given) != layers:
        wrong = f"adds up to {sum(given)} layers, but model.num_layers={layers}"
    else:
        return
    shown = range(min(stages, MOST_STAGES))
    even = [layers // stages + (stage < layers % stages) for stage in shown]
    advice = f"an even split is {name}={show(even)}" if stages == len(even) else f"give {name}=null"
    raise UserError(f"{name}={show(given)} {wrong}; {advice}.")


# Data parallelism


def check_data_parallel(ddp: DataParallelConfig, zero: int, *, dp: int, cp: int) -> None:
    """Checks hooks and shards against `zero`; raises UserError."""
    ranks = dp * cp
    size, hook = ddp.shard_size, f"ddp.comm_hook={ddp.comm_hook}"
    for key in ("hierarchical", "comm_hook"):
        name, value = f"ddp.{key}", getattr(ddp, key)
        off = all_keys()[name].default
        if zero and value != off:
            raise UserError(
                f"{spell(name, value)} is about sums of whole gradients, and zero={zero} scatters "
                f"them; the nearest is zero=0, or {spell(name, off)}."
            )
    if ddp.hierarchical and ddp.comm_hook != "none":
        raise UserError(
            f"{hook} and ddp.hierarchical=true are two ways to sum a bucket; the nearest is "
            "ddp.hierarchical=false, or ddp.comm_hook=none."
        )
    for name in ("reduce_every_microbatch", "shard_size"):
        if zero < 2 and (value := getattr(ddp, name)):
            raise UserError(
                f"{spell(f'ddp.{name}', value)} is read by zero=2 and zero=3 alone, but "
                f"zero={zero}; the nearest is ddp.{name}=null."
            )
    if size is not None and ranks > 1 and (size < 2 or ranks % size):
        near = closest(size, lambda n: n > 1 and ranks % n == 0, ranks) or ranks
        of = f"dp={ranks}" if cp == 1 else f"dp · cp = {ranks}"
        raise UserError(
            f"ddp.shard_size={size} must divide {of} and be at least 2; the nearest is "
            f"ddp.shard_size={near}."
        )


def _check_noise_scale(
    zero: int, freeze: list[str] | None, sizes: BatchSizes, schedule: Any, micro_batch_size: int
) -> None:
    """Raises UserError unless gradients of a part of the batch are available.

    `zero`: 0 where a rank has no replicas. `schedule`: of global batches, by which they have
    `sizes`.
    """
    least = min(sizes.sizes)
    if zero > 1:
        why = f"the gradients of one replica before they are summed, which zero={zero} hides"
        near = "zero=1"
    elif freeze:
        why = f"no gradients of optim.freeze={show(freeze)}, which the buckets hold too"
        near = "train.noise_scale=false"
    elif least == micro_batch_size:
        batch, near = f"global_batch_size={least}", f"global_batch_size={2 * least}"
        if schedule is not None:
            batch, near = f"a batch of {least} in train.batch_schedule", f"one of {2 * least} there"
        why = f"two parts of a batch, and with dp=1 {batch} is one micro-batch"
    else:
        return
    raise UserError(f"train.noise_scale=true compares {why}; the nearest is {near}.")


# Length, learning rate, precision, what is recorded


def check_samples(data: DataConfig, vocabulary: int) -> None:
    """Checks the `data` section against the vocabulary; raises UserError."""
    if data.reads_bytes and vocabulary < BYTE_VOCABULARY:
        raise UserError(
            f"model.vocab_size={vocabulary} must be at least {BYTE_VOCABULARY} for "
            f"data.tokenizer=byte; the nearest is model.vocab_size={BYTE_VOCABULARY}."
        )
    check_corpora(data)


def check_batch_schedule(given: Mapping[Any, Any], batch: int, replica: Replicas) -> None:
    """Checks form and sizes of `train.batch_schedule`, whose end is the global batch; raises
    UserError."""
    name, multiple = f"train.batch_schedule={show(given)}", replica.multiple
    firsts = [_token(first) for first in given]
    if not given or firsts[0] != 0 or any(a >= b for a, b in pairwise(firsts)):
        raise UserError(
            f"{name} must give global batches by numbers of samples that grow from 0; the nearest "
            f"is train.batch_schedule={{0:{batch}}}."
        )
    for size in given.values():
        if type(size) is not int or size < 1 or size % multiple:
            near = nearest_multiple(size, multiple) if type(size) is int else multiple
            raise UserError(
                f"{name}: the global batch {show(size)} must be a multiple of {multiple}, the "
                f"product of micro_batch_size={replica.micro_batch_size} and dp={replica.dp}; the "
                f"nearest is {max(near, multiple)}."
            )
    if size != batch:
        raise UserError(
            f"{name} must end with global_batch_size={batch}, which memory, "
            f"time and evaluations go by; the nearest is global_batch_size={size}."
        )


def _check_schedule_of_batches(
    given: Mapping[Any, int], schedule: str, pp: int, vpp: int, replica: Replicas
) -> None:
    """Raises UserError unless the pipeline's schedule takes each of these global batches."""
    if schedule not in NAMED_SCHEDULES:
        raise UserError(
            f"train.batch_schedule={show(given)} changes the number of micro-batches, and "
            f"schedule={schedule} is made for one number; the nearest is schedule=1f1b."
        )
    for size in given.values():
        make(schedule, pp, size // replica.multiple, vpp)


def check_length(train: TrainConfig, optim: OptimConfig, data: str) -> None:
    """Raises UserError if two keys give the same, or epochs of a blend are asked for."""
    sections = {"train": train, "optim": optim}
    for keys in ALTERNATIVES:
        named = {key: key.split(".") for key in keys}
        values = {key: getattr(sections[s], name) for key, (s, name) in named.items()}
        given = {key: value for key, value in values.items() if value}
        if len(given) > 1:
            raise UserError(
                f"{' and '.join(spell(*each) for each in given.items())} must not stand together; "
                f"keep one of them, the nearest is to leave {next(reversed(given))} out."
            )
    if train.epochs is not None and data == "blend":
        raise UserError(
            f"train.epochs={show(train.epochs)} must be of one corpus, and a part of data=blend is "
            "read as often as its weight says; give train.tokens instead."
        )


def check_init(init_from: str | None, init_optimizer: bool) -> None:
    """Raises UserError for an optimizer's state from nowhere."""
    if init_optimizer and init_from is None:
        raise UserError(
            "init_optimizer=true must stand beside init_from, whose optimizer it takes; the "
            "nearest is init_optimizer=false."
        )


def check_validation(
    data: DataConfig, train: TrainConfig, ema_decay: float | None, run: str | None
) -> None:
    """Checks names and paths of `data.valid`, and that what is evaluated alone has a run; raises
    UserError."""
    sets = data.valid
    for name, path in (sets or {}).items():
        if not (isinstance(path, str) and path):
            raise UserError(
                f"data.valid gives {show(name)} the path {show(path)}, and must give a prefix of a "
                f"pair or text; as in 'data.valid={{{name}:corpora/{name}}}'."
            )
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]*\w[\w.-]*", name)):
            close = re.sub(r"[^\w.-]+", "_", str(name)).strip("_.-") or "set"
            close = close if isinstance(name, str) else f"set_{close}"  # YAML reads 0 as a number
            raise UserError(
                f"data.valid: the name {show(name)} must be of letters, digits, -, _ and dots, and "
                f"not of dots alone, as loggers show it; the nearest is {close}."
            )
    if ema_decay is not None and "ema" in (data.blend or {}):
        raise UserError(
            "data.blend must have no part named ema beside optim.ema_decay, whose held-out loss "
            "has that name; the nearest is ./ema."
        )
    batches = train.eval_batches
    if train.eval_only and (run is None or batches == 0):
        raise UserError(
            "train.eval_only=true must stand beside run=, whose checkpoint it evaluates, and "
            f"train.eval_batches above 0 or null, but {spell('run', run)} and "
            f"{spell('train.eval_batches', batches)}; the nearest is run=NAME "
            "train.eval_batches=null."
        )


def check_learning_rate(optim: OptimConfig, steps: int | None) -> None:
    """Checks rate, warm-up and decay against each other; raises UserError.

    `steps`: of the run; None until the data is open, or the run's place is known.
    """
    if optim.name == "muon" and optim.momentum == 0:
        raise UserError(
            f"optim.momentum={show(optim.momentum)} must be above 0 with optim.name=muon; the "
            f"nearest is optim=muon, which sets 0.95."
        )
    _check_at_most("optim.min_lr", optim.min_lr, "optim.lr", optim.lr)
    if (span := optim.lr_decay_steps or steps) is not None:  # else it is checked then
        check_schedule_of_rate(optim, span)


def check_schedule_of_rate(optim: OptimConfig, steps: int) -> None:
    """Checks warm-up and decay against the `steps` of the learning rate's schedule; raises
    UserError."""
    span = "optim.lr_decay_steps" if optim.lr_decay_steps else "train.steps"
    if optim.lr_warmup_steps >= steps:
        raise UserError(
            f"optim.lr_warmup_steps={optim.lr_warmup_steps} must be below {span}={steps}; the "
            f"nearest is optim.lr_warmup_steps={steps - 1}."
        )
    if optim.lr_decay_style != "wsd":
        return
    warmup = optim.lr_warmup_fraction or optim.lr_warmup_steps / steps
    name, decay, near = "wsd_decay_fraction", optim.wsd_decay_fraction, round(1 - warmup, 9)
    if optim.wsd_decay_steps is not None:
        name, decay = "wsd_decay_steps", optim.wsd_decay_steps / steps
        near = steps - (optim.lr_warmup_steps or round(optim.lr_warmup_fraction * steps))
    # The margin lets 1/3 and 0.666666667, which the sentence below proposes, add up to 1.
    if warmup + decay > 1 + 1e-9 and getattr(optim, name) > near:
        raise UserError(
            f"optim.{name}={show(getattr(optim, name))} must be at most {show(near)}, what a "
            f"warm-up over {warmup:g} of {span}={steps} leaves; the nearest is "
            f"optim.{name}={show(near)}."
        )


def _check_at_most(name: str, value: float, limit: str, most: float) -> None:
    if value > most:
        raise UserError(
            f"{spell(name, value)} must be at most {spell(limit, most)}; the nearest is "
            f"{spell(name, most)}."
        )


def check_precision(precision: PrecisionConfig, device: str) -> None:
    """Raises UserError for tf32 on a CPU, and a loss scale or half-precision loss without fp16."""
    check_precision_of(device, precision.name)
    for key in ("lm_cross_entropy", "loss_scale"):
        name = f"precision.{key}"
        value, off = getattr(precision, key), all_keys()[name].default
        if value != off and precision.name != "fp16":
            raise UserError(
                f"{spell(name, value)} is for precision=fp16 alone, but precision="
                f"{precision.name}; the nearest is {spell(name, off)}, or precision=fp16."
            )
    least, first = precision.min_loss_scale, precision.initial_loss_scale
    _check_at_most("precision.min_loss_scale", least, "precision.initial_loss_scale", first)


def check_precision_of(device: str, precision: str) -> None:
    """Raises UserError for a precision that `device` ("cpu", "cuda" or "cuda:1") does not have."""
    if precision == "tf32" and device == "cpu":
        raise UserError(
            "precision=tf32 is a mode of a GPU's tensor cores, and this run computes on the CPU; "
            "the nearest is precision=fp32."
        )


def check_profile(profile: ProfileConfig, steps: int | None, world_size: int | None) -> None:
    """Checks steps and ranks to profile, ranks only if `world_size` is known; `steps` as in
    `check_learning_rate`; raises UserError."""
    last_step = LAST_STEP if steps is None else steps
    if not profile.steps:
        if profile.memory:
            raise UserError(
                "profile.memory=true must stand beside profile.steps, which says when; the nearest "
                f"is profile.steps=[{min(10, last_step)},{min(12, last_step)}]."
            )
        return
    first, *_, last = [profile.steps[0], *profile.steps]
    if len(profile.steps) != 2 or not 1 <= first <= last <= last_step:
        near = sorted(
            min(max(1, step), last_step) for step in (min(profile.steps), max(profile.steps))
        )
        raise UserError(
            f"profile.steps={show(profile.steps)} must be two numbers, the first and the last step "
            f"to profile, from 1 to train.steps={last_step}; the nearest is "
            f"profile.steps={show(near)}."
        )
    if profile.ranks != "all" and world_size is not None and max(profile.ranks) >= world_size:
        near = [rank for rank in profile.ranks if rank < world_size] or [world_size - 1]
        raise UserError(
            f"profile.ranks={show(profile.ranks)} must be ranks of this run, from 0 to "
            f"{world_size - 1}; the nearest is profile.ranks={show(near)}."
        )


WANDB_MODES = ("online", "offline", "disabled", "dryrun", "run", "shared")


def check_loggers(logger: LoggerConfig, environ: Mapping[str, str]) -> None:
    """Raises UserError if the package of a logger is missing here, where rank 0 is, and for a mode
    of W&B's own variable that W&B does not know."""
    mode = environ.get("WANDB_MODE")
    if "wandb" in logger.names and logger.mode == "auto" and mode and mode not in WANDB_MODES:
        raise UserError(
            f"WANDB_MODE={mode} must be one of {', '.join(WANDB_MODES)}"
            f"{nearest_hint(mode, WANDB_MODES)}: set it so, or give logger.mode"
        )
    if "tensorboard" in logger.names and importlib.util.find_spec("tensorboard") is None:
        given, others = show(logger.name), [name for name in logger.names if name != "tensorboard"]
        raise UserError(
            f"logger={given} needs the package tensorboard, which is not installed: give "
            f"pip install 'parallel3d[tensorboard]', or logger={show(others) if others else 'none'}"
        )


def single_process(config: Config) -> Config:
    """Returns the config of the same training on one rank, with micro-batches for replicas.

    Numbers for each stage say where memory is saved, and no layer computes anything else by them:
    a process that has all layers goes without. Raises UserError if one process cannot train it.
    """
    one = dict.fromkeys(("tp", "pp", "dp", "cp", "vpp"), 1)
    of_stages = dict.fromkeys(("recompute_layers", "offload_layers"))
    alone = {"sp": False, "schedule": ScheduleConfig(), "profile": ProfileConfig()}
    return check_config(with_values(config, one | of_stages | alone), 1)


def check_run_name(run: str | None, runs_dir: str) -> None:
    """Raises UserError unless `run` is a plain folder name."""
    if run is None:
        return
    is_plain = run.isprintable() and not re.search(r"[/\\]|^~|^\s|\s$", run)
    if run in ("", ".", "..") or not is_plain or len(os.fsencode(run)) > LONGEST_RUN_NAME:
        raise UserError(
            f"run={show(run)} must be the plain name of a folder inside runs_dir="
            f"{show(runs_dir)}, with no blank around it and no ~ before it, of at most "
            f"{LONGEST_RUN_NAME} bytes; null makes a name, and runs_dir moves the place."
        )
    if (variable := re.search(r"\$\{?(\w+)", run)) is not None:
        raise UserError(
            f"run={show(run)} has {variable[0]}, which nothing here expands, so that others would "
            f"have the same name; let the shell do it, or type ${{oc.env:{variable[1]}}} in its "
            "place."
        )


def check_plain(config: Config) -> None:
    """Raises UserError for text that config.yaml would read as a reference."""
    for key, value in values_of(config).items():
        is_text_free = value is None or isinstance(value, (bool, int, float))
        if not is_text_free and "${" in json.dumps(value):
            raise UserError(
                f"{key}={show(value)} holds ${{, which config.yaml would take for a reference to "
                "another key; give it without."
            )


# Corpora and the weights of a blend


TOKENS = "tokens"  # as a weight: the data set's number of tokens
PACKED = ("corpus", "blend")
# The meaning of `data.path`, by the kind of source.
PATHS = {
    "text": "a file, a folder or a glob, as in data.path=book.txt, or leave data=stdlib",
    "corpus": "the prefix of a pair, its name without .bin and .idx, as in data.path=corpora/web",
    "chat": "jsonl, a conversation a row, as in data.path=sft.jsonl",
}


class Weights(NamedTuple):
    """Exact weights by prefix, from token `first` of the run on.

    None: the data set's number of tokens; the other weights are then numbers of tokens.
    """

    first: int
    by_prefix: Mapping[str, Fraction | None]


def check_corpora(data: DataConfig) -> None:
    """Checks `data.path` and a blend against the kind of source; raises UserError."""
    if data.name in PATHS and not data.path:
        raise UserError(
            f"data={data.name} needs data.path, which is {show(data.path)}; give "
            f"{PATHS[data.name]}."
        )
    if data.name == "blend":
        blend_weights(data)
    for name in ("path", "blend", "blend_stages"):
        readers = ("blend",) if name != "path" else tuple(PATHS)
        if (value := getattr(data, name)) is not None and data.name not in readers:
            near = f"data={readers[0]}, which reads it"
            if data.name == "blend":
                near = f"'data.blend={{{value}:1}}'"
            raise UserError(
                f"data.{name}={show(value)} is not read by data={data.name}; the nearest is {near}."
            )


def blend_weights(data: DataConfig) -> list[Weights]:
    """Returns the weights of a blend and its later stages, in order; raises UserError."""
    if not data.blend:
        raise UserError(
            f"data=blend needs data.blend, which is {show(data.blend)}; give weights by prefix, as "
            "in 'data.blend={corpora/web:0.7,corpora/code:0.3}'."
        )
    stages = [Weights(0, _weights(data.blend, "data.blend"))]
    for typed, weights in (data.blend_stages or {}).items():
        name = f"data.blend_stages at {show(typed)}"
        first = _token(typed)
        if first <= stages[-1].first:
            near = stages[-1].first + 1
            raise UserError(
                f"{name} must be a number of tokens, above {stages[-1].first:,} of the stage "
                f"before it; the nearest is {near}."
            )
        if not isinstance(weights, dict) or not weights:
            raise UserError(
                f"{name} is {show(weights)}, and must be weights by prefix; as in "
                f"'data.blend_stages={{{first}:{{corpora/web:0.5,corpora/math:0.5}}}}'."
            )
        stages.append(Weights(first, _weights(weights, name)))
    return stages


def _token(typed: Any) -> int:
    """Returns a number of tokens, typed as 1000000000 or 1e9; -1 for other text."""
    try:
        number = Fraction(str(typed))
    except (ValueError, ZeroDivisionError):
        return -1
    return int(number) if number.denominator == 1 and number < 2**63 else -1


def _weights(given: Mapping[Any, Any], name: str) -> dict[str, Fraction | None]:
    weights: dict[str, Fraction | None] = {}
    for prefix, typed in given.items():
        if typed == TOKENS:
            weights[str(prefix)] = None
            continue
        is_number = isinstance(typed, (int, float)) and not isinstance(typed, bool)
        if not is_number or not math.isfinite(typed) or typed <= 0:
            near = f"to leave {show(str(prefix))} out"
            if isinstance(typed, str):
                near = nearest(typed, [TOKENS]) or "1"
            raise UserError(
                f"{name} gives {show(str(prefix))} the weight {show(typed)}: it must be a number "
                f"above 0 or {TOKENS}; the nearest is {near}."
            )
        weights[str(prefix)] = Fraction(repr(typed))
    small = next(((p, w) for p, w in weights.items() if w is not None and w < 1), None)
    if small is not None and None in weights.values():
        raise UserError(
            f"{name} gives {show(small[0])} the weight {float(small[1]):g}: beside {TOKENS} it "
            f"must be a number of tokens, at least 1; the nearest is {TOKENS}."
        )
    return weights


# Placement and NCCL


def check_groups(
    launch: LaunchConfig, cluster: ClusterConfig, placement: str, rank_file: str | None
) -> None:
    """Checks placement, rank file and NCCL settings; raises UserError."""
    if (placement == "file") != (rank_file is not None):
        near = "placement=default" if rank_file is None else "placement=file"
        raise UserError(
            "placement=file reads rank_file=…, which has a line `rank host local_index` for each "
            f"rank, but {spell('placement', placement)} and "
            f"{spell('rank_file', rank_file)}; the nearest is {near}."
        )
    for kind in launch.nccl_high_priority:
        if kind not in GROUP_KINDS:
            raise UserError(
                f"launch.nccl_high_priority={show(kind)} must name a kind of group, one of "
                f"{', '.join(GROUP_KINDS)}; the nearest is {nearest(kind, GROUP_KINDS) or 'dp'}."
            )
    parse_nccl_settings(launch.nccl_settings)
    parse_nccl_env(cluster.nccl_env)
