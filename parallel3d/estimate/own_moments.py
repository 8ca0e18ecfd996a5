"""Finds the moments of a step at which a rank of a user's own model uses the most memory.

The walk is that of the transformer (`moments.py`). Embedding and head with the loss are parts of a
stage like its blocks, and their traces say what each keeps (`trace/own_trace.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from parallel3d.blueprint.blueprint import StageBlueprint
from parallel3d.blueprint.in_flight import States
from parallel3d.blueprint.parameters import stage_parameters
from parallel3d.blueprint.rank import PipelineRank
from parallel3d.estimate.layer_memory import LayerMemories, LayerMemory
from parallel3d.estimate.moments import ENDS, FP32, Bytes, Moment, StagePlace, StepMoments, ahead
from parallel3d.models.survey import OwnModelConfig
from parallel3d.schedules.actions import Kind
from parallel3d.trace.own_trace import ModelTrace, PartTrace, WantedParts, spans, traces_of


def own_moments(rank: PipelineRank) -> Iterator[Moment]:
    """Yields what `moments.moments` does for a rank of a user's own model."""
    return _OwnMoments(rank).all()


class OwnTraces:
    """The traces of the parts of a rank's stages.

    Attributes:
        whole: the traces of this run.
        plain: those without recomputation, or `whole`.
    """

    def __init__(self, rank: PipelineRank, adds: bool = False) -> None:
        model = rank.blueprint.model
        assert isinstance(model, OwnModelConfig)
        traces, wanted = traces_of(model), WantedParts.of(rank.blueprint)
        if adds:
            wanted = wanted.unsharded
        self.whole: ModelTrace = traces.of(wanted)
        some = any(stage.recomputed < len(stage.layers) for stage in rank.stages)
        again = wanted.recomputed and some
        self.plain: ModelTrace = traces.of(wanted.kept) if again else self.whole

    def parts(self, stage: StageBlueprint) -> list[PartTrace]:
        """Returns the traces of a stage's parts, in the order in which they run."""
        found = [self.whole.embedding] * stage.first
        for place, layer in enumerate(stage.layers):
            found.append((self.whole if place < stage.recomputed else self.plain).blocks[layer])
        return [*found, *[self.whole.head] * stage.last]


class _OwnMoments(StepMoments):
    def __init__(self, rank: PipelineRank) -> None:
        self.traces = OwnTraces(rank)
        self.parts = [self.traces.parts(stage) for stage in rank.stages]
        self.batch = float(sum(self.traces.whole.batch.values()))
        given, made = (
            [float(sum(tensors)) for tensors in ends]
            for ends in zip(*((parts[0].x, parts[-1].y) for parts in self.parts), strict=True)
        )
        self.sides = np.array([given, given, made, made]).ravel()  # in the order of MESSAGES
        # Bytes of a result that its message and the micro-batch both hold.
        self.both = np.array(
            [spans(parts)[1] if parts[-1].sends_y else 0.0 for parts in self.parts]
        )
        super().__init__(rank, LayerMemories(rank.blueprint))
        self.head = 0.0  # the head is one of the places

    def _of_table(self) -> float:
        return 0.0

    def _moved(self, seen: States, kind: Kind, chunk: int) -> Bytes:
        # A message has all tensors of a result, and every rank of tp sends it whole.
        found: Bytes = (seen.messages + seen.handed) @ self.sides
        # The latest results are sent, and they are those of the micro-batches in flight.
        chunks = len(self.both)
        sent = seen.messages[:, -chunks:].copy()
        for here, place in enumerate(self._next):
            if place is not None:  # this rank reads it, and may then keep it as its input
                sent[:, here] = seen.live[:, place] + seen.handed[:, place]
        live = seen.live.copy()
        if kind != Kind.F:  # the pass frees the oldest result, but not while it is sent
            live[:, chunk] -= 1
        found = found - np.minimum(sent, live) @ self.both
        return found

    @cached_property
    def _next(self) -> list[int | None]:
        """For each chunk, the chunk of this rank that reads its result; None: another rank does."""
        rank, found = self.rank, list[int | None]()
        for chunk in range(len(rank.stages)):
            place = rank.assignment.neighbour(rank.index, chunk, 1)
            here = place is not None and place[0] == rank.index
            found.append(place[1] if here and place is not None else None)
        return found

    def _places(self, stage: StageBlueprint) -> list[StagePlace]:
        rank, parts = self.rank, self.traces.parts(stage)
        memories = [_memory(part) for part in parts]
        adding = [memory.backward for memory in memories]
        if self.adds:
            added = OwnTraces(rank, adds=True).parts(stage)
            adding = [_memory(part).backward for part in added]
        layers: list[int | None] = [None] * stage.first
        layers += [*stage.layers]
        layers += [None] * stage.last
        freed, _ = spans(parts)
        found = []
        for i, (layer, memory) in enumerate(zip(layers, memories, strict=True)):
            numel = trained = 0
            if layer is not None:
                _, numel = rank.numels[rank.blueprint.kind_of_layer[layer]]
                trained = numel - sum(rank.frozen_numel(range(layer, layer + 1)))
            mine = range(0) if layer is None else range(layer, layer + 1)
            is_head = layer is None and i > 0
            ends = StageBlueprint.plain(range(0), layer is None and not is_head, is_head)
            held = rank.held(ends, mine)
            numels = [p.numel for p in held] or [0]
            # A split layer adds its gradient to the sum in the product itself, unlike a plain one,
            # whose trace has the gradient.
            fused = max((p.numel for p in held if p.name in self._split), default=0)
            adding[i] += FP32 * fused * self.adds
            first = min(adding[i], memory.backward)
            found.append(StagePlace(memory, first, freed[i], numel, 0, trained, 0, numels[-1]))
        return found

    @cached_property
    def _split(self) -> frozenset[str]:
        """Names of the parameters that tensor parallelism divides."""
        rank, model = self.rank, self.rank.blueprint.model
        stages = (rank.held(stage, stage.layers) for stage in rank.stages)
        names = {p.name for held in stages for p in held}
        whole = stage_parameters(model, 2, range(model.num_layers), True, True)
        return frozenset(p.name for p in whole if not p.replicated and p.name in names)

    def _with_backward(self, chunk: int) -> list[StagePlace]:
        stage = self.rank.stages[chunk]
        without = stage.without_backward + (stage.first and stage.without_backward > 0)
        return self.places[chunk][without:]

    def _shared(self, chunk: int) -> float:
        """Returns the bytes of the batch that a stage's parts keep for one micro-batch."""
        names = frozenset().union(*(part.holds_batch for part in self.parts[chunk]))
        return float(sum(self.traces.whole.batch[name] for name in names))

    def _forward(self, chunk: int) -> dict[str, float]:
        parts = self.parts[chunk]
        # The caller keeps the stage's input until the forward ends.
        base = float(sum(parts[0].x)) + self.batch
        if chunk in self._next:  # it is the result that another chunk of this rank keeps
            base -= float(self.both[self._next.index(chunk)])
        kept = most = 0.0
        for i, part in enumerate(parts):
            given = 0.0 if i == 0 else float(sum(part.x))
            beside = spans(parts[:i])[1] if i else 0.0  # of its input, which is kept already
            most = max(most, kept + max(0.0, given - beside) + part.passes.forward.peak)
            kept = sum(spans(parts[: i + 1])[0])
        return {"forward": base + most + self.away(chunk) + self.gathered(chunk)}

    def _backward(
        self, chunk: int, kind: Kind, adds: bool = False, layers: int | None = None
    ) -> float:
        # The head is one of the places, and the next micro-batch is loaded already.
        count = None if layers is None else layers + self.rank.stages[chunk].last
        return self.batch + super()._backward(chunk, kind, adds, count)

    def _of_embedding(self, chunk: int) -> float:
        return -math.inf  # it is one of the places

    def _of_head(self, chunk: int, adds: bool) -> float:
        """Returns the bytes of the head's gradients until FSDP2 has reduced them."""
        stage = self.rank.stages[chunk]
        if not stage.last or not self.rank.fully_sharded or adds:
            return 0.0
        held = self.rank.held(StageBlueprint.plain(range(0), last=True), range(0))
        return self.rank.item * float(sum(p.numel for p in held if not p.frozen))

    def _completed(self, stage: StageBlueprint) -> int:
        return sum(p.numel for p in self.rank.held(stage, range(0)) if not p.frozen)

    def _reduction(self, chunk: int) -> dict[str, float]:
        rank, sums, stage = self.rank, not self.rank.accumulates, self.rank.stages[chunk]
        frees = rank.blueprint.data.zero == 2 and (self.once or rank.accumulates)
        always = self.away(chunk) + self._of_head(chunk, self.adds) + self.batch
        places, parts = self._with_backward(chunk), self.parts[chunk]
        parts = parts[len(parts) - len(places) :]
        after = during = -math.inf
        more = 0.0
        for i, (place, part) in reversed([*enumerate(zip(places, parts, strict=True))]):
            before = places[i - 1] if i else None
            more -= place.stays
            if not place.trained:
                continue
            wide = sums * FP32 * place.trained
            if frees:
                wide -= rank.item * place.trained
            alone = self.gathered_with(before.numel if before else 0)
            # FSDP2 still refers to the last gradient that it has copied.
            result = sums * (FP32 * place.trained / rank.replicas + rank.item * place.widest)
            given = max(sums * rank.item * place.trained, result)
            of_x = float(sum(part.x))
            after = max(after, more + of_x + always + alone + wide + given)
            if before is not None and sums:
                beside = self.gathered_with(before.numel + ahead(places, i - 1))
                during = max(during, more + always + beside + before.memory.backward + wide)
        found = {"reduction": after, "backward during a reduction": during}
        completed = self._completed(stage)
        ends = more + always + float(sum(parts[0].x)) if parts else more + always
        ends += rank.item * completed - self._of_head(chunk, self.adds)
        ends += 0.0 if self.once else self.gathered_with(0)
        if sums:
            ends += FP32 * completed * (1 + 1 / rank.replicas)
        return found | {ENDS: ends}


def _memory(part: PartTrace) -> LayerMemory:
    found = LayerMemory.of(part.passes, float(sum(part.y)))
    return found._replace(deferred=found.deferred + part.waits)
