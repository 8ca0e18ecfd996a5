"""Builds a rank's model and the objects that train it, in the order in which they are needed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.comm.group import SINGLE, Group
from parallel3d.comm.step_timer import StepTimer
from parallel3d.comm.turns import Turns
from parallel3d.data_parallel.build import ShardedLayer, data_parallel_engine
from parallel3d.data_parallel.pending_gathers import PendingGathers
from parallel3d.device import accelerator
from parallel3d.device.precision import compute_dtype
from parallel3d.experts.balance import BalanceOfRun
from parallel3d.models.experts import MixtureOfExperts
from parallel3d.models.transformer import BuildContext, Stage, compile_blocks, stages_of_rank
from parallel3d.optim.muon import Muon, MuonByKind
from parallel3d.optim.optimizer import Optimizer, trained_spans
from parallel3d.parameters.initializer import Initializer
from parallel3d.pipeline.executor import Executor
from parallel3d.pipeline.offload import ActivationOffload
from parallel3d.pipeline.p2p import P2PRoute, SharedP2P, StageOutputs, measure_baseline_latency
from parallel3d.run.keys import LaunchConfig
from parallel3d.schedules.schedule import Schedule

if TYPE_CHECKING:
    from parallel3d.comm.process_groups import ProcessGroups
    from parallel3d.data_parallel.interface import DataParallel


@dataclass(frozen=True)
class RankParts:
    """A rank's model and the objects that train it.

    Attributes:
        stages: the rank's pipeline stages, in the order of its chunks.
        tied_name: the name of the embedding table if it is trained and another rank holds a copy
            of it; otherwise None.
        data_parallel: sums gradients over the replicas, and holds the parameters.
        executor: runs the stages' forwards and backwards, and exchanges their messages.
        balance: balances the load of the experts; None for a model without experts.
    """

    stages: Sequence[Stage]
    tied_name: str | None
    data_parallel: DataParallel
    optimizer: Optimizer
    executor: Executor
    balance: BalanceOfRun | None


def build(
    blueprint: Blueprint,
    schedule: Schedule,
    groups: ProcessGroups,
    device: torch.device,
    launch: LaunchConfig,
    timer: StepTimer,
) -> RankParts:
    """Builds a rank's layers, parameters, compiled code, optimizer and executor; collective.

    Args:
        schedule: the pipeline schedule for `global_batch_size`.
        launch: settings of messages between stages: shared memory and time limit.
        timer: gets the measured baseline latencies of the messages.
    """
    dtype = compute_dtype(blueprint.precision)
    master_dtype = torch.promote_types(dtype, torch.float32)
    # Layers are created on the meta device; the engine initialises the parameters of this rank.
    initializer = Initializer(blueprint.seed, master_dtype, device, deferred=True)
    turns = Turns(device) if blueprint.pipeline.overlaps else None
    held = blueprint.stages_of(groups.pp.index)
    gathers = PendingGathers(timer)
    offload = ActivationOffload(device) if any(stage.offloaded for stage in held) else None
    of_layers = groups.tp, groups.cp, groups.ep, turns, gathers, offload
    context = BuildContext.of_run(blueprint, initializer, *of_layers)
    stages = stages_of_rank(blueprint.model, held, context)
    freeze(stages, blueprint.frozen)
    # The engine, which sums gradients over dp, also creates the parameters.
    tied = {stage.tied_table for stage in stages} - {None} - blueprint.frozen
    engine = data_parallel_engine(
        blueprint.data,
        stages,
        sharded_layers(stages),
        initializer,
        dtype,
        groups,
        gathers,
        before_reduction=(lambda: None) if turns is None else turns.join,
    )
    if blueprint.compiles:
        compile_blocks(stages, saves_operands=schedule.splits_backward)
    optimizer = build_optimizer(blueprint, engine, groups, device)
    executor = build_executor(
        blueprint, schedule, stages, engine, groups, device, launch, timer, turns, offload
    )
    balance = expert_balance(blueprint, stages, groups)
    return RankParts(stages, next(iter(tied), None), engine, optimizer, executor, balance)


def sharded_layers(stages: Sequence[Stage]) -> list[ShardedLayer]:
    """Returns the blocks of all stages, which FSDP2 shards one by one."""
    return [
        ShardedLayer(
            block,
            block.mlp.experts if isinstance(block.mlp, MixtureOfExperts) else None,
            index >= stage.without_backward,
        )
        for stage in stages
        for index, block in enumerate(stage.blocks.values())
    ]


def freeze(stages: Sequence[Stage], names: Collection[str]) -> None:
    """Excludes the parameters with these names from training, before the engine reads them.

    It is enough to clear `requires_grad`: autograd, the linear layers, the engines and the
    optimizer treat such a parameter as a constant.
    """
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if name in names:
                parameter.requires_grad_(False)


def expert_balance(
    blueprint: Blueprint, stages: Sequence[Stage], groups: ProcessGroups
) -> BalanceOfRun | None:
    """Creates the load balancing for a rank's experts; returns None for a model without experts."""
    model = blueprint.model
    if not model.num_experts:
        return None
    blocks = [item for stage in stages for item in stage.blocks.items()]
    return BalanceOfRun(
        blueprint.balance,
        {int(n): b.mlp.router for n, b in blocks if isinstance(b.mlp, MixtureOfExperts)},
        model.expert_layers,
        model.num_experts,
        model.experts_per_token,
        (groups.tp, groups.cp),
        has_biases=model.router_bias,
        fixed=blueprint.fixed_states,
        is_first=groups.tp.index == groups.dp_cp.index == 0,
    )


def build_optimizer(
    blueprint: Blueprint, engine: DataParallel, groups: ProcessGroups, device: torch.device
) -> Optimizer:
    """Creates the optimizer for the shards of parameters that this rank updates."""
    optim = blueprint.optim
    muon: Muon | MuonByKind | None = None
    if optim.name == "muon":
        computed = compute_dtype(blueprint.precision)
        half = computed.itemsize < 4 and optim.muon_dtype == "auto"
        master_dtype = torch.promote_types(computed, torch.float32)
        dtype = torch.bfloat16 if half or optim.muon_dtype == "bf16" else master_dtype

        def matrices(experts: bool, tp: Group, data: Group) -> Muon:
            held = [trained_spans(engine.spans_of(i), optim) for i in range(data.size)]
            spans = [[span for span in each if span.spec.is_expert is experts] for each in held]
            return Muon(spans, optim.muon_scale, dtype, tp, data, device)

        muon = matrices(False, groups.tp, groups.dp_cp)
        if blueprint.model.num_experts:
            muon = MuonByKind(matrices(True, SINGLE, groups.edp), muon)
    return Optimizer(optim, engine.segments, blueprint.seed, muon)


def build_executor(
    blueprint: Blueprint,
    schedule: Schedule,
    stages: Sequence[Stage],
    engine: DataParallel,
    groups: ProcessGroups,
    device: torch.device,
    launch: LaunchConfig,
    timer: StepTimer,
    turns: Turns | None,
    offload: ActivationOffload | None,
) -> Executor:
    """Creates the executor, and sets the baseline latencies of `timer`; collective."""
    sliced = blueprint.sends_slices(accelerator.is_accelerator(device))
    sequence = blueprint.local_seq_length // (groups.tp.size if blueprint.layer.sp else 1)
    hidden = (blueprint.micro_batch_size, sequence, blueprint.model.hidden_size)
    dtype = compute_dtype(blueprint.precision)
    outputs = StageOutputs((hidden,), dtype, groups.tp if sliced else SINGLE)
    message, channel = outputs.empty_message(device).zero_(), None
    route = P2PRoute(groups.pp, schedule.assignment, groups.pp_backward)
    if launch.shared_memory:
        pipeline = blueprint.pipeline
        earlier = (pipeline.schedule(count).program() for count in pipeline.earlier)
        programs = schedule.program(), schedule.forwards(), *earlier
        channel = SharedP2P.of_programs(programs, route, message, launch.timeout_s)
    timer.baseline_latency = measure_baseline_latency(groups, message, channel)
    sends = [outputs] * (schedule.assignment.stages - 1)
    run = engine.callable_stages(stages)
    return Executor(
        run,
        route,
        sends,
        device,
        channel,
        timer,
        offload=offload,
        without_backward=blueprint.stages_without_backward,
        turns=turns,
    )
