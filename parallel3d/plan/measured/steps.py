"""Seconds of one step of a layout on a measured machine, and where they go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from parallel3d.config.schema import Config
from parallel3d.plan.measured.costs import NOTHING, MeasuredCosts, Passes
from parallel3d.plan.measured.machine import MeasuredMachine
from parallel3d.plan.measured.sharing import shared_clock
from parallel3d.schedules.simulate import Costs as StageCosts
from parallel3d.sizes.recompute import recomputing
from parallel3d.sizes.run_schedule import run_schedule
from parallel3d.sizes.stages import layers_of_stages


@dataclass(frozen=True)
class Parts:
    """Seconds of a step by part, as in plan/step.py; `core` is what all ranks work together."""

    compute: float
    bubble: float
    messages: float
    gradients: float
    optimizer: float
    fixed: float
    core: float

    @property
    def total(self) -> float:
        return sum(
            (self.compute, self.bubble, self.messages, self.gradients, self.optimizer, self.fixed)
        )


def step_parts(config: Config, machine: MeasuredMachine) -> Parts:
    """What a step of a checked configuration takes on the machine.

    Raises UserError for a schedule or a split that cannot be.
    """
    costs = MeasuredCosts(config, machine)
    schedule = run_schedule(config)
    placement = schedule.placement
    each = _stages(config, costs)
    sums = [sum((p.total for p in stage), 0.0) for stage in each]
    held = [
        [placement.stage(rank, c) for c in range(placement.chunks)] for rank in range(config.pp)
    ]
    count, last = config.num_microbatches, placement.stages - 1
    splits = layers_of_stages(config)
    elements = [
        sum(costs.elements(splits[s], s == 0, s == last, 0 in mine and last in mine) for s in mine)
        for mine in held
    ]
    gradients = [costs.gradients(n) for n in elements]
    updates = [costs.update(n) for n in elements]
    fixed, tied = costs.fixed(), costs.tied()
    ends = [
        g + u + fixed + tied * (0 in mine or last in mine)
        for g, u, mine in zip(gradients, updates, held, strict=True)
    ]
    hop, replicas = costs.hop(), config.tp * (config.dp or 1)
    speed = speed_of(machine, config.tp * config.pp * (config.dp or 1), _share(each))
    clock = StageCosts(
        *(tuple(max(p.total, 1e-9) for p in way) for way in zip(*each, strict=True)), hop
    )
    total = shared_clock(schedule.orders, placement, clock, replicas, speed, ends)
    messages = 2 * hop * count * max(placement.chunks * (config.pp > 1), 0)
    busy = [count * sum(sums[s] for s in mine) for mine in held]
    slowest = max(range(config.pp), key=lambda rank: busy[rank] + ends[rank])
    alone = 1 / speed(config.pp * replicas)
    parts = (messages, gradients[slowest] + tied * (config.pp > 1), updates[slowest], fixed)
    shown = [part * alone for part in parts]
    computing = busy[slowest] * alone
    scale = min(1.0, total / (computing + sum(shown)))  # others wait: then it goes faster
    shown, computing = [part * scale for part in shown], computing * scale
    work = replicas * (sum(busy) + sum(ends) + messages * config.pp)
    return Parts(computing, total - computing - sum(shown), *shown, work)


def _stages(config: Config, costs: MeasuredCosts) -> list[Passes]:
    """Of every stage: its layers, the ends, what an action of the pipeline costs the host."""
    splits = layers_of_stages(config)
    layer, again = costs.layer(), costs.again()
    action = costs.machine.numbers["launch.action"]
    found = []
    for stage, layers in enumerate(splits):
        stage_passes = NOTHING.plus(layer, len(layers))
        repeated = recomputing(config.recompute_layers, stage, len(layers))
        more = stage_passes.input.plus(again, repeated)
        stage_passes = stage_passes._replace(input=more)
        if stage == 0:
            stage_passes = stage_passes.plus(costs.embedding())
        if stage == len(splits) - 1:
            stage_passes = stage_passes.plus(costs.head())
        launched = [p._replace(rest=p.rest + action) for p in stage_passes[:2]]
        found.append(Passes(*launched, stage_passes.weight))
    return found


def _share(stages: list[Passes]) -> float:
    """Of all seconds, those of products."""
    passes = [p for stage in stages for p in stage]
    return sum(p.products for p in passes) / sum(p.total for p in passes)


def speed_of(machine: MeasuredMachine, ranks: int, products: float) -> Callable[[int], float]:
    """Ranks that compute at once → how fast each is, 1 as if one were alone with one thread.

    Cores are shared out, and those that work at once are slowed by what they share besides.
    """
    if not machine.shares:
        return lambda busy: 1.0
    cores = machine.made.count
    threads = max(1, cores // ranks)

    def speed(busy: int) -> float:
        working = min(busy, cores)
        slow = products * machine["together.gemm"](working)
        slow += (1 - products) * machine["together.move"](working)
        own = min(1.0, cores / busy)
        return own / slow / (machine["threads"](threads) if threads > 1 else 1.0)

    return speed
