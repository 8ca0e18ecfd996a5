"""Bytes of a layer for one micro-batch: what it keeps, and the peaks of its passes.

They are those of a trace (`trace.table`), which runs such a layer on tensors without values.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

from parallel3d.blueprint.blueprint import Blueprint, StageBlueprint
from parallel3d.blueprint.rank import PipelineRank
from parallel3d.models.repeats import Repeats
from parallel3d.schedules.messages import OFFLOADED_BYTES
from parallel3d.trace.layer_trace import LayerPasses
from parallel3d.trace.table import table_of
from parallel3d.trace.wanted import WantedTrace


class LayerMemory(NamedTuple):
    """Bytes of a layer for one micro-batch.

    Attributes:
        shared: tensors that all layers of a stage share.
        kept: tensors that its forward keeps for its backward, and its result.
        large: the part of them that is large enough to be offloaded.
        forward: peak of the forward, above its start.
        backward: peak of the backward, above its start without the gradient of the result.
        of_rest: the same after the gradients of experts are complete, with FSDP2.
        halved: the same for I, the half of the backward that defers the weight gradients.
        deferred: what is kept from I to W, the backward of the weights.
        weights: peak of W, above its start.
        exchanged_again: number of exchanges of tokens that the backward repeats.
    """

    shared: float
    kept: float
    large: float
    forward: float
    backward: float
    of_rest: float
    halved: float
    deferred: float
    weights: float
    exchanged_again: int

    @classmethod
    def of(cls, passes: LayerPasses, stream: float) -> LayerMemory:
        """`stream`: bytes of the gradient of the layer's result."""
        sent = passes.repeated.sent
        return cls(
            shared=sum(passes.shared),
            kept=sum(passes.kept),
            large=sum(size for size in passes.kept if size >= OFFLOADED_BYTES),
            forward=passes.forward.peak,
            backward=stream + passes.backward.peak,
            of_rest=stream + passes.backward.peak_of_rest,
            halved=stream + passes.inputs.peak,
            deferred=sum(passes.deferred),
            weights=passes.weights.peak,
            exchanged_again=sum(s.count for s in sent if s.group == "ep" and s.nbytes >= stream),
        )


class LayerMemories:
    """The bytes of the layers of a run, each found once.

    Attributes:
        kinds: the kind of each layer of the model.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        self.blueprint = blueprint
        self.kinds = blueprint.kind_of_layer
        self._wanted: dict[Hashable, WantedTrace] = {}
        self._found: dict[WantedTrace, LayerMemory] = {}

    def of_stage(
        self, rank: PipelineRank, stage: StageBlueprint, adds: bool = False
    ) -> list[LayerMemory]:
        """Returns the bytes of each layer of a rank's stage.

        `adds`: whether each gradient is added to that of earlier micro-batches, even with FSDP2.
        """
        wanted = [self._wanted_of(stage, place) for place in range(len(stage.layers))]
        if adds:
            wanted = [replace(each, sharded=False) for each in wanted]
        missing = [*dict.fromkeys(each for each in wanted if each not in self._found)]
        if missing:
            traces = table_of(self.blueprint.model).traces(missing)
            for each, trace in zip(missing, traces, strict=True):
                passes = trace.at(self.blueprint.micro_batch_size)
                self._found[each] = LayerMemory.of(passes, rank.stream)
        return [self._found[each] for each in wanted]

    def _wanted_of(self, stage: StageBlueprint, place: int) -> WantedTrace:
        blueprint, number = self.blueprint, stage.layers[place]
        inert, again = place < stage.without_backward, place < stage.recomputed
        # Layers with frozen parameters differ, even if they are of one kind.
        alike = number if blueprint.frozen else self.kinds[number]
        if (alike, inert, again) not in self._wanted:
            run = _inert(blueprint) if inert else blueprint
            made = WantedTrace.of(run, number, recomputed=inert or again)
            self._wanted[alike, inert, again] = made
        return self._wanted[alike, inert, again]


def _inert(blueprint: Blueprint) -> Blueprint:
    """Returns a run that trains all parameters and repeats whole layers.

    A layer of it keeps nothing during its forward, like a layer that has no backward.
    """
    layer = replace(blueprint.layer, repeats=Repeats(layer=True), mlp_chunks=1)
    return replace(blueprint, layer=layer, optim=replace(blueprint.optim, freeze=None))
