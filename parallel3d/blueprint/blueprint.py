"""Derives the parameters and the work of every rank of a run from its settings.

`resolve.blueprint_of` makes a `Blueprint` of a checked configuration. The trainer
builds the whole model from it, the dry run builds one rank, and the planner estimates time and
memory. `rank.PipelineRank` derives the sizes of one rank from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from parallel3d.blueprint.layout import Layout
from parallel3d.blueprint.parameters import first_trained, fixed_states, frozen_parameters
from parallel3d.blueprint.sizes import offloading, recomputing
from parallel3d.blueprint.stages import checked_split, training_costs
from parallel3d.device.keys import PrecisionConfig
from parallel3d.experts.keys import ExpertsConfig
from parallel3d.models.declared import KnownModel, LayerKind, kinds_of_known, layer_kinds
from parallel3d.models.keys import ModelConfig
from parallel3d.models.products import repeats_anything
from parallel3d.models.repeats import Repeats
from parallel3d.optim.keys import OptimConfig
from parallel3d.schedules.choose import chosen, wanted
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import NAMED_SCHEDULES, WITHOUT_SPLIT, Schedule, assignment_of
from parallel3d.schedules.walk import RankWork
from parallel3d.tensor_parallel.keys import LossConfig


@dataclass(frozen=True)
class PipelineSettings:
    """Settings of a run's pipeline that determine its schedules.

    Attributes:
        name, file: `schedule.name` and `schedule.file`.
        ranks: number of ranks in the pipeline.
        chunks: number of stages on each rank.
        microbatches: number of micro-batches that a rank runs in a step with the full global batch.
        earlier: `microbatches` of earlier steps with a smaller global batch
            (`train.batch_schedule`).
        work, memory: the costs of actions and the memory limit for schedule=auto.
        whole_backwards: whether backwards must not be split, because FSDP2 reduces gradients during
            the backward.
        overlaps: whether a forward runs during the backward of the previous micro-batch
            (`moe.overlap`).
    """

    name: str
    file: str | None
    ranks: int
    chunks: int
    microbatches: int
    earlier: tuple[int, ...]
    work: RankWork
    memory: float
    whole_backwards: bool
    overlaps: bool

    def schedule(self, microbatches: int | None = None) -> Schedule:
        """Returns the schedule for `microbatches` micro-batches.

        If `microbatches` is None, the run's number is used. Raises UserError if there is no such
        schedule (see `choose.wanted`).
        """
        count = self.microbatches if microbatches is None else microbatches
        found = wanted(self.name, self.ranks, count, self.chunks, self.file, self.work, self.memory)
        if self.overlaps:
            return found.a_forward_ahead()
        return found.with_whole_backwards() if self.whole_backwards else found

    @property
    def may_split(self) -> bool:
        """Whether gradients of weights may be computed apart from those of inputs."""
        return not self.whole_backwards and self.name not in WITHOUT_SPLIT

    def why_chosen(self) -> str:
        """Describes the schedule that schedule=auto found, and the next best ones."""
        return chosen(self.ranks, self.microbatches, self.chunks, self.work, self.memory).why

    @cached_property
    def assignment(self) -> StageAssignment:
        """The assignment of stages to ranks: vpp stages per rank, in loops or as a V."""
        if self.name not in NAMED_SCHEDULES:
            return self.schedule().assignment
        return assignment_of(self.name, self.ranks, self.chunks)


@dataclass(frozen=True)
class StageBlueprint:
    """One stage of the pipeline.

    Attributes:
        layers: indices of the stage's layers in the model.
        recomputed: number of layers, counted from the first one, that repeat a part of their
            forward in the backward.
        offloaded: number of layers, counted from the first one, that are offloaded.
        first: whether the stage holds the embedding.
        last: whether the stage holds the head.
        without_backward: number of layers, counted from the first one, that have no backward,
            because there is nothing to train in them or before them.
        has_backward: whether there is anything to train in this stage or before it.
    """

    layers: range
    recomputed: int
    offloaded: int
    first: bool
    last: bool
    without_backward: int
    has_backward: bool

    @classmethod
    def plain(cls, layers: range, first: bool = False, last: bool = False) -> StageBlueprint:
        """Returns a stage that trains and recomputes all of its layers, and offloads none."""
        return cls(layers, len(layers), 0, first, last, 0, True)

    @property
    def backward(self) -> StageBlueprint:
        """The stage with only those layers that have a backward and therefore keep activations."""
        few = self.without_backward
        if not few:
            return self
        return replace(
            self,
            layers=self.layers[few:],
            recomputed=max(0, self.recomputed - few),
            offloaded=max(0, self.offloaded - few),
            without_backward=0,
        )


@dataclass(frozen=True)
class LayerSettings:
    """Settings of computation and communication in the layers of a run.

    Attributes:
        sp: whether sequence parallelism is on.
        repeats: parts of a layer that the backward computes again.
        chunks: number of pieces into which sequence parallelism splits its communication.
        mlp_chunks: number of pieces in which a recomputed MLP runs.
        gather_qk: whether q and k are gathered over tp (`Attention.project`).
        cp_style: how attention reads the keys of other context-parallel ranks.
        cp_balance: whether ranks of cp get equal work even if documents would make the work uneven.
        cp_states: how layers with a state read the tokens of other context-parallel ranks.
        state_kernel: the configured kernel of layers with a state (`delta_kernel`).
        attention_kernel: the configured kernel (see `models.attention.choose_kernel`).
        dispatch: how tokens reach the experts of other ranks (`experts/route.py`).
    """

    sp: bool
    repeats: Repeats
    chunks: int
    mlp_chunks: int
    gather_qk: bool
    cp_style: str
    cp_balance: bool
    cp_states: str
    attention_kernel: str
    state_kernel: str
    dispatch: str


@dataclass(frozen=True)
class DataParallelSettings:
    """Settings of gradients and optimizer states that ranks with equal parameters share.

    Attributes:
        zero: ZeRO stage.
        every_microbatch: whether FSDP2 reduces gradients after each micro-batch, so that no rank
            keeps whole gradients.
        bucket_cap_mb, comm_hook: settings of gradient buckets (`buckets.assign`, `comm_hooks.py`).
        overlap: whether buckets are reduced while the last backward runs.
    """

    zero: int
    every_microbatch: bool
    bucket_cap_mb: float | None
    comm_hook: str
    overlap: bool


@dataclass(frozen=True)
class Blueprint:
    """Holds the facts of a run that its ranks share; `resolve.blueprint_of` creates it.

    Attributes:
        given: `schedule.layers_per_stage`, or None if layers are balanced by cost.
        recompute_layers: number of recomputed layers of each stage, one number for all stages, or
            () if all layers are recomputed.
        offload_layers: number of offloaded layers of each stage, one number for all stages, or ()
            if no layers are offloaded.
        slices: `schedule.slices`; None means true on accelerators and false elsewhere.
        local_seq_length: tokens of a sample on a context-parallel rank, before sp divides them.
        device: the key `device`; all values except "cpu" mean a GPU.
        compiles: whether the forward and backward of the layers are compiled.
        load: number of rows of a rank's experts, divided by the mean over all ranks. A value
            above 1 describes the fullest rank.
    """

    model: ModelConfig
    layout: Layout
    pipeline: PipelineSettings
    layer: LayerSettings
    data: DataParallelSettings
    given: tuple[int, ...] | None
    recompute_layers: tuple[int, ...]
    offload_layers: tuple[int, ...]
    slices: bool | None
    global_batch_size: int
    micro_batch_size: int
    local_seq_length: int
    precision: PrecisionConfig
    device: str
    seed: int
    compiles: bool
    optim: OptimConfig
    loss: LossConfig
    balance: ExpertsConfig
    load: float = 1.0

    @property
    def microbatches(self) -> int:
        return self.pipeline.microbatches

    @property
    def half_loss(self) -> bool:
        """Whether the cross entropy is computed in half precision."""
        return self.precision.lm_cross_entropy == "fp16"

    @property
    def sequence_parallel(self) -> bool:
        return self.layer.sp and self.layout.tp > 1

    @property
    def rank_multiple(self) -> int:
        """The number by which a sample's tokens on a context-parallel rank must be divisible."""
        return self.layout.tp * self.layer.chunks if self.layer.sp else 1

    @property
    def assignment(self) -> StageAssignment:
        return self.pipeline.assignment

    @cached_property
    def looped_layout(self) -> Layout:
        """The layout, with `loops` set to how often the schedule's stages loop over the ranks."""
        shape, chunks = self.assignment.shape, self.assignment.chunks
        return replace(self.layout, loops=1 if shape == "v" else chunks)

    @cached_property
    def known_model(self) -> KnownModel:
        """The model, as a key of what is remembered about it."""
        return KnownModel.of(self.model)

    @cached_property
    def kind_of_layer(self) -> tuple[LayerKind, ...]:
        """The kind of each layer of the model."""
        return kinds_of_known(self.known_model)

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers in the model, dense ones first."""
        return tuple(layer_kinds(self.model))

    @cached_property
    def layers_per_stage(self) -> tuple[int, ...]:
        """Number of layers of each stage, as configured or balanced by cost.

        Raises UserError if the configured split does not fit the model, or a stage would be empty.
        """
        model, assignment = self.model, self.assignment
        if self.given is not None:
            return checked_split(self.given, model.num_layers, assignment)
        return training_costs(model, self.optim).split(assignment)

    @cached_property
    def stages(self) -> tuple[StageBlueprint, ...]:
        """Stages of the pipeline, by number. Raises UserError (see `layers_per_stage`)."""
        counts = self.layers_per_stage
        last = len(counts) - 1
        begin = self.first_trained
        model, parts = self.model, self.layer.repeats
        repeats = any(repeats_anything(model, kind, parts) for kind in self.kinds)
        return tuple(
            StageBlueprint(
                layers=range(end - n, end),
                recomputed=recomputing(self.recompute_layers, i, n) if repeats else 0,
                offloaded=offloading(self.offload_layers, i, n),
                first=i == 0,
                last=i == last,
                without_backward=min(n, max(0, begin - (end - n))),
                has_backward=begin < end + (i == last),
            )
            for i, (n, end) in enumerate(zip(counts, accumulate(counts), strict=True))
        )

    @cached_property
    def frozen(self) -> frozenset[str]:
        """Names of the local parameters in which no tensor is trained (`frozen_parameters`)."""
        return frozen_parameters(self.model, self.optim)

    @property
    def fixed_states(self) -> frozenset[str]:
        """Names of the model's states that the run does not change (`parameters.fixed_states`)."""
        return fixed_states(self.model, self.optim)

    @cached_property
    def first_trained(self) -> int:
        """The first layer with a parameter to train (see `parameters.first_trained`)."""
        return first_trained(self.model, self.frozen)

    @property
    def stages_without_backward(self) -> int:
        """Number of stages, counted from the first one, that compute and receive no gradient."""
        return sum(not stage.has_backward for stage in self.stages)

    def stages_of(self, index: int) -> tuple[StageBlueprint, ...]:
        """Returns the stages of rank `index` along pp, by chunk."""
        place = self.assignment
        return tuple(self.stages[place.stage(index, chunk)] for chunk in range(place.chunks))

    def recompute_forwards(self) -> list[float]:
        """Returns, for each stage, the share of its layers' forward that its backward repeats."""
        weights = self.pipeline.work.weights
        assert weights is not None
        return [again / part for part, _, again in weights(self.assignment) or ()]

    def sends_slices(self, on_accelerator: bool) -> bool:
        """Returns whether tensor-parallel ranks each send a slice of their hidden states onward.

        This is Megatron-LM's scatter_gather_tensors_in_pipeline (Narayanan et al. 2021 §4.1).
        Slices need hidden states that are equal on all tensor-parallel ranks, so `sp` excludes
        them.
        """
        tp, pp = self.layout.tp, self.layout.pp
        if self.layer.sp or tp == 1 or pp == 1 or self.model.seq_length % tp:
            return False
        return on_accelerator if self.slices is None else self.slices
