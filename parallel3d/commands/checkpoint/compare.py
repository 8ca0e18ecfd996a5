"""Runs `parallel3d checkpoint verify` and `diff`."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from parallel3d.checkpoint.manifest import (
    DamagedCheckpoint,
    UnreadableCheckpoint,
    list_checkpoints,
    read_manifest,
)
from parallel3d.checkpoint.storage import read_full, verify_checkpoint
from parallel3d.commands.checkpoint import listing
from parallel3d.config.identity import flat
from parallel3d.errors import UserError
from parallel3d.files import plain

KINDS = ("parameter", "ema", "exp_avg", "exp_avg_sq", "momentum")
SHOWN = 20  # rows of differing tensors


def verify(runs_dir: Path, run: str, step: int | None) -> int:
    """Verifies a run's checkpoints, or one. Returns 1 if one is damaged or unreadable, else 0."""
    if step is None:
        folders = list_checkpoints(listing.find_run(runs_dir, run))
        if not folders:
            raise UserError(f"run={run} has no checkpoint in {runs_dir / run}")
    else:
        folders = [listing.find_checkpoint(runs_dir, run, step)]
    code = 0
    for folder in folders:
        started = time.perf_counter()
        try:
            manifest = verify_checkpoint(folder)
        except (DamagedCheckpoint, UnreadableCheckpoint) as problem:
            print(f"{folder.name}  {listing.condition(problem)}")
            code = 1
            continue
        seconds = time.perf_counter() - started
        print(f"{folder.name}  whole: {manifest.size:,} bytes proved in {seconds:.2f} s")
    return code


@dataclass(frozen=True)
class Difference:
    """Holds how far a tensor's values are apart; `relative` to its largest magnitude in either."""

    name: str
    absolute: float
    relative: float
    elements: int  # that differ
    total: int

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


def diff(runs_dir: Path, a: str, b: str) -> int:
    """Compares tensors and progress of two checkpoints. Returns 0 if they are equal, else 1."""
    folders = [listing.folder_of(runs_dir, a), listing.folder_of(runs_dir, b)]
    print(f"a: {listing.title(folders[0])}\nb: {listing.title(folders[1])}")
    same = True
    compared: list[Difference] = []
    for kind in KINDS:
        left, right = (_read(folder, kind) for folder in folders)
        same &= _print_unmatched(left, right)
        compared += [_difference(n, left[n], right[n]) for n in left if _alike(left, right, n)]
    differing = [d for d in compared if d.elements]
    same &= not differing
    print(_summary(compared))
    if differing:
        print(_differences(differing))
    with listing.damage_refused(f"{listing.title(folders[0])} or {listing.title(folders[1])}"):
        manifests = [read_manifest(folder) for folder in folders]
    same &= _print_differences("progress", manifests[0].progress, manifests[1].progress)
    _print_differences("configuration", flat(manifests[0].config), flat(manifests[1].config))
    print("equal" if same else "different")
    return 0 if same else 1


def _read(folder: Path, kind: str) -> dict[str, Tensor]:
    """Reads one kind of tensors, so that two checkpoints need not fit into memory."""
    with listing.damage_refused(listing.title(folder)):
        return read_full(folder, (kind,))


def _alike(left: dict[str, Tensor], right: dict[str, Tensor], name: str) -> bool:
    return name in right and left[name].shape == right[name].shape


def _print_unmatched(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Prints tensors that are in one alone, or of two shapes. Returns whether there are none."""
    found = []
    for name in sorted(left.keys() | right.keys()):
        if name not in right:
            found.append(f"only in a: {name}")
        elif name not in left:
            found.append(f"only in b: {name}")
        elif left[name].shape != right[name].shape:
            shapes = f"{tuple(left[name].shape)} and {tuple(right[name].shape)}"
            found.append(f"of two shapes: {name}, {shapes}")
    for line in found[:SHOWN]:
        print(plain(line))
    if len(found) > SHOWN:
        print(f"… and {len(found) - SHOWN} more")
    return not found


def _difference(name: str, a: Tensor, b: Tensor) -> Difference:
    a, b = a.double(), b.double()
    # NaN equals itself here: the question is whether the same was saved.
    unequal = (a != b) & ~(a.isnan() & b.isnan())
    gap = (a - b).abs()[unequal]
    largest = float(gap.max()) if gap.numel() else 0.0
    scale = max(float(t.abs().max()) if t.numel() else 0.0 for t in (a, b))
    return Difference(
        name, largest, largest / scale if scale else 0.0, int(unequal.sum()), a.numel()
    )


def _summary(compared: list[Difference]) -> str:
    lines = []
    for kind in KINDS:
        some = [d for d in compared if d.kind == kind]
        if some:
            equal = sum(not d.elements for d in some)
            lines.append(f"{kind}: {len(some)} tensors in both, {equal} of them equal")
    return "\n".join(lines)


def _differences(differing: list[Difference]) -> str:
    """Returns a table: parameters first, each kind by descending relative difference."""
    order = sorted(differing, key=lambda d: (KINDS.index(d.kind), -d.relative, d.name))
    rows = [
        {
            "tensor": d.name,
            "max abs": f"{d.absolute:.3g}",
            "max rel": f"{d.relative:.3g}",
            "elements": f"{d.elements:,} of {d.total:,}",
        }
        for d in order[:SHOWN]
    ]
    numbers = ("max abs", "max rel", "elements")
    text = listing.table(("tensor", *numbers), rows, numbers)
    more = f"\n… and {len(order) - SHOWN} more" if len(order) > SHOWN else ""
    return f"{text}{more}\n(max rel: the largest difference over the tensor's largest magnitude)"


def _print_differences(what: str, a: dict[str, Any], b: dict[str, Any]) -> bool:
    keys = [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
    for key in keys:
        print(plain(f"{what}: {key} is {a.get(key)} in a, {b.get(key)} in b"))
    sys.stdout.flush()
    return not keys
