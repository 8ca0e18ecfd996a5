"""Lists runs and their checkpoints (`parallel3d checkpoint ls`), without torch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.manifest import (
    DamagedCheckpoint,
    Manifest,
    UnreadableCheckpoint,
    list_checkpoints,
    list_damaged,
    read_manifest,
    reason,
    step_of,
)
from parallel3d.checkpoint.runs import condition, damage_refused, find_run, run_names, title
from parallel3d.errors import UserError
from parallel3d.files import plain
from parallel3d.run.directory import NO_CONFIG, typed_config
from parallel3d.run_config import Config
from parallel3d.text import aligned, duration, si

HEADINGS = ("run", "step", "age", "size", "layout", "loss", "state")
RIGHT = ("step", "age", "size", "loss")


def list_runs(runs_dir: Path, run: str | None) -> int:
    """Prints a row for each checkpoint, even if it is damaged.

    The checkpoints are those of `run` or, if it is None, of all runs. Returns the exit code, 0.
    Raises UserError if there is no such run.
    """
    runs = [find_run(runs_dir, run)] if run else [runs_dir / name for name in run_names(runs_dir)]
    rows = [row for run_dir in runs for row in _rows(run_dir)]
    if not rows:
        where = runs[0] if run else runs_dir
        print(f"parallel3d: no checkpoint in {where}", file=sys.stderr)
        return 0
    print(table(HEADINGS, rows, RIGHT))
    return 0


def _rows(run_dir: Path) -> Iterator[dict[str, str]]:
    folders = list_checkpoints(run_dir)
    losses = _losses(run_dir / "metrics.jsonl")
    for folder in folders:
        step = step_of(folder)
        row = _row(run_dir.name, folder) | {"step": str(step), "loss": losses.get(step, "")}
        try:
            row["layout"] = layout(read_manifest(folder).config)
            row["state"] = "whole, newest" if folder == folders[0] else "whole"
        except (DamagedCheckpoint, UnreadableCheckpoint) as problem:
            row["state"] = condition(problem)
        yield row
    for folder in list_damaged(run_dir):
        yield _row(run_dir.name, folder) | {"state": f"damaged, set aside as {folder.name}"}


def _row(run: str, folder: Path) -> dict[str, str]:
    """Returns a row with the age and the size of a folder, both empty if it cannot be read."""
    row = dict.fromkeys(HEADINGS, "") | {"run": run}
    try:
        row["size"] = f"{si(sum(path.stat().st_size for path in folder.iterdir()))}B"
        row["age"] = duration(time.time() - folder.stat().st_mtime)
    except OSError as error:
        _log_unreadable(folder, error)
    return row


def read_with_config(folder: Path) -> tuple[Manifest, Config]:
    """Returns a checkpoint's manifest and its configuration.

    Raises UserError if one of them is damaged or cannot be read.
    """
    with damage_refused(title(folder), "; parallel3d checkpoint ls shows the other checkpoints"):
        manifest = read_manifest(folder)
    try:
        return manifest, typed_config(manifest.config)
    except NO_CONFIG as error:
        why = plain(str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise UserError(f"{title(folder)} has a configuration that cannot be read: {why}") from None


def layout(config: Mapping[str, Any]) -> str:
    """Formats the layout in a manifest's configuration, such as `tp=2 pp=2 dp=1 zero=1`.

    Values that are not whole numbers are left out, because a manifest is not trusted.
    """
    sizes = {key: config.get(key) for key in ("tp", "pp", "cp", "dp", "vpp", "zero")}
    neutral = {"cp": 1, "vpp": 1, "zero": 0}
    shown = {k: v for k, v in sizes.items() if type(v) is int and neutral.get(k) != v}
    return " ".join(f"{k}={v}" for k, v in shown.items())


def _losses(path: Path) -> dict[int, str]:
    """Returns the training losses in metrics.jsonl by step; for a repeated step, the last loss."""
    found: dict[int, str] = {}
    try:
        lines = path.read_bytes().splitlines() if path.is_file() else []
    except OSError as error:
        _log_unreadable(path, error)
        return {}
    for line in lines:  # lines without a training loss, and torn lines, are skipped
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            record = json.loads(line)
            found[record["step"]] = f"{record['loss']:.4f}"
    return found


def _log_unreadable(path: Path, error: OSError) -> None:
    print(f"parallel3d: {path} cannot be read ({plain(reason(error))})", file=sys.stderr)


def table(headings: Sequence[str], rows: list[dict[str, str]], right: Sequence[str]) -> str:
    """Formats rows under their headings, with the columns in `right` right-aligned."""
    cells = [list(headings), *([plain(row[h]) for h in headings] for row in rows)]
    return "\n".join(aligned(cells, ["<>"[heading in right] for heading in headings]))
