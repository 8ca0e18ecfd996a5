"""Resolves a checked configuration: which layout, pipeline and layers its keys describe.

Everything below takes the values: only this file reads the keys of layout, schedule, layers and
batch for a `Blueprint`. It imports no torch, so a layout of a million ranks can be priced.
"""

from __future__ import annotations

from parallel3d.blueprint.blueprint import (
    Blueprint,
    DataParallelSettings,
    LayerSettings,
    PipelineSettings,
)
from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.stages import StageWeights, head_cost, training_costs
from parallel3d.models.flops import layer_costs, repeated_share
from parallel3d.models.repeats import Repeats
from parallel3d.run_config import Config
from parallel3d.schedules.walk import RankWork


def layout_of(config: Config) -> Layout:
    """Returns the layout of a checked configuration; if `dp` is None, dp is 1 and ep at most 1."""
    ep = 1 if config.dp is None else config.ep
    ep = ep if config.model.num_experts else 0
    return Layout(tp=config.tp, pp=config.pp, dp=config.dp or 1, cp=config.cp, ep=ep)


def blueprint_of(config: Config) -> Blueprint:
    """Returns what the ranks of a checked configuration share."""
    given = config.schedule.layers_per_stage
    return Blueprint(
        model=config.model,
        layout=layout_of(config),
        pipeline=pipeline_settings(config),
        layer=layer_settings(config),
        data=data_parallel_settings(config),
        given=None if given is None else tuple(given),
        recompute_layers=tuple(config.recompute_layers or ()),
        offload_layers=tuple(config.offload_layers or ()),
        slices=config.schedule.slices,
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        local_seq_length=config.local_seq_length,
        precision=config.precision,
        device=config.device,
        seed=config.seed,
        compiles=config.compile,
        optim=config.optim,
        loss=config.loss,
        balance=config.moe,
    )


def pipeline_settings(config: Config) -> PipelineSettings:
    """Returns the settings that determine the schedules of a pipeline."""
    keys, layout = config.schedule, layout_of(config)
    forward, input, weight = keys.costs
    sequences = config.micro_batch_size * layout.dp
    return PipelineSettings(
        name=keys.name,
        file=keys.file,
        ranks=config.pp,
        chunks=config.vpp,
        microbatches=config.global_batch_size // sequences,
        earlier=tuple(batch // sequences for batch in config.batch_sizes.sizes[:-1]),
        work=RankWork(forward, input, weight, keys.hop, stage_weights(config)),
        memory=1.0 if keys.memory is None else keys.memory,
        whole_backwards=config.zero > 1 and layout.most_copies > 1,
        overlaps=config.moe.overlap,
    )


def layer_settings(config: Config) -> LayerSettings:
    """Returns the settings of the layers."""
    return LayerSettings(
        sp=config.sp,
        repeats=Repeats.of(config.recompute),
        chunks=config.tensor_parallel.chunks,
        mlp_chunks=config.mlp_chunks,
        gather_qk=config.tensor_parallel.attention == "gather_qk",
        cp_style=config.context_parallel.style,
        cp_balance=config.context_parallel.balance,
        cp_states=config.context_parallel.states,
        attention_kernel=config.attention_kernel,
        state_kernel=config.delta_kernel,
        dispatch=config.moe.dispatch,
    )


def data_parallel_settings(config: Config) -> DataParallelSettings:
    """Returns the settings of gradients and optimizer states."""
    ddp = config.ddp
    return DataParallelSettings(
        zero=config.zero,
        every_microbatch=ddp.reduces_every_microbatch(config.zero),
        bucket_cap_mb=ddp.bucket_cap_mb,
        comm_hook=ddp.comm_hook,
        overlap=ddp.overlap,
    )


def stage_weights(config: Config, balances: bool = False) -> StageWeights:
    """Returns the costs of the pipeline's stages, for any assignment of layers to them.

    `balances`: as in `StageWeights`.
    """
    model, given = config.model, config.schedule.layers_per_stage
    divided_by = training_costs(model, config.optim)
    costs = layer_costs(model) if divided_by.differ_widely else divided_by.layers
    return StageWeights(
        costs,
        head_cost(model),
        config.pp,
        None if given is None else tuple(given),
        balances,
        divided_by,
        repeated_share(model, Repeats.of(config.recompute), config.ep),
        tuple(config.recompute_layers or ()),
    )
