"""Reads runs from their directories and makes an HTML page about them.

Tables and bars are plain HTML, whereas curves are embedded as data that page.js draws in the
browser.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parallel3d.blueprint.dispatch import rank_load
from parallel3d.blueprint.layout import DIMENSIONS
from parallel3d.checkpoint.identity import flat
from parallel3d.checkpoint.runs import find_run
from parallel3d.comm.step_timer import KINDS
from parallel3d.commands.report.lost import lost_time
from parallel3d.config.fields import show
from parallel3d.faults.keys import RecoveryConfig
from parallel3d.html import bar_key, colour, html_table, section, stacked_bar, whole_page
from parallel3d.metrics.jsonl import COUNTS, EVAL_TERMS, TERMS, rows_of, value
from parallel3d.metrics.loggers import NAMES, figures_of
from parallel3d.metrics.lost_time import NAMES_OF_CAUSES
from parallel3d.metrics.screen import NAMES_OF_PARTS
from parallel3d.metrics.starts import (
    DAMAGED,
    PARTS,
    STARTS,
    Goodput,
    Start,
    goodput,
    seconds_of,
    starts_of,
)
from parallel3d.metrics.units import NATS, units_of
from parallel3d.run.directory import (
    NO_CONFIG,
    PLACEMENT_FILE,
    config_files,
    is_running,
    read_config,
    read_json,
)
from parallel3d.run_config import Config, saved_tree
from parallel3d.text import duration, si

COLUMNS = 1000  # maximum number of points of a curve on the page
STEP_FIGURES = {key: NAMES[key] for key in ("loss", "grad_norm", "lr", "tokens_per_s")}
LOSS = NAMES["loss"]
LOAD = "experts/load"
MOST_SETS = 3  # maximum number of validation sets in the first table
# maximum number of ranks that a table of bars shows, and that a map of the hosts shows
MOST_RANKS, MOST_PLACES = 16, 64
NOT_COMPARED = ("run", "runs_dir")
CHARTS = {
    "train/loss": ("Training loss", NATS),
    "eval/loss": ("Held-out loss", NATS),
    "train/grad_norm": ("Gradient norm", "before clipping"),
    "train/lr": ("Learning rate", ""),
    "speed/tokens_per_s": ("Speed", "tokens a second"),
    LOAD: ("Fullest expert", "its number of tokens over the mean, in the worst layer"),
}
# prefixes of the names of curves that can be switched to a logarithmic axis
LOGARITHMIC = ("train/loss", "train/grad_norm", "eval/loss", "valid/")
SHARED = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
STYLE = """
.controls{position:sticky;top:0;z-index:1;background:Canvas;
display:flex;flex-wrap:wrap;gap:6px 22px;padding:10px 0;margin-top:14px}
.controls fieldset{border:0;margin:0;padding:0;display:flex;flex-wrap:wrap;gap:4px 14px}
.controls legend{float:left;font-weight:600;margin-right:10px;padding:0}
label{cursor:pointer;white-space:nowrap} .dot{display:inline-block;width:11px;height:11px;
border-radius:3px;margin:0 6px 0 2px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));
gap:18px 34px}
figure{margin:0;min-width:0} figcaption{font-weight:600;margin-bottom:2px}
figcaption small{font-weight:400;opacity:.7} .read{font-size:13px;min-height:24px;
font-variant-numeric:tabular-nums} .read span{margin-right:14px;white-space:nowrap}
.chart svg{display:block;width:100%;height:230px;touch-action:pan-y}
.chart:focus-visible{outline:2px solid #3b7dc4;outline-offset:3px}
.chart text{font-size:12px;fill:currentColor;opacity:.75} .grid{stroke:currentColor;opacity:.13}
.curve{fill:none;stroke-width:1.6;stroke-linejoin:round} .restart{stroke-width:1.3;
stroke-dasharray:4 3;opacity:.85} .cross{stroke:currentColor;opacity:.45}
.odd{font-weight:700;opacity:1!important} .map{display:flex;flex-wrap:wrap;gap:5px}
.map b{font-weight:400;font-size:12px;border-left:4px solid;padding:2px 8px;background:#8882}
.heat{display:flex;gap:1px;min-width:200px} .heat i{flex:1 1 6px;height:16px;min-width:3px;
border:1px solid #8884} p .heat{display:inline-flex;gap:8px;vertical-align:middle}
p .heat i{flex:0 0 16px}
th{white-space:nowrap} h3{font-size:15px;margin:18px 0 6px}
.muted{opacity:.7} footer{margin-top:30px;font-size:13px}
@media print{.controls{position:static}}
"""


# A run's directory


class Point(NamedTuple):
    """One point of a curve.

    `tokens` counts the tokens up to this step, and `value` is None if the step has no value.
    """

    step: int
    tokens: int
    value: float | None


@dataclass(frozen=True)
class RunRecord:
    """The content of one run's directory."""

    name: str
    curves: Mapping[str, list[Point]]  # by their names in loggers, such as train/loss
    starts: list[dict[str, Any]]  # each has first_step, tokens, started, and often host and layout
    configs: list[Config]  # one for the first start and for each later start that changed keys
    summary: Mapping[str, Any]  # summary.json; {} if the last start has not written it
    ranks: list[dict[str, Any]]  # rows of placement.json
    state: str  # "running", or how the last start ended
    goodput: Goodput | None = None  # seconds of all starts by activity; None without starts.jsonl
    accounts: Sequence[Start] = ()  # of the same starts
    # The last step that recorded the tokens of each expert, and these counts by layer. None means
    # that no step recorded them.
    experts: tuple[int, Mapping[str, list[int]]] | None = None

    @property
    def last(self) -> tuple[int, int]:
        """The last recorded step and the number of tokens up to it; zeros if there is none."""
        losses = self.curves.get(LOSS)
        return losses[-1][:2] if losses else (0, 0)

    def last_value(self, curve: str, pick: Any = None) -> float | None:
        """Returns the last finite value of a curve, or the one that `pick` (min, max) chooses.

        Returns None if the curve has no finite value.
        """
        values = (point.value for point in self.curves.get(curve, []))
        numbers = [v for v in values if v is not None and np.isfinite(v)]
        return (pick(numbers) if pick else numbers[-1]) if numbers else None


def read_run(runs_dir: Path, name: str) -> RunRecord:
    """Reads one run. Raises UserError if it does not exist, and OSError if a file is unreadable."""
    folder = find_run(runs_dir, name)
    metrics = folder / "metrics.jsonl"
    curves: defaultdict[str, list[Point]] = defaultdict(list)
    found: list[tuple[str, float | None]]
    experts = None
    accounts, steps_s, late_s = starts_of(folder / STARTS), 0.0, 0.0
    for line in rows_of(metrics) if metrics.exists() else ():
        try:
            if COUNTS in line:
                experts = int(line["step"]), _counts(line[COUNTS])
                continue
            if "eval_loss" in line:
                found = [(key, v) for key, v in figures_of(line).items() if _is_held_out(key)]
            else:
                found = [(curve, value(line, key)) for key, curve in STEP_FIGURES.items()]
                if TERMS in line:
                    found += [each for each in figures_of(line).items() if _is_term(each[0])]
                if "experts" in line:
                    found.append((LOAD, max(line["experts"]["load"].values())))
            for curve, figure in found:
                curves[curve].append(Point(line["step"], line["tokens"], figure))
            steps_s += seconds_of(line)
            if accounts and line["step"] > accounts[-1].step:  # a step after the last summary
                late_s += float(line.get("step_time_s") or 0.0)
        except DAMAGED:  # a torn line, or a kind of line that is not drawn
            continue
    summary = read_json(folder / "summary.json")
    starts = _starts(folder / STARTS, curves.get(LOSS, []))
    if starts and summary.get("started") != starts[-1]["started"]:
        summary = {}  # the summary belongs to an earlier start
    state = summary.get("status") or "killed (it left no summary)"
    if error := summary.get("error"):
        state = f"{state}: {error}"
    if is_running(folder):
        state, summary = "running", {}
    places = read_json(folder / PLACEMENT_FILE).get("ranks", [])
    if not places and starts and (starts[-1].get("layout") or {}).get("world_size") == 1:
        alone = dict.fromkeys(("rank", "local_index", *DIMENSIONS), 0)
        places = [alone | {"host": starts[-1].get("host", "this host")}]
    ranks = [
        {key: place[key] if key == "host" else int(place[key]) for key in place} for place in places
    ]
    heard_of = accounts[-1].account + late_s if accounts else None
    spent = goodput(accounts, steps_s, heard_of)
    configs = _configs(folder)
    how = (state, spent, accounts, experts)
    return RunRecord(name, curves, starts, configs, summary, ranks, *how)


def _counts(line: Mapping[str, Any]) -> dict[str, list[int]]:
    return {layer: [int(n) for n in counts] for layer, counts in line.items()}


def _is_held_out(figure: str) -> bool:
    is_of_set = figure.startswith("valid/") and figure.endswith("/loss")
    return figure.startswith("eval/loss") or is_of_set or _is_term(figure)


def _is_term(figure: str) -> bool:
    """Returns whether a figure is the mean of a named term of a user's own loss."""
    return figure.startswith((f"{TERMS}/", f"{EVAL_TERMS}/"))


def _starts(path: Path, losses: Sequence[Point]) -> list[dict[str, Any]]:
    lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
    starts: list[dict[str, Any]] = []
    for line in lines:
        try:
            start = json.loads(line)
            first, at = int(start["first_step"]), str(start["started"])
            before = bisect_left(losses, first, key=lambda point: point.step)
            tokens = losses[before - 1].tokens if before else 0
            starts.append({**start, "first_step": first, "started": at, "tokens": tokens})
        except DAMAGED:
            continue  # a crash has torn this line
    return starts


def _configs(folder: Path) -> list[Config]:
    """Returns the configurations of a run that can be read, the oldest first."""
    found = []
    for path in config_files(folder):
        with suppress(*NO_CONFIG, OSError):
            found.append(read_config(path))
    return found


def thinned(points: Sequence[Point]) -> dict[str, Any]:
    """Returns a curve for the page, reduced to at most COLUMNS points.

    The lists `s`, `t` and `y` have the step, the tokens and the value of each point. If the curve
    is reduced, a point has the mean of several values, and `low` and `high` have the lowest and
    the highest of them, so that spikes stay visible. `odd` lists points with NaN or an infinity.
    """
    values = np.array([np.nan if p.value is None else p.value for p in points], dtype=float)
    edges = np.linspace(0, len(values), min(len(values), COLUMNS) + 1).astype(int).tolist()
    found: dict[str, Any] = {"s": [], "t": [], "y": [], "low": [], "high": [], "odd": []}
    for begin, end in pairwise(edges):
        part = values[begin:end]
        numbers = part[np.isfinite(part)]
        for name, pick in (("y", np.mean), ("low", np.min), ("high", np.max)):
            found[name].append(float(f"{pick(numbers):.6g}") if numbers.size else None)
        step, tokens, _ = points[end - 1]
        found["s"].append(step)
        found["t"].append(tokens)
        shown = (point.value for point in points[begin:end])
        odd = (v for v in shown if v is not None and not np.isfinite(v))
        found["odd"] += [[step, tokens, str(v)] for v in list(odd)[:1]]
    if len(values) <= COLUMNS:  # each point is a single step, so these would only repeat `y`
        del found["low"], found["high"]
    return found


# The page


def page_of(runs: Sequence[RunRecord], mark: str) -> str:
    """Returns the page as HTML, with `mark` as the attribute that identifies pages of `report`."""
    names = [escape(run.name) for run in runs]
    title = " · ".join(names)
    dots = [f"<i class='dot' style='background:{colour(i)}'></i>" for i in range(len(runs))]
    labels = [f"<b>{dot}{name}</b>" for dot, name in zip(dots, names, strict=True)]
    controls = "".join(
        f"<label><input type='checkbox' class='shown' value='{i}' checked> {dot}{name}</label>"
        for i, (dot, name) in enumerate(zip(dots, names, strict=True))
    )
    data = json.dumps(_data(runs), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    script = Path(__file__).with_name("page.js").read_text("utf-8")
    body = f"""<h1>{title}</h1>
{section("Runs", "", _overview(runs, labels))}
<form class='controls' onsubmit='return false'><fieldset><legend>x axis</legend>
<label><input type='radio' name='axis' value='s' checked> steps</label>
<label><input type='radio' name='axis' value='t'> tokens</label></fieldset>
<fieldset><legend>y axis</legend><label><input type='checkbox' id='log'> logarithmic losses and
norms</label></fieldset><fieldset><legend>runs</legend>{controls}</fieldset></form>
<noscript><p>This page's own script draws the curves, but scripts are switched off here.</p>
</noscript>
<section><h2>Curves</h2><p class='muted'>Point at a chart, or choose it with Tab and move with the
arrow keys. Dashed: a restart from a checkpoint. ✕: a value that is not a finite number.</p>
<div class='charts' id='charts'></div></section>
{"".join(_sections(runs, labels))}
<footer class='muted'>A curve of more than {COLUMNS:,} steps shows means, with the lowest and the
highest values in a paler colour.</footer>
<script type='application/json' id='data'>{data}</script><script>{script}</script>"""
    head = f"<meta http-equiv='Content-Security-Policy' content=\"{SHARED}\"><style>{STYLE}</style>"
    return whole_page(mark, f"Report: {title}", body, head)


def _data(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Returns the data for page.js: the runs, and for each chart the curves of all runs."""
    others = {*STEP_FIGURES.values(), LOAD}
    held_out = sorted({name for run in runs for name in run.curves} - others)
    order = [*list(CHARTS)[:1], *held_out, *list(CHARTS)[2:]]
    charts = []
    for name in order:
        heading, unit = CHARTS.get(name, (_of_set(name), "" if _is_term(name) else NATS))
        if unit == NATS:
            unit = " or ".join(dict.fromkeys(_loss_unit(run) for run in runs))
        curves = [thinned(run.curves[name]) if name in run.curves else None for run in runs]
        if any(curves):
            is_loss = name.startswith(LOGARITHMIC)
            charts.append({"name": heading, "unit": unit, "log": is_loss, "curves": curves})
    return {
        "runs": [
            {
                "name": run.name,
                "colour": colour(i),
                "restarts": [
                    {"s": start["first_step"] - 1, "t": start["tokens"], "at": _time(start)}
                    for start in run.starts[1:] or run.starts
                    if len(run.starts) > 1 or start["first_step"] > 1
                ],
            }
            for i, run in enumerate(runs)
        ],
        "charts": charts,
    }


def _loss_unit(run: RunRecord) -> str:
    return units_of(run.configs[-1].model).loss if run.configs else NATS


def _of_set(figure: str) -> str:
    """Returns the heading of the chart for a held-out set, from the curve's name in loggers.

    It may also be the name of a term.
    """
    if _is_term(figure):
        key, _, term = figure.partition("/")
        return f"{'Held-out term' if key == EVAL_TERMS else 'Term'} {term}"
    if figure.startswith("valid/"):
        return f"Validation loss of {figure.removeprefix('valid/').removesuffix('/loss')}"
    return f"Held-out loss of {figure.removeprefix('eval/loss of ')}"


def _overview(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    head = ["run", "state", "model", "layout", "steps", "tokens", "last loss", "held-out, best"]
    head += ["tokens/s", "MFU", "goodput", "last start took"]
    rows = []
    for run, label in zip(runs, labels, strict=True):
        config, summary = run.configs[-1] if run.configs else None, run.summary
        speed, mfu = summary.get("tokens_per_s") or {}, summary.get("mfu") or {}
        steps, tokens = run.last
        size = f", {si(summary['parameters'])}" if "parameters" in summary else ""
        cells = [
            f"{config.model._target_ or config.model.name}{size}, {config.precision.name}"
            if config
            else "–",
            _layout_words(run),
            f"{steps:,}" + (f" of {total:,}" if (total := _length(run)) else ""),
            si(tokens).replace("  ", " "),
            _number(run.last_value(LOSS), ".4f"),
            _best(run),
            _number(speed.get("mean"), ",.0f"),
            _number(mfu.get("value"), ".1%"),
            _number(run.goodput.value if run.goodput else None, ".1%"),
            duration(summary["wall_time_s"]) if "wall_time_s" in summary else "–",
        ]
        rows.append([label, escape(run.state), *map(escape, cells)])
    return html_table(head, rows)


def _length(run: RunRecord) -> int | None:
    """Returns the step at which the last start should end, or None if it is unknown."""
    if run.starts and "last_step" in run.starts[-1]:
        return int(run.starts[-1]["last_step"])
    config = run.configs[-1] if run.configs else None
    return config.train_steps if config is not None and config.train.epochs is None else None


def _best(run: RunRecord) -> str:
    """Returns the lowest held-out loss, or the lowest loss of each validation set, as text."""
    if (best := run.last_value("eval/loss", min)) is not None:
        return f"{best:.4f}"
    sets = [name for name in run.curves if name.startswith("valid/")]
    named = ((name.split("/")[1], run.last_value(name, min)) for name in sets[:MOST_SETS])
    more = ["…"] if len(sets) > MOST_SETS else []
    return ", ".join([f"{name} {_number(best, '.4f')}" for name, best in named] + more) or "–"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _layout_words(run: RunRecord) -> str:
    layout: dict[str, int] = next(
        (s["layout"] for s in reversed(run.starts) if s.get("layout")), {}
    )
    ranks = layout.get("world_size") if len(run.ranks) > 1 else None
    return _dims(layout) + (f" = {ranks} ranks" if ranks else "")


def _dims(layout: Mapping[str, int]) -> str:
    """Formats the dimensions of a layout that are larger than 1."""
    used = (f"{d} {layout[d]}" for d in ("tp", "pp", "cp", "dp") if layout.get(d, 1) > 1)
    words = " × ".join(used) or ("one rank" if layout else "–")
    return f"{words}, ep {layout['ep']}" if layout.get("ep", 1) > 1 else words


def _sections(runs: Sequence[RunRecord], labels: Sequence[str]) -> Iterable[str]:
    """Yields the sections of tables: differing keys, starts, times, memory, maps and experts."""
    if len(runs) > 1:
        pairs = zip(labels, runs, strict=True)
        known = {label: run.configs[-1] for label, run in pairs if run.configs}
        table = _differing(["key", *known], list(known.values()))
        said = "" if table else "No key differs, except run and runs_dir."
        yield section("What differs", said, table)
    yield _starts_table(runs, labels)
    for heading, part, said in (
        ("Where the time of all starts went", _goodput, "It comes from starts.jsonl."),
        ("Where a step's time goes, on average", _times, "It comes from summary.json."),
        ("Memory of the ranks", _memory, "It is measured on accelerators only."),
        ("Layout and map", _map, "It comes from placement.json."),
        ("Tokens of the experts", _experts, ""),
    ):
        shown = [(label, part(run)) for label, run in zip(labels, runs, strict=True)]
        found = [f"<h3>{label}</h3>{html}" for label, html in shown if html]
        missing = ", ".join(r.name for r, (_, html) in zip(runs, shown, strict=True) if not html)
        if (
            not said
        ):  # models without experts do not have this part, so its absence needs no explanation
            missing = ""
            if not found:
                continue
        yield section(heading, f"Not known for {missing}. {said}" if missing else "", *found)


def _differing(head: Sequence[str], configs: Sequence[Config]) -> str:
    """Returns a table of the keys whose values differ, or "" if there are none."""
    trees = [flat(saved_tree(config)) for config in configs]
    keys = [key for key in sorted({*()}.union(*trees)) if key not in NOT_COMPARED]
    rows = [
        [f"<code>{key}</code>", *(escape(show(tree.get(key))) for tree in trees)]
        for key in keys
        if any(tree.get(key) != trees[0].get(key) for tree in trees)
    ]
    return html_table(head, rows) if rows else ""


def _starts_table(runs: Sequence[RunRecord], labels: Sequence[str]) -> str:
    rows, changes = [], ""
    tells = any("cause" in start for run in runs for start in run.starts)
    for run, label in zip(runs, labels, strict=True):
        for number, start in enumerate(run.starts, 1):
            first, where = f"{start['first_step']:,}", start.get("host", "–")
            cells = [f"{number}", _time(start), first, _dims(start.get("layout") or {}), where]
            rows.append([label, *map(escape, [*cells, _after(start)][: len(cells) + tells])])
        for before, after in pairwise(run.configs):
            if table := _differing(("key", "before", "after"), (before, after)):
                changes += f"<h3>{label} resumed with changed keys</h3>{table}"
    head = ("run", "start", "at", "first step", "layout", "host of rank 0", *["after"] * tells)
    return section("Starts", "", html_table(head, rows) if rows else "", changes)


def _after(start: Mapping[str, Any]) -> str:
    """Returns what the start followed, such as "node on node3, replace", or "–"."""
    if "cause" not in start:
        return "–"
    host = f" on {start['cause_host']}" if "cause_host" in start else ""
    decision = f", {start['decision']}" if "decision" in start else ""
    return f"{NAMES_OF_CAUSES.get(start['cause'], start['cause'])}{host}{decision}"


def _time(start: Mapping[str, Any]) -> str:
    """Returns the time of a start in UTC, such as "2026-11-25 03:19:55 UTC"."""
    return str(start["started"]).replace("T", " ").replace("+00:00", " UTC")


def _times(run: RunRecord) -> str:
    ranks = (run.summary.get("breakdown") or {}).get("ranks", [])
    parts = [{kind: 1e3 * rank.get(kind, 0.0) for kind in KINDS} for rank in ranks]
    return _bars(run, parts, "ms", [f"{1e3 * rank['step']:.3g} ms" for rank in ranks])


def _goodput(run: RunRecord) -> str:
    """Returns a bar of the wall time of all starts by activity, or "" if it is unknown."""
    if run.goodput is None or not run.goodput.wall_s:
        return ""
    seconds = {NAMES_OF_PARTS[part]: run.goodput.seconds[part] for part in PARTS}
    words = " · ".join(f"{part} {duration(one)}" for part, one in seconds.items() if one >= 1.0)
    bar = stacked_bar(seconds, max(run.goodput.wall_s, sum(seconds.values())), "s")
    table = html_table(
        ("wall time", "", ""), [[escape(duration(run.goodput.wall_s)), bar, escape(words)]]
    )
    nodes = len({str(rank["host"]) for rank in run.ranks}) or 1
    days = run.configs[-1].recovery.node_days if run.configs else RecoveryConfig().node_days
    lost = lost_time(run.goodput, run.accounts, days, nodes, max(1, len(run.ranks)))
    return bar_key(seconds) + table + lost


def _memory(run: RunRecord) -> str:
    ranks = (run.summary.get("memory") or {}).get("ranks", [])
    used = [(rank["allocated"] / 1e9, rank["reserved"] / 1e9) for rank in ranks]
    parts = [{"allocated": one, "reserved beyond": max(all - one, 0.0)} for one, all in used]
    return _bars(run, parts, "GB", [f"{one:.3g} of {all:.3g} GB reserved" for one, all in used])


def _bars(
    run: RunRecord, parts: Sequence[Mapping[str, float]], unit: str, texts: Sequence[str]
) -> str:
    """Returns a table with a bar for each rank, or for the MOST_RANKS ranks with the longest bars.

    Args:
        parts: the parts of each rank's bar, by name.
        unit: the unit of the parts.
        texts: the text beside each bar.
    """
    if not parts:
        return ""
    longest = sorted(range(len(parts)), key=lambda rank: -sum(parts[rank].values()))
    most = sum(parts[longest[0]].values())
    rows = [
        [_rank_name(run, rank), stacked_bar(parts[rank], most, unit), texts[rank]]
        for rank in sorted(longest[:MOST_RANKS])
    ]
    return bar_key(parts[0]) + html_table(("rank", "", ""), rows) + _cut(parts, MOST_RANKS)


def _map(run: RunRecord) -> str:
    """Returns a table of the hosts and their ranks, which are coloured by pipeline stage."""
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    for rank in run.ranks[:MOST_PLACES]:
        hosts.setdefault(str(rank["host"]), []).append(rank)
    rows = []
    for host, ranks in hosts.items():
        boxes = "".join(
            f"<b style='border-color:{colour(rank['pp'])}' title='place {rank['local_index']} of "
            f"the host'>{_rank_name(run, rank['rank'])}</b>"
            for rank in sorted(ranks, key=lambda rank: rank["local_index"])
        )
        rows.append([escape(host), f"<div class='map'>{boxes}</div>"])
    head = ("host", f"ranks: {escape(_layout_words(run))}")
    return html_table(head, rows) + _cut(run.ranks, MOST_PLACES) if rows else ""


def _experts(run: RunRecord) -> str:
    """Returns a table of layers × experts, coloured by an expert's tokens relative to the mean.

    Returns "" if no step recorded these tokens.
    """
    if run.experts is None:
        return ""
    step, by_layer = run.experts
    rows = []
    for layer, counts in by_layer.items():
        mean = max(1.0, sum(counts) / len(counts))
        boxes = "".join(
            f"<i style='background:{_heat(count / mean)}' title='layer {layer}, expert {e}: "
            f"{count:,} tokens, {count / mean:.2f} of the mean'></i>"
            for e, count in enumerate(counts)
        )
        rows.append(
            [f"layer {layer}", f"<div class='heat'>{boxes}</div>", f"{max(counts) / mean:.2f}"]
        )
    key = "".join(
        f"<i style='background:{_heat(ratio)}'></i>{ratio:g} " for ratio in (0, 0.5, 1, 1.5, 2)
    )
    words = (
        f"<p class='muted'>Step {step:,}. Tokens over the mean: <span class='heat'>{key}</span></p>"
    )
    layers = list(by_layer.values())
    experts = math.gcd(*map(len, layers))
    sizes = [ep for ep in range(2, experts + 1) if experts % ep == 0]
    loads = [f"ep={ep}: {max(rank_load(counts, ep) for counts in layers):.2f}" for ep in sizes]
    if loads:
        words += (
            "<p class='muted'>Tokens of the fullest rank's experts over the mean (the load of "
            f"<code>plan.load</code>), with {', '.join(loads)}.</p>"
        )
    return words + html_table(("", "experts from 0 on", "fullest"), rows)


def _heat(ratio: float) -> str:
    """Returns the colour for the ratio of tokens to their mean: blue below 1, orange above 1."""
    distance = min(1.0, abs(ratio - 1.0))
    red, green, blue = (59, 125, 196) if ratio < 1 else (222, 120, 30)
    return f"rgba({red},{green},{blue},{0.08 + 0.92 * distance:.2f})"


def _rank_name(run: RunRecord, number: int) -> str:
    place = run.ranks[number] if number < len(run.ranks) else {}
    used = [d for d in ("pp", "dp", "cp", "tp") if any(rank[d] for rank in run.ranks)]
    where = " ".join(f"{d}{place[d]}" for d in used)
    return f"rank {number}" + (f" · {where}" if where else "")


def _cut(ranks: Sequence[Any], most: int) -> str:
    return f"<p class='muted'>{most} of {len(ranks):,} ranks.</p>" if len(ranks) > most else ""
