"""Runs `parallel3d checkpoint ls`: reads names, sizes and manifests, without torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    LATEST,
    DamagedCheckpoint,
    Manifest,
    UnreadableCheckpoint,
    list_checkpoints,
    list_damaged,
    read_manifest,
    reason,
    step_folder,
    step_of,
)
from parallel3d.config.schema import Config
from parallel3d.errors import UserError, nearest_hint
from parallel3d.files import open_regular, plain, read_bounded
from parallel3d.run.directory import CONFIG_FILE, NO_CONFIG, TEMPORARY, typed_config

HEADINGS = ("run", "step", "age", "size", "layout", "loss", "state")
RIGHT = ("step", "age", "size", "loss")


def run_names(runs_dir: Path) -> list[str]:
    names = (path.parent.name for path in runs_dir.glob(f"*/{CONFIG_FILE}"))
    return sorted(name for name in names if not name.startswith(TEMPORARY))


def find_run(runs_dir: Path, run: str) -> Path:
    """Returns the folder of a run. Raises UserError, naming the nearest, if there is none."""
    known = run_names(runs_dir)
    if run in known:
        return runs_dir / run
    none = f", which has none (runs_dir={runs_dir})"
    hint = nearest_hint(run, known, "run=") if known else none
    raise UserError(f"run={run} is not a run in {runs_dir}{hint}")


def find_checkpoint(runs_dir: Path, run: str, step: int | None) -> Path:
    """Returns a run's checkpoint, by default the newest. Raises UserError with the nearest step."""
    run_dir = find_run(runs_dir, run)
    folders = list_checkpoints(run_dir)
    if not folders:
        raise UserError(f"run={run} has no checkpoint in {run_dir}")
    if step is None:
        return folders[0]
    found = [folder for folder in folders if folder.name == step_folder(step)]
    if not found:
        steps = [step_of(folder) for folder in folders]
        close = min(steps, key=lambda there: abs(there - step))
        raise UserError(f"run={run} has no checkpoint of step={step}; the nearest is step={close}")
    return found[0]


def folder_of(runs_dir: Path, word: str) -> Path:
    """Returns the checkpoint that `run`, or `run@step`, names. Raises UserError."""
    run, at, step = word.rpartition("@")
    if not at:
        return find_checkpoint(runs_dir, word, None)
    if not step.isascii() or not step.isdigit():
        raise UserError(f"{word}: behind the @ must stand a step, as in {run}@100")
    return find_checkpoint(runs_dir, run, int(step))


def check_ema(folder: Path, key: str) -> None:
    """Raises UserError about `key` if a checkpoint has no average of the weights."""
    with damage_refused(title(folder)):
        if not read_manifest(folder).has_ema:
            raise UserError(
                f"{key}=ema: {title(folder)} has no average of the weights, as it was trained with "
                f"optim.ema_decay=null; give {key}=model instead"
            )


def title(folder: Path) -> str:
    return f"run={folder.parents[1].name} step={step_of(folder)}"


def list_runs(runs_dir: Path, run: str | None) -> int:
    """Prints a row for each checkpoint, damaged ones included. Returns the exit code."""
    runs = [find_run(runs_dir, run)] if run else [runs_dir / name for name in run_names(runs_dir)]
    rows = [row for run_dir in runs for row in _rows(run_dir)]
    if not rows:
        where = runs[0] if run else runs_dir
        print(f"parallel3d: no checkpoint in {where}", file=sys.stderr)
        return 0
    print(table(HEADINGS, rows, RIGHT))
    return 0


def _rows(run_dir: Path) -> Iterable[dict[str, str]]:
    folders = list_checkpoints(run_dir)
    losses = _losses(run_dir, {step_of(folder) for folder in folders})
    newest = _pointer(run_dir)
    for folder in folders:
        row = {"run": run_dir.name, "step": str(step_of(folder))}
        row |= _age_and_size(folder) | {"loss": losses.get(step_of(folder), "")}
        try:
            manifest = read_manifest(folder)
        except (DamagedCheckpoint, UnreadableCheckpoint) as problem:
            yield row | {"layout": "", "state": condition(problem)}
            continue
        row["layout"] = layout(manifest.config)
        yield row | {"state": "whole, newest" if folder.name == newest else "whole"}
    for folder in list_damaged(run_dir):
        row = {"run": run_dir.name, "step": "", "layout": "", "loss": ""} | _age_and_size(folder)
        yield row | {"state": f"damaged, set aside as {folder.name}"}


def read_with_config(folder: Path) -> tuple[Manifest, Config]:
    """Returns a checkpoint's manifest and its configuration. Raises UserError."""
    with damage_refused(title(folder), "; parallel3d checkpoint ls shows the others"):
        manifest = read_manifest(folder)
    try:
        return manifest, typed_config(manifest.config)
    except NO_CONFIG as error:
        why = plain(str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise UserError(f"{title(folder)} has a configuration that cannot be read: {why}") from None


def condition(problem: Exception) -> str:
    """Returns `damaged: …`, or `unreadable: …`, which may pass."""
    word = "damaged" if isinstance(problem, DamagedCheckpoint) else "unreadable"
    return f"{word}: {problem}"


@contextmanager
def damage_refused(what: str, advice: str = "") -> Iterator[None]:
    """Raises a damaged or unreadable checkpoint inside as a UserError about `what`."""
    try:
        yield
    except (DamagedCheckpoint, UnreadableCheckpoint) as problem:
        raise UserError(f"{what} is {condition(problem)}{advice}") from None


def layout(config: Mapping[str, Any]) -> str:
    """Returns `tp=2 pp=2 dp=1 zero=1`, without what is no number in an untrusted manifest."""
    sizes = {key: config.get(key) for key in ("tp", "pp", "cp", "dp", "vpp", "zero")}
    neutral = {"cp": 1, "vpp": 1, "zero": 0}
    shown = {k: v for k, v in sizes.items() if type(v) is int and neutral.get(k) != v}
    return " ".join(f"{k}={v}" for k, v in shown.items())


def _losses(run_dir: Path, steps: set[int]) -> dict[int, str]:
    """Returns the training losses of these steps in metrics.jsonl; of repeated steps the last."""
    found: dict[int, str] = {}
    try:
        with (
            open_regular(run_dir / "metrics.jsonl") as descriptor,
            open(descriptor, encoding="utf-8", errors="replace", closefd=False) as lines,
        ):
            for line in lines:
                try:
                    record = json.loads(line)
                    if record["step"] in steps:
                        found[record["step"]] = f"{record['loss']:.4f}"
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue  # a header, an evaluation, or an incomplete line of a killed run
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _log_unreadable(run_dir / "metrics.jsonl", error)
    return found


def _pointer(run_dir: Path) -> str:
    try:
        return read_bounded(run_dir / CHECKPOINTS / LATEST, 1000).decode().strip()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        _log_unreadable(run_dir / CHECKPOINTS / LATEST, error)
        return ""


def _log_unreadable(path: Path, error: Exception) -> None:
    why = reason(error) if isinstance(error, OSError) else str(error)
    print(f"parallel3d: {path} cannot be read ({plain(why)})", file=sys.stderr)


def _age_and_size(folder: Path) -> dict[str, str]:
    """Returns empty texts if the folder cannot be read."""
    try:
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        return {"age": _age(folder.stat().st_mtime), "size": _size(size)}
    except OSError as error:
        _log_unreadable(folder, error)
        return {"age": "", "size": ""}


def _size(count: int) -> str:
    """Formats bytes in powers of 1000: `3.1 MB`."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < 1000 or unit == "PB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _age(since: float) -> str:
    seconds = max(0.0, datetime.now(UTC).timestamp() - since)
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def table(headings: Iterable[str], rows: list[dict[str, str]], right: Iterable[str] = ()) -> str:
    """Aligns rows under their headings; the columns `right` to the right."""
    headings, right = list(headings), set(right)
    rows = [{h: plain(row[h]) for h in headings} for row in rows]
    rows = [dict(zip(headings, headings, strict=True)), *rows]
    widths = {h: max(len(row[h]) for row in rows) for h in headings}
    lines = [
        "  ".join(
            row[h].rjust(widths[h]) if h in right else row[h].ljust(widths[h]) for h in headings
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
