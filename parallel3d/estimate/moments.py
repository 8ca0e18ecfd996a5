"""Finds the moments of a step at which a rank uses the most memory.

A forward and a backward run through the layers of a stage one by one. Before each layer, other
micro-batches in flight (`in_flight.states_of`) and the stage's other layers hold tensors; on top
comes the peak of the layer itself (`layer_memory`), and what FSDP2 has gathered and reduces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from parallel3d.blueprint.blueprint import StageBlueprint
from parallel3d.blueprint.buckets import LOOKUP_TOKENS, PIECE
from parallel3d.blueprint.in_flight import States, states_of
from parallel3d.blueprint.rank import PipelineRank, flat_shards
from parallel3d.estimate.layer_memory import LayerMemories, LayerMemory
from parallel3d.models.declared import LayerKind
from parallel3d.optim.keys import TriedOptimConfig
from parallel3d.schedules.actions import Kind

Bytes: TypeAlias = NDArray[np.float64]
FP32 = 4  # bytes per element of gradients during their reduction
ENDS = "gradients of embedding and head"


class Moment(NamedTuple):
    """Bytes at one moment of a step, without the states that exist throughout it.

    Attributes:
        phase: name of the phase of the step.
        activations: tensors that micro-batches in flight keep for their backward.
        temporary: other tensors, including the parameters that FSDP2 has gathered.
    """

    phase: str
    activations: float
    temporary: float

    @property
    def total(self) -> float:
        return self.activations + self.temporary


class StagePlace(NamedTuple):
    """One layer of a stage.

    Attributes:
        memory: bytes of the layer for one micro-batch.
        adding: `memory.backward` if there are gradients of an earlier micro-batch.
        stays: bytes of `memory.kept` that are not offloaded.
        numel: number of elements that FSDP2 gathers for the layer.
        experts: number of those, if any, that FSDP2 gathers as a unit of their own.
        trained: number of elements with gradients.
        apart: number of those that are experts.
        widest: number of elements of the layer's largest parameter.
    """

    memory: LayerMemory
    adding: float
    stays: float
    numel: int
    experts: int
    trained: int
    apart: int
    widest: int


def moments(rank: PipelineRank, layers: LayerMemories) -> Iterator[Moment]:
    """Yields the peak of each kind of action of each stage, and that of the optimizer."""
    return StepMoments(rank, layers).all()


class StepMoments:
    """The moments of a rank of the transformer; a user's own model has others (`own_moments`)."""

    def __init__(self, rank: PipelineRank, layers: LayerMemories) -> None:
        self.rank = rank
        self.layers = layers
        # In fp32 autograd adds each gradient at once to the sum that FSDP2 keeps.
        self.adds = rank.accumulates and rank.item == rank.grad_item
        self.places = [self._places(stage) for stage in rank.stages]
        self.once = rank.blueprint.microbatches == 1
        self.table = self._of_table()
        # The head's forward also computes the gradients of its table, and of its input before and
        # after the norm.
        self.states = 2 * rank.stream
        self.head = self.states + self.table * rank.last

    def _of_table(self) -> float:
        """Returns the bytes of the gradient of a table until FSDP2 has reduced it.

        It is in the compute dtype.
        """
        rank = self.rank
        model, cut = rank.blueprint.model, rank.layout.tp
        table = rank.item * (model.padded_vocab_size // cut * model.hidden_size)
        reduces = rank.fully_sharded and not (rank.last and rank.table.frozen)
        return float(table) if reduces else 0.0

    def _places(self, stage: StageBlueprint) -> list[StagePlace]:
        rank, found = self.rank, []
        away = layers_away(rank, stage)
        memories = self.layers.of_stage(rank, stage)
        adding = [memory.backward for memory in memories]
        if self.adds:
            added = self.layers.of_stage(rank, stage, adds=True)
            adding = [memory.backward for memory in added]
        widest: dict[LayerKind, int] = {}
        for i, (number, memory) in enumerate(zip(stage.layers, memories, strict=True)):
            if (kind := self.layers.kinds[number]) not in widest:
                held = rank.held(StageBlueprint.plain(range(0)), range(number, number + 1))
                widest[kind] = max(p.numel for p in held)
            adding[i] += FP32 * widest[kind] * self.adds
            stays = memory.kept - memory.large * (i < away)
            experts, others = rank.numels[kind]
            frozen = rank.frozen_numel(range(number, number + 1))
            trained = experts - frozen[0], others - frozen[1]
            numels = experts + others, experts, sum(trained), trained[0], widest[kind]
            found.append(StagePlace(memory, min(adding[i], memory.backward), stays, *numels))
        return found

    def all(self) -> Iterator[Moment]:
        rank = self.rank
        kept = [
            sum(p.stays for p in self._with_backward(c)) + self._shared(c)
            for c in range(len(self.places))
        ]
        held = [n + self.head * s.last for n, s in zip(kept, rank.stages, strict=True)]
        waits = [sum(p.memory.deferred for p in places) for places in self.places]
        left = np.array([self._left(chunk) for chunk in range(len(self.places))])
        for (kind, chunk), seen in states_of(rank.blueprint, rank.index).items():
            if kind == Kind.W:  # W only frees memory, so it is never the peak
                continue
            stage = rank.stages[chunk]
            if kind != Kind.F and not stage.has_backward:
                continue
            live = seen.live @ held + seen.deferred @ waits + self._moved(seen, kind, chunk)
            beside = self._beside(chunk, kind) if rank.blueprint.pipeline.overlaps else 0.0
            if kind == Kind.F:
                before = seen.live[:, chunk] + seen.deferred[:, chunk] + seen.begun[:, chunk]
                live = live + (before == 0) * self._copied(chunk)
                most = float((live + seen.begun @ left).max())
                for phase, more in self._forward(chunk).items():
                    yield Moment(phase, most, more + beside)
                continue
            for others, more in self._backwards(chunk, kind, live, seen.begun, left):
                most = float(others.max(initial=-math.inf))
                yield Moment("backward", most, more + beside)
            if rank.fully_sharded:
                # This backward has already added to the sums, or freed the last reduction's input.
                begun = (seen.begun | (np.arange(len(left)) == chunk)) & rank.accumulates
                behind = live + begun @ left
                last = behind[seen.final] if rank.accumulates else behind
                for phase, more in self._reduction(chunk).items():
                    most = float((behind if phase == ENDS else last).max(initial=-math.inf))
                    yield Moment(phase, most, more)
        optim = rank.blueprint.optim
        if isinstance(optim, TriedOptimConfig):
            first, second, *_ = [*sorted((s.numel for s in flat_shards(rank)), reverse=True), 0, 0]
            elements = optim.temporary * first + optim.carried * second
            yield Moment("optimizer", 0.0, elements * rank.grad_item)
        if optim.state == "bf16":  # a piece has fp32 states and random bits
            widest = max((s.numel for s in flat_shards(rank)), default=0)
            yield Moment("optimizer", 0.0, 3.0 * FP32 * min(PIECE, widest))

    def _moved(self, seen: States, kind: Kind, chunk: int) -> Bytes:
        """Returns the bytes of messages, and of results that another chunk of the rank reads.

        They are those before an action of this kind on a chunk.
        """
        rank = self.rank
        message = rank.stream / (rank.layout.tp if rank.sends_slices else 1)
        found: Bytes = seen.in_flight * message + seen.handed.sum(axis=1) * rank.stream
        return found

    def _with_backward(self, chunk: int) -> list[StagePlace]:
        return self.places[chunk][self.rank.stages[chunk].without_backward :]

    def _shared(self, chunk: int) -> float:
        """Returns the bytes of tensors that a stage's layers share for one micro-batch."""
        return self.places[chunk][0].memory.shared

    def _forward(self, chunk: int) -> dict[str, float]:
        """Returns phase → bytes of a forward, for a layer and for the head with the loss."""
        rank, stage = self.rank, self.rank.stages[chunk]
        most, kept = 0.0, rank.stream + self._shared(chunk)  # the stage's input
        for i, place in enumerate(self.places[chunk]):
            if i < stage.without_backward:
                # The code also refers to the input of such a layer, which nothing keeps. The first
                # layer's is that of the stage.
                most = max(most, kept + rank.stream * (i > 0) + place.memory.forward)
            else:
                most = max(most, kept + place.memory.forward)
                kept += place.stays
        found = {"forward": most + self.away(chunk) + self.gathered(chunk)}
        if not stage.last:
            return found
        logits = rank.item * max(rank.loss_chunks) * rank.columns
        # The gathered hidden states and their gradient; the sum that tp ranks divide, and for
        # several sequences a copy in which their tokens are in order.
        states = self.states + 2 * rank.hidden
        states += (rank.hidden * rank.copies + rank.stream) if rank.sp else 0
        # The gradient of the table is summed in fp32, and then converted.
        wide = self.table * rank.grad_item / rank.item
        tables = wide + max(logits, self.table * (rank.grad_item > rank.item))
        kept -= rank.stream
        gathered = self.gathered_with(0)
        if rank.blueprint.data.zero == 3:
            gathered += self._copy_of(self.places[chunk][-1])
        return found | {"head and loss": kept + states + tables + gathered}

    def _backwards(
        self, chunk: int, kind: Kind, live: Bytes, begun: NDArray[np.bool_], left: Bytes
    ) -> Iterator[tuple[Bytes, float]]:
        """Yields (bytes that other actions hold, bytes of a backward).

        Args:
            live: bytes of the micro-batches in flight in each state before the backward.
            begun: (states, chunks), whether a chunk has had a backward in the step.
            left: bytes that remain after the backward of each chunk (`_left`).
        """
        behind = live + begun @ left
        if self.adds:
            again = begun[:, chunk]
            yield behind[~again], self._backward(chunk, kind)
            yield behind[again], self._backward(chunk, kind, adds=True)
        elif self.rank.accumulates:
            yield behind, self._backward(chunk, kind)
        else:
            # The first reduction of this backward frees the input of the last one.
            yield live, self._backward(chunk, kind)
            yield behind, self._backward(chunk, kind, layers=1)

    def _backward(
        self, chunk: int, kind: Kind, adds: bool = False, layers: int | None = None
    ) -> float:
        """Returns the bytes of a backward that the forward has not kept.

        In I, the operands of later layers' weight gradients wait for W.

        Args:
            adds: whether gradients are added to those of an earlier micro-batch.
            layers: number of layers, counted from the last one, or None for the whole stage.
        """
        more, most = 0.0, -math.inf
        places = self._with_backward(chunk)
        for i, place in [*enumerate(places)][::-1][:layers]:
            if kind == Kind.I:
                most = max(most, more + place.memory.halved)
                more += place.memory.deferred - place.stays
            else:
                gathered = self.gathered_with(place.numel + ahead(places, i))
                peak = place.adding if adds else place.memory.backward
                most = max(most, more + gathered + peak)
                more -= place.stays
        if layers is None:
            most = max(most, more + self._of_embedding(chunk))
        return most + self.away(chunk) + self._of_head(chunk, adds)

    def away(self, chunk: int) -> float:
        """Returns the bytes of offloaded layers that are on the device at the same time.

        They belong to the layer that computes, a neighbour, and a layer that the next action
        fetches.
        """
        stage = self.rank.stages[chunk]
        near = min(2, stage.offloaded) + (not turns_around(self.rank, stage))
        moved = (place.memory.kept - place.stays for place in self._with_backward(chunk))
        # A place of a user's own model also frees its input, which nothing moves.
        return near * max([0.0, *moved])

    def _of_head(self, chunk: int, adds: bool) -> float:
        """Returns the bytes that the head adds to the backward of a stage's layers.

        The backward begins with the gradient of the head's input. That of its table is kept, or
        added to that of an earlier micro-batch.
        """
        stage = self.rank.stages[chunk]
        return self._cast(stage) * (not adds) - self.rank.stream if stage.last else 0.0

    def _of_embedding(self, chunk: int) -> float:
        """Returns the bytes of the embedding's backward, which follows that of the layers."""
        rank, first = self.rank, self.rank.stages[chunk].first
        if not first or (words := rank.ends[0]).frozen:
            return 0.0
        # Only a table that tp divides needs the gradients of all tokens.
        rows = rank.stream if words.replicated else rank.hidden
        piece = min(rows / rank.item, LOOKUP_TOKENS * rank.blueprint.model.hidden_size)
        wide = 0 if rank.fully_sharded or rank.grad_item == rank.item else rank.grad_item
        gathered = self.gathered_with(0) + self.table
        return gathered + rank.stream + rows * (rows > rank.stream) + piece * (rank.item + wide)

    def _cast(self, stage: StageBlueprint) -> float:
        """Returns the bytes of the head's gradient before it is reduced, unless its table is tied
        to the embedding of the same stage."""
        ties = stage.first and stage.last and self.rank.table.tied
        return self.table if stage.last and not ties else 0.0

    def _beside(self, chunk: int, kind: Kind) -> float:
        """Returns the bytes that the other pass adds while a forward and a backward take turns.

        For each layer whose tensors the backward frees, the forward keeps the tensors of one layer,
        so the passes stay within two layers of each other. If the backward also repeats exchanges
        of tokens, it waits more often and falls further behind.
        """
        layers = [place.memory for place in self._with_backward(chunk)]
        if not layers:  # all are frozen
            return 0.0
        if kind == Kind.F:
            most = max(layer.backward for layer in layers)
        else:
            most = max(layer.forward - layer.kept for layer in layers)
        apart = 2 * max(layer.kept for layer in layers)
        again = max(layer.exchanged_again for layer in layers)
        return most + apart + sum(layer.kept for layer in layers) * again / (2 + again)

    # FSDP2 reduces a layer's gradients during the next layer's backward, or accumulates them.

    def gathered(self, chunk: int) -> float:
        """Returns the bytes that FSDP2 has gathered in the forward of a stage's layers."""
        places = self.places[chunk]
        if self.rank.blueprint.data.zero == 2:
            return self.gathered_with(0)
        return max(self.gathered_with(place.numel) + self._copy_of(place) for place in places)

    def _copy_of(self, place: StagePlace) -> float:
        """Returns the bytes of the buffer from which FSDP2 copies a layer's parameters.

        In a forward, a buffer exists beside the parameters until the next all-gather. Experts that
        no other rank has are not gathered.
        """
        rank = self.rank
        if not rank.fully_sharded:
            return 0.0
        of_experts, of_all = place.experts, place.numel
        if rank.blueprint.data.zero == 2:
            of_experts, of_all = place.apart, place.trained
        if of_experts:
            return float(rank.item * of_experts * (rank.layout.edp > 1))
        return float(rank.item * of_all)

    def _copied(self, chunk: int) -> float:
        """Returns the bytes of the buffer that remains after a stage's first forward.

        With zero=2, the later forwards gather nothing.
        """
        if self.rank.blueprint.data.zero == 3:
            return 0.0
        return self._copy_of(self.places[chunk][-1])

    def gathered_with(self, numel: int) -> float:
        """Returns the bytes that FSDP2 has gathered with these elements of layers.

        With zero=2, all layers are gathered instead.
        """
        rank = self.rank
        if not rank.fully_sharded:
            return 0.0
        if rank.blueprint.data.zero == 2:  # frozen parameters are whole on every rank
            return rank.item * float(rank.all_trained_numel)
        return rank.item * float(numel + rank.end_numel)

    def _completed(self, stage: StageBlueprint) -> int:
        """Returns the elements of embedding and head whose gradients a stage's backward completes.

        The first stage's backward does not complete a tied table if the rank has the last stage
        too.
        """
        rank = self.rank
        adds = stage.first and not stage.last and rank.last and rank.table.tied
        numel = sum(p.numel for p in rank.ends_read(stage) if not p.frozen)
        return numel - (rank.table.numel if adds and not rank.table.frozen else 0)

    def _left(self, chunk: int) -> float:
        """Returns the bytes that remain after a stage's backward with FSDP2.

        They are sums of gradients, or the input of the last reduction.
        """
        rank, stage, places = self.rank, self.rank.stages[chunk], self.places[chunk]
        if rank.accumulates:
            return float(FP32 * (sum(p.trained for p in places) + self._completed(stage)))
        if rank.fully_sharded and not self.once and len(rank.stages) == 1:
            # The rest of a layer is reduced after its experts, and embedding and head after all
            # layers but one whose input has no gradient.
            last = next((p.trained - p.apart or p.apart for p in places if p.trained), 0)
            begins = rank.blueprint.first_trained in stage.layers
            return float(FP32 * (last if begins else self._completed(stage) or last))
        return 0.0

    def _reduction(self, chunk: int) -> dict[str, float]:
        """Returns phase → bytes after a layer's backward with FSDP2.

        The phases are the reduction of the layer's gradients, the next layer's backward during that
        reduction, and the reduction of the gradients of embedding and head.
        """
        rank, sums, stage = self.rank, not self.rank.accumulates, self.rank.stages[chunk]
        frees = rank.blueprint.data.zero == 2 and (self.once or rank.accumulates)
        cast = self._cast(stage) * (not self.adds)
        always = self.away(chunk) + self._of_head(chunk, self.adds)
        places = self._with_backward(chunk)
        after = during = -math.inf
        more = 0.0  # less the bytes that layers had kept and that their backwards have freed
        for i, place in reversed([*enumerate(places)]):
            before = places[i - 1] if i else None
            if place.apart and sums:
                # FSDP2 reduces a layer's experts during the backward of the layer's attention, and
                # the rest of the layer during the backward of the next layer's experts.
                others = place.numel - place.experts + ahead(places, i)
                reducing = place.apart * (FP32 * (1 + 1 / rank.layout.edp) - rank.item)
                reducing -= frees * rank.item * place.trained
                always_beside = more + always + self.gathered_with(others)
                during = max(during, always_beside + place.memory.of_rest + reducing)
                # With one rank, FSDP2 copies the input twice.
                edp = rank.layout.edp
                result = FP32 * place.apart / edp + rank.item * place.widest
                if edp == 1:
                    result = 2.0 * FP32 * place.apart
                given = max(rank.item * place.apart, result)
                # The rest of the backward begins here, with no more than at its peak.
                begins = min(rank.stream, place.memory.of_rest - rank.item * place.apart)
                after = max(after, always_beside + begins + FP32 * place.apart + given)
            more -= place.stays
            rest = sums * (place.trained - place.apart)
            wide = FP32 * rest
            if frees:  # zero=2 frees a layer's parameters after its last backward
                wide -= rank.item * place.trained
            alone = self.gathered_with(before.numel if before else 0)
            # The gradients exist until they have been copied to the input. Beside the result, FSDP2
            # still refers to one gradient.
            result = FP32 * rest / rank.replicas + sums * rank.item * place.widest
            given = max(rank.item * rest, result)
            after = max(after, more + rank.stream + cast + alone + wide + given)
            if before is not None and sums:
                beside = self.gathered_with(before.numel + ahead(places, i - 1))
                beside += before.memory.backward
                during = max(during, more + always + beside + wide)
        found = {"reduction": after, "backward during a reduction": during}
        table = self.table if stage.first else 0.0
        ends = rank.stream + more - self.states * stage.last + cast + table
        ends += 0.0 if self.once else self.gathered_with(0)
        if sums:
            input, several = FP32 * self._completed(stage), len(rank.ends_read(stage)) > 1
            shared = stage.first or (rank.first and rank.table.tied)
            freed = self.table if several and shared else 0.0
            ends += input + max(0.0, input / rank.replicas - freed)
        if places and stage.first and stage.last and rank.table.tied:
            # Autograd adds the embedding's gradient to the head's, during the last reduction.
            added = rank.stream + more - self.states + 2 * self.table
            frees = rank.blueprint.data.zero == 2 and self.once
            added += rank.item * rank.end_numel if frees else self.gathered_with(0)
            ends = max(ends, added + sums * FP32 * places[0].trained)
        return found | {ENDS: ends}


def ahead(places: list[StagePlace], i: int) -> int:
    """Returns the number of elements that FSDP2 gathers ahead during the backward of a layer.

    They belong to the unit before the layer, which is the experts of the previous layer if it has
    any.
    """
    return places[i - 1].experts or places[i - 1].numel if i else 0


def turns_around(rank: PipelineRank, stage: StageBlueprint) -> bool:
    """Returns whether each micro-batch's backward on the stage directly follows its forward."""
    return stage.last and rank.blueprint.pipeline.name != "gpipe"


def layers_away(rank: PipelineRank, stage: StageBlueprint) -> int:
    """Returns the number of a stage's layers whose activations are copied to the host.

    If the backward follows the forward of the same micro-batch directly, the stage's last layer
    stays on the device.
    """
    return min(stage.offloaded, len(stage.layers) - turns_around(rank, stage))
