"""Divides layers among pipeline stages, balanced by cost or as configured."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from parallel3d.blueprint.parameters import (
    TABLE,
    first_trained,
    frozen_parameters,
    stage_parameters,
)
from parallel3d.blueprint.sizes import recomputing
from parallel3d.config.fields import show
from parallel3d.errors import UserError
from parallel3d.models.declared import LayerKind
from parallel3d.models.flops import flops_of, layer_costs, layer_flops
from parallel3d.models.keys import ModelConfig
from parallel3d.models.survey import survey_of
from parallel3d.optim.keys import OptimConfig
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.walk import Weights


@functools.lru_cache(maxsize=1024)  # a search asks for the same split many times
def balance_chunks(
    cost: float, layers: int, assignment: StageAssignment, last_extra: float = 0.0
) -> tuple[int, ...]:
    """Returns the number of layers of each stage, at least 1, if all layers cost the same.

    `cost` is the cost of a layer in any unit, and `last_extra` the additional cost of head and loss
    on the last stage. The result minimises the cost of the most expensive rank, summed over its
    chunks, then the sum of the stages' squared costs. Among equal splits, it prefers layers in
    middle stages, then in earlier stages. Adding layers one by one, each to the stage where it adds
    least, gives the exact optimum, because a stage's next layer never adds less than its previous
    one. Raises UserError if there are more stages than layers.
    """
    stages, ranks = assignment.stages, [rank for rank, _ in assignment.places]
    if stages > layers:
        pp, vpp = assignment.ranks, assignment.chunks
        enough = f"pp={layers // vpp}" if vpp <= layers else f"pp=1 and vpp={layers}"
        raise UserError(
            f"pp={pp} × vpp={vpp} stages are more than model.num_layers={layers}, but every stage "
            f"needs a layer: set {enough} or less."
        )
    unit, last = _whole(cost, last_extra)
    extras = [0] * (stages - 1) + [last]
    base = dict.fromkeys(ranks, assignment.chunks * unit)
    base[ranks[-1]] += last
    # Giving each layer to the cheapest rank minimises the cost of the most expensive one.
    cheapest = sorted(base.values())
    for _ in range(layers - stages):
        heapq.heapreplace(cheapest, cheapest[0] + unit)
    most = max(cheapest)
    free = {rank: (most - of) // unit for rank, of in base.items()}

    def added_cost(stage: int, count: int) -> tuple[int, int, int]:
        """Returns the squared cost that one more layer adds to a stage, and two tie-breakers."""
        squares = unit * (2 * (count * unit + extras[stage]) + unit)
        return squares, abs(2 * stage - (stages - 1)), stage

    counts = [1] * stages
    waiting = [added_cost(stage, 1) for stage in range(stages)]
    heapq.heapify(waiting)
    for _ in range(layers - stages):
        while not free[ranks[waiting[0][-1]]]:
            heapq.heappop(waiting)
        stage = waiting[0][-1]
        counts[stage] += 1
        free[ranks[stage]] -= 1
        heapq.heapreplace(waiting, added_cost(stage, counts[stage]))
    return tuple(counts)


def _whole(*costs: float) -> list[int]:
    """Returns the costs as whole numbers of a common unit, so that equal sums compare equal."""
    exact = [Fraction(cost) for cost in costs]
    scale = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * scale) for cost in exact]


class LayerCosts(NamedTuple):
    """Costs by which layers are divided among stages, in any unit.

    Attributes:
        layers: cost of each layer.
        head: additional cost of the last stage.
        differ_widely: whether long runs of layers cost much more than others, as if the first ones
            are frozen. The layers are then divided by other steps.
    """

    layers: tuple[float, ...]
    head: float = 0.0
    differ_widely: bool = False

    def split(self, assignment: StageAssignment) -> tuple[int, ...]:
        """Returns the number of layers of each stage. Raises UserError as `balance_layers`."""
        return balance_layers(self.layers, assignment, self.head, self.differ_widely)


@functools.lru_cache(maxsize=1024)
def balance_layers(
    costs: tuple[float, ...],
    assignment: StageAssignment,
    last_extra: float = 0.0,
    differ_widely: bool = False,
) -> tuple[int, ...]:
    """Returns the number of layers of each stage, like `balance_chunks`, given each layer's cost.

    Layers of unequal cost are first divided as if all had the mean cost. Then one stage at a time
    gives a layer to another stage, as long as that lowers the cost of the most expensive rank or,
    if that cost is equal, the sum of the stages' squared costs. If costs differ widely, the layers
    are first divided at equal shares of the sum of costs, and stages give layers to their
    neighbours alone.
    """
    layers = len(costs)
    if len(set(costs)) == 1:
        return balance_chunks(costs[0], layers, assignment, last_extra)
    best = balance_chunks(sum(costs) / layers, layers, assignment, last_extra)
    if differ_widely:
        best = _by_shares(costs, assignment.stages, last_extra)
    *each, last = _whole(*costs, last_extra)
    sums = [0, *itertools.accumulate(each)]
    ranks = [rank for rank, _ in assignment.places]

    def price(counts: tuple[int, ...]) -> tuple[int, int]:
        ends = [0, *itertools.accumulate(counts)]
        stages = [sums[b] - sums[a] for a, b in itertools.pairwise(ends)]
        stages[-1] += last
        of_rank = [0] * assignment.ranks
        for rank, cost in zip(ranks, stages, strict=True):
            of_rank[rank] += cost
        return max(of_rank), sum(cost * cost for cost in stages)

    least = price(best)
    while True:
        moved = {counts: price(counts) for counts in _neighbours(best, differ_widely)}
        found = min(moved, key=moved.__getitem__, default=best)
        if found == best or moved[found] >= least:
            return best
        best, least = found, moved[found]


def _by_shares(costs: tuple[float, ...], stages: int, last_extra: float) -> tuple[int, ...]:
    """Returns a split in which each stage ends where the sum of costs reaches its share."""
    share = (sum(costs) + last_extra) / stages
    counts, layer, done = [], 0, 0.0
    for stage in range(stages):
        begin, most = layer, len(costs) - (stages - 1 - stage)  # later stages need a layer each
        while layer < most and (
            layer == begin or stage == stages - 1 or done + costs[layer] / 2 <= share * (stage + 1)
        ):
            done += costs[layer]
            layer += 1
        counts.append(layer - begin)
    return tuple(counts)


def _neighbours(counts: tuple[int, ...], adjacent: bool) -> Iterator[tuple[int, ...]]:
    """Yields the splits in which one stage has a layer more and another stage a layer less.

    `adjacent`: whether the two stages follow each other.
    """
    for source, target in itertools.permutations(range(len(counts)), 2):
        if counts[source] > 1 and not (adjacent and abs(source - target) > 1):
            found = list(counts)
            found[source] -= 1
            found[target] += 1
            yield tuple(found)


def checked_split(
    given: Sequence[int], layers: int, assignment: StageAssignment
) -> tuple[int, ...]:
    """Returns `schedule.layers_per_stage`; raises UserError if it does not split the model."""
    fair = balance_chunks(1.0, layers, assignment)
    if len(given) == len(fair) and min(given) > 0 and sum(given) == layers:
        return tuple(given)
    raise UserError(
        f"schedule.layers_per_stage={show(given)} must be {len(fair)} positive numbers that add up "
        f"to model.num_layers={layers}; the nearest is {show(list(fair))}."
    )


# The head computes its gradients in the forward, with its loss (`tensor_parallel/loss.py`).
HEAD_MATMULS = 3


def head_cost(model: ModelConfig) -> float:
    """Returns the forward FLOPs of the output head for one token, including vocabulary padding."""
    if (survey := survey_of(model)) is not None:
        return 2.0 * survey.head_elements
    return 2.0 * model.hidden_size * model.padded_vocab_size


class LayerTraining(NamedTuple):
    """How much of a layer is trained.

    Attributes:
        backward: whether the layer has a backward, because it or a layer before it is trained.
        trained: share of the layer's elements that are trained.
    """

    backward: bool = True
    trained: float = 1.0


def layer_training(model: ModelConfig, optim: OptimConfig) -> list[LayerTraining]:
    """Returns what is trained of each layer."""
    frozen = frozen_parameters(model, optim)
    if not frozen:
        return [LayerTraining()] * model.num_layers
    first, every, trained = first_trained(model, frozen), Counter[int](), Counter[int]()
    for held in stage_parameters(model, 1, range(model.num_layers), False, False):
        layer = int(held.name.split(".")[1])
        every[layer] += held.numel
        trained[layer] += held.numel * (held.name not in frozen)
    return [
        LayerTraining(layer >= first, trained[layer] / max(1, every[layer]))
        for layer in range(model.num_layers)
    ]


def training_costs(model: ModelConfig, optim: OptimConfig) -> LayerCosts:
    """Returns the costs by which layers are divided among stages.

    They are FLOPs of a token: those of the forward if everything is trained, because forward and
    backward are then proportional, and else a third of all that a layer computes.
    """
    frozen = frozen_parameters(model, optim)
    if not frozen:
        return LayerCosts(layer_costs(model), head_cost(model))
    costs = []
    for layer, (backward, trained) in enumerate(layer_training(model, optim)):
        kind = LayerKind.of(model, layer)
        forward, products = layer_flops(model, kind), flops_of(model, kind).products
        of_inputs = backward * (2 * forward - products)
        costs.append((forward + of_inputs + trained * products) / 3)
    reached = first_trained(model, frozen) < model.num_layers
    head = head_cost(model) * (1 + reached + (TABLE not in frozen)) / 3
    return LayerCosts(tuple(costs), head, differ_widely=True)


@dataclass(frozen=True)
class StageWeights:
    """Computes the `walk.Weights` of a stage assignment; the embedding's look-up counts as free.

    Args:
        costs: forward FLOPs of each layer.
        head: those of the head.
        ranks: number of ranks of the pipeline.
        given: `schedule.layers_per_stage`, which fixes the number of stages, or None if layers are
            balanced by cost.
        balances: whether layers are balanced if the number of stages differs from that of `given`,
            which is not allowed otherwise.
        divided_by: the costs by which layers are balanced, or None if they are `costs` and `head`.
        again: share of a layer's forward that the backward repeats (0 to 1).
        recompute_layers: number of recomputed layers by stage (see `recomputing`), ignored if it
            does not fit the number of stages.
    """

    costs: tuple[float, ...]
    head: float
    ranks: int
    given: tuple[int, ...] | None = None
    balances: bool = False
    divided_by: LayerCosts | None = None
    again: float = 0.0
    recompute_layers: tuple[int, ...] = ()

    def __call__(self, assignment: StageAssignment) -> Weights | None:
        """Returns the weights of each stage, or None if the model cannot have these stages."""
        stages = assignment.stages
        layers = len(self.costs)
        given = self.given
        if stages > layers:
            return None
        if given is not None and len(given) == stages:
            counts = checked_split(given, layers, assignment)
        elif given is None or self.balances:
            counts = (self.divided_by or LayerCosts(self.costs, self.head)).split(assignment)
        else:
            return None
        sums = [0.0, *itertools.accumulate(self.costs)]
        mean, ends = sums[-1] / layers, [0, *itertools.accumulate(counts)]
        extras = [0.0] * (stages - 1) + [HEAD_MATMULS * self.head / mean]
        some = self.recompute_layers if len(self.recompute_layers) in (1, stages) else ()
        parts, again = [], []
        for stage, (first, end) in enumerate(itertools.pairwise(ends)):
            last = first + recomputing(some, stage, end - first)
            parts.append((sums[end] - sums[first]) / mean)
            again.append(self.again * ((sums[last] - sums[first]) / mean))
        of_rank = layers / self.ranks
        return [
            (n / of_rank, more / of_rank, twice / of_rank)
            for n, more, twice in zip(parts, extras, again, strict=True)
        ]
