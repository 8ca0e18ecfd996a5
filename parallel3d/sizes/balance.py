"""Which layers go to which pipeline stage: balanced by cost, or as the user says."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate

from parallel3d.config.schema import Config, ModelConfig
from parallel3d.config.sections import parts_of
from parallel3d.errors import UserError
from parallel3d.schedules.choose import RankWork, Weights, chosen, wanted
from parallel3d.schedules.orders import StageAssignment
from parallel3d.schedules.schedule import NAMED_SCHEDULES, V_SHAPED, Schedule
from parallel3d.sizes.model import flops_again, layer_flops, recomputing
from parallel3d.topology.layout import Layout, layout_of


def balance_chunks(
    cost: float,
    layers: int,
    placement: StageAssignment,
    first_extra: float = 0.0,
    last_extra: float = 0.0,
) -> list[int]:
    """How many of `layers` layers of one `cost`, in any unit, each stage gets: one at least.

    `first_extra` (embedding) burdens the first stage and `last_extra` (final norm, head, loss) the
    last one. What counts is the most expensive rank, over all of its chunks. Of the splits that
    make it cheapest, those with the most even stages (least sum of squares) are taken, then those
    whose layers lie closest to the middle stages, then to the earlier ones: a layer too many never
    lands on the last stage, which also holds the logits, when another could take it at the same
    cost. It is the exact optimum at any size: a layer is worth less to a stage the more it has, and
    a rank that is full takes no more, so that giving layers away one by one, each to where it does
    least harm, is best in the end. Raises UserError if there are more stages than layers.
    """
    if not all(math.isfinite(c) and c >= 0 for c in (cost, first_extra, last_extra)):
        raise ValueError("costs of layers must be finite and not negative")
    _refuse_empty_stages(layers, placement.ranks, placement.chunks)
    (unit,), first, last = _integers([cost], first_extra, last_extra)
    stages = placement.stages
    ranks = [rank for rank, _ in placement.places]
    extras = [first * (stage == 0) + last * (stage == stages - 1) for stage in range(stages)]
    room = _room(unit, layers, placement, ranks, extras)

    def harm(stage: int, count: int) -> tuple[int, int, int]:
        """What one layer more than `count` adds to a stage's squared cost, and the next best."""
        squares = unit * (2 * (count * unit + extras[stage]) + unit)
        return squares, abs(2 * stage - (stages - 1)), stage

    counts = [1] * stages
    waiting = [harm(stage, 1) for stage in range(stages)]
    heapq.heapify(waiting)
    for _ in range(layers - stages):
        while not room[ranks[waiting[0][-1]]]:
            heapq.heappop(waiting)
        stage = waiting[0][-1]
        counts[stage] += 1
        room[ranks[stage]] -= 1
        heapq.heapreplace(waiting, harm(stage, counts[stage]))
    return counts


def _room(
    unit: int, layers: int, placement: StageAssignment, ranks: Sequence[int], extras: Sequence[int]
) -> list[int]:
    """How many layers each rank may take beyond one a chunk, if none is to cost more than must be.

    Args:
        unit: the cost of a layer. ranks, extras: of each stage, its rank and what else it costs.
    """
    burdens: Counter[int] = Counter()
    for rank, extra in zip(ranks, extras, strict=True):
        burdens[rank] += extra + unit
    if not unit:
        return [layers] * placement.ranks

    def rooms(limit: int) -> list[int]:
        return [(limit - burdens[rank]) // unit for rank in range(placement.ranks)]

    low = max(burdens.values())
    high = low + unit * layers
    while low < high:
        middle = (low + high) // 2
        if sum(rooms(middle)) >= layers - placement.stages:
            high = middle
        else:
            low = middle + 1
    return rooms(low)


def _refuse_empty_stages(layers: int, pp: int, vpp: int = 1) -> None:
    """Raises UserError if there are more stages than layers."""
    if pp * vpp <= layers:
        return
    said = f"pp={pp} is" if vpp == 1 else f"pp={pp} × vpp={vpp} stages are"
    enough = f"pp={layers // vpp}" if vpp <= layers else f"pp=1 and vpp={layers}"
    raise UserError(
        f"{said} more than model.num_layers={layers}, but every stage needs a layer: set {enough} "
        "or less."
    )


def _integers(
    costs: Sequence[float], first_extra: float, last_extra: float
) -> tuple[list[int], int, int]:
    """The same costs as exact integers of a common unit, so that equal sums compare equal."""
    exact = [Fraction(c) for c in (*costs, first_extra, last_extra)]
    unit = math.lcm(*(f.denominator for f in exact))
    scaled = [int(f * unit) for f in exact]
    return scaled[:-2], scaled[-2], scaled[-1]


def layers_per_stage_given(
    given: Sequence[int], num_layers: int, pp: int, vpp: int = 1
) -> list[int]:
    """The user's `schedule.layers_per_stage`, if it is a split of the model; else UserError."""
    _refuse_empty_stages(num_layers, pp, vpp)
    said = f"schedule.layers_per_stage={list(given)}".replace(" ", "")
    fair = str(balance_chunks(1.0, num_layers, StageAssignment(pp * vpp))).replace(" ", "")
    if len(given) != pp * vpp:
        sizes = f"pp={pp}" if vpp == 1 else f"pp={pp} × vpp={vpp}"
        raise UserError(
            f"{said} has {len(given)} entries, but {sizes} stages need one each, e.g. {fair}."
        )
    if min(given) < 1:
        stage = next(s for s, count in enumerate(given) if count < 1)
        raise UserError(
            f"{said} gives stage {stage} {given[stage]} layers, but every stage needs at least "
            f"one, e.g. {fair}."
        )
    if sum(given) != num_layers:
        raise UserError(
            f"{said} adds up to {sum(given)} layers, but model.num_layers={num_layers}, "
            f"e.g. {fair}."
        )
    return list(given)


# What the stages of a pipeline compute, by the sizes of the model.


# The head makes its gradients with its loss, in the forward (`tensor_parallel/loss.py`).
HEAD_PRODUCTS = 3


def layer_cost(model: ModelConfig) -> float:
    """Forward FLOPs of one layer and token."""
    return sum(layer_flops(model))


def head_cost(model: ModelConfig) -> float:
    """Forward FLOPs of the output head for one token, padding included."""
    return 2.0 * model.hidden_size * model.padded_vocab_size


@dataclass(frozen=True)
class StageWeights:
    """By placement, what each stage weighs in layers of an average rank (see `choose.Work`).

    A look-up in the embedding takes next to no time.

    Args:
        layer, head: their costs, in one unit. ranks: of the pipeline.
        again: of a layer's forward, what the backward of one that recomputes makes again.
        recompute_layers: of each stage (see `recomputing`); of another number of them: all.
        given: `schedule.layers_per_stage`, if there is one: then no placement with other stages
            fits, unless `balances` says that those are balanced.
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
        model, given = config.model, config.schedule.layers_per_stage
        costs = layer_cost(model), head_cost(model)
        kept = None if given is None else tuple(given)
        again = flops_again(model, parts_of(config.recompute)) / costs[0]
        some = tuple(config.recompute_layers or ())
        return cls(model.num_layers, *costs, config.pp, kept, balances, again, some)

    def __call__(self, placement: StageAssignment) -> Weights | None:
        """None: the model cannot be laid out so."""
        stages, layers = placement.stages, self.layers
        is_given = self.given is not None and len(self.given) == stages
        if stages > layers or not (is_given or self.given is None or self.balances):
            return None
        if is_given:
            sizes = placement.ranks, placement.chunks
            counts = layers_per_stage_given(self.given, layers, *sizes)
        else:
            counts = balance_chunks(self.layer, layers, placement, last_extra=self.head)
        extras = [0.0] * (stages - 1) + [HEAD_PRODUCTS * self.head / self.layer]
        given = self.recompute_layers if len(self.recompute_layers) in (1, stages) else ()
        again = [
            self.again * recomputing(given, stage, count) for stage, count in enumerate(counts)
        ]
        of_rank = layers / self.ranks
        return [
            (n / of_rank, more / of_rank, twice / of_rank)
            for n, more, twice in zip(counts, extras, again, strict=True)
        ]


# The pipeline schedule of a run, by its configuration.


def run_schedule(config: Config, microbatches: int | None = None) -> Schedule:
    """What `schedule=…` names, for the run's micro-batches or as many as are given.

    Raises UserError where there is no such schedule (see `choose.wanted`).
    """
    count = config.num_microbatches if microbatches is None else microbatches
    name, file = config.schedule.name, config.schedule.file
    return wanted(name, config.pp, count, config.vpp, file, *_costs(config))


def sends_slices(config: Config, on_accelerator: bool) -> bool:
    """Whether the ranks of a tensor group, which hold equal hidden states without `sp`, each send
    a part of them to the next stage (Narayanan et al. 2021 §4.1)."""
    if config.sp or config.tp == 1 or config.pp == 1 or config.model.seq_length % config.tp:
        return False
    wanted = config.schedule.slices
    return on_accelerator if wanted is None else wanted


def why_chosen(config: Config) -> str:
    """What `schedule=auto` has found, and what it is better than."""
    return chosen(config.pp, config.num_microbatches, config.vpp, *_costs(config)).why


def _costs(config: Config) -> tuple[RankWork, float]:
    keys = config.schedule
    work = RankWork(*keys.costs, keys.hop, StageWeights.of_run(config))
    return work, 1.0 if keys.memory is None else keys.memory


# The layer numbers of each pipeline stage.


def placement_of(config: Config) -> StageAssignment:
    """Which rank of the pipeline holds which stage: vpp stages each, in loops or as a V."""
    name = config.schedule.name
    if name not in NAMED_SCHEDULES:
        return run_schedule(config).placement
    return StageAssignment(config.pp, config.vpp, "v" if name in V_SHAPED else "loop")


def layout_with_loops(config: Config) -> Layout:
    """`layout_of`, and how often the stages of a pipeline go round its ranks."""
    placement = placement_of(config)
    loops = 1 if placement.shape == "v" else placement.chunks
    return replace(layout_of(config), loops=loops)


def layers_of_stages(config: Config) -> list[range]:
    """Global layer numbers of every stage, in the order of the model:
    `schedule.layers_per_stage`, or balanced by what each rank's stages cost together.

    Raises:
        UserError: the given split does not fit the model, or a stage would be empty.
    """
    model, given, placement = config.model, config.schedule.layers_per_stage, placement_of(config)
    if given is not None:
        sizes = placement.ranks, placement.chunks
        counts = layers_per_stage_given(given, model.num_layers, *sizes)
    else:
        cost, head = layer_cost(model), head_cost(model)
        counts = balance_chunks(cost, model.num_layers, placement, last_extra=head)
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def forwards_again(config: Config) -> list[float]:
    """By stage, how many times its layers' forward their backward computes again."""
    whole = flops_again(config.model, parts_of(config.recompute)) / layer_cost(config.model)
    counts = map(len, layers_of_stages(config))
    return [
        whole * recomputing(config.recompute_layers, stage, count) / count
        for stage, count in enumerate(counts)
    ]
