"""`plan.html=FILE`: the whole plan on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from parallel3d.config.schema import Config
from parallel3d.plan.memory import GIB
from parallel3d.plan.own.memory import Held
from parallel3d.plan.report.bars import bar, held, legend, table
from parallel3d.plan.report.changes import Change, changes
from parallel3d.plan.report.style import css
from parallel3d.plan.report.words import INSIDE, KINDS, PARTS, caution, setting, verdict
from parallel3d.plan.search import Priced

MARK = "data-by='parallel3d plan'"


@dataclass(frozen=True)
class Page:
    """What the page shows.

    Attributes:
        rows: of the table, the best first. reasons: of each, a line. mfu: per cent.
        stages: what each rank of the best layout's pipeline holds.
        room: bytes of a GPU, of which `reserve` are no tensor's.
        timeline: SVG or "", with the micro-batches that it shows. map: SVG, or why there is none.
        assumed: what was taken for granted. spread: a line on the placement of ranks, or "".
        inside: seconds of what the busiest GPU computes by kind, or none.
    """

    config: Config
    priced: Priced
    rows: Sequence[int]
    reasons: Sequence[str]
    mfu: Sequence[float]
    gpus: int
    domain: int
    tokens: float
    command: str
    stages: Sequence[Held]
    room: float
    reserve: float
    timeline: tuple[str, int]
    map: str
    assumed: Sequence[str]
    spread: str = ""
    inside: Mapping[str, float] = field(default_factory=dict)

    @property
    def best(self) -> int:
        return self.rows[0]


def render(page: Page) -> str:
    """The HTML document."""
    config = page.config
    title = f"{config.model.name} on {page.gpus:,} GPUs of {config.cluster.name}"
    parts = [
        f"<!DOCTYPE html><html lang='en' {MARK}><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width,initial-scale=1'>",
        f"<title>Plan: {escape(title)}</title><style>{css()}</style></head><body><main>",
        _top(page, title),
        _answer(page),
        _rivals(page),
        _ten(page),
        _step(page),
        _pipeline(page),
        _memory(page),
        _map(page),
        _foot(page),
        "</main></body></html>",
    ]
    return "\n".join(filter(None, parts)) + "\n"


def _top(page: Page, title: str) -> str:
    config, seconds = page.config, float(page.priced.seconds[page.best])
    at_most = " at most" if caution(config) else ""
    tiles = (
        (f"{seconds:.3g} s", "a step"),
        (f"{page.tokens / seconds:,.0f}", "tokens a second"),
        (f"{page.mfu[0]:.1f} %", f"MFU{at_most}: useful work of the datasheet's peak"),
        (
            f"{float(page.priced.memory.total[page.best]) / page.room:.0%}",
            f"of the fullest GPU's {page.room / 1e9:.1f} GB",
        ),
        (
            f"{len(page.priced.order):,} of {len(page.priced.choices):,}",
            "layouts fit of those that were priced",
        ),
    )
    boxes = "".join(f"<div class='tile'><b>{a}</b><span>{escape(b)}</span></div>" for a, b in tiles)
    return (
        f"<h1>{escape(title)}</h1><p class='soft'>{config.precision.name}, "
        f"{config.global_batch_size:,} sequences of {config.model.seq_length:,} tokens a step. "
        "Computed from shapes and datasheets before anything is launched.</p>"
        f"<div class='tiles'>{boxes}</div>"
    )


def _answer(page: Page) -> str:
    choice = page.priced.choices[page.best]
    count = page.config.global_batch_size // (choice.dp * choice.micro_batch)
    items = "".join(
        f"<dt><code>{escape(a)}</code></dt><dd>{escape(b)}</dd>"
        for a, b in setting(choice, page.domain, count)
    )
    spread = f"<p class='soft'>{escape(page.spread)}</p>" if page.spread else ""
    return (
        "<section><h2>The best layout</h2>"
        f"<p class='soft'>Memory {escape(verdict(page.priced, page.best, page.room))}.</p>"
        f"<pre>{escape(page.command)}</pre><dl>{items}</dl>{spread}</section>"
    )


def _rivals(page: Page) -> str:
    rows = [_rival(change) for change in changes(page.priced, page.best, page.room)]
    if not rows:
        return ""
    words = (
        "Each choice beside its nearest rival: the fastest layout that differs from the best one "
        "there, all else chosen anew; and what would be faster if it fitted."
    )
    return (
        f"<section><h2>Why it is the best</h2><p class='soft'>{words}</p>"
        + table(("choice", "best", "instead", "the step", ""), rows, (0, 1, 2, 3, 4))
        + "</section>"
    )


def _rival(change: Change) -> list[str]:
    name = f"<code>{change.knob}</code>"
    other = escape(change.other)
    slower = f"{100 * change.slower:+.1f} %" if abs(change.slower) > 0.0005 else "as fast"
    if change.over > 0:
        effect = f"<span class='worse'>{slower}, but does not fit</span>"
        why = f"misses by {change.over / GIB:.1f} GiB with all else as in the best"
    else:
        effect = f"<b>{slower}</b>"
        why = "nothing else changes" if change.alone else "with what then suits it best"
    return [name, escape(change.best), other, effect, f"{escape(change.meaning)}; {why}"]


def _ten(page: Page) -> str:
    priced, slowest = page.priced, max(float(page.priced.seconds[i]) for i in page.rows)
    head = ("#", "tp", "pp", "vpp", "dp", "mb", "schedule", "recompute", "zero", "step", "MFU %")
    head += ("memory", "where the time goes", "why it stands here")
    bound = escape(caution(page.config))
    rows = []
    for place, i in enumerate(page.rows):
        c, seconds = priced.choices[i], float(priced.seconds[i])
        share = float(priced.memory.total[i]) / page.room
        rows.append(
            [
                str(place + 1), str(c.tp), str(c.pp), str(c.vpp), str(c.dp), str(c.micro_batch),
                c.schedule if c.pp > 1 else "–", c.recompute, str(c.zero), f"{seconds:.3g} s",
                f"{page.mfu[place]:.1f}", f"{share:.0%}",
                bar(parts_of(priced, i), slowest, "s"), escape(page.reasons[place]),
            ]
        )  # fmt: skip
    return (
        f"<section><h2>The {len(rows)} best layouts</h2><p class='soft'>One for each pair of tp "
        f"and pp; of layouts within half a per cent the simpler stands first. {bound}</p>"
        + legend((kind, kind) for kind in PARTS)
        + table(head, rows, (6, 7, 12, 13), best=0)
        + "</section>"
    )


def parts_of(priced: Priced, index: int) -> dict[str, float]:
    """Seconds of a step by part."""
    return {part: max(float(getattr(priced.time, part)[index]), 0.0) for part in PARTS}


def _step(page: Page) -> str:
    total = float(page.priced.seconds[page.best])
    parts = {**page.inside, **parts_of(page.priced, page.best)}
    if page.inside:
        del parts["compute"]
    rows = [
        [
            legend([(kind, kind)]), f"{value:.3g} s", f"{100 * value / total:.1f} %",
            escape((INSIDE | PARTS)[kind]),
        ]
        for kind, value in parts.items()
    ]  # fmt: skip
    return (
        "<section class='big'><h2>Where the step's time goes</h2><p class='soft'>The best layout: "
        f"{total:.3g} s.</p>{bar(parts, sum(parts.values()), 's')}"
        + table(("part", "time", "share", "what it is"), rows, (0, 3))
        + "</section>"
    )


def _pipeline(page: Page) -> str:
    svg, shown = page.timeline
    if not svg:
        return ""
    choice = page.priced.choices[page.best]
    count = page.config.global_batch_size // (choice.dp * choice.micro_batch)
    drawn = f"Drawn: all {count} micro-batches, without messages."
    if shown < count:
        parts = parts_of(page.priced, page.best)
        idle = parts["bubble"] / (parts["bubble"] + parts["compute"])
        drawn = (
            f"Drawn: {shown} of the {count} micro-batches, without messages. In the whole step "
            f"the middle goes on as it is, and {100 * idle:.1f} % is idle."
        )
    return (
        "<section><h2>The pipeline in time</h2><p class='soft'>A row is a rank of the pipeline, a "
        f"box a micro-batch with its number, white is idle. {drawn}</p>"
        f"<div class='paper'>{svg}</div></section>"
    )


def _memory(page: Page) -> str:
    rows, room = [], page.room / 1e9
    longest = max(room, *((h.total + page.reserve) / 1e9 for h in page.stages)) * 1.02
    shown = list(enumerate(page.stages))
    if len(shown) > 16:
        shown = [*shown[:8], *shown[-8:]]
    most = max(range(len(page.stages)), key=lambda i: page.stages[i].total)
    for index, one in shown:
        total = (one.total + page.reserve) / 1e9
        name = f"rank {index}" + (" (fullest)" if index == most and len(page.stages) > 1 else "")
        rows.append(
            [
                name, held(kinds_of(one, page.reserve), room, longest, "GB"), f"{total:.1f} GB",
                f"peaks in {escape(one.phase)}",
            ]
        )  # fmt: skip
    left = "" if len(shown) == len(page.stages) else ", the first eight and the last eight"
    return (
        "<section><h2>Memory along the pipeline</h2><p class='soft'>Each rank at its fullest "
        f"moment of a step{left}. The red line is the GPU's memory, {room:.1f} GB.</p>"
        + legend(KINDS.items())
        + table(("along pp", "", "in all", ""), rows, (0, 1, 3), best=None)
        + "</section>"
    )


def kinds_of(one: Held, reserve: float) -> dict[str, float]:
    """GB by kind."""
    return {
        "parameters": one.parameters / 1e9,
        "weight gradients": one.gradients / 1e9,
        "masters and moments": (one.masters + one.optimizer) / 1e9,
        "activations": one.activations / 1e9,
        "logits": one.logits / 1e9,
        "buffers": one.buffers / 1e9,
        "reserve": reserve / 1e9,
    }


def _map(page: Page) -> str:
    if not page.map.startswith("<svg"):
        return f"<section><h2>The cluster</h2><p class='soft'>{escape(page.map)}</p></section>"
    return (
        "<section><h2>Where the ranks sit</h2><p class='soft'>Rank 0 with the groups that it "
        "belongs to, and what a step sends over the wires, as wide as its bytes.</p>"
        f"<div class='paper map'>{page.map}</div></section>"
    )


def _foot(page: Page) -> str:
    assumed = f" Assumed: {escape(', '.join(page.assumed))}." if page.assumed else ""
    return (
        "<footer>Made by <code>parallel3d plan</code>. Times are priced with constants that are "
        "fitted to published runs, memory is what parallel3d's own code holds; how right both are, "
        f"and where they are wrong: docs/planner.md.{assumed}</footer>"
    )
