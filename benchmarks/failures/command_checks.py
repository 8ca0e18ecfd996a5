"""Checks a disturbed command, and the same command when it runs again."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.failures.command_cases import KEEP, RUN, STEPS, Case, Ended, Stage
from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    DAMAGED,
    DamagedCheckpoint,
    UnreadableCheckpoint,
    list_checkpoints,
    list_damaged,
    step_folder,
)
from parallel3d.checkpoint.storage import verify_checkpoint
from parallel3d.run.directory import NO_CONFIG, config_files, load_config

TRACEBACK = "Traceback (most recent call last)"
FINAL, SUMMARY, METRICS = "weights-final.safetensors", "summary.json", "metrics.jsonl"
# Values that have the same bits in every run of the same steps.
CURVE = ("loss", "grad_norm", "lr", "eval_loss", "tokens")


@dataclass
class Reference:
    """The results of the undisturbed commands."""

    weights: str = ""  # SHA-256 of the final weights' file
    curve: dict[tuple[int, str], tuple[Any, ...]] = field(default_factory=dict)
    outs: dict[str, str] = field(default_factory=dict)  # scenario → stdout, if that is its result
    errs: dict[str, str] = field(default_factory=dict)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "none"


def tree(folder: Path) -> dict[str, str]:
    """Returns every file below a folder with its digest."""
    return {
        str(p.relative_to(folder)): digest(p) if p.is_file() else "folder"
        for p in sorted(folder.rglob("*"))
    }


def curve_of(path: Path) -> dict[tuple[int, str], tuple[Any, ...]]:
    """Returns (step, kind) → the reproducible figures. Raises ValueError for a torn or a second
    line."""
    found: dict[tuple[int, str], tuple[Any, ...]] = {}
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            raise ValueError(f"a torn line: {line!r}")
        row = json.loads(line)
        key = row["step"], "evaluation" if "eval_loss" in row else "step"
        if key in found:
            raise ValueError(f"there are two lines of {key}")
        found[key] = tuple(row.get(name) for name in CURVE)
    return found


def whole_ones(run_dir: Path) -> set[str]:
    """Returns the names of the complete checkpoints."""
    return {f.name for f in list_checkpoints(run_dir) if damage_of(f) is None}


def damage_of(folder: Path) -> str | None:
    return _damage_of(folder, json.dumps([folder.name, tree(folder)]))


@functools.lru_cache(4096)
def _damage_of(folder: Path, content: str) -> str | None:
    """Returns the files with this content."""
    try:
        verify_checkpoint(folder)
    except (DamagedCheckpoint, UnreadableCheckpoint) as problem:
        return str(problem)
    return None


def lost(before: set[str], run_dir: Path) -> list[str]:
    """Returns the checkpoints of `before` that are no longer complete and should not have been
    removed."""
    kept = sorted(whole_ones(run_dir))
    oldest = kept[-KEEP] if len(kept) >= KEEP else ""  # saving removes older ones
    return [name for name in sorted(before) if name not in kept and name > oldest]


def said_well(ended: Ended) -> Iterator[str]:
    """Yields the faults of a command's end and last lines."""
    if ended.code is None:
        yield f"hung: no end after {ended.seconds:.0f} s"
        return
    if TRACEBACK in ended.out + ended.err:
        words = (ended.out + ended.err).split(TRACEBACK)[1].strip().splitlines()
        places = [w.strip() for w in words if "parallel3d/" in w][-2:]
        yield f"a traceback: {words[-1]} ({' '.join(places)})"
    if ended.code not in (0, 1, 2):
        yield f"ended with code {ended.code}"
    lines = [line for line in ended.err.splitlines() if line.strip()]
    is_said = lines[-1].startswith("parallel3d: ") if lines else "unreadable: " in ended.out
    if ended.code and not is_said:
        yield f"ended with code {ended.code}, and its last line is {lines[-1:]}"


def silent(case: Case, name: str, folder: Path, ended: Ended, ref: Reference) -> Iterator[str]:
    """Yields faults that were not reported, after an end with code 0."""
    if not case.trains:
        is_said = ended.err.strip() != ref.errs[name].strip() or "unreadable: " in ended.out
        if timeless(ended.out) != timeless(ref.outs[name]) and not is_said:
            yield f"another answer: {ended.out[-200:]!r}"
        return
    run_dir, words = folder / RUN, ended.out + ended.err
    if digest(run_dir / FINAL) != ref.weights:
        yield "the weights differ or are missing"
    try:
        curve = curve_of(run_dir / METRICS)
    except (OSError, ValueError) as error:
        curve = {(0, str(error)): ()}
    if curve != ref.curve and METRICS not in words:
        yield f"the metrics differ: {differing(curve, ref.curve)}"
    if status_of(run_dir) != "finished" and SUMMARY not in words:
        yield "no summary"
    if step_folder(STEPS) not in whole_ones(run_dir) and "step-" not in words:
        yield "no last checkpoint"


def timeless(answer: str) -> str:
    """Returns an answer without its times (0:07, 1.5 s) and the widths of its columns."""
    return re.sub(r"\b([0-9.]+ (s|min)|[0-9]+(:[0-9]{2})+)\b", "…", re.sub(" +", " ", answer))


def differing(curve: dict, other: dict) -> list[Any]:
    return [key for key in {**curve, **other} if curve.get(key) != other.get(key)][:3]


def status_of(run_dir: Path) -> str | None:
    try:
        return json.loads((run_dir / SUMMARY).read_text())["status"]
    except (OSError, ValueError, KeyError):
        return None


def given_again(case: Case, name: str, stage: Stage, ref: Reference) -> Iterator[str]:
    """Runs the same command again on a healthy disk; returns the faults then."""
    before = whole_ones(stage.folder / RUN)
    ended = stage.give(case)
    problems = list(said_well(ended))
    if ended.code:
        problems.append(f"code {ended.code}: {ended.err.splitlines()[-1:]}")
    if not problems:
        problems = list(as_undisturbed(case, name, stage, ended, ref))
    problems += [f"{name} is gone" for name in lost(before, stage.folder / RUN)]
    yield from (f"given again: {problem}" for problem in problems)


def as_undisturbed(
    case: Case, name: str, stage: Stage, ended: Ended, ref: Reference
) -> Iterator[str]:
    """Yields the differences of a successful run from the undisturbed one."""
    # No message excuses a difference.
    ended = replace(ended, out="" if case.trains else ended.out, err=ref.errs[name])
    yield from silent(case, name, stage.folder, ended, ref)
    if not case.trains:
        return
    run_dir = stage.folder / RUN
    try:
        load_config(run_dir)
        for path in config_files(run_dir):
            if path.stat().st_size == 0 and "lying" not in name:
                yield f"{path.name} is empty"
    except (OSError, *NO_CONFIG) as error:
        yield f"its configuration cannot be read: {error!r}"
    yield from wrongly_aside(run_dir)
    left = [p.name for p in (run_dir / CHECKPOINTS).iterdir() if p.name.startswith(".")]
    if left != [".claim"]:
        yield f"left lying: {left}"


def wrongly_aside(run_dir: Path) -> Iterator[str]:
    """Yields checkpoints that were set aside and are not damaged."""
    for folder in list_damaged(run_dir):
        named = folder.parent.parent / "looked-at" / folder.name.removeprefix(DAMAGED).split(".")[0]
        shutil.rmtree(named.parent, ignore_errors=True)
        shutil.copytree(folder, named)
        if damage_of(named) is None:
            yield f"{folder.name} is whole"
        shutil.rmtree(named.parent)
