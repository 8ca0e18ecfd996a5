"""Derives the stages, parameters, gradient buckets and shards of a pipeline rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from parallel3d.blueprint.blueprint import Blueprint, StageBlueprint
from parallel3d.blueprint.buckets import (
    assign,
    padded_numel,
)
from parallel3d.blueprint.parameters import TABLES, LocalParameter, parameters_of_known
from parallel3d.blueprint.sizes import heads_at_once, loss_chunks
from parallel3d.models.declared import LayerKind, heads_of
from parallel3d.models.products import Gradients, gradients_of

ACTIVATION_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


class LayersOfKind(NamedTuple):
    """Layers of one kind on a rank or a stage.

    Attributes:
        kind: the kind of the layers.
        layers: number of layers.
        recomputed: number of layers whose backward repeats a part of the forward.
    """

    kind: LayerKind
    layers: int
    recomputed: int


class PipelineRank:
    """One rank of a pipeline, with all of its stages and with the sizes that follow from them.

    Args:
        index: index of the rank along pp.
        data_rank: index of the rank along dp_cp, which decides its shards under ZeRO.
    """

    def __init__(self, blueprint: Blueprint, index: int, data_rank: int = 0) -> None:
        self.blueprint = blueprint
        self.index = index
        self.data_rank = data_rank
        self.layout = blueprint.layout
        self.assignment = blueprint.assignment
        self.stages = blueprint.stages_of(index)
        model = blueprint.model
        tp = self.layout.tp
        zero = blueprint.data.zero
        self.replicas = self.layout.dp_cp
        self.kinds = _sum_of_kinds([kind for stage in self.stages for kind in self.kinds_of(stage)])
        self.layer_count = sum(len(stage.layers) for stage in self.stages)
        self.first = any(stage.first for stage in self.stages)
        self.last = any(stage.last for stage in self.stages)
        self.sp = blueprint.sequence_parallel
        self.on_accelerator = blueprint.device != "cpu"  # device=auto counts as a GPU
        self.sends_slices = blueprint.sends_slices(self.on_accelerator)
        has_experts = any(of.kind.experts for of in self.kinds)
        copies = max(self.replicas, self.layout.edp if has_experts else 1)
        self.fully_sharded = zero > 1 and copies > 1  # FSDP2 shards the parameters
        # Number of ranks over which the optimizer's state is sharded
        self.shards = self.replicas if zero else 1
        # Number of ranks over which the optimizer's state of experts is sharded
        self.expert_shards = self.layout.edp if zero else 1
        # Bytes of an element of activations, and of an accumulated gradient in fp32 or better.
        self.item = ACTIVATION_BYTES[blueprint.precision.name]
        self.grad_item = max(4, self.item)
        # Tokens of a micro-batch, bytes of its hidden states (b, s, h) and of the residual stream
        # on this rank, and whether collectives need contiguous copies.
        self.tokens = blueprint.micro_batch_size * blueprint.local_seq_length
        self.hidden = self.tokens * model.hidden_size * self.item
        self.stream = self.hidden / (tp if self.sp else 1)
        self.copies = self.sp and blueprint.micro_batch_size > 1
        # Number of columns of the logits from which this rank computes the loss.
        self.columns = model.padded_vocab_size // (tp if model.parallel_output else 1)

    @property
    def accumulates(self) -> bool:
        """Whether FSDP2 keeps whole gradients until the last backward, which reduces them."""
        every = self.blueprint.data.every_microbatch
        return self.fully_sharded and not every and self.blueprint.microbatches > 1

    @property
    def loss_chunks(self) -> Mapping[int, int]:
        """Loss chunks of a micro-batch: {tokens of a chunk: number of such chunks}."""
        return loss_chunks(
            self.tokens,
            self.columns,
            self.blueprint.loss.chunk_tokens,
            item=self.item,
            on_accelerator=self.on_accelerator,
        )

    def groups_of_heads(self, kind: LayerKind) -> int:
        """Returns the number of sets of key-value heads; cp gathers one set at a time."""
        _, keys = (dim.local(self.layout.tp) for dim in heads_of(kind))
        heads, of_head = keys // kind.head_size, 2 * self.tokens * kind.head_size * self.item
        return heads // heads_at_once(heads, of_head)

    def kinds_of(self, stage: StageBlueprint) -> list[LayersOfKind]:
        """Groups the layers of a stage by kind."""
        layers, kinds = stage.layers, self.blueprint.kinds
        if len(kinds) == 1:
            return [LayersOfKind(kinds[0], len(layers), stage.recomputed)]
        every = [*self.blueprint.kind_of_layer[layers.start : layers.stop]]
        again = every[: stage.recomputed]
        return [
            LayersOfKind(kind, every.count(kind), again.count(kind))
            for kind in kinds
            if kind in every
        ]

    def layers_alike(self) -> list[tuple[LayersOfKind, Gradients]]:
        """Groups the layers of this rank by kind and by the gradients that they have."""
        if not self.blueprint.frozen:
            return [(of, self.all_gradients(of.kind)) for of in self.kinds]
        found: dict[tuple[LayerKind, Gradients], LayersOfKind] = {}
        for stage in self.stages:
            for place, layer in enumerate(stage.layers):
                key = self.blueprint.kind_of_layer[layer], self.gradients(layer)
                kind, count, again = found.get(key, (key[0], 0, 0))
                repeats = stage.without_backward <= place < stage.recomputed
                found[key] = LayersOfKind(kind, count + 1, again + repeats)
        return [(of, gradients) for (_, gradients), of in found.items()]

    def all_gradients(self, kind: LayerKind) -> Gradients:
        """Returns the gradients of a layer without frozen parameters."""
        return gradients_of(self.blueprint.model, kind, (), reached=True)

    def gradients(self, layer: int) -> Gradients:
        """Returns the gradients of a layer."""
        model, prefix = self.blueprint.model, f"layers.{layer}."
        mine = (name for name in self.blueprint.frozen if name.startswith(prefix))
        frozen = {name.removeprefix(prefix) for name in mine}
        reached = self.blueprint.first_trained < layer
        return gradients_of(model, self.blueprint.kind_of_layer[layer], frozen, reached)

    def shards_of(self, parameter: LocalParameter) -> int:
        """Returns the number of ranks over which a parameter's optimizer state is sharded."""
        if self.fully_sharded and not self.is_fully_sharded(parameter):
            return 1
        return self.expert_shards if parameter.expert else self.shards

    def is_fully_sharded(self, parameter: LocalParameter) -> bool:
        """Returns whether FSDP2 shards a parameter, as it does to all but wide ones."""
        return self.fully_sharded and self.item_of(parameter) == self.item

    def item_of(self, parameter: LocalParameter) -> int:
        """Returns the bytes of an element of a parameter as layers read it."""
        return self.grad_item if parameter.wide else self.item

    def index_of(self, parameter: LocalParameter) -> int:
        """Returns the index of tensor-parallel rank 0 among the ranks that `shards_of` counts."""
        return self._stage_place // self.layout.ep if parameter.expert else self.data_rank

    @property
    def experts_here(self) -> range:
        """Indices of the experts on the first tensor-parallel rank."""
        count = self.blueprint.model.num_experts // self.layout.ep
        first = count * (self._stage_place % self.layout.ep)
        return range(first, first + count)

    @cached_property
    def _stage_place(self) -> int:
        """Index of the first tensor-parallel rank among the ranks of its stage."""
        layout = self.layout
        dp, cp = divmod(self.data_rank, layout.cp)
        place = {"pp": self.index, "dp": dp, "cp": cp}
        rank = sum(index * layout.stride(dim) for dim, index in place.items())
        return sorted(layout.group_of(rank, "tp", "cp", "dp")).index(rank)

    @property
    def mlp_chunks(self) -> int:
        """Number of chunks in which the MLP of a recomputed layer runs."""
        length = self.blueprint.local_seq_length // (self.layout.tp if self.sp else 1)
        return -(-length // -(-length // self.blueprint.layer.mlp_chunks))

    @property
    def is_tied_to_another(self) -> bool:
        """Whether this rank and another one hold copies of a tied weight and sum its gradients."""
        if self.first == self.last or not self._tables:
            return False
        return self.table.tied and not self.table.frozen

    def neighbours(self, offset: int, with_backward: bool = False) -> int:
        """Counts the stages whose next (+1) or previous (-1) stage is on another rank.

        With `with_backward` it counts only the pairs whose earlier stage receives a gradient.
        """
        found = 0
        for chunk in range(len(self.stages)):
            place = self.assignment.neighbour(self.index, chunk, offset)
            stage = self.assignment.stage(self.index, chunk) + min(offset, 0)
            counts = not with_backward or self.blueprint.stages[stage].has_backward
            found += place is not None and place[0] != self.index and counts
        return found

    def held(self, stage: StageBlueprint, layers: range) -> list[LocalParameter]:
        """Returns the parameters that the stage would hold if it had only these layers.

        A tied table is listed once per rank.
        """
        frozen = self.blueprint.frozen
        found = parameters_of_known(
            self.blueprint.known_model,
            self.layout.tp,
            layers,
            stage.first,
            stage.last,
            borrows_table=self.first,
            ep=max(self.layout.ep, 1),
        )
        return [p._replace(frozen=p.name in frozen) for p in found] if frozen else found

    @cached_property
    def chunks(self) -> list[list[LocalParameter]]:
        """The parameters of each chunk."""
        return [self.held(stage, stage.layers) for stage in self.stages]

    @cached_property
    def ends(self) -> list[LocalParameter]:
        """Parameters of the embedding and the head."""
        return [p for stage in self.stages for p in self.held(stage, range(0))]

    @cached_property
    def numels(self) -> dict[LayerKind, tuple[int, int]]:
        """Kind of layer → (elements of the layer's experts, elements of its other parameters)."""
        of, tp, ep = self.blueprint.known_model, self.layout.tp, max(self.layout.ep, 1)
        found = {}
        for kind in self.blueprint.kinds:
            layer = self.blueprint.kind_of_layer.index(kind)
            held = parameters_of_known(of, tp, range(layer, layer + 1), False, False, ep=ep)
            of_experts = sum(p.numel for p in held if p.expert)
            found[kind] = of_experts, sum(p.numel for p in held) - of_experts
        return found

    def frozen_numel(self, layers: range | None = None) -> tuple[int, int]:
        """Counts the frozen elements of experts, and those of all other parameters.

        `layers`: layers of this rank to count, or None for all of the rank's parameters.
        """
        if not self.blueprint.frozen:
            return 0, 0
        held = self.parameters
        if layers is not None:
            held = [p for p in held if _layer_of(p) in layers]
        frozen = [p for p in held if p.frozen]
        experts = sum(p.numel for p in frozen if p.expert)
        return experts, sum(p.numel for p in frozen) - experts

    def trained_numel(self, stage: StageBlueprint) -> int:
        """Counts the trained elements in the layers of a stage."""
        numel = sum(sum(self.numels[of.kind]) * of.layers for of in self.kinds_of(stage))
        return numel - sum(self.frozen_numel(stage.layers))

    def trained_layers(self, stage: StageBlueprint) -> float:
        """Returns the number of the stage's layers, times the trained share of their elements."""
        numel = self.trained_numel(stage)
        whole = numel + sum(self.frozen_numel(stage.layers))
        return len(stage.layers) * numel / whole if whole else 0.0

    def most_trained(self, stage: StageBlueprint) -> int:
        """Returns the largest number of trained elements in any layer of the stage."""
        if not self.blueprint.frozen:
            return self.layer_numel(self.kinds_of(stage))
        numels = Counter[int]()
        for p in self.trained:
            numels[_layer_of(p)] += p.numel
        return max((numels[layer] for layer in stage.layers), default=0)

    def layer_numel(self, kinds: Sequence[LayersOfKind]) -> int:
        """Returns the number of elements of the largest of these layers."""
        return max(sum(self.numels[of.kind]) for of in kinds)

    @cached_property
    def all_trained_numel(self) -> int:
        """Number of elements of all trained parameters."""
        return sum(p.numel for p in self.trained)

    @cached_property
    def end_numel(self) -> int:
        return sum(p.numel for p in self.ends)

    def ends_read(self, stage: StageBlueprint) -> list[LocalParameter]:
        """Returns the parameters of embedding and head that a stage reads.

        They are the stage's own parameters and, for the last stage, a tied table that the rank's
        first stage holds.
        """
        ends = self.held(stage, range(0))
        borrows = stage.last and bool(self._tables) and self.table.tied and self.table not in ends
        return [*ends, self.table] if borrows else ends

    @property
    def table(self) -> LocalParameter:
        """The weight that the rank's head holds itself, or else the weight of the embedding.

        Only the first and the last rank of a pipeline have such a table.
        """
        return self._tables[-1]

    @property
    def _tables(self) -> list[LocalParameter]:
        return [p for p in self.ends if p.name in TABLES]  # none in a model of the user's own

    @property
    def parameters(self) -> list[LocalParameter]:
        return [parameter for chunk in self.chunks for parameter in chunk]

    @cached_property
    def trained(self) -> list[LocalParameter]:
        """The parameters that have gradients, masters and states of the optimizer."""
        return [parameter for parameter in self.parameters if not parameter.frozen]


def _layer_of(parameter: LocalParameter) -> int:
    """Returns the number of the layer that holds a parameter; −1 for embedding and head."""
    part, number, *_ = parameter.name.split(".")
    return int(number) if part == "layers" else -1


def buckets_of(rank: PipelineRank) -> list[list[LocalParameter]]:
    """Returns the trained parameters of each bucket, in the order in which they lie in the bucket.

    The chunk of the last layers comes first, because its gradients are ready first. Gradients of
    experts have buckets of their own, unless the run has one rank, and so have wide parameters.
    FSDP2 has no buckets, except of wide parameters.
    """
    found = []
    apart = rank.layout.world_size > 1
    for chunk in reversed(rank.chunks):
        ready = [p for p in reversed(chunk) if not (p.frozen or rank.is_fully_sharded(p))]
        buckets: list[list[int]] = []
        kinds = [(p.expert and apart, rank.item_of(p)) for p in ready]
        for kind in dict.fromkeys(kinds):
            places = [i for i, of in enumerate(kinds) if of == kind]
            sizes = [ready[i].numel * rank.grad_item for i in places]
            tied = rank.is_tied_to_another
            alone = [j for j, i in enumerate(places) if ready[i].tied and tied]
            cap = rank.blueprint.data.bucket_cap_mb
            for members in assign(sizes, cap, alone, rank.on_accelerator):
                buckets.append([places[j] for j in members])
        buckets.sort(key=max)  # in the order in which buckets fill up
        found += [[ready[i] for i in reversed(members)] for members in buckets]
    return found


def bucket_numel(bucket: Sequence[LocalParameter], rank: PipelineRank) -> int:
    """Returns the number of elements of a bucket, including padding."""
    return padded_numel(sum(p.numel for p in bucket), rank.shards_of(bucket[0]))


def _sum_of_kinds(kinds: Sequence[LayersOfKind]) -> list[LayersOfKind]:
    sums: dict[LayerKind, LayersOfKind] = {}
    for kind, layers, recomputed in kinds:
        before = sums.get(kind, LayersOfKind(kind, 0, 0))
        sums[kind] = LayersOfKind(kind, before.layers + layers, before.recomputed + recomputed)
    return sorted(sums.values(), key=lambda of: of.kind.experts)


class FlatShard(NamedTuple):
    """A part of the gradients that a rank uses in its optimizer step.

    Attributes:
        spans: (parameter, first, count) for parameters with the same weight decay and replication:
            the shard has `count` elements of each parameter, from element `first` on.
        shared: number of elements that tp ranks sum (see `LocalParameter`), times their `owners`.
    """

    spans: list[tuple[LocalParameter, int, int]]
    shared: int

    @classmethod
    def of(cls, spans: list[tuple[LocalParameter, int, int]]) -> FlatShard:
        last = (p.owners * min(n, first + n - (p.numel - p.shared)) for p, first, n in spans)
        return cls(spans, sum(n for n in last if n > 0))

    @property
    def numel(self) -> int:
        return sum(count for _, _, count in self.spans)

    @property
    def replicated(self) -> bool:
        return self.spans[0][0].replicated

    @property
    def experts(self) -> bool:
        return self.spans[0][0].expert

    @property
    def hidden(self) -> int:
        """Number of elements in matrices that Muon updates."""
        return sum(n for p, _, n in self.spans if p.muon)


def flat_shards(rank: PipelineRank) -> list[FlatShard]:
    """Returns the gradients that a rank sums over tp and then uses in its optimizer step.

    Frozen parameters have none. Without ZeRO the result has all gradients, by bucket. Under zero=1
    it has the rank's part of every bucket, and under zero=2 and 3 its rows of every parameter that
    FSDP2 shards.
    """
    found = []
    if rank.fully_sharded:
        for p in filter(rank.is_fully_sharded, rank.trained):
            most, at = sharded_numel(p, rank.shards_of(p)), rank.index_of(p)
            first, end = (min(p.numel, most * i) for i in (at, at + 1))
            found.append(FlatShard.of([(p, first, end - first)]))
    for bucket in buckets_of(rank):
        shards = rank.shards_of(bucket[0])
        own = bucket_numel(bucket, rank) // shards
        start = own * rank.index_of(bucket[0]) if shards > 1 else 0
        by_kind: dict[tuple[bool, bool], list[tuple[LocalParameter, int, int]]] = defaultdict(list)
        for p, offset in _placed(bucket):
            first, end = max(start - offset, 0), min(start + own - offset, p.numel)
            if first < end:
                by_kind[p.decays, p.replicated].append((p, first, end - first))
        found += [FlatShard.of(spans) for spans in by_kind.values()]
    return found


def _placed(bucket: Sequence[LocalParameter]) -> Iterator[tuple[LocalParameter, int]]:
    """Yields the parameters of a bucket in their order there, with their first elements."""
    offset = 0
    for p in sorted(bucket, key=lambda p: (p.decays, p.replicated)):
        yield p, offset
        offset += p.numel


def rank_with_most_sums(rank: PipelineRank) -> PipelineRank:
    """Returns the rank along dp_cp, at the same place of the pipeline, whose tp sums are largest.

    These are the sums of the gradients of shared heads, of norms and, under sp, of all replicated
    parameters. Of equal ranks it returns the first.
    """
    if rank.layout.tp == 1 or rank.shards == 1:
        return rank
    places: list[tuple[LocalParameter, int, int]] = []  # with first element and a rank's elements
    if rank.fully_sharded:
        whole = filter(rank.is_fully_sharded, rank.trained)
        places += [(p, 0, sharded_numel(p, rank.shards_of(p))) for p in whole]
    for bucket in buckets_of(rank):
        own = bucket_numel(bucket, rank) // rank.shards_of(bucket[0])
        places += [(p, offset, own) for p, offset in _placed(bucket)]
    sums: Counter[tuple[bool, int]] = Counter()
    for p, offset, own in places:
        if rank.shards_of(p) == 1:
            continue
        end = offset + p.numel
        parts = [(end - p.shared, p.owners), (offset, int(rank.sp and p.replicated))]
        for start, times in parts:
            for shard in range(start // own, -(-end // own)) if times else ():
                both = min(end, own * (shard + 1)) - max(start, own * shard)
                sums[p.expert, shard] += times * both
    ranks = [PipelineRank(rank.blueprint, rank.index, i) for i in range(rank.shards)]
    experts = next((p for p in rank.trained if p.expert), None)

    def summed(other: PipelineRank) -> int:
        of_experts = 0 if experts is None else sums[True, other.index_of(experts)]
        return sums[False, other.data_rank] + of_experts

    return max(ranks, key=summed)


def sharded_numel(parameter: LocalParameter, shards: int) -> int:
    """Returns the number of elements of the first, largest shard of a parameter.

    The parameter is cut into `shards` shards of whole rows.
    """
    rows = parameter.numel // parameter.columns
    return -(-rows // shards) * parameter.columns
