"""Builds a rank's groups, model and trainer from a configuration, part by part."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from parallel3d.blueprint.blueprint import Blueprint
from parallel3d.blueprint.groups import two_levels
from parallel3d.blueprint.rank_mapping import RankMapping
from parallel3d.comm.batch_overlap import BatchOverlap
from parallel3d.comm.group import SINGLE, Group
from parallel3d.comm.process_groups import Interfaces, ProcessGroups, shards_and_replicas
from parallel3d.comm.step_timer import StepTimer
from parallel3d.data.loader import Batches, with_length
from parallel3d.data.sampler import SampleSource, TrainingText
from parallel3d.data.tokens import WatchedFile
from parallel3d.data_parallel.build import data_parallel_engine
from parallel3d.data_parallel.pending_gathers import PendingGathers
from parallel3d.device.precision import compute_dtype, set_numerics
from parallel3d.errors import UserError
from parallel3d.models.architecture import StageModule, architecture_of
from parallel3d.optim.checks import check_own
from parallel3d.optim.muon import Muon, MuonByKind
from parallel3d.optim.optimizer import Optimizer, trained_spans
from parallel3d.pipeline.executor import Executor, PipelineStage
from parallel3d.pipeline.offload import ActivationOffload
from parallel3d.pipeline.p2p import P2PRoute, SharedP2P, StageOutputs, measure_baseline_latency
from parallel3d.resolve import blueprint_of, layout_of
from parallel3d.run.keys import LaunchConfig
from parallel3d.run_config import Config, check_config
from parallel3d.schedules.schedule import Schedule
from parallel3d.trainer import RankParts, RankTrainer, StepSamples

if TYPE_CHECKING:
    from parallel3d.data_parallel.interface import DataParallel
    from parallel3d.optim.own import OptimizerFactory


class Trainer(RankTrainer):
    """Trains one rank's part of the model.

    Args:
        config: a complete configuration, which is checked here again for users of the library.
        groups: the process groups of this rank.
        device: the device of this rank.
        corpus: the result of `open_corpus`, with training and held-out samples; None if the samples
            come from the sources.
        train_source, valid_source: the training and held-out samples without a corpus.
        valid_sets: the samples of the validation sets by name; a source with `windows` (`Finite`)
            has that many samples, and any other source is endless.
        token_bytes: (vocabulary,), the number of bytes in each token's text, for `Score`; None if
            it is unknown.
        valid_files: the open files of the validation sets, which are checked for changes.
        stop_requested: returns whether this rank was asked to end the run; called in every step.
        save_requested: returns whether this rank asks for a checkpoint; called in every step.
        optimizer: with `optim.name=own`, makes an element-wise optimizer of parameter groups, such
            as the class `torch.optim.NAdam`.

    Raises:
        UserError: if the configuration cannot work.
    """

    def __init__(
        self,
        config: Config,
        groups: ProcessGroups,
        device: torch.device,
        corpus: TrainingText | None = None,
        train_source: SampleSource | None = None,
        valid_source: SampleSource | None = None,
        valid_sets: Mapping[str, SampleSource] | None = None,
        token_bytes: npt.NDArray[np.int64] | None = None,
        valid_files: Sequence[WatchedFile] = (),
        stop_requested: Callable[[], bool] = lambda: False,
        optimizer: OptimizerFactory | None = None,
        save_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        own_samples = train_source is not None
        may_resume = config.run is not None  # only `restore` knows whether the run resumes
        size = groups.layout.world_size
        config = check_config(config, size, own_samples=own_samples, may_resume=may_resume)
        if config.cp > 1 and config.context_parallel.style == "auto":  # subcommands resolve "auto"
            raise UserError(
                "context_parallel.style=auto must be gather, heads or ring if you create a Trainer "
                "yourself; the nearest is context_parallel.style=gather"
            )
        blueprint, timer = blueprint_of(config), StepTimer(device)
        groups = groups.observed(timer=timer)
        set_numerics(config.precision, device, config.deterministic)
        schedule = blueprint.pipeline.schedule()
        held_out_parts: Mapping[str, SampleSource] = {}
        if corpus is not None:
            train_source, valid_source, held_out_parts = corpus.sources(
                config.model, config.data, config.seed
            )
        if train_source is None:
            raise ValueError("a Trainer needs a corpus or a train_source")
        source, size = train_source, blueprint.micro_batch_size
        checks_tokens = corpus is None and config.model.has_vocabulary

        def example() -> tuple[Any, ...]:
            batches = Batches(
                source,
                size,
                1,
                0,
                device,
                document_mask=config.data.masks_documents,
                vocab_size=config.model.vocab_size if checks_tokens else None,
                fields_in=compute_dtype(blueprint.precision),
            )
            return batches.micro_batch(0, 0)

        self.stages, parts = build(
            blueprint, schedule, groups, device, config.launch, timer, example, optimizer
        )
        if config.train.epochs is not None:
            train = with_length(config.train, train_source, config.model.seq_length)
            config = dataclasses.replace(config, train=train)
            config = check_config(config, own_samples=corpus is None, may_resume=may_resume)
        self.config, self.corpus, self.valid_files = config, corpus, valid_files
        samples = StepSamples(
            train_source,
            checks_tokens=checks_tokens,
            is_own=corpus is None,
            document_mask=config.data.masks_documents,
            held_out=valid_source,
            held_out_parts=held_out_parts,
            valid_sets=valid_sets or {},
            token_bytes=token_bytes,
            eval_batches=config.train.eval_batches,
        )
        length = config.planned_length
        asked = stop_requested, save_requested
        super().__init__(blueprint, parts, samples, length, groups, device, timer, *asked)


def build(
    blueprint: Blueprint,
    schedule: Schedule,
    groups: ProcessGroups,
    device: torch.device,
    launch: LaunchConfig,
    timer: StepTimer,
    example: Callable[[], tuple[Any, ...]],
    own_optimizer: OptimizerFactory | None = None,
) -> tuple[Sequence[StageModule], RankParts]:
    """Builds a rank's layers, parameters, compiled code, optimizer and executor; collective.

    Args:
        schedule: the pipeline schedule for `global_batch_size`.
        launch: settings of messages between stages: shared memory and time limit.
        timer: gets the measured baseline latencies of the messages.
        example: loads a micro-batch, by which the stages of a user's own model find what they send.
        own_optimizer: makes the optimizer with `optim.name=own`.
    """
    architecture = architecture_of(blueprint.model)
    dtype = compute_dtype(blueprint.precision)
    # Layers are created on the meta device; the engine initialises the parameters of this rank.
    initializer = architecture.initializer(blueprint, device)
    overlap = BatchOverlap(device) if blueprint.pipeline.overlaps else None
    held = blueprint.stages_of(groups.pp.index)
    gathers = PendingGathers(timer)
    offload = ActivationOffload(device) if any(stage.offloaded for stage in held) else None
    stages: Sequence[StageModule] = architecture.stages_of_rank(
        blueprint, held, initializer, groups, gathers, overlap, offload
    )
    freeze(stages, blueprint.frozen)
    # The engine, which sums gradients over dp, also creates the parameters.
    tied = {stage.tied_table for stage in stages} - {None} - blueprint.frozen
    engine = data_parallel_engine(
        blueprint.data,
        stages,
        architecture.sharded_layers(stages),
        initializer,
        dtype,
        groups,
        gathers,
        before_reduction=(lambda: None) if overlap is None else overlap.join,
    )
    if blueprint.compiles:
        architecture.compile(stages, saves_operands=schedule.splits_backward)
    optimizer = build_optimizer(blueprint, engine, groups, device, own_optimizer)
    take_sums = stages[-1].take_sums if architecture.counts_loss and stages[-1].last else None
    run = engine.callable_stages(stages)
    messages = architecture.messages(blueprint, stages, run, groups, device, example)
    if take_sums is not None:
        take_sums()
    executor = build_executor(
        blueprint,
        schedule,
        run,
        messages,
        groups,
        device,
        launch,
        timer,
        overlap,
        offload,
    )
    return stages, RankParts(
        executor,
        engine,
        optimizer,
        architecture.expert_balance(blueprint, stages, groups),
        tied_name=next(iter(tied), None),
        needs_batch=any(stage.reads_batch for stage in stages),
        has_loss=stages[-1].last,
        sums_replicated=architecture.sums_replicated(blueprint),
        split=architecture.split(blueprint, groups.cp),
        measures=architecture.measures(blueprint.model),
        counts_loss=architecture.counts_loss,
        take_sums=take_sums,
    )


def groups_of_run(config: Config, device: str, placement: RankMapping | None) -> ProcessGroups:
    """Creates the groups of a run's layout on this rank, as configured; collective.

    `placement` maps the ranks to the GPUs of the cluster; it is None if no cluster is known.
    """
    device_type, layout = device.split(":")[0], layout_of(config)
    interfaces = None
    if device_type == "cpu":
        interfaces = Interfaces.of_run(config.cluster, placement)
    levels = None
    if config.ddp.hierarchical and placement is not None:
        levels = two_levels(placement, "dp_cp")
    if config.zero > 1 and config.ddp.shard_size is not None:
        levels = shards_and_replicas(layout, config.ddp.shard_size)
    timeout_s = config.launch.timeout_s
    return ProcessGroups.create(layout, device_type, timeout_s, config.launch, interfaces, levels)


def freeze(stages: Sequence[nn.Module], names: Collection[str]) -> None:
    """Excludes the parameters with these names from training, before the engine reads them.

    It is enough to clear `requires_grad`: autograd, the linear layers, the engines and the
    optimizer treat such a parameter as a constant.
    """
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if name in names:
                parameter.requires_grad_(False)


def build_optimizer(
    blueprint: Blueprint,
    engine: DataParallel,
    groups: ProcessGroups,
    device: torch.device,
    own: OptimizerFactory | None = None,
) -> Optimizer:
    """Creates the optimizer for the shards of parameters that this rank updates.

    `own` makes the optimizer of a script. Raises UserError if it is not element-wise.
    """
    optim = blueprint.optim
    check_own(optim, own is not None)
    if own is not None:
        # torch.optim imports the compiler, which takes a second.
        from parallel3d.optim.own import OwnOptimizer

        return OwnOptimizer(own, optim, engine.segments, blueprint.seed, device)
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
    stages: Sequence[PipelineStage],
    sends: Sequence[StageOutputs],
    groups: ProcessGroups,
    device: torch.device,
    launch: LaunchConfig,
    timer: StepTimer,
    overlap: BatchOverlap | None,
    offload: ActivationOffload | None,
) -> Executor:
    """Creates the executor, and sets the baseline latencies of `timer`; collective."""
    largest = max(sends, key=lambda sent: math.prod(sent.shape), default=None)
    message, channel = torch.zeros((), device=device), None
    if largest is not None:
        message = largest.empty_message(device).zero_()
    route = P2PRoute(groups.pp, schedule.assignment, groups.pp_backward)
    if launch.shared_memory:
        pipeline = blueprint.pipeline
        earlier = (pipeline.schedule(count).program() for count in pipeline.earlier)
        programs = schedule.program(), schedule.forwards(), *earlier
        channel = SharedP2P.of_programs(programs, route, message, launch.timeout_s)
    timer.baseline_latency = measure_baseline_latency(groups, message, channel)
    return Executor(
        stages,
        route,
        sends,
        device,
        channel,
        timer,
        offload=offload,
        without_backward=blueprint.stages_without_backward,
        overlap=overlap,
    )
