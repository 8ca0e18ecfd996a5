"""Cross-checks of a whole configuration: one sentence for an error, before any process group.

Library callers who build a `Config` get the same checks. Without torch, so that they take
milliseconds.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from parallel3d.config.checks.model import (
    check_attention,
    check_context_parallel,
    check_data_parallel,
    check_model,
    check_tensor_parallel,
    nearest_multiple,
)
from parallel3d.config.checks.run import (
    check_batch_schedule,
    check_groups,
    check_init,
    check_learning_rate,
    check_length,
    check_plain,
    check_precision,
    check_profile,
    check_run_name,
    check_samples,
)
from parallel3d.config.fields import check_fields, fits_64_bits, show, with_values
from parallel3d.config.parameters import check_treatment
from parallel3d.config.schema import Config
from parallel3d.config.values import parts_of, spelled
from parallel3d.errors import UserError, closest
from parallel3d.schedules.choose import check_search, wanted
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import NAMED_SCHEDULES, check_vpp

MOST_STAGES = 256  # up to which an even split is proposed


def check_config(
    config: Config,
    world_size: int | None = None,
    *,
    own_samples: bool = False,
    communication_only: bool = False,
) -> Config:
    """Checks a whole configuration and returns it with derived values filled in.

    Filled in: `dp` (by `world_size` ranks; 1 where that is None), `model.num_query_groups`,
    `model.ffn_hidden_size`, `model.max_position_embeddings`, `data.valid_fraction`, `train.steps`
    unless tokens or epochs are given; a list of `recompute` becomes text. The argument is not
    changed; a checked configuration passes unchanged. `own_samples`: the caller has samples, and
    `data` is not checked. `communication_only` (`bench comm`): neither data nor model is checked;
    only `dp` is filled in.

    Raises UserError: one sentence with the key, its value, what is allowed and the nearest choice.
    """
    if not isinstance(config, Config):
        kind = type(config).__name__
        raise UserError(f"a {kind} is not a Config; make one by OmegaConf.to_object or Config().")
    check_fields(config)
    check_plain(config)
    if communication_only:
        return _check_communication(config, world_size)
    _check_given(config)
    check_model(config.model)
    check_tensor_parallel(config)
    _check_mlp_chunks(config)
    _check_pipeline(config)
    dp = _data_parallel_size(config, world_size)
    _check_batch(config, dp)
    check_batch_schedule(config, dp)
    _check_schedule(dataclasses.replace(config, dp=dp))
    check_context_parallel(config)
    if not own_samples:
        check_samples(config)
    check_length(config)
    check_init(config)
    check_learning_rate(config)
    check_treatment(config.optim, config.model)
    check_attention(config)
    check_precision(config)
    check_data_parallel(config, dp)
    is_known = world_size is not None or config.dp is not None
    check_profile(config, config.replica_size * dp if is_known else None)
    check_run_name(config)
    check_groups(config)
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


def _check_given(config: Config) -> None:
    """Raises UserError for layout=auto, which `parallel3d train` replaces before its check."""
    if config.layout != "given":
        raise UserError(
            f"layout={config.layout} must be given but for parallel3d train, which asks the "
            "planner; the nearest is parallel3d plan, which lists the best layouts."
        )
    if config.launch.ranks is not None:
        raise UserError(
            f"launch.ranks={config.launch.ranks} must be left out but with layout=auto: tp, pp and "
            f"dp say how many ranks there are; the nearest is dp={config.launch.ranks}."
        )


def _check_communication(config: Config, world_size: int | None) -> Config:
    """Checks what `bench comm` needs: at least two ranks that add up, and sizes to measure."""
    dp = _data_parallel_size(config, world_size)
    check_run_name(config)
    check_groups(config)
    if config.replica_size * dp == 1:
        raise UserError(
            f"tp={config.tp}, pp={config.pp} and dp={dp} are one rank, and one rank sends nothing; "
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


def _check_pipeline(config: Config) -> None:
    """Checks the virtual stages of a named schedule; for auto and file see `_check_schedule`."""
    name = config.schedule.name
    if name not in NAMED_SCHEDULES:
        return
    check_vpp(name, config.vpp)
    _check_stages(config, StageAssignment(config.pp, config.vpp))


def _check_schedule(config: Config) -> None:
    """Checks search, file and ZeRO against the schedule; raises UserError."""
    keys, zero = config.schedule, config.zero
    if zero > 1 and (config.dp or 1) * config.cp > 1 and keys.name == "auto":
        raise UserError(
            f"zero={zero} reduces gradients within whole backwards, and schedule=auto must split "
            "them to be what it is chosen for; the nearest is zero=1, or schedule=1f1b."
        )
    check_work(config)
    sizes = config.pp, config.num_microbatches, config.vpp
    if keys.name == "auto":  # `sizes.run_schedule` later finds what fits the model
        check_search(*sizes, 1.0 if keys.memory is None else keys.memory)
        _check_layers(config, 1)  # the number of stages is not known yet
        given = len(keys.layers_per_stage or ()) // config.pp
        _check_stages(
            config, StageAssignment(config.pp, given if given in (1, 2, config.vpp) else 1)
        )
    elif keys.name not in NAMED_SCHEDULES or keys.file is not None:
        _check_stages(config, wanted(keys.name, *sizes, keys.file).placement)


def check_work(config: Config) -> None:
    """Raises UserError unless `schedule.costs` are three positive numbers."""
    costs = config.schedule.costs
    if len(costs) != 3 or not all(0 < cost < float("inf") for cost in costs):
        raise UserError(
            f"schedule.costs={show(costs)} must be three positive numbers: forward, gradient of "
            "the input, gradient of the weights; the default is schedule.costs=[1.0,1.0,1.0]."
        )


def _check_mlp_chunks(config: Config) -> None:
    """Checks `mlp_chunk_tokens` against what it cannot go with; raises UserError."""
    if config.mlp_chunk_tokens is None:
        return
    name = f"mlp_chunk_tokens={config.mlp_chunk_tokens}"
    if "mlp" not in parts_of(config.recompute):
        raise UserError(
            f"{name} cuts an MLP that the backward makes again, and needs mlp in recompute, not "
            f"recompute={spelled(config.recompute)}; the nearest is recompute=[norm,attention,mlp]."
        )
    if config.tensor_parallel.chunks > 1:
        raise UserError(
            f"{name} cuts the sequence, as tensor_parallel.chunks={config.tensor_parallel.chunks} "
            "does inside of each GEMM; the nearest is tensor_parallel.chunks=1."
        )
    if config.compile:
        raise UserError(
            f"{name} must be null with compile=true, whose graphs hold a whole layer; the nearest "
            "is compile=false."
        )


def _check_layers(config: Config, stages: int) -> None:
    """Checks `recompute_layers` and `offload_layers` against the stages; raises UserError."""
    if config.recompute_layers is not None and not parts_of(config.recompute):
        raise UserError(
            f"recompute_layers={show(config.recompute_layers)} says how many layers recompute, but "
            "recompute=none; the nearest is recompute_layers=null, or recompute=full."
        )
    for key in ("recompute_layers", "offload_layers"):
        _check_counts(config, key, stages)


def _check_counts(config: Config, key: str, stages: int) -> None:
    given, layers = getattr(config, key), config.model.num_layers
    if given is None:
        return
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


def _check_stages(config: Config, placement: StageAssignment) -> None:
    pp, layers, given = config.pp, config.model.num_layers, config.schedule.layers_per_stage
    stages, chunks = placement.stages, placement.chunks
    _check_layers(config, stages)
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


def _data_parallel_size(config: Config, world_size: int | None) -> int:
    """Returns dp, given or derived; raises UserError if the ranks do not add up."""
    if world_size is None:
        return config.dp or 1
    is_number = isinstance(world_size, int) and not isinstance(world_size, bool)
    if not is_number or world_size < 1 or not fits_64_bits(world_size):
        raise UserError(
            f"a world size of {show(world_size)} must be a whole number, at least 1 and of 64 "
            "bits; the nearest is 1."
        )
    replica = config.replica_size
    if world_size == replica * (config.dp or max(1, world_size // replica)):
        return world_size // replica
    factors = f"tp={config.tp}, pp={config.pp}, cp={config.cp}"
    if config.dp is None:
        wrong = f"must be a multiple of {replica}, the product of {factors}"
        fewer = max(replica, world_size // replica * replica)
    else:
        fewer = replica * config.dp
        wrong = f"must be {fewer}, the product of {factors} and dp={config.dp}"
    near = f"dp={world_size // replica} or " if config.dp and world_size % replica == 0 else ""
    raise UserError(f"a world size of {world_size} {wrong}; what fits is {near}{fewer} ranks.")


def _check_batch(config: Config, dp: int) -> None:
    batch, micro = config.global_batch_size, config.micro_batch_size
    if (count := config.schedule.num_microbatches) is not None:
        raise UserError(
            f"schedule.num_microbatches={count} must be null but for `parallel3d schedule` alone: "
            f"here global_batch_size={count * micro * dp} makes as many."
        )
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
