"""Shows what interruptions cost a run, beside what the model of saves and failures expects."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from parallel3d.html import html_table
from parallel3d.loop.failure_cost import (
    FailureCosts,
    FailureRate,
    Waste,
    expected_waste,
    failure_rate,
    span,
)
from parallel3d.metrics.lost_time import NAMES_OF_CAUSES, START_UP, Cost, total
from parallel3d.metrics.starts import Goodput, Start, failures_of
from parallel3d.text import duration

NOTICING, RESTART = ("detect",), ("end", "probe", "decide", "start", *START_UP)
COLUMNS = {
    "repeated steps": ("lost",),
    "noticing": NOTICING,
    "restart": RESTART,
    "queue": ("queue",),
    "gap": ("gap",),
}


def lost_time(
    spent: Goodput, starts: Sequence[Start], node_days: float, nodes: int, ranks: int
) -> str:
    """Returns the tables of a run, or "" if it was never interrupted and ran on one node."""
    rate = failure_rate(node_days, nodes, failures_of([*starts]), ranks)
    failed = any(cost.is_failure(cause) for cause, cost in spent.costs.items())
    model = _model(spent, starts, rate) if failed or nodes > 1 else ""
    return _by_cause(spent) + model


def _by_cause(spent: Goodput) -> str:
    if not spent.costs:
        return ""
    whole = total(spent.costs.values())
    shown = {name: of for name, of in COLUMNS.items() if whole.sum(of) > 0}
    rows = [
        [
            escape(NAMES_OF_CAUSES[cause]),
            str(cost.times),
            escape(duration(cost.sum())),
            f"{cost.sum() / spent.wall_s:.2%}",
            *(_seconds(cost.sum(of)) for of in shown.values()),
        ]
        for cause, cost in spent.costs.items()
    ]
    head = ("lost time by cause", "times", "in all", "of the wall time", *shown)
    return html_table(head, rows)


def _seconds(seconds: float) -> str:
    return escape(span(seconds)) if seconds > 0 else "–"


def measured(spent: Goodput, starts: Sequence[Start]) -> FailureCosts:
    """Returns what the model needs to know of a run; what failures took is the mean over them."""
    cost = _of_failures(spent)
    trained = spent.seconds["steps"] + cost.sum(["lost"])
    saves = sum(start.saves for start in starts)
    # What the last save took is known from the line after it, which a failure prevents.
    timed = sum(max(0, start.saves - (start.status is None)) for start in starts)
    delay = spent.seconds["checkpoint"] / timed if timed else None
    interval = trained / saves if saves else None
    if not cost.times:  # a restart takes what the first start took
        return FailureCosts(delay, interval, None, max(0.0, starts[0].at - starts[0].begun), None)
    known = cost.sum(NOTICING) > 0  # some launchers tell nothing of it
    return FailureCosts(
        delay,
        interval,
        cost.sum(NOTICING) / cost.times if known else None,
        cost.sum(RESTART) / cost.times,
        cost.sum(["queue"]) / cost.times,
    )


def _of_failures(spent: Goodput) -> Cost:
    """Returns what all failures have cost."""
    return total(cost for cause, cost in spent.costs.items() if cost.is_failure(cause))


def _model(spent: Goodput, starts: Sequence[Start], rate: FailureRate) -> str:
    """Returns a table of each part of the model: its own figure, its expected and its real share.

    The parts of a failure count once it has happened, and the model says how often that will be.
    """
    run = measured(spent, starts)
    expected = expected_waste(run, rate.seconds).of_wall
    cost, wall = _of_failures(spent), spent.wall_s
    real = Waste(
        spent.seconds["checkpoint"] / wall,
        cost.sum(["lost"]) / wall,
        cost.sum([*NOTICING, "gap"]) / wall,
        cost.sum(RESTART) / wall,
        cost.sum(["queue"]) / wall,
    )
    every = "" if run.interval is None else f" each {span(run.interval)}"
    half = None if run.interval is None else run.interval / 2
    lost = cost.sum(["lost"]) / cost.times if cost.times else None
    parts = (
        ("saves", _each(run.delay) + every),
        ("repeated steps", f"{_each(half)} expected, {_each(lost)} measured"),
        ("noticing a failure", _each(run.detect)),
        ("restart", _each(run.restart)),
        ("queue", _each(run.queue)),
    )
    rows = [
        [name, escape(each), _share(one), _share(other)]
        for (name, each), one, other in zip(parts, expected, real, strict=True)
    ]
    rows.append(["sum", "", _share(expected.sum), _share(real.sum)])
    head = ("saves and failures", "each time", "expected", "measured")
    words = (
        f"Expected are δ/T + (T/2 + D + R + Q)/M by this run's own times, as {rate.because}, in "
        "shares of the wall time"
    )
    return html_table(head, rows) + f"<p class='muted'>{escape(words)}.</p>"


def _each(seconds: float | None) -> str:
    return "–" if seconds is None else span(seconds)


def _share(share: float | None) -> str:
    return "–" if share is None else f"{share:.3%}"
