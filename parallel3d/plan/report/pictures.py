"""The page's two drawings: the pipeline in time, and the cluster with the groups of one rank."""

from __future__ import annotations

from parallel3d.config.schema import Config
from parallel3d.schedules.choose import Work
from parallel3d.schedules.render import render_svg
from parallel3d.schedules.schedule import Schedule, make
from parallel3d.schedules.simulate import Costs, time_orders
from parallel3d.sizes.stage_costs import StageWeights
from parallel3d.topology.map.facts import facts_of
from parallel3d.topology.map.report import MADE_BY, Report, make_report, picture_of

SHARES = (1 / 3, 0.4, 0.8 / 3)  # of forward, input's and weights' gradient (schedule.costs)
BOXES = 7900  # that are drawn with their names


def timeline(config: Config, seconds: float) -> tuple[str, int]:
    """The pipeline of a layout as SVG, and the micro-batches that it shows: as many as show how it
    fills, runs and drains. `seconds`: of a micro-batch on the busiest rank."""
    most = max(BOXES // (3 * config.pp * config.vpp), config.pp)
    shown = min(config.num_microbatches, max(3 * config.pp, 8), most)
    schedule = make(config.schedule.name, config.pp, shown, config.vpp)
    drawn = time_orders(schedule.orders, schedule.placement, _costs(config, schedule, seconds))
    title = f"{config.schedule.name}, {config.pp} ranks, {shown} micro-batches"
    return render_svg(drawn, title, 1080, unit=" s"), shown


def _costs(config: Config, schedule: Schedule, seconds: float) -> Costs:
    weights = StageWeights.of_run(config)(schedule.placement)
    if weights is None:
        return Costs.even(schedule.placement, *(share * seconds for share in SHARES))
    busy: dict[int, float] = {}
    for (rank, _), (part, *more) in zip(schedule.placement.places, weights, strict=True):
        busy[rank] = busy.get(rank, 0.0) + part + sum(more) * SHARES[0]
    unit = seconds / max(busy.values())
    work = Work(*(share * unit for share in SHARES), weights=lambda _: weights)
    return work.costs(schedule.placement)


def mapped(config: Config) -> Report:
    """What `parallel3d topology` finds out of a layout. Raises UserError where it cannot."""
    return make_report(config, None, {})


def cluster_map(report: Report) -> str:
    """The map as SVG."""
    return picture_of(report, facts_of(report, MADE_BY))


def spread(report: Report) -> tuple[str, str]:
    """(what to type, what it is worth) of the placement whose communication is cheapest; "" twice
    where the launcher's order is as good, within a per cent."""
    default = next((c for c in report.candidates if c.is_default), None)
    if default is None or not report.candidates:
        return "", ""
    best = min(report.candidates, key=lambda c: c.seconds)
    if best.is_default or best.base.note or best.seconds > 0.99 * default.seconds:
        return "", ""
    less = 1 - best.seconds / default.seconds
    words = f"placement={best.tiling} communicates {less:.0%} less long than the launcher's order "
    return f"placement={best.tiling}", words + "(beside no compute); the step is priced without it"
