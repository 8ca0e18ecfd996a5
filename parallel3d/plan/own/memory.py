"""Bytes that a rank of parallel3d holds at the fullest moment of a step, and what they are."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parallel3d.config.recompute import parts_of
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.plan.own.layer import (
    WIDE,
    HeadBytes,
    LayerBytes,
    Tensors,
    batch_bytes,
    head_bytes,
    layer_bytes,
    rotary_bytes,
    tensors,
)
from parallel3d.plan.own.moments import Moments, moments
from parallel3d.plan.own.sharded import Parameters, added, sharded
from parallel3d.sizes.balance import balance_chunks
from parallel3d.sizes.local_shapes import stage_parameters
from parallel3d.sizes.recompute import recomputing
from parallel3d.sizes.stage_costs import head_cost, layer_cost
from parallel3d.sizes.stages import layers_of_stages, placement_of
from parallel3d.sizes.transfer import ACTIVATION_BYTES

PHASES = ("forward", "backward", "backward", "weight gradients")


@dataclass(frozen=True)
class Held:
    """Bytes of one rank at its fullest moment, by kind as `dryrun` names them."""

    parameters: float
    gradients: float
    masters: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    phase: str

    @property
    def total(self) -> float:
        kinds = (self.parameters, self.gradients, self.masters, self.optimizer)
        return sum(kinds) + self.activations + self.logits + self.buffers


@dataclass(frozen=True)
class Chunk:
    """One stage of a rank: its layers, how many of them recompute, and its ends."""

    layers: int
    recomputed: int
    first: bool
    last: bool
    turns: bool  # its input is what the rank's other chunk has made and keeps


def layers_by_stage(config: Config) -> Sequence[int]:
    """How many layers each stage has; a search asks often for the same."""
    if config.schedule.layers_per_stage is not None:
        return [len(layers) for layers in layers_of_stages(config)]
    model = config.model
    costs = layer_cost(model), head_cost(model)
    return _balanced(costs[0], model.num_layers, placement_of(config), 0.0, costs[1])


_balanced = functools.lru_cache(maxsize=1024)(balance_chunks)
_layer = functools.lru_cache(maxsize=1024)(layer_bytes)


def chunks_of(config: Config, index: int) -> list[Chunk]:
    """The stages of rank `index` along pp. Raises UserError where a stage would be empty."""
    placement, split = placement_of(config), layers_by_stage(config)
    made = []
    for chunk in range(placement.chunks):
        stage = placement.stage(index, chunk)
        count = split[stage]
        again = recomputing(config.recompute_layers, stage, count)
        before = placement.neighbour(index, chunk, -1)
        turns = before is not None and before[0] == index
        ends = stage == 0, stage == placement.stages - 1
        made.append(Chunk(count, again, *ends, turns))
    return made


def parameters_of(config: Config, chunks: Sequence[Chunk]) -> Parameters:
    """Elements that a rank with these stages holds."""
    model, tp = config.model, config.tp
    first, last = (any(getattr(c, end) for c in chunks) for end in ("first", "last"))
    layer = _count(model, tp, range(1), False, False)
    ends = _count(model, tp, range(0), True, False) if first else 0
    head = 0
    if last:
        head = _count(model, tp, range(0), False, True, borrows=first and len(chunks) > 1)
        if first and len(chunks) == 1:
            head = _count(model, tp, range(0), True, True) - ends
    table = model.padded_vocab_size // tp * model.hidden_size if last else 0
    layers = sum(c.layers for c in chunks)
    return Parameters(layer, ends + head, table, layer * layers + ends + head)


def _count(
    model: ModelConfig, tp: int, layers: range, first: bool, last: bool, borrows: bool = False
) -> int:
    found = stage_parameters(model, tp, layers, first, last, borrows_table=borrows)
    return sum(p.numel for p in found)


def peak_memory(config: Config, index: int) -> Held:
    """Of rank `index` along pp, as `dryrun` would play it.

    `config` is checked, with dp and a schedule that has a name. Dropout of probabilities and
    documents are not known here.
    """
    chunks, t = chunks_of(config, index), tensors(config)
    parameters = parameters_of(config, chunks)
    layer, head = _layer(t, parts_of(config.recompute)), head_bytes(config, t)
    if config.zero > 1 and (config.dp or 1) > 1:  # each forward has made its table's gradient
        cast = ACTIVATION_BYTES[config.precision.name] * parameters.table
        head = head._replace(kept=head.kept + cast)
    name, pp, count = config.schedule.name, config.pp, config.num_microbatches
    seen = moments(name, pp, len(chunks), count, index)
    state = _state(config, parameters)
    extra = (
        sharded(config, parameters, chunks[0].layers, chunks[0].first)
        if config.zero > 1 and (config.dp or 1) > 1
        else {}
    )
    best: Held | None = None
    for chunk in range(len(chunks)):
        for made in _fullest(config, chunk, chunks, t, layer, head, seen, state, extra):
            if best is None or made.total > best.total:
                best = made
    assert best is not None
    return best


def held_at_least(config: Config) -> float:
    """Bytes that the fullest rank cannot hold less of: no more than `held` of it, and quick.

    The rank of most layers has their state, and before its first backward one micro-batch's
    activations in all of them.
    """
    layers = -(-config.model.num_layers // config.pp)
    one = _count(config.model, config.tp, range(1), False, False)
    kept = layers * _layer(tensors(config), parts_of(config.recompute)).kept
    return _state(config, Parameters(one, 0, 0, one * layers)).total + kept


def _state(config: Config, parameters: Parameters) -> Held:
    """What is there between steps, and in them under zero 0 and 1."""
    item = ACTIVATION_BYTES[config.precision.name]
    wide, dp = max(WIDE, item), config.dp or 1
    numel = parameters.all
    cut = dp if config.zero > 0 else 1
    spread = dp if config.zero > 1 else 1
    moments_ = {"adamw": 2, "sgd": 1}.get(config.optim.name, 2)
    return Held(
        parameters=0.0 if spread > 1 else float(item * numel),
        gradients=wide * numel / spread,
        masters=0.0 if item >= WIDE and spread == 1 else wide * numel / cut,
        optimizer=moments_ * wide * numel / cut,
        activations=0.0,
        logits=0.0,
        buffers=rotary_bytes(config.model) * config.vpp,
        phase="",
    )


def _kept(config: Config, chunk: Chunk, t: Tensors, head: HeadBytes) -> float:
    """Bytes of a chunk's activations between the forward and the backward of one micro-batch."""
    how = _layer(t, parts_of(config.recompute)).kept
    plain = _layer(t, ()).kept
    layers = chunk.recomputed * how + (chunk.layers - chunk.recomputed) * plain
    end = head.kept if chunk.last else t.stream
    return layers + end - (t.stream if chunk.turns else 0.0)


def _fullest(
    config: Config,
    index: int,
    chunks: Sequence[Chunk],
    t: Tensors,
    layer: LayerBytes,
    head: HeadBytes,
    seen: Moments,
    state: Held,
    extra: dict[str, dict[str, float]],
) -> list[Held]:
    """The fullest moment of each kind of action on one chunk."""
    kept = np.array([_kept(config, chunk, t, head) for chunk in chunks])
    waits = np.array([chunk.layers * layer.put_off for chunk in chunks])
    base = seen.live @ kept + seen.put_off @ waits + seen.sent * t.sent
    chunk, made = chunks[index], []
    inner = kept[index] - (head.kept if chunk.last else t.stream)
    reads = batch_bytes(config) if chunk.first or chunk.last else 0.0
    for kind in range(3):
        rows = (seen.kind == kind) & (seen.chunk == index)
        if not rows.any():
            continue
        for begun in (False, True) if extra else (None,):
            mine = rows if begun is None else rows & (seen.begun == begun)
            if not mine.any():
                continue
            most = float(base[mine].max())
            for name, activations, logits in _inside(chunk, kind, inner, t, layer, head):
                more = added(extra, name, bool(begun))
                made.append(
                    Held(
                        parameters=state.parameters + more.get("parameters", 0.0),
                        gradients=state.gradients + more.get("gradients", 0.0),
                        masters=state.masters,
                        optimizer=state.optimizer,
                        activations=most + activations + more.get("activations", 0.0),
                        logits=logits,
                        buffers=state.buffers + more.get("buffers", 0.0) + reads,
                        phase="head and loss" if name in ("head", "cast") else PHASES[kind],
                    )
                )
    return made


def _inside(
    chunk: Chunk, kind: int, inner: float, t: Tensors, layer: LayerBytes, head: HeadBytes
) -> list[tuple[str, float, float]]:
    """(moment, activations, logits) beside all that is kept, of an action of `kind` on a chunk."""
    if kind == 0:
        found = [("forward", inner + layer.forward, 0.0)]
        if chunk.last:
            found.append(("head", inner + head.states, head.logits))
            found.append(("cast", inner + head.states, 0.0))
        return found
    received = t.stream if chunk.last else 0.0  # the head has made it and keeps it
    if kind == 1:
        return [
            ("backward", layer.backward + layer.again - received, 0.0),
            ("products", layer.again - t.inner + (1 + 2 * t.sp) * t.whole, 0.0),
            ("made", t.stream - inner / chunk.layers, 0.0),
            ("reduction", t.stream - inner / chunk.layers, 0.0),
            ("later", t.stream - min(2, chunk.layers) * inner / chunk.layers, 0.0),
            ("ends", 2 * t.stream - inner, 0.0),
            ("out", 2 * t.stream - inner, 0.0),
        ]
    late = (chunk.layers - 1) * (layer.put_off - inner / chunk.layers)
    return [("backward", layer.halved + layer.again - received + max(late, 0.0), 0.0)]
