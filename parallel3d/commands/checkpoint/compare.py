"""Implements `parallel3d checkpoint verify` and `parallel3d checkpoint diff`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from parallel3d.checkpoint.identity import flat
from parallel3d.checkpoint.manifest import (
    DamagedCheckpoint,
    UnreadableCheckpoint,
    list_checkpoints,
    read_manifest,
)
from parallel3d.checkpoint.runs import (
    condition,
    damage_refused,
    find_checkpoint,
    find_run,
    folder_of,
    title,
)
from parallel3d.checkpoint.storage import read_full, verify_checkpoint
from parallel3d.commands.checkpoint.listing import table
from parallel3d.config.fields import show
from parallel3d.errors import UserError
from parallel3d.files import plain
from parallel3d.optim.optimizer import EMA, STATES
from parallel3d.parameters.slices import PARAMETER, STATE

KINDS = (PARAMETER, STATE, EMA, *STATES)
SHOWN = 20  # maximum number of differing tensors that are printed


def verify(runs_dir: Path, run: str, step: int | None) -> int:
    """Verifies all checkpoints of a run, or only that of `step`.

    Returns 1 if a checkpoint is damaged or unreadable, or else 0. Raises UserError if there is no
    checkpoint.
    """
    if step is None:
        folders = list_checkpoints(find_run(runs_dir, run))
        if not folders:
            raise UserError(f"run={run} has no checkpoint in {runs_dir / run}")
    else:
        folders = [find_checkpoint(runs_dir, run, step)]
    code = 0
    for folder in folders:
        started = time.perf_counter()
        try:
            manifest = verify_checkpoint(folder)
        except (DamagedCheckpoint, UnreadableCheckpoint) as problem:
            print(f"{folder.name}  {condition(problem)}")
            code = 1
            continue
        seconds = time.perf_counter() - started
        print(f"{folder.name}  whole: {manifest.size:,} bytes verified in {seconds:.2f} s")
    return code


class Difference(NamedTuple):
    """Describes the differences between two tensors of the same name.

    `absolute` is the largest difference, and `relative` is `absolute` divided by the largest
    magnitude in either tensor.
    """

    name: str
    absolute: float
    relative: float
    elements: int  # number of differing elements
    total: int

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]


def diff(runs_dir: Path, a: str, b: str) -> int:
    """Compares the tensors and the progress of two checkpoints.

    `a` and `b` are names of runs, or run@step. Returns 0 if both checkpoints are equal, or else 1.
    Raises UserError if a checkpoint is missing or damaged.
    """
    folders = [folder_of(runs_dir, a), folder_of(runs_dir, b)]
    titles = [title(folder) for folder in folders]
    print(f"a: {titles[0]}\nb: {titles[1]}")
    unmatched: list[str] = []
    compared: list[Difference] = []
    for kind in KINDS:  # one kind at a time, so that two whole checkpoints need not fit into memory
        left, right = (_read(folder, kind) for folder in folders)
        for name in left | right:
            if name not in right or name not in left:
                unmatched.append(f"only in {'a' if name in left else 'b'}: {name}")
            elif left[name].shape != right[name].shape:
                shapes = f"{tuple(left[name].shape)} and {tuple(right[name].shape)}"
                unmatched.append(f"different shapes: {name}, {shapes}")
            else:
                compared.append(_difference(name, left[name], right[name]))
    with damage_refused(" or ".join(titles)):
        manifests = [read_manifest(folder) for folder in folders]
    for line in unmatched[:SHOWN]:
        print(plain(line))
    _print_rest(unmatched)
    for kind in KINDS:
        if some := [d for d in compared if d.kind == kind]:
            equal = sum(not d.elements for d in some)
            print(f"{kind}: {len(some)} tensors in both, {equal} of them equal")
    differing = [d for d in compared if d.elements]
    if differing:
        _print_table(differing)
    same = not unmatched and not differing
    same &= _print_differences("progress", manifests[0].progress, manifests[1].progress)
    _print_differences("configuration", flat(manifests[0].config), flat(manifests[1].config))
    print("equal" if same else "different")
    return 0 if same else 1


def _read(folder: Path, kind: str) -> dict[str, Tensor]:
    with damage_refused(title(folder)):
        return read_full(folder, (kind,))


def _difference(name: str, a: Tensor, b: Tensor) -> Difference:
    a, b = a.double(), b.double()
    # Two NaNs count as equal here, because the question is whether the same values were saved.
    unequal = (a != b) & ~(a.isnan() & b.isnan())
    gap = (a - b).abs()[unequal]
    largest = float(gap.max()) if gap.numel() else 0.0
    scale = max(float(t.abs().max()) if t.numel() else 0.0 for t in (a, b))
    relative = largest / scale if scale else 0.0
    return Difference(name, largest, relative, int(unequal.sum()), a.numel())


def _print_table(differing: list[Difference]) -> None:
    """Prints the differing tensors by kind, each kind by descending relative difference."""
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
    print(table(("tensor", *numbers), rows, numbers))
    _print_rest(order)
    print("(max rel: the largest difference divided by the tensor's largest magnitude)")


def _print_rest(found: Sequence[object]) -> None:
    if len(found) > SHOWN:
        print(f"… and {len(found) - SHOWN} more")


def _print_differences(what: str, a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Prints the keys whose values differ, and returns whether there are no such keys.

    `what` names the two mappings.
    """
    keys = [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
    for key in keys:
        print(plain(f"{what}: {key} is {show(a.get(key))} in a, {show(b.get(key))} in b"))
    return not keys
