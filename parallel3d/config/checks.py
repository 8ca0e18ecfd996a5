"""Checks a whole configuration, and refuses an invalid one in one sentence.

The checks run before any process group exists. They also apply to a `Config` that a library caller
builds. They do not import torch, so they take only milliseconds.
"""

from __future__ import annotations

import json
from operator import attrgetter

from parallel3d.blueprint.checks import check_given, check_groups, data_parallel_size
from parallel3d.config.fields import (
    AnyConfig,
    check_conflicts,
    check_fields,
    show,
    values_of,
    with_values,
)
from parallel3d.config.values import (
    Replicas,
    spelled,
)
from parallel3d.context_parallel.checks import check_context_parallel
from parallel3d.data.checks import check_samples, check_validation
from parallel3d.data_parallel.checks import check_data_parallel
from parallel3d.device.checks import check_precision
from parallel3d.errors import UserError
from parallel3d.experts.checks import check_expert_parallel, check_experts
from parallel3d.loop.checks import (
    check_batch,
    check_batch_schedule,
    check_profile,
)
from parallel3d.loop.keys import ProfileConfig
from parallel3d.models.checks import check_layer_types, check_model
from parallel3d.optim.checks import check_learning_rate, check_treatment
from parallel3d.run.checks import check_run_name
from parallel3d.run_config import CONFLICTS, Config
from parallel3d.schedules.checks import (
    LayerCounts,
    check_no_count,
    check_schedule,
    check_schedule_of_batches,
)
from parallel3d.schedules.keys import ScheduleConfig
from parallel3d.tensor_parallel.checks import check_tensor_parallel


def check_config(
    config: AnyConfig,
    world_size: int | None = None,
    *,
    own_samples: bool = False,
    may_resume: bool = False,
) -> AnyConfig:
    """Checks a whole configuration and returns a copy with derived values filled in.

    The derived values are `dp` (from `world_size`; 1 if both are None), `model.num_query_groups`,
    `model.ffn_hidden_size`, `model.max_position_embeddings`, `data.valid_fraction`,
    `data.document_mask`, and `train.steps` unless tokens or epochs are given. A list in `recompute`
    becomes text. A configuration that was returned by this function passes unchanged.

    Args:
        config: the configuration.
        world_size: number of ranks; None if it is not known.
        own_samples: whether the caller provides the samples, so that `data` is not checked.
        may_resume: whether the run may resume a checkpoint with another global batch. The number of
            steps that follows from `train.tokens` is then not known yet, and the caller calls
            `check_schedule_of_rate` later.

    Raises:
        UserError: the configuration is invalid. The sentence has the key, its value, the allowed
            values and the nearest one.
    """
    if not isinstance(config, Config):
        kind = type(config).__name__
        raise UserError(f"a {kind} is not a Config; make one by OmegaConf.to_object or Config().")
    check_fields(config)
    check_plain(config)
    check_given(config.layout, config.launch.ranks)
    tp = config.tp
    cp = config.cp
    pp = config.pp
    vpp = config.vpp
    model = config.model
    schedule = config.schedule
    train = config.train
    optim = config.optim
    tensor, batch = config.tensor_parallel, config.global_batch_size
    check_model(model)
    check_experts(model)
    check_tensor_parallel(model, tensor.chunks, tp=tp, cp=cp, sp=config.sp)
    dp = data_parallel_size(world_size, tp=tp, pp=pp, cp=cp, dp=config.dp)
    derived = {"dp": dp, "data.document_mask": config.data.masks_documents}
    check_conflicts(
        CONFLICTS, lambda name: derived[name] if name in derived else attrgetter(name)(config)
    )
    check_layer_types(model)
    check_expert_parallel(model.num_experts, config.ep, tp * cp * dp)
    replica = Replicas(config.micro_batch_size, dp)
    check_no_count(schedule.num_microbatches, replica)
    check_batch(batch, replica)
    layers = LayerCounts(
        num_layers=model.num_layers,
        layers_per_stage=schedule.layers_per_stage,
        recompute=config.recompute,
        recompute_layers=config.recompute_layers,
        offload_layers=config.offload_layers,
    )
    check_schedule(schedule, layers, pp=pp, vpp=vpp, count=batch // replica.multiple)
    if train.batch_schedule is not None:
        check_batch_schedule(train.batch_schedule, batch, replica)
        check_schedule_of_batches(train.batch_schedule, schedule.name, pp, vpp, replica)
    style = config.context_parallel.style
    check_context_parallel(model, style, tensor.attention, tp=tp, cp=cp)
    if not own_samples:
        check_samples(config.data, model.vocab_size)
        check_validation(config.data, train, optim.ema_decay, config.run)
    is_open = train.epochs is not None or (may_resume and train.tokens is not None)
    steps = None if is_open else config.train_steps
    check_learning_rate(optim, steps)
    check_treatment(optim, model)
    check_precision(config.precision)
    check_data_parallel(config.ddp, dp=dp, cp=cp)
    is_known = world_size is not None or config.dp is not None
    check_profile(config.profile, steps, config.replica_size * dp if is_known else None)
    check_run_name(config.run, config.runs_dir)
    check_groups(config.launch, config.cluster)
    values = {"dp": dp, "recompute": spelled(config.recompute)}
    return with_values(with_derived_keys(config), values)


def with_derived_keys(config: AnyConfig) -> AnyConfig:
    """Returns a copy of the configuration in which null keys have the values that others imply."""
    model, train = config.model, config.train
    values = {
        "model.num_query_groups": model.kv_heads,
        "model.ffn_hidden_size": model.ffn_size,
        "model.max_position_embeddings": model.max_positions,
        "data.valid_fraction": config.data.held_out,
        "data.document_mask": config.data.masks_documents,
    }
    if train.tokens is None and train.epochs is None:
        values["train.steps"] = config.train_steps
    return with_values(config, values)


def single_process(config: AnyConfig) -> AnyConfig:
    """Returns the configuration of the same training on one rank.

    More micro-batches replace the data-parallel replicas. The numbers of recomputed and offloaded
    layers of each stage are dropped, since they only save memory. Raises UserError if one process
    cannot train the model.
    """
    one = dict.fromkeys(("tp", "pp", "dp", "cp", "vpp", "ep"), 1)
    of_stages = dict.fromkeys(("recompute_layers", "offload_layers"))
    alone = {"sp": False, "schedule": ScheduleConfig(), "profile": ProfileConfig()}
    return check_config(with_values(config, one | of_stages | alone), 1)


def check_plain(config: Config) -> None:
    """Raises UserError for text that a reader of config.yaml would take for a reference."""
    for key, value in values_of(config).items():
        is_text_free = value is None or isinstance(value, (bool, int, float))
        if not is_text_free and "${" in json.dumps(value):
            raise UserError(
                f"{key}={show(value)} holds ${{, which config.yaml would take for a reference to "
                "another key; give text without it."
            )
