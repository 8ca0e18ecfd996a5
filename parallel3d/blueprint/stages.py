"""Layers of each pipeline stage, balanced by cost or as configured, and the run's schedule."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

from parallel3d.blueprint.layout import Layout, layout_of
from parallel3d.blueprint.ops import flops, layer_flops, ops_of_run
from parallel3d.blueprint.sizes import recomputing
from parallel3d.config.fields import show
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.errors import UserError
from parallel3d.schedules.choose import chosen, wanted
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import NAMED_SCHEDULES, V_SHAPED, Schedule
from parallel3d.schedules.walk import RankWork, Weights


@functools.lru_cache(maxsize=1024)  # a search asks often for the same
def balance_chunks(
    cost: float, layers: int, placement: StageAssignment, last_extra: float = 0.0
) -> tuple[int, ...]:
    """Returns how many of `layers` layers of one `cost` (in any unit) each stage gets, at least 1.

    `last_extra` (head and loss) is added to the last stage's cost. The result minimises the cost of
    the most expensive rank over all of its chunks, then the sum of squared costs of stages, then
    prefers middle stages and earlier ones. Adding layers one by one where each adds least is the
    exact optimum: a stage's next layer never adds less than its last one did. Raises UserError if
    there are more stages than layers.
    """
    stages, ranks = placement.stages, [rank for rank, _ in placement.places]
    if stages > layers:
        pp, vpp = placement.ranks, placement.chunks
        enough = f"pp={layers // vpp}" if vpp <= layers else f"pp=1 and vpp={layers}"
        raise UserError(
            f"pp={pp} × vpp={vpp} stages are more than model.num_layers={layers}, but every stage "
            f"needs a layer: set {enough} or less."
        )
    # Whole numbers of a common unit, so that equal sums compare equal.
    exact = [Fraction(c) for c in (cost, last_extra)]
    scale = math.lcm(*(c.denominator for c in exact))
    unit, last = (int(c * scale) for c in exact)
    extras = [0] * (stages - 1) + [last]
    base = dict.fromkeys(ranks, placement.chunks * unit)
    base[ranks[-1]] += last
    # The least possible cost of the most expensive rank: each layer to the cheapest one.
    cheapest = sorted(base.values())
    for _ in range(layers - stages):
        heapq.heapreplace(cheapest, cheapest[0] + unit)
    most = max(cheapest)
    free = {rank: (most - of) // unit for rank, of in base.items()}

    def added_cost(stage: int, count: int) -> tuple[int, int, int]:
        """Returns the increase of a stage's squared cost by layer `count` + 1, and tie-breakers."""
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


def checked_split(given: Sequence[int], layers: int, placement: StageAssignment) -> tuple[int, ...]:
    """Returns `schedule.layers_per_stage`; raises UserError if it does not split the model."""
    fair = balance_chunks(1.0, layers, placement)
    if len(given) == len(fair) and min(given) > 0 and sum(given) == layers:
        return tuple(given)
    raise UserError(
        f"schedule.layers_per_stage={show(given)} must be {len(fair)} positive numbers that add up "
        f"to model.num_layers={layers}; the nearest is {show(list(fair))}."
    )


# The head computes its gradients in the forward, with its loss (`tensor_parallel/loss.py`).
HEAD_MATMULS = 3


def head_cost(model: ModelConfig) -> float:
    """Returns forward FLOPs of the output head for one token, padding included."""
    return 2.0 * model.hidden_size * model.padded_vocab_size


@dataclass(frozen=True)
class StageWeights:
    """Computes `choose.Weights` of a stage assignment; the embedding's look-up is taken as free.

    Args:
        layer, head: their costs, in one unit. ranks: of the pipeline.
        given: `schedule.layers_per_stage`, which rules out other numbers of stages
            unless `balances` is set: then those are balanced.
        again: the repeated part of a layer's forward (0 to 1).
        recompute_layers: by stage (see `recomputing`); all layers where the lengths differ.
    """

    layers: int
    layer: float
    head: float
    ranks: int
    given: tuple[int, ...] | None = None
    balances: bool = False
    again: float = 0.0
    recompute_layers: tuple[int, ...] = ()

    @classmethod
    def of_run(cls, config: Config, balances: bool = False) -> StageWeights:
        model, given, ops = config.model, config.schedule.layers_per_stage, ops_of_run(config)
        again = flops(ops.repeated, model.seq_length) / flops(ops.ops, model.seq_length)
        return cls(
            model.num_layers,
            layer_flops(model),
            head_cost(model),
            config.pp,
            None if given is None else tuple(given),
            balances,
            again,
            tuple(config.recompute_layers or ()),
        )

    def __call__(self, placement: StageAssignment) -> Weights | None:
        """Returns None if the model has no such stages."""
        stages, layers, given = placement.stages, self.layers, self.given
        if stages > layers:
            return None
        if given is not None and len(given) == stages:
            counts = checked_split(given, layers, placement)
        elif given is None or self.balances:
            counts = balance_chunks(self.layer, layers, placement, last_extra=self.head)
        else:
            return None
        extras = [0.0] * (stages - 1) + [HEAD_MATMULS * self.head / self.layer]
        some = self.recompute_layers if len(self.recompute_layers) in (1, stages) else ()
        again = [self.again * recomputing(some, stage, count) for stage, count in enumerate(counts)]
        of_rank = layers / self.ranks
        return [
            (n / of_rank, more / of_rank, twice / of_rank)
            for n, more, twice in zip(counts, extras, again, strict=True)
        ]


def run_schedule(config: Config, microbatches: int | None = None) -> Schedule:
    """Returns the schedule of `schedule=…` for the run's micro-batches, or as many as are given.

    Raises UserError if there is no such schedule (see `choose.wanted`).
    """
    count = config.num_microbatches if microbatches is None else microbatches
    name, file = config.schedule.name, config.schedule.file
    found = wanted(name, config.pp, count, config.vpp, file, *_costs(config))
    return found.with_whole_backwards() if has_whole_backwards(config) else found


def has_whole_backwards(config: Config) -> bool:
    """Whether no schedule of the run splits its backwards: FSDP2 reduces in the backward what
    gradients are there."""
    return config.zero > 1 and config.cp * (config.dp or 1) > 1


def sends_slices(config: Config, on_accelerator: bool) -> bool:
    """Whether each tensor rank sends only its slice of the hidden states to the next stage:
    Megatron's scatter_gather_tensors_in_pipeline (Narayanan et al. 2021 §4.1). Needs equal states,
    so no `sp`."""
    if config.sp or config.tp == 1 or config.pp == 1 or config.model.seq_length % config.tp:
        return False
    wanted = config.schedule.slices
    return on_accelerator if wanted is None else wanted


def why_chosen(config: Config) -> str:
    """Describes the schedule that schedule=auto found, and the next best ones."""
    return chosen(config.pp, config.num_microbatches, config.vpp, *_costs(config)).why


def _costs(config: Config) -> tuple[RankWork, float]:
    keys = config.schedule
    forward, input, weight = keys.costs
    work = RankWork(forward, input, weight, keys.hop, StageWeights.of_run(config))
    return work, 1.0 if keys.memory is None else keys.memory


def placement_of(config: Config) -> StageAssignment:
    """Returns the run's stage assignment: vpp stages per rank, in loops or as a V."""
    name = config.schedule.name
    if name not in NAMED_SCHEDULES:
        return run_schedule(config).placement
    return StageAssignment(config.pp, config.vpp, "v" if name in V_SHAPED else "loop")


def layout_with_loops(config: Config) -> Layout:
    """Returns `layout_of` with the number of times that the stages loop over the ranks."""
    placement = placement_of(config)
    loops = 1 if placement.shape == "v" else placement.chunks
    return replace(layout_of(config), loops=loops)


def layers_by_stage(config: Config) -> tuple[int, ...]:
    """Returns how many layers each stage has, given or balanced by cost.

    Raises UserError if the given split does not fit the model, or a stage would be empty.
    """
    model, given, placement = config.model, config.schedule.layers_per_stage, placement_of(config)
    if given is not None:
        return checked_split(given, model.num_layers, placement)
    cost, head = layer_flops(model), head_cost(model)
    return balance_chunks(cost, model.num_layers, placement, last_extra=head)


def layers_of_stages(config: Config) -> list[range]:
    """Returns the global layer numbers of every stage; see `layers_by_stage`."""
    counts = layers_by_stage(config)
    return [range(end - n, end) for n, end in zip(counts, accumulate(counts), strict=True)]


def recompute_forwards(config: Config) -> list[float]:
    """Returns, by stage, how many times its layers' forward its backward repeats."""
    weights = StageWeights.of_run(config)(placement_of(config))
    return [again / part for part, _, again in weights or ()]
