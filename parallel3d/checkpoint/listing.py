"""`parallel3d checkpoint ls`: what there is, at a glance. Names, sizes and manifests; no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    DAMAGED,
    LATEST,
    DamagedCheckpoint,
    list_checkpoints,
    read_manifest,
    step_folder,
)
from parallel3d.errors import UserError, nearest
from parallel3d.run_config import CONFIG_FILE
from parallel3d.run_directory import BEING_MADE

HEADINGS = ("run", "step", "age", "size", "layout", "loss", "state")
RIGHT = ("step", "age", "size", "loss")


def run_names(runs_dir: Path) -> list[str]:
    """The runs in a folder, by name."""
    names = (path.parent.name for path in runs_dir.glob(f"*/{CONFIG_FILE}"))
    return sorted(name for name in names if not name.startswith(BEING_MADE))


def find_run(runs_dir: Path, run: str) -> Path:
    """The folder of a run. Raises UserError, naming the nearest, if there is none."""
    known = run_names(runs_dir)
    if run in known:
        return runs_dir / run
    close = nearest(run, known)
    hint = f"; the nearest is run={close}" if close else ""
    if not known:
        hint = f", which has none (runs_dir={runs_dir})"
    raise UserError(f"run={run} is not a run in {runs_dir}{hint}")


def find_checkpoint(runs_dir: Path, run: str, step: int | None) -> Path:
    """The folder of a run's checkpoint, the newest if `step` is None.

    Raises UserError if there is none, naming the nearest step.
    """
    run_dir = find_run(runs_dir, run)
    folders = list_checkpoints(run_dir)
    if not folders:
        raise UserError(f"run={run} has no checkpoint in {run_dir}")
    if step is None:
        return folders[0]
    found = [folder for folder in folders if folder.name == step_folder(step)]
    if not found:
        steps = [step_number(folder) for folder in folders]
        close = min(steps, key=lambda there: abs(there - step))
        raise UserError(f"run={run} has no checkpoint of step={step}; the nearest is step={close}")
    return found[0]


def step_number(folder: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(folder.name.rpartition("-")[2])


def list_runs(runs_dir: Path, run: str | None) -> int:
    """Print a row for each checkpoint; those set aside as damaged too. Returns the exit code."""
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
    losses = _losses(run_dir, {step_number(folder) for folder in folders})
    newest = _pointer(run_dir)
    for folder in folders:
        row = {"run": run_dir.name, "step": str(step_number(folder))}
        row |= {"age": _age(folder.stat().st_mtime), "size": _size(_bytes_in(folder))}
        row["loss"] = losses.get(step_number(folder), "")
        try:
            manifest = read_manifest(folder)
            for file in manifest.files:
                if (size := (folder / file.name).stat().st_size) != file.size:
                    raise DamagedCheckpoint(f"{file.name} has {size} bytes instead of {file.size}")
        except (DamagedCheckpoint, OSError) as damage:
            yield row | {"layout": "", "state": f"damaged: {damage}"}
            continue
        row["layout"] = layout(manifest.config)
        yield row | {"state": "whole, newest" if folder.name == newest else "whole"}
    for folder in sorted((run_dir / CHECKPOINTS).glob(f"{DAMAGED}*")):
        row = {"run": run_dir.name, "step": "", "age": _age(folder.stat().st_mtime)}
        row |= {"size": _size(_bytes_in(folder)), "layout": "", "loss": ""}
        yield row | {"state": f"damaged, set aside as {folder.name}"}


def layout(config: Mapping[str, Any]) -> str:
    """The layout that a checkpoint was saved under, as it is typed: `tp=2 pp=2 dp=1 zero=1`."""
    sizes = {key: config.get(key) for key in ("tp", "pp", "cp", "dp", "vpp", "zero")}
    neutral = {"cp": 1, "vpp": 1, "zero": 0}
    return " ".join(f"{k}={v}" for k, v in sizes.items() if v is not None and neutral.get(k) != v)


def _losses(run_dir: Path, steps: set[int]) -> dict[int, str]:
    """The training losses of these steps, where metrics.jsonl has them; of repeated the last."""
    found: dict[int, str] = {}
    try:
        with (run_dir / "metrics.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    record = json.loads(line)
                    if record["step"] in steps:
                        found[record["step"]] = f"{record['loss']:.4f}"
                except (ValueError, KeyError, TypeError):
                    continue  # a header, an evaluation, or a line that a killed run left half
    except OSError:
        return {}
    return found


def _pointer(run_dir: Path) -> str:
    try:
        return (run_dir / CHECKPOINTS / LATEST).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _size(count: int) -> str:
    """Bytes in powers of 1000, as disks are sold: `3.1 MB`."""
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
    """Rows under their headings, columns as wide as their longest cell; `right` are aligned so."""
    headings, right = list(headings), set(right)
    rows = [dict(zip(headings, headings, strict=True)), *rows]
    widths = {h: max(len(row[h]) for row in rows) for h in headings}
    lines = [
        "  ".join(
            row[h].rjust(widths[h]) if h in right else row[h].ljust(widths[h]) for h in headings
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
