"""Reads what a run's directory tells about it: curves, starts, configuration, how it ended."""

from __future__ import annotations

import fcntl
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from parallel3d.config.schema import Config
from parallel3d.errors import UserError, nearest
from parallel3d.files import no_link
from parallel3d.metrics.jsonl import rows_of, value
from parallel3d.metrics.loggers import NAMES, figures_of
from parallel3d.metrics.recorder import STARTS
from parallel3d.run.directory import (
    CONFIG_FILE,
    NO_CONFIG,
    PLACEMENT_FILE,
    config_files,
    read_config,
)
from parallel3d.topology.layout import DIMENSIONS

COLUMNS = 1000  # places of a curve on the page
DAMAGED = (KeyError, TypeError, ValueError, AttributeError)  # raised by a line that is not whole
STEP_FIGURES = {key: NAMES[key] for key in ("loss", "grad_norm", "lr", "tokens_per_s")}
LOSS = NAMES["loss"]


@dataclass
class Points:
    """One curve: steps, tokens so far and values; None where there is no number."""

    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)

    def add(self, step: int, tokens: int, figure: float | None) -> None:
        self.steps.append(step)
        self.tokens.append(tokens)
        self.values.append(figure)


@dataclass(frozen=True)
class RunRecord:
    """One run as its directory tells it."""

    name: str
    curves: Mapping[str, Points]  # by a logger's names
    starts: list[dict[str, Any]]  # with first_step, tokens before it, started, host, layout
    configs: list[Config]  # of the first start, and of later ones with other keys
    summary: Mapping[str, Any]  # {} unless it is of the last start
    ranks: list[dict[str, Any]]  # of placement.json
    state: str  # how the last start ended

    @property
    def last(self) -> tuple[int, int]:
        """The last step that has a line, and the tokens until then; zeros without one."""
        losses = self.curves.get(LOSS)
        return (losses.steps[-1], losses.tokens[-1]) if losses else (0, 0)

    def last_value(self, curve: str, pick: Any = None) -> float | None:
        """Returns the last number of a curve, or the one that `pick` chooses of all."""
        points = self.curves.get(curve, Points())
        numbers = [v for v in points.values if v is not None and np.isfinite(v)]
        return (pick(numbers) if pick else numbers[-1]) if numbers else None


def read_run(runs_dir: Path, name: str) -> RunRecord:
    """Reads one run. Raises UserError if there is none, and OSError."""
    folder = runs_dir / name
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(_missing(runs_dir, name))
    metrics = folder / "metrics.jsonl"
    curves: defaultdict[str, Points] = defaultdict(Points)
    found: list[tuple[str, float | None]]
    for line in rows_of(metrics) if metrics.exists() else ():
        try:
            if "eval_loss" in line:
                found = [(key, v) for key, v in figures_of(line).items() if _is_held_out(key)]
            else:
                found = [(curve, value(line, key)) for key, curve in STEP_FIGURES.items()]
            for curve, figure in found:
                curves[curve].add(line["step"], line["tokens"], figure)
        except DAMAGED:  # also of a blend's parts, which are not drawn
            continue
    summary = _json(folder / "summary.json")
    starts = _starts(folder / STARTS, summary, curves.get(LOSS, Points()))
    if starts and summary.get("started") != starts[-1]["started"]:
        summary = {}  # of an earlier start
    state = summary.get("status") or "killed (it left no summary)"
    if error := summary.get("error"):
        state = f"{state}: {error}"
    if _is_locked(folder / CONFIG_FILE):
        state, summary = "running", {}
    places = _json(folder / PLACEMENT_FILE).get("ranks", [])
    if not places and starts and (starts[-1].get("layout") or {}).get("world_size") == 1:
        alone = dict.fromkeys(("rank", "local_index", *DIMENSIONS), 0)
        places = [alone | {"host": starts[-1].get("host", "this host")}]
    ranks = [
        {key: place[key] if key == "host" else int(place[key]) for key in place} for place in places
    ]
    return RunRecord(name, curves, starts, _configs(folder), summary, ranks, state)


def _missing(runs_dir: Path, name: str) -> str:
    there = sorted(path.parent.name for path in runs_dir.glob(f"*/{CONFIG_FILE}"))
    if not there:
        return f"run={name}: {runs_dir} holds no runs; give the folder that does as runs_dir="
    close = nearest(name, there) or there[-1]
    return f"run={name} must be one of the runs in {runs_dir}; the nearest is run={close}"


def _is_held_out(figure: str) -> bool:
    is_of_set = figure.startswith("valid/") and figure.endswith("/loss")
    return figure.startswith("eval/loss") or is_of_set


def _json(path: Path) -> dict[str, Any]:
    """Returns the object in a file; {} without one."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _starts(path: Path, summary: Mapping[str, Any], losses: Points) -> list[dict[str, Any]]:
    """Returns the starts; of a run older than starts.jsonl, the one that the summary is of."""
    lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
    starts: list[dict[str, Any]] = []
    for line in lines:
        try:
            start = json.loads(line)
            first, at = int(start["first_step"]), str(start["started"])
            starts.append({**start, "first_step": first, "started": at})
        except DAMAGED:
            continue  # torn by a crash
    if not starts and "first_step" in summary:
        starts = [{key: summary.get(key) for key in ("first_step", "started", "layout")}]
    for start in starts:
        before = int(np.searchsorted(losses.steps, start["first_step"]))
        start["tokens"] = losses.tokens[before - 1] if before else 0
    return starts


def _configs(folder: Path) -> list[Config]:
    """Returns the readable configurations of a run, oldest first."""
    found = []
    for path in config_files(folder):
        with suppress(*NO_CONFIG, OSError):
            found.append(read_config(path))
    return found


def _is_locked(path: Path) -> bool:
    """Returns whether a process on this host, or on this file system's others, has the run."""
    try:
        descriptor = no_link(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False


def thinned(points: Points) -> dict[str, Any]:
    """Returns a curve for the page: steps, tokens and value of at most COLUMNS places.

    A place that stands for several points has their mean, and beside it the lowest and the highest,
    so that spikes stay. `odd`: places with NaN or an infinity.
    """
    values = np.array([np.nan if v is None else v for v in points.values], dtype=float)
    edges = np.linspace(0, len(values), min(len(values), COLUMNS) + 1).astype(int).tolist()
    found: dict[str, Any] = {"s": [], "t": [], "y": [], "low": [], "high": [], "odd": []}
    for begin, end in pairwise(edges):
        part = values[begin:end]
        numbers = part[np.isfinite(part)]
        for name, pick in (("y", np.mean), ("low", np.min), ("high", np.max)):
            found[name].append(float(f"{pick(numbers):.6g}") if numbers.size else None)
        step, tokens = points.steps[end - 1], points.tokens[end - 1]
        found["s"].append(step)
        found["t"].append(tokens)
        odd = (v for v in points.values[begin:end] if v is not None and not np.isfinite(v))
        found["odd"] += [[step, tokens, str(v)] for v in list(odd)[:1]]
    if len(values) <= COLUMNS:  # each place is one point
        del found["low"], found["high"]
    return found
