"""Computes a safe upper bound on a rank's peak memory from the configuration alone.

States and the activations of micro-batches in flight are counted exactly. Their peak together with
temporary tensors is found by a walk through the layers of each stage (`moments`), and a margin is
added. `benchmarks/planner/plan_dryrun.py` compares the bound with the memory that
`parallel3d dryrun` measures. `plan` applies the bound to its best rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from parallel3d.blueprint.blueprint import Blueprint, StageBlueprint
from parallel3d.blueprint.dispatch import most_load
from parallel3d.blueprint.in_flight import states_of
from parallel3d.blueprint.parameters import LocalParameter
from parallel3d.blueprint.rank import PipelineRank, sharded_numel
from parallel3d.estimate.layer_memory import LayerMemories
from parallel3d.estimate.moments import layers_away, moments, turns_around
from parallel3d.estimate.own_moments import own_moments
from parallel3d.estimate.search import (
    NEARLY_FULL,
    SAME,
    TIGHT,
    LayoutChoice,
    PricedLayouts,
    configure,
    planned,
    ranked,
)
from parallel3d.models.declared import KnownModel
from parallel3d.models.survey import OwnModelConfig
from parallel3d.optim.keys import OptimConfig, TriedOptimConfig
from parallel3d.run_config import Config
from parallel3d.schedules.actions import Kind
from parallel3d.schedules.messages import SLAB_BYTES

BLOCK = 512  # bytes; the allocator rounds the size of each tensor up to a multiple
MARGIN = 0.04  # share of activations and temporary tensors that is added for uncounted tensors


class RankMemory(NamedTuple):
    """Bytes that one rank uses at its peak, by purpose.

    Attributes:
        parameters, gradients: parameters, and gradients that exist between actions of a step.
        masters: master weights.
        optimizer: states of the optimizer, including the average of the weights.
        tables: tables of rotary positions.
        activations: tensors that micro-batches in flight keep for their backward.
        temporary: other tensors at the peak, including the parameters that FSDP2 has gathered.
        margin: allowance for tensors that are not counted.
        phase: name of the phase of the step in which the peak occurs.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    masters: float = 0.0
    optimizer: float = 0.0
    tables: float = 0.0
    activations: float = 0.0
    temporary: float = 0.0
    margin: float = 0.0
    phase: str = ""

    @property
    def states(self) -> float:
        """Bytes of parameters, gradients, masters and optimizer that exist throughout a step."""
        return self.parameters + self.gradients + self.masters + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.tables + self.activations + self.temporary + self.margin


NEAR = 0.9  # a rank may be the fullest if its bound exceeds this share of the largest bound


def peak_stage(blueprint: Blueprint) -> tuple[int, RankMemory]:
    """Returns (index along pp, peak memory) of the rank that needs the most memory."""
    return max(_fullest(blueprint), key=lambda pair: pair[1].total)


def nearly_fullest(config: Config) -> list[int]:
    """Returns the indices along pp of the ranks that may need the most memory, fullest first."""
    found = sorted(_fullest(planned(config)), key=lambda pair: -pair[1].total)
    return [index for index, peak in found if peak.total >= NEAR * found[0][1].total]


def _fullest(blueprint: Blueprint) -> list[tuple[int, RankMemory]]:
    """Returns (index along pp, peak memory) of the ranks that may be the fullest.

    Ranks between the ends differ only in their layers and in their micro-batches in flight, which
    are more numerous on earlier ranks. The candidates are therefore the first two ranks, the middle
    one, the last one, and the first one with the most layers.
    """
    pp = blueprint.layout.pp
    counts = [0] * pp
    for (index, _), layers in zip(
        blueprint.assignment.places, blueprint.layers_per_stage, strict=True
    ):
        counts[index] += layers
    most = counts.index(max(counts))
    seen = sorted({0, min(1, pp - 1), pp // 2, pp - 1, most})
    return [*zip(seen, peak_memories(blueprint, seen), strict=True)]


def least_memory(
    config: Config,
    choices: Sequence[LayoutChoice],
    tell: Callable[[str], None] | None = None,
    load: float = 1.0,
) -> tuple[int, float]:
    """Returns the index of the layout that needs the least memory, and its bytes.

    `tell` is called with messages about the progress. `load`: see `memory_of`.
    """
    least = np.array([surely_needed(planned(configure(config, choice))) for choice in choices])
    known = np.full(len(choices), math.inf)
    for done, i in enumerate(np.argsort(least, kind="stable").tolist()):
        if known.min() <= least[i]:
            break
        if tell is not None:
            tell(f"layout {done} of {len(choices)}")
        known[i] = memory_of(config, choices[i], load)
    first = int(known.argmin())
    return first, float(known[first])


def surely_needed(blueprint: Blueprint) -> float:
    """Returns bytes that the first rank of a pipeline needs at least, found without a trace.

    They are its states and the results of all layers of the micro-batches in flight.
    """
    rank = PipelineRank(blueprint, 0)
    if isinstance(blueprint.model, OwnModelConfig):
        return _state(rank).states
    kept = [
        rank.stream * max(0, len(stage.layers) - max(stage.without_backward, stage.offloaded))
        for stage in rank.stages
    ]
    live = max(float((seen.live @ kept).max()) for seen in states_of(blueprint, 0).values())
    state = _state(rank)
    return state.states + state.tables + live


def memory_of(config: Config, choice: LayoutChoice, load: float = 1.0) -> float:
    """Returns the bytes of a layout's fullest GPU.

    `load`: rows of that GPU's experts in each layer, relative to the mean over all ranks.
    """
    return peak_stage(loaded(planned(configure(config, choice)), load))[1].total


def bounded(
    config: Config,
    priced: PricedLayouts,
    rows: int,
    most: float,
    reserve: float,
    load: float = 1.0,
    tell: Callable[[str], None] | None = None,
) -> PricedLayouts:
    """Returns the priced layouts, with the memory of all layouts that can be among the best rows.

    Memory is computed from the fastest layout on, until no further layout can be among the best
    `rows` rows of layouts that fit into `most` bytes. Memory that is already known is kept, and
    that of layouts that surely do not fit stays unknown. If none fits, the memory of the layout
    that needs the least is known.

    Args:
        reserve: bytes that tensors cannot use.
        load: see `memory_of`.
        tell: called with messages about the progress.
    """
    memory, seconds = np.array(priced.memory), priced.seconds
    found: dict[tuple[int, ...], float] = {}
    for done, i in enumerate(np.argsort(seconds, kind="stable").tolist()):
        last = sorted(found.values())[rows - 1 : rows]
        if not math.isfinite(seconds[i]) or (last and seconds[i] > SAME * last[0]):
            break
        choice = priced.choices[i]
        if math.isnan(memory[i]):
            blueprint = planned(configure(config, choice))
            if surely_needed(blueprint) + reserve > most:
                continue
            if tell is not None:
                tell(f"layout {done} of {len(priced.choices)}")
            memory[i] = peak_stage(loaded(blueprint, load))[1].total + reserve
        if memory[i] <= most:
            risked = float(seconds[i]) * (TIGHT if memory[i] > NEARLY_FULL * most else 1.0)
            found[choice.row] = min(risked, found.get(choice.row, math.inf))
    if not found:
        first, least = least_memory(config, priced.choices, tell, load)
        memory[first] = least + reserve
    return ranked(priced.choices, priced.time, memory, most)


def loaded(blueprint: Blueprint, load: float) -> Blueprint:
    """Returns the blueprint of a rank whose experts get `load` times the mean number of rows."""
    return blueprint if load == blueprint.load else replace(blueprint, load=load)


def load_that_fits(config: Config, choice: LayoutChoice, room: float) -> float:
    """Returns the largest load of a rank's experts with which a layout still fits into memory.

    `room`: bytes that the layout may need beyond its memory with a load of 1. The result is
    infinity if the layout fits even when one rank of each expert-parallel group has all rows.
    """
    most, least = most_load(config.model, choice.ep), 1.0
    even = memory_of(config, choice)
    over = memory_of(config, choice, most) - even - room  # bytes too many with `most`
    if over <= 0:
        return math.inf
    left, step = room, 0  # bytes left with `least`
    while (width := most - least) > 0.005:
        # Memory is nearly linear in the load, so a line through both ends crosses the limit close
        # by. Where it is not, each third step halves the range.
        share = 0.5 if step % 3 == 2 else left / (left + over)
        middle = least + min(max(0.004, width * share), width - 0.004)
        rest, step = room - (memory_of(config, choice, middle) - even), step + 1
        if rest >= 0:
            least, left = middle, rest
        else:
            most, over = middle, -rest
    return least


def peak_memory(config: Config, index: int, load: float = 1.0) -> RankMemory:
    """Returns an upper bound on the peak memory of rank `index` along pp.

    `config` must be checked and have dp and a named schedule. `load`: see `memory_of`. Dropout of
    attention probabilities and document masks are not modelled. Raises UserError if a stage would
    be empty.
    """
    return peak_memories(loaded(planned(config), load), [index])[0]


def peak_memories(blueprint: Blueprint, indices: Sequence[int]) -> list[RankMemory]:
    """Returns the `peak_memory` of several ranks of a pipeline."""
    layers = LayerMemories(blueprint)
    return [_peak(PipelineRank(blueprint, index), layers) for index in indices]


def _peak(rank: PipelineRank, layers: LayerMemories) -> RankMemory:
    is_own = isinstance(rank.blueprint.model, OwnModelConfig)
    found = max(
        own_moments(rank) if is_own else moments(rank, layers), key=lambda moment: moment.total
    )
    return _state(rank)._replace(
        activations=found.activations,
        temporary=found.temporary,
        margin=MARGIN * found.total,
        phase=found.phase,
    )


def _state(rank: PipelineRank) -> RankMemory:
    """Returns the memory of the states that exist throughout a step."""
    optim, zero, wide = rank.blueprint.optim, rank.blueprint.data.zero, rank.grad_item
    parameters = gradients = masters = optimizer = 0.0
    for p, count in _held(rank):
        item, spread = rank.item_of(p), rank.is_fully_sharded(p)
        size = _block if spread or p.frozen else float  # a bucket has several parameters
        own = float(sharded_numel(p, rank.shards_of(p)) if spread else p.numel)
        if not spread or p.frozen:
            parameters += count * size(item * (own if spread and zero == 3 else p.numel))
        if p.frozen:
            continue
        gradients += count * wide * own  # even FSDP2's shards are parts of one tensor
        own = own if spread else own / rank.shards_of(p)
        masters += count * size(wide * own) * (spread or item < wide)
        each = sum(size(nbytes * own) for nbytes in _state_bytes(p, optim, wide))
        each += size(wide * own) * (optim.ema_decay is not None)
        steps = BLOCK * spread  # the number of updates, which the optimizer's kernel reads
        optimizer += count * (each + steps)
    tables = float(len(rank.stages) * wide * _rotary_numel(rank.blueprint.known_model))
    return RankMemory(parameters, gradients, masters, optimizer, tables)


@functools.lru_cache(maxsize=64)
def _rotary_numel(of: KnownModel) -> int:
    """Returns the number of cosines and sines in a stage's tables of rotary positions."""
    model = of.model
    return sum(2 * rope.pairs * sum(model.rotary_lengths(rope)) for rope in model.ropes)


def _block(nbytes: float) -> float:
    """Returns the bytes that a tensor of `nbytes` bytes takes."""
    return math.ceil(nbytes / BLOCK) * BLOCK


def _held(rank: PipelineRank) -> Iterator[tuple[LocalParameter, int]]:
    """Yields the parameters of a rank, each with the number of layers that hold one like it."""
    if rank.blueprint.frozen:
        yield from ((p, 1) for p in rank.parameters)
        return
    yield from ((p, 1) for p in rank.ends)
    every = rank.blueprint.kind_of_layer
    for of in rank.kinds:
        layers = (n for stage in rank.stages for n in stage.layers)
        one = next(n for n in layers if every[n] == of.kind)
        stage = StageBlueprint.plain(range(one, one + 1))
        yield from ((p, of.layers) for p in rank.held(stage, stage.layers))


def _state_bytes(p: LocalParameter, optim: OptimConfig, wide: float) -> Sequence[float]:
    """Returns the bytes of an element of each state that the optimizer keeps for a parameter.

    `wide`: the bytes of an element of a master weight.
    """
    if isinstance(optim, TriedOptimConfig):
        return [wide if nbytes is None else nbytes for nbytes in optim.kept]
    moment = 2 if optim.state == "bf16" else wide
    if optim.name == "sgd":
        return [moment] * (optim.momentum > 0)
    return [moment] * (1 if optim.name == "muon" and p.muon else 2)


def host_memory(config: Config, index: int) -> float:
    """Returns the bytes of pinned memory for offloaded activations of rank `index` along pp."""
    rank = PipelineRank(planned(config), index)
    waiting, running, memories = [], [], LayerMemories(rank.blueprint)
    for stage in rank.stages:
        away = layers_away(rank, stage)
        layers = memories.of_stage(rank, stage)[stage.without_backward : away] if away else []
        slabs = [math.ceil(layer.large / SLAB_BYTES) for layer in layers]
        turns = turns_around(rank, stage)
        waiting.append(sum(slabs))
        # The slabs of one layer are already on their way back to the device.
        back = -max(slabs, default=0)
        forward = sum(slabs) + back * (not turns)
        running.append({Kind.F: forward, Kind.B: back, Kind.I: back, Kind.W: 0})
    seen = states_of(rank.blueprint, index).items()
    most = max((s.live @ waiting).max() + running[chunk][kind] for (kind, chunk), s in seen)
    return SLAB_BYTES * float(most)
