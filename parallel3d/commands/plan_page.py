"""Writes what `parallel3d plan` has found as one HTML page: `plan.html=FILE`.

The page needs nothing else, no script and no network, and is light or dark as the browser is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape

from parallel3d.commands.plan_table import caution
from parallel3d.config.schema import Config
from parallel3d.errors import UserError
from parallel3d.plan.constants import load
from parallel3d.plan.inside import inside
from parallel3d.plan.measured.price import configure as configured_here
from parallel3d.plan.own.memory import Held, peak_memory
from parallel3d.plan.own.table import configure
from parallel3d.plan.reasons import reason
from parallel3d.plan.search import Priced, works
from parallel3d.schedules.choose import RankWork
from parallel3d.schedules.render import render_svg
from parallel3d.schedules.schedule import Schedule, make
from parallel3d.schedules.simulate import Costs, time_orders
from parallel3d.sizes.stage_costs import StageWeights
from parallel3d.topology.map.facts import facts_of
from parallel3d.topology.map.output import check_free, write
from parallel3d.topology.map.report import MADE_BY as MAP_MADE_BY
from parallel3d.topology.map.report import make_report, picture_of

MADE_BY = "parallel3d plan"
MARK = "data-by='parallel3d plan'"
SHARES = (1 / 3, 0.4, 0.8 / 3)  # of forward, input's and weights' gradient (schedule.costs)
BOXES = 7900  # of a pipeline, that are drawn with their names
MOST_RANKS = 16  # of a pipeline, whose memory is shown

# kind -> (colour, what it is): parts of a step,
PARTS = {
    "compute": ("#3b7dc4", "the busiest GPU computes, with waits inside of its layers"),
    "bubble": ("#8d9299", "waiting for the pipeline to fill and to drain"),
    "messages": ("#e08e2b", "hidden states on their way to the next stage, where nothing hides it"),
    "gradients": ("#b5475b", "summing gradients over the replicas beyond the backward"),
    "optimizer": ("#6f9f4f", "the optimizer's pass over its state"),
    "fixed": ("#9b8bb8", "what a step takes whatever its size"),
}
# of what the busiest GPU computes,
INSIDE = {
    "matrix products": ("#1f5e9e", "GEMMs of the layers, forward and both of the backward"),
    "attention": ("#2f8f8a", "scores, softmax and values, forward and backward"),
    "between the products": ("#7fb3e0", "norms, activations, residuals: bytes through the memory"),
    "made again": ("#c7a13c", "forwards that run again, as their results were not kept"),
    "sums over tp": ("#7a5ea8", "waits for the other GPUs of a layer, where no GEMM hides them"),
    "head and embedding": ("#8aa3b8", "logits, loss and table, where the busiest stage has them"),
    "launches": ("#a0522d", "the host, where it is slower than the GPU, and gathers of zero=3"),
}
# and of a rank's memory.
KINDS = {
    "parameters": ("#1f5e9e", "parameters in the type that is computed with"),
    "weight gradients": ("#2f8f8a", "gradients, fp32"),
    "masters and moments": ("#6f9f4f", "fp32 copies and the optimizer's moments"),
    "activations": ("#e08e2b", "activations, kept from forward to backward"),
    "logits": ("#b5475b", "logits of the head"),
    "buffers": ("#9b8bb8", "buffers of collectives and tables"),
    "reserve": ("#8d9299", "kept for the driver, NCCL and fragments"),
}
COLOURS = {kind: colour for kinds in (PARTS, INSIDE, KINDS) for kind, (colour, _) in kinds.items()}

STYLE = """
:root{color-scheme:light dark} body{font:15px/1.5 system-ui,sans-serif;margin:0}
main{max-width:1180px;margin:0 auto;padding:24px} h1{font-size:26px;margin:0} h2{font-size:19px}
section{border-top:1px solid #8886;margin-top:28px} pre{background:#8882;padding:12px;
border-left:4px solid #3b7dc4;white-space:pre-wrap} .wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 8px;border-bottom:1px solid #8884;font-size:14px}
td{white-space:nowrap} td:last-child{white-space:normal}
.bar{position:relative;display:flex;height:18px;min-width:150px}
.big .bar{height:40px;margin:12px 0} .bar i{display:block} .bar u{position:absolute;top:-3px;
bottom:-3px;width:2px;background:#d33} .key i{display:inline-block;width:12px;height:12px;
margin:0 6px 0 14px} .paper{background:#fff;padding:8px;overflow:auto;max-height:760px}
.paper svg{max-width:100%;height:auto}
"""


def check_page(config: Config) -> None:
    """Refuse a file that cannot be written, before any work is done; raises UserError."""
    check_free("plan.html", config.plan.html, MARK, MADE_BY)


def write_page(
    config: Config,
    priced: Priced,
    rows: Sequence[int],
    mfu: Sequence[float],
    gpus: int,
    sizes: Mapping[str, float],
    command: str,
    assumed: Sequence[str],
) -> None:
    """Write the page. `rows` are those of the table, `mfu` theirs; raises UserError."""
    first, is_measured = rows[0], config.cluster.file is not None
    best = (configured_here if is_measured else configure)(config, priced.choices[first])
    room = float(sizes["memory_bytes"])
    title = f"{config.model.name} on {gpus:,} GPUs of {config.cluster.name}"
    parts = [
        f"<!DOCTYPE html><html lang='en' {MARK}><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width,initial-scale=1'>",
        f"<title>Plan: {escape(title)}</title><style>{STYLE}</style></head><body><main>",
        _best(config, priced, first, mfu[0], room, title, command),
        _table_of_ten(config, priced, rows, mfu, room, int(sizes["gpus_per_node"])),
        _step(config, priced, first, {} if is_measured else sizes),
        _pipeline(best, priced, first) if best.pp > 1 else "",
        _memory(best, priced, first, room),
        _cluster(best),
        "<footer>Times are priced with constants that are fitted to published runs, memory is what "
        "parallel3d's own code holds; how right both are: docs/planner.md. "
        + escape(f"Assumed: {', '.join(assumed)}." if assumed else ""),
        "</footer></main></body></html>",
    ]
    write("plan.html", str(config.plan.html), "\n".join(filter(None, parts)) + "\n")


def _best(
    config: Config, priced: Priced, first: int, mfu: float, room: float, title: str, command: str
) -> str:
    """The best layout: its time, its memory and what to type."""
    seconds, used = float(priced.seconds[first]), float(priced.memory.total[first])
    rate = config.global_batch_size * config.model.seq_length / seconds
    words = (
        f"{seconds:.3g} s a step, {rate:,.0f} tokens a second, MFU{_at_most(config)} {mfu:.1f} %, "
        f"{used / 1e9:.1f} of {room / 1e9:.1f} GB on the fullest GPU. {len(priced.order):,} of "
        f"{len(priced.choices):,} layouts fit."
    )
    return (
        f"<h1>{escape(title)}</h1><p>{config.precision.name}, {config.global_batch_size:,} "
        f"sequences of {config.model.seq_length:,} tokens a step.</p><section><h2>The best layout"
        f"</h2><p>{escape(words)}</p><pre>{escape(command)}</pre></section>"
    )


def _at_most(config: Config) -> str:
    return " at most" if caution(config) else ""


def _table_of_ten(
    config: Config,
    priced: Priced,
    rows: Sequence[int],
    mfu: Sequence[float],
    room: float,
    domain: int,
) -> str:
    slowest = max(float(priced.seconds[i]) for i in rows)
    head = ["#", "tp", "pp", "vpp", "dp", "mb", "schedule", "recompute", "zero"]
    head += ["step", "MFU", "memory", "time", "why"]
    cells = []
    for place, i in enumerate(rows):
        c, why = priced.choices[i], reason(priced, i, rows[0], domain)
        sizes = (place + 1, c.tp, c.pp, c.vpp, c.dp, c.micro_batch)
        ways = (c.schedule if c.pp > 1 else "–", c.recompute, c.zero)
        share = float(priced.memory.total[i]) / room
        figures = (f"{float(priced.seconds[i]):.3g} s", f"{mfu[place]:.1f} %", f"{share:.0%}")
        bar = _bar(_parts(priced, i), slowest, "s")
        cells.append([*map(str, (*sizes, *ways, *figures)), bar, escape(why)])
    return (
        f"<section><h2>The {len(rows)} best layouts</h2><p>One for each pair of tp and pp; of "
        "layouts within half a per cent the simpler stands first. "
        f"{escape(caution(config))}</p>{_key(PARTS)}{_table(head, cells)}</section>"
    )


def _step(config: Config, priced: Priced, first: int, sizes: Mapping[str, float]) -> str:
    """The best layout's time by kind; with `sizes` what is computed is told apart."""
    parts = _parts(priced, first)
    if sizes:
        work = works([priced.choices[first]], sizes, config.global_batch_size)
        parts = inside(work, load(), parts.pop("compute")) | parts
    total = float(priced.seconds[first])
    rows = [
        [_key([kind]), f"{value:.3g} s", f"{100 * value / total:.1f} %",
         escape((PARTS | INSIDE)[kind][1])]
        for kind, value in parts.items()
    ]  # fmt: skip
    return (
        f"<section class='big'><h2>Where the step's time goes</h2>"
        f"{_bar(parts, sum(parts.values()), 's')}"
        f"{_table(('part', 'time', 'share', 'what it is'), rows)}</section>"
    )


def _pipeline(best: Config, priced: Priced, first: int) -> str:
    """The pipeline by the clock, of as many micro-batches as show how it fills, runs and drains."""
    count = best.num_microbatches
    seconds = float(priced.time.compute[first]) / count  # of one on the busiest rank
    most = max(BOXES // (3 * best.pp * best.vpp), best.pp)
    shown = min(count, max(3 * best.pp, 8), most)
    schedule = make(best.schedule.name, best.pp, shown, best.vpp)
    drawn = time_orders(schedule.orders, schedule.placement, _costs(best, schedule, seconds))
    title = f"{best.schedule.name}, {best.pp} ranks, {shown} micro-batches"
    parts = _parts(priced, first)
    idle = 100 * parts["bubble"] / (parts["bubble"] + parts["compute"])
    return (
        f"<section><h2>The pipeline in time</h2><p>Drawn: {shown} of the {count} micro-batches, "
        f"without messages. In the whole step {idle:.1f} % is idle.</p>"
        f"<div class='paper'>{render_svg(drawn, title, 1080, unit=' s')}</div></section>"
    )


def _costs(config: Config, schedule: Schedule, seconds: float) -> Costs:
    weights = StageWeights.of_run(config)(schedule.placement)
    if weights is None:
        return Costs.even(schedule.placement, *(share * seconds for share in SHARES))
    busy: dict[int, float] = {}
    for (rank, _), (part, *more) in zip(schedule.placement.places, weights, strict=True):
        busy[rank] = busy.get(rank, 0.0) + part + sum(more) * SHARES[0]
    unit = seconds / max(busy.values())
    work = RankWork(*(share * unit for share in SHARES), weights=lambda _: weights)
    return work.costs(schedule.placement)


def _memory(best: Config, priced: Priced, first: int, room: float) -> str:
    """What each rank of the pipeline holds at its fullest moment."""
    stages = [peak_memory(best, index) for index in range(best.pp)]
    reserve = float(priced.memory.total[first]) - max(h.total for h in stages)
    longest = max(room, *(h.total + reserve for h in stages)) * 1.02 / 1e9
    shown = list(enumerate(stages))
    if len(shown) > MOST_RANKS:
        shown = [*shown[: MOST_RANKS // 2], *shown[-MOST_RANKS // 2 :]]
    rows = [
        [f"rank {index}", _bar(_kinds(one, reserve), longest, "GB", room / 1e9),
         f"{(one.total + reserve) / 1e9:.1f} GB", f"peaks in {escape(one.phase)}"]
        for index, one in shown
    ]  # fmt: skip
    return (
        "<section><h2>Memory along the pipeline</h2><p>Each rank at its fullest moment of a step. "
        f"The red line is the GPU's memory, {room / 1e9:.1f} GB.</p>{_key(KINDS)}"
        f"{_table(('along pp', 'memory', 'in all', ''), rows)}</section>"
    )


def _kinds(one: Held, reserve: float) -> dict[str, float]:
    """GB by kind."""
    nbytes = (one.parameters, one.gradients, one.masters + one.optimizer)
    nbytes += (one.activations, one.logits, one.buffers, reserve)
    return {kind: value / 1e9 for kind, value in zip(KINDS, nbytes, strict=True)}


def _cluster(best: Config) -> str:
    """The picture of `parallel3d topology`, or why there is none."""
    try:
        shown = replace(best.topology, search=0)
        report = make_report(replace(best, topology=shown), None, {})
        picture = picture_of(report, facts_of(report, MAP_MADE_BY))
        picture = f"<div class='paper'>{picture}</div>"
    except UserError as error:
        picture = f"<p>No picture: {escape(str(error))}</p>"
    return f"<section><h2>Where the ranks sit</h2>{picture}</section>"


# --- bars and tables -----------------------------------------------------------------------------


def _parts(priced: Priced, index: int) -> dict[str, float]:
    """Seconds of a step by part."""
    return {part: max(float(getattr(priced.time, part)[index]), 0.0) for part in PARTS}


def _bar(parts: Mapping[str, float], whole: float, unit: str, limit: float | None = None) -> str:
    """A bar as long as the sum of `parts` is of `whole`, and a line at `limit`."""
    made = "".join(
        f"<i style='width:{100 * value / whole:.2f}%;background:{COLOURS[kind]}' "
        f"title='{escape(f'{kind}: {value:.3g} {unit}')}'></i>"
        for kind, value in parts.items()
        if value > 0
    )
    line = "" if limit is None else f"<u style='left:{100 * limit / whole:.2f}%'></u>"
    return f"<div class='bar'>{made}{line}</div>"


def _key(kinds: Sequence[str] | Mapping[str, tuple[str, str]]) -> str:
    items = (f"<i style='background:{COLOURS[kind]}'></i>{escape(kind)}" for kind in kinds)
    return f"<div class='key'>{''.join(items)}</div>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in row)}</tr>" for row in rows)
    return f"<div class='wide'><table><tr>{top}</tr>{body}</table></div>"
