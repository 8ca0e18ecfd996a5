"""`parallel3d plan`: the ten best layouts of a model on a cluster, in a table and an HTML page.

Typed keys are fixed (tp, pp, vpp, dp, micro_batch_size, schedule, recompute, zero), the others
searched. No torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any, TextIO

import numpy as np

from parallel3d.config.checks.model import check_model
from parallel3d.config.fields import check_fields, show
from parallel3d.config.schema import Config
from parallel3d.config.sections import spelled
from parallel3d.errors import UserError, closest, nearest
from parallel3d.estimate.analytic_memory import (
    configure,
    least_memory,
    memories,
    peak_memory,
)
from parallel3d.estimate.balance import StageWeights
from parallel3d.estimate.devices import DEVICES, Device
from parallel3d.estimate.memory import GIB, PARALLEL3D
from parallel3d.estimate.ops import flops_per_token
from parallel3d.estimate.profiled_cost import (
    check_type,
    measured_layouts,
    measured_sizes,
    price_measured,
    read,
    scaled,
)
from parallel3d.estimate.profiled_cost import configure as configured_here
from parallel3d.estimate.rates import NETWORKS, SPEEDS, load, ranges
from parallel3d.estimate.search import (
    MOST_STAGES,
    MOST_V_HALF,
    LayoutChoice,
    Priced,
    best,
    divisors,
    layouts,
    price,
    reason,
    works,
)
from parallel3d.estimate.step import breakdown
from parallel3d.estimate.work import sizes_of_model
from parallel3d.schedules.costs import Costs, RankWork
from parallel3d.schedules.draw import render_svg
from parallel3d.schedules.schedule import Schedule, make
from parallel3d.schedules.walk import time_orders
from parallel3d.topology.assumptions import assume_model, check_free, chosen_keys, write
from parallel3d.topology.report import MADE_BY as MAP_MADE_BY
from parallel3d.topology.report import facts_of, make_report, picture_of

IN_LOG_S, ON_TERMINAL_S = 10.0, 0.2  # seconds between progress messages


class SearchProgress:
    """Shows a search's progress on stderr: an overwritten line on a terminal, else log lines.

    Most searches end before the first log line, after `IN_LOG_S` seconds.
    """

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream = sys.stderr if stream is None else stream  # sys.stderr is None if closed
        self.clock = clock
        self.on_terminal = self.stream is not None and self.stream.isatty()
        self.every = ON_TERMINAL_S if self.on_terminal else IN_LOG_S
        self.next, self.shown = clock() + self.every, False

    def __call__(self, where: str) -> None:
        if self.stream is None or self.clock() < self.next:
            return
        self.next, self.shown = self.clock() + self.every, True
        start, end = ("\r\x1b[K", "") if self.on_terminal else ("", "\n")
        print(f"{start}plan: {where} …", end=end, file=self.stream, flush=True)

    def at(self, nodes: int) -> Callable[[str], None]:
        """Returns a function that shows progress of the search on so many nodes."""
        return lambda where: self(f"does it fit cluster.nodes={nodes}: {where}")

    def __enter__(self) -> SearchProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.shown and self.on_terminal:
            print("\r\x1b[K", end="", file=self.stream, flush=True)


ROWS = 10
UNMEASURED = (
    "MFU is an upper bound and the step's time a lower one: prices are datasheets' and others' "
    "published runs, and no GPU has been measured against them."
)


def caution(config: Config) -> str:
    """Returns the caveat about a plan's times; none if the machine itself was measured."""
    return "" if config.cluster.file else UNMEASURED


def table(config: Config, priced: Priced, gpus: int, sizes: Mapping[str, float]) -> list[str]:
    """Returns the lines of the table."""
    rows, likely = best(priced, ROWS), spread_of(config)
    where, said = f"{gpus} GPUs of {config.cluster.name}", caution(config)
    if (file := config.cluster.file) is not None:
        where = f"{gpus} ranks of the machine in {file}"
        said = scaled(read(file), file, config.model)
    lines = [
        f"{config.model.name} on {where}, {config.precision.name}, "
        f"{config.global_batch_size} sequences of {config.model.seq_length} a step: "
        f"{len(priced.choices)} layouts, {len(priced.order)} fit",
        "",
        "  #   tp  pp vpp    dp  mb schedule       recompute         "
        "zero  step s" + "       range" * (likely is not None) + "   MFU %  GiB  why",
    ]
    for place, i in enumerate(rows, 1):
        c, seconds = priced.choices[i], float(priced.seconds[i])
        held = float(priced.memory.total[i]) / GIB
        why = reason(priced, i, rows[0], int(sizes["gpus_per_node"]))
        lines.append(
            f"{place:3d} {c.tp:4d} {c.pp:3d} {c.vpp:3d} {c.dp:5d} {c.micro_batch:3d} "
            f"{c.schedule:14s} {c.recompute:17s} {c.zero:4d} {seconds:7.3g} "
            f"{f'{within(seconds, likely):>11s} ' if likely else ''}"
            f"{mfu(config, sizes, gpus, seconds):7.1f} {held:4.{2 if held < 1 else 0}f}  {why}"
        )
    return [*lines, *filter(None, [said]), "", command(priced, rows[0])]


def spread_of(config: Config) -> tuple[float, float] | None:
    """Returns what measured steps are to predictions, from a tenth to nine tenths of them; None
    for a measured machine.

    As wide as for a network and engine that no run covers: parallel3d itself has none.
    """
    return None if config.cluster.file else ranges()["place"]


def within(seconds: float, spread: tuple[float, float]) -> str:
    """Returns the seconds that four of five steps lie within."""
    return "–".join(f"{seconds * factor:.3g}" for factor in spread)


def mfu(config: Config, sizes: Mapping[str, float], gpus: int, seconds: float) -> float:
    """Returns the model FLOPs utilisation in per cent."""
    tokens = config.global_batch_size * config.model.seq_length
    useful = tokens * flops_per_token(config.model, config.model.seq_length)
    return 100 * useful / (seconds * gpus * sizes["peak"])


def command(priced: Priced, index: int) -> str:
    """Returns the command line of a layout."""
    c: Any = priced.choices[index]
    words = [f"tp={c.tp}", f"pp={c.pp}", f"dp={c.dp}", f"micro_batch_size={c.micro_batch}"]
    words += [f"schedule={c.schedule}"] * (c.pp > 1) + [f"vpp={c.vpp}"] * (c.vpp > 1)
    words += ["sp=true"] * (c.tp > 1) + [f"zero={c.zero}"] * (c.zero > 0)
    words += [f"recompute={c.recompute}"] * (c.recompute != "none")
    return "parallel3d train … " + " ".join(words)


MADE_BY = "parallel3d plan"
MARK = "data-by='parallel3d plan'"
SHARES = (1 / 3, 0.4, 0.8 / 3)  # forward, input and weight gradient (schedule.costs)
BOXES = 7900  # of a pipeline's drawing, with their names
MOST_RANKS = 16  # of a pipeline's memory chart

# kind -> (colour, explanation): parts of a step,
PARTS = {
    "compute": ("#3b7dc4", "the busiest GPU computes, with waits inside of its layers"),
    "bubble": ("#8d9299", "waiting for the pipeline to fill and to drain"),
    "messages": ("#e08e2b", "hidden states on their way to the next stage, where nothing hides it"),
    "gradients": ("#b5475b", "summing gradients over the replicas beyond the backward"),
    "optimizer": ("#6f9f4f", "the optimizer's pass over its state"),
    "fixed": ("#9b8bb8", "what a step takes whatever its size"),
}
# parts of the busiest GPU's compute,
COMPUTE_PARTS = {
    "matmuls": ("#1f5e9e", "GEMMs of the layers, forward and both of the backward"),
    "attention": ("#2f8f8a", "scores, softmax and values, forward and backward"),
    "element-wise": ("#7fb3e0", "norms, activations, residuals: bytes through the memory"),
    "recomputed": ("#c7a13c", "forwards that run again, as their results were not kept"),
    "tp collectives": ("#7a5ea8", "waits for the other GPUs of a layer, where no GEMM hides them"),
    "head and embedding": ("#8aa3b8", "logits, loss and table, where the busiest stage has them"),
    "launches": ("#a0522d", "the host, where it is slower than the GPU, and gathers of zero=3"),
}
# and parts of a rank's memory.
KINDS = {
    "parameters": ("#1f5e9e", "parameters in the type that is computed with"),
    "weight gradients": ("#2f8f8a", "gradients, fp32"),
    "masters and moments": ("#6f9f4f", "fp32 copies and the optimizer's moments"),
    "activations": ("#e08e2b", "activations, kept from forward to backward"),
    "logits": ("#b5475b", "logits of the head"),
    "buffers": ("#9b8bb8", "buffers of collectives and tables"),
    "reserve": ("#8d9299", "kept for the driver, NCCL and fragments"),
}
COLOURS = {
    kind: colour for kinds in (PARTS, COMPUTE_PARTS, KINDS) for kind, (colour, _) in kinds.items()
}

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
    """Raises UserError, before any work is done, if the file cannot be written."""
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
    """Writes a single HTML page. `rows`: of the table, `mfu` theirs; raises UserError."""
    first, is_measured = rows[0], config.cluster.file is not None
    best = (configured_here if is_measured else configure)(config, priced.choices[first])
    memory = float(sizes["memory_bytes"])
    title = f"{config.model.name} on {gpus:,} GPUs of {config.cluster.name}"
    parts = [
        f"<!DOCTYPE html><html lang='en' {MARK}><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width,initial-scale=1'>",
        f"<title>Plan: {escape(title)}</title><style>{STYLE}</style></head><body><main>",
        _best(config, priced, first, mfu[0], memory, title, command),
        _table_of_ten(config, priced, rows, mfu, memory, int(sizes["gpus_per_node"])),
        _step(config, priced, first, {} if is_measured else sizes),
        _pipeline(best, priced, first) if best.pp > 1 else "",
        _memory(best, priced, first, memory),
        _cluster(best),
        "<footer>Times are priced with constants that are fitted to published runs, memory is what "
        "parallel3d's own code holds; how right both are: docs/planner.md. "
        + escape(f"Assumed: {', '.join(assumed)}." if assumed else ""),
        "</footer></main></body></html>",
    ]
    write("plan.html", str(config.plan.html), "\n".join(filter(None, parts)) + "\n")


def _best(
    config: Config, priced: Priced, first: int, mfu: float, memory: float, title: str, command: str
) -> str:
    """Returns the best layout with time, memory and command line."""
    seconds, used = float(priced.seconds[first]), float(priced.memory.total[first])
    rate = config.global_batch_size * config.model.seq_length / seconds
    words = (
        f"{seconds:.3g} s a step, {rate:,.0f} tokens a second, "
        f"MFU{' at most' * bool(caution(config))} {mfu:.1f} %, "
        f"{used / 1e9:.1f} of {memory / 1e9:.1f} GB on the fullest GPU. {len(priced.order):,} of "
        f"{len(priced.choices):,} layouts fit."
    )
    return (
        f"<h1>{escape(title)}</h1><p>{config.precision.name}, {config.global_batch_size:,} "
        f"sequences of {config.model.seq_length:,} tokens a step.</p><section><h2>The best layout"
        f"</h2><p>{escape(words)}</p><pre>{escape(command)}</pre></section>"
    )


def _table_of_ten(
    config: Config,
    priced: Priced,
    rows: Sequence[int],
    mfu: Sequence[float],
    memory: float,
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
        share = float(priced.memory.total[i]) / memory
        figures = (f"{float(priced.seconds[i]):.3g} s", f"{mfu[place]:.1f} %", f"{share:.0%}")
        bar = _bar(_parts(priced, i), slowest, "s")
        cells.append([*map(str, (*sizes, *ways, *figures)), bar, escape(why)])
    return (
        f"<section><h2>The {len(rows)} best layouts</h2><p>One for each pair of tp and pp; of "
        "layouts within half a per cent the simpler stands first. "
        f"{escape(caution(config))}</p>{_key(PARTS)}{_table(head, cells)}</section>"
    )


def _step(config: Config, priced: Priced, first: int, sizes: Mapping[str, float]) -> str:
    """Returns the best layout's time by kind; `sizes` split its compute."""
    parts = _parts(priced, first)
    if sizes:
        work = works([priced.choices[first]], sizes, config.global_batch_size)
        parts = breakdown(work, load(), parts.pop("compute")) | parts
    total = float(priced.seconds[first])
    rows = [
        [_key([kind]), f"{value:.3g} s", f"{100 * value / total:.1f} %",
         escape((PARTS | COMPUTE_PARTS)[kind][1])]
        for kind, value in parts.items()
    ]  # fmt: skip
    return (
        f"<section class='big'><h2>Where the step's time goes</h2>"
        f"{_bar(parts, sum(parts.values()), 's')}"
        f"{_table(('part', 'time', 'share', 'what it is'), rows)}</section>"
    )


def _pipeline(best: Config, priced: Priced, first: int) -> str:
    """Draws the pipeline with as many micro-batches as show how it fills, runs and drains."""
    count = best.num_microbatches
    seconds = float(priced.time.compute[first]) / count  # of a micro-batch on the busiest rank
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
        forward, input, weight = (share * seconds for share in SHARES)
        return Costs.even(schedule.placement, forward, input, weight)
    busy: dict[int, float] = {}
    for (rank, _), (part, *more) in zip(schedule.placement.places, weights, strict=True):
        busy[rank] = busy.get(rank, 0.0) + part + sum(more) * SHARES[0]
    unit = seconds / max(busy.values())
    forward, input, weight = (share * unit for share in SHARES)
    return RankWork(forward, input, weight, weights=lambda _: weights).costs(schedule.placement)


def _memory(best: Config, priced: Priced, first: int, memory: float) -> str:
    """Returns the peak memory of each rank of the pipeline."""
    stages = [peak_memory(best, index) for index in range(best.pp)]
    reserve = float(priced.memory.total[first]) - max(h.total for h in stages)
    longest = max(memory, *(h.total + reserve for h in stages)) * 1.02 / 1e9
    shown = list(enumerate(stages))
    if len(shown) > MOST_RANKS:
        shown = [*shown[: MOST_RANKS // 2], *shown[-MOST_RANKS // 2 :]]
    rows = []
    for index, one in shown:
        nbytes = (one.parameters, one.gradients, one.masters + one.optimizer, one.activations,
                  one.logits, one.buffers, reserve)  # fmt: skip
        parts = {kind: value / 1e9 for kind, value in zip(KINDS, nbytes, strict=True)}
        bar = _bar(parts, longest, "GB", memory / 1e9)
        rows.append([f"rank {index}", bar, f"{sum(parts.values()):.1f} GB",
                     f"peaks in {escape(one.phase)}"])  # fmt: skip
    return (
        "<section><h2>Memory along the pipeline</h2><p>Each rank at its fullest moment of a step. "
        f"The red line is the GPU's memory, {memory / 1e9:.1f} GB.</p>{_key(KINDS)}"
        f"{_table(('along pp', 'memory', 'in all', ''), rows)}</section>"
    )


def _cluster(best: Config) -> str:
    """Returns the picture of `parallel3d topology`, or the reason why there is none."""
    try:
        shown = replace(best.topology, search=0)
        report = make_report(replace(best, topology=shown), None, {})
        picture = picture_of(report, facts_of(report, MAP_MADE_BY))
        picture = f"<div class='paper'>{picture}</div>"
    except UserError as error:
        picture = f"<p>No picture: {escape(str(error))}</p>"
    return f"<section><h2>Where the ranks sit</h2>{picture}</section>"


def _parts(priced: Priced, index: int) -> dict[str, float]:
    """Returns seconds of a step by part."""
    return {part: max(float(getattr(priced.time, part)[index]), 0.0) for part in PARTS}


def _bar(parts: Mapping[str, float], whole: float, unit: str, limit: float | None = None) -> str:
    """Returns a bar as long as the sum of `parts` is of `whole`, and a line at `limit`."""
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
    """Returns a table whose cells are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{c}</td>' for c in row)}</tr>" for row in rows)
    return f"<div class='wide'><table><tr>{top}</tr>{body}</table></div>"


TYPES = ("bf16", "fp16", "fp8")
_MOST_NODES = 1 << 16  # searched for a cluster that the model would fit
_STILL = 0.98  # of a rank's memory: if twice the nodes still need as much, the search ends
_HELD = {
    "tp": "tp", "pp": "pp", "vpp": "vpp", "dp": "dp", "zero": "zero", "recompute": "recompute",
    "micro_batch_size": "micro_batch",
}  # fmt: skip


def plan(config: Config, typed: Sequence[str]) -> int:
    """Prints the table. Returns the exit code, 0. Raises UserError for what cannot work."""
    keys = chosen_keys(typed)
    check_page(config)
    config, assumed = assume_model(config, typed)
    if not {"precision", "precision.name"} & keys and config.cluster.file is None:
        config = replace(config, precision=replace(config.precision, name="bf16"))
    check_fields(config)
    check_model(config.model)
    fixed = held(config, keys)
    nodes, node = _gpus(config)
    gpus = nodes * node
    check_fixed(config, fixed, gpus)
    priced, sizes = searched(config, fixed, gpus)
    if not priced.order:
        raise UserError(fits_nowhere(config, sizes, priced, fixed, nodes))
    for line in table(config, priced, gpus, sizes):
        print(line, file=sys.stdout)
    if config.plan.html:
        rows = best(priced, ROWS)
        shown = [mfu(config, sizes, gpus, float(priced.seconds[i])) for i in rows]
        write_page(config, priced, rows, shown, gpus, sizes, command(priced, rows[0]), assumed)
    if config.model.num_layers > MOST_STAGES and "pp" not in fixed:
        print(f"Not looked at: pp above {MOST_STAGES}, and above {MOST_V_HALF} with v_half")
    if assumed:
        print(f"Assumed: {', '.join(assumed)}")
    return 0


def held(config: Config, keys: set[str]) -> dict[str, int | str]:
    """Returns the user's choices by the names of `plan.search.LayoutChoice`."""
    found = {name: getattr(config, key) for key, name in _HELD.items() if key in keys}
    if "recompute" in found:
        found["recompute"] = spelled(config.recompute)
    if "dp" in found and found["dp"] is None:
        del found["dp"]
    if "schedule" in keys or "schedule.name" in keys:
        found["schedule"] = config.schedule.name
    return found


def searched(
    config: Config, fixed: Mapping[str, int | str], ranks: int
) -> tuple[Priced, dict[str, float]]:
    """Returns every layout of `ranks`, priced by the cluster's datasheet or its measured file, and
    the sizes that they share. Raises UserError for a cluster that cannot be priced."""
    file, batch = config.cluster.file, config.global_batch_size
    if fixed.get("schedule") == "v_half" and int(fixed.get("pp", 1)) > MOST_V_HALF:
        raise UserError(
            f"pp={fixed['pp']} must be at most {MOST_V_HALF} with schedule=v_half, which is not "
            f"priced for more ranks; the nearest is pp={MOST_V_HALF}"
        )
    if file is not None:
        machine = read(file)
        check_type(machine, file, config.precision.name)
        if (config.cluster.nodes or 1) > 1:
            raise UserError(
                f"cluster.nodes={config.cluster.nodes} must be 1 with cluster={file}, in which no "
                "network was measured; the nearest is cluster.nodes=1"
            )
        sizes = measured_sizes(config, machine, ranks)
        choices = list(measured_layouts(sizes, ranks, batch, fixed))
        if not choices:
            raise UserError(no_layout(config, ranks, fixed))
        return price_measured(choices, sizes, config, machine), sizes
    sizes = sizes_of(config)
    choices = list(layouts(sizes, ranks, int(sizes["gpus_per_node"]), batch, fixed))
    if not choices:
        raise UserError(no_layout(config, ranks, fixed))
    return priced_by_shapes(config, choices, sizes), sizes


def priced_by_shapes(
    config: Config, choices: list[LayoutChoice], sizes: Mapping[str, float]
) -> Priced:
    """Prices times by the datasheet's constants, memory by parallel3d's own code."""
    with SearchProgress() as tell:
        held = memories(config, choices, 1e9 * config.dryrun.reserve_gb, tell)
    return price(choices, sizes, config.global_batch_size, load(), held)


def _gpus(config: Config) -> tuple[int, int]:
    """Returns (nodes, GPUs of a node)."""
    if config.cluster.file is not None:
        return 1, config.cluster.gpus_per_node or read(config.cluster.file).made.count
    return config.cluster.nodes or 1, config.cluster.gpus_per_node or 8


def card_of(config: Config) -> tuple[str, Device]:
    """Returns the cluster's GPU among those whose constants are known.

    Raises UserError if the cluster names none, an unknown one, or one without the type.
    """
    named = config.cluster.gpu
    if named is None:
        raise UserError(
            f"cluster={config.cluster.name} does not say which GPU it has: cluster.gpu must be one "
            f"of {', '.join(DEVICES)}; cluster=dgx_h100 has H100s"
        )
    words = named.lower().replace("-", " ").split()
    found = next((word for word in words if word in DEVICES), None)
    if found is None:
        near = nearest(named.lower(), DEVICES) or "h100"
        raise UserError(
            f"cluster.gpu={show(named)} must be one of {', '.join(DEVICES)}, whose speed is known; "
            f"the nearest is {near}"
        )
    type = config.precision.name
    known = [t for t in TYPES if t in DEVICES[found].peak]
    if type not in known:
        raise UserError(
            f"precision={type} must be one of {', '.join(known)} on a GPU whose peaks are those of "
            f"{found}; the nearest is {known[0]}"
        )
    return found, DEVICES[found]


def sizes_of(config: Config) -> dict[str, float]:
    """Returns the fields of `StepWork` that no layout changes."""
    model, cluster, type = config.model, config.cluster, config.precision.name
    name, card = card_of(config)
    like = name.replace("b300", "b200")
    # A card has constants for one of bf16 and fp16, which are equally fast.
    speed = next(s for s in (f"{like}/{type}", f"{like}/bf16", f"{like}/fp16") if s in SPEEDS)
    domain = cluster.domain_gpus or cluster.gpus_per_node or 8
    memory = cluster.gpu_memory_gb * 1e9 if cluster.gpu_memory_gb else card.memory_gib * GIB
    moved = cluster.gpu_memory_gb_per_s or card.memory_gb_s
    fabric = "ndr" if cluster.rail_gb_per_s >= 40 else "hdr"
    return {
        **sizes_of_model(model),
        "gpus_per_node": domain, "flash": 1, "dropout": 0, "overlap_tp": 1, "overlap_pp": 1,
        "overlap_dp": 1, "scatter_gather": 1, "compiled": 1, "fp8": float(type == "fp8"),
        "grad_bytes": 4,
        "peak": card.peak[type] * 1e12, "peak_attention": card.peak.get("bf16", 125.0) * 1e12,
        "memory_bytes": memory, "memory_rate": moved * 1e9, "units": card.units,
        "link_rate": cluster.nvlink_gb_per_s * 1e9, "fabric_rate": cluster.rail_gb_per_s * 1e9,
        "speed": SPEEDS.index(speed), "fabric": NETWORKS.index(fabric),
    }  # fmt: skip


def check_divides(fixed: Mapping[str, int | str], count: int, of: str) -> None:
    """Raises UserError if the given tp, pp or dp do not divide `count`."""
    product = 1
    for name in ("tp", "pp", "dp"):
        value = int(fixed.get(name, 1))
        product *= value
        if count % product:

            def divides(v: int, others: int = product // value) -> bool:
                return count % (others * v) == 0

            near = closest(value, divides, count)
            raise UserError(
                f"{name}={value} must divide the {count} {of} with what else was "
                f"typed; the nearest is {near}"
            )


def check_fixed(config: Config, fixed: Mapping[str, int | str], gpus: int) -> None:
    """Raises UserError for given sizes that the GPUs, the heads or the batch do not allow."""
    check_divides(fixed, gpus, "GPUs of the cluster")
    heads = config.model.num_attention_heads
    tp = int(fixed.get("tp", 1))
    if heads % tp:
        near = closest(tp, lambda v: heads % v == 0, heads)
        raise UserError(
            f"tp={tp} must divide model.num_attention_heads={heads}; the nearest is {near}"
        )
    pp, layers = int(fixed.get("pp", 1)), config.model.num_layers
    if pp > layers:
        raise UserError(
            f"pp={pp} must be at most model.num_layers={layers}; the nearest is {layers}"
        )


def no_layout(config: Config, gpus: int, fixed: Mapping[str, int | str]) -> str:
    """Returns the error message for a batch, or a node count, that no layout divides."""
    batch = config.global_batch_size
    model = int(fixed.get("tp", 1)) * int(fixed.get("pp", 1))
    most = gpus // model
    ways = [d for d in divisors(most) if not fixed.get("dp") or d == fixed["dp"]]
    step = int(fixed.get("micro_batch", 1)) * min(ways or [1], key=lambda d: abs(d - most))
    near = max(round(batch / step), 1) * step
    return (
        f"global_batch_size={batch} must be a multiple of dp times the micro-batch in a layout of "
        f"{gpus} GPUs with what else was typed; the nearest is {near}"
    )


def fits_nowhere(
    config: Config,
    sizes: Mapping[str, float],
    priced: Priced,
    fixed: Mapping[str, int | str],
    nodes: int,
) -> str:
    """Returns the error message for a model that fits no layout: by how much, and what would."""
    least = int(np.argmin(priced.memory.total))
    choice, memory = priced.choices[least], float(sizes["memory_bytes"])
    needed, file = float(priced.memory.total[least]), config.cluster.file
    where = f"of the ranks of cluster={file}" if file else f"on cluster.nodes={nodes}"
    available = f"{memory / GIB:.1f} a rank" if file else f"{memory / GIB:.0f}"
    if file:
        words = _fewer_layers(config, choice, sizes)
    else:
        words = "cluster.nodes must be larger, "
        words += _nodes_that_fit(config, sizes, fixed, nodes, needed)
    return (
        f"model={config.model.name} fits no layout {where}: the one that needs least "
        f"(tp={choice.tp} pp={choice.pp} micro_batch_size={choice.micro_batch} "
        f"recompute={choice.recompute} zero={choice.zero}) misses by "
        f"{(needed - memory) / GIB:.1f} GiB of {available}; {words}"
    )


def _nodes_that_fit(
    config: Config,
    sizes: Mapping[str, float],
    fixed: Mapping[str, int | str],
    nodes: int,
    needed: float,
) -> str:
    """Returns the end of that message: the nodes, doubled until a layout fits. `needed`: bytes of
    the best layout of `nodes`."""
    node, memory = config.cluster.gpus_per_node or 8, float(sizes["memory_bytes"])
    full = PARALLEL3D["memory.full"]
    with SearchProgress() as tell:
        while True:
            nodes *= 2
            batch = max(config.global_batch_size, nodes * node)
            tried = list(layouts(sizes, nodes * node, int(sizes["gpus_per_node"]), batch, fixed))
            grown = replace(config, global_batch_size=batch)
            before = needed
            if tried:
                # Only bytes decide whether a layout fits: times are not priced.
                least = least_memory(
                    grown, tried, 1e9 * config.dryrun.reserve_gb, full * memory, tell.at(nodes)
                )
                if least / memory <= full:
                    words = f"the nearest that would is cluster.nodes={nodes}"
                    more = batch != config.global_batch_size
                    return words + (f" global_batch_size={batch}" if more else "")
                needed = min(needed, least)
            # If twice the GPUs save nothing, the rest is sharded as far as possible.
            if 2 * nodes > _MOST_NODES or (tried and needed > _STILL * before):
                return f"none was found up to {nodes} nodes"


def _fewer_layers(config: Config, choice: LayoutChoice, sizes: Mapping[str, float]) -> str:
    """Returns the deepest model of the same kind that would fit in the layout that needs least."""
    machine, step = read(str(config.cluster.file)), choice.pp * choice.vpp
    for layers in range((config.model.num_layers - 1) // step * step, 0, -step):
        smaller = replace(config, model=replace(config.model, num_layers=layers))
        if price_measured([choice], sizes, smaller, machine).order:
            return f"model.num_layers must be less, the nearest that fits is {layers}"
    return "model.hidden_size must be less: no number of layers fits"
