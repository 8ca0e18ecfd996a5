"""`parallel3d checkpoint average`: makes a run that begins with the mean of several checkpoints.

The mean of the weights at the last steps often does better than the last ones (Izmailov et al.
2018, arXiv:1803.05407). It is taken in fp64, some tensors at a time, so that memory does not grow
with the model. Checkpoints of any layouts go together, as all hold full tensors.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.checkpoint.manifest import list_checkpoints, step_of
from parallel3d.checkpoint.storage import full_tensors, read_state, stored_shapes
from parallel3d.commands.checkpoint.branch import copy_tokenizer, named
from parallel3d.commands.checkpoint.huggingface import AT_ONCE, save_first
from parallel3d.commands.checkpoint.listing import (
    damage_refused,
    find_checkpoint,
    find_run,
    read_with_config,
)
from parallel3d.errors import UserError, print_line
from parallel3d.run.directory import make_run_directory

PARAMETER = "parameter/"


def average(runs_dir: Path, run: str, last: int | None, steps: list[int] | None, to: str) -> int:
    """Makes the run `to`, of the mean of checkpoints of `run`, which stays as it is; returns 0.

    Its optimizer's state is zero, as before a first step. A failure removes it again.

    Args:
        last: how many of the newest checkpoints; None: those of `steps`.

    Raises:
        UserError: too few checkpoints, a damaged one, a name that is taken or is none.
    """
    old, folders = find_run(runs_dir, run), _chosen(runs_dir, run, last, steps)
    config = named(read_with_config(folders[-1])[1], old, runs_dir, to)
    config, new = make_run_directory(config)
    try:
        copy_tokenizer(old, new)
        dtype = torch.float64 if config.precision.name == "fp64" else torch.float32
        save_first(config, new, _means(folders, dtype))
    except BaseException:
        shutil.rmtree(new)
        raise
    names = ", ".join(str(step_of(folder)) for folder in folders)
    print_line(f"run={to} has, at step 0, the mean of the weights of run={run} at steps {names}")
    return 0


def _chosen(runs_dir: Path, run: str, last: int | None, steps: list[int] | None) -> list[Path]:
    """Returns folders of checkpoints by ascending step."""
    if steps is not None:
        return [find_checkpoint(runs_dir, run, step) for step in steps]
    newest = find_checkpoint(runs_dir, run, None)
    folders = list_checkpoints(newest.parents[1])
    assert last is not None
    if last > len(folders):
        raise UserError(
            f"last={last} must be at most {len(folders)}, the checkpoints that run={run} has "
            f"(checkpoint.keep says how many stay); the nearest is last={len(folders)}"
        )
    return folders[:last][::-1]


def _means(folders: list[Path], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields name and mean of each full parameter."""
    with damage_refused(_title(folders[0])):
        found = stored_shapes(folders[0])
    left = [(name, shape) for name, shape in found.items() if name.startswith(PARAMETER)]
    while left:
        some = dict([left.pop()])
        while left and sum(map(math.prod, (*some.values(), left[-1][1]))) <= AT_ONCE:
            some |= dict([left.pop()])
        total: dict[str, Tensor] = {}
        for folder in folders:
            state = full_tensors(some, dict.fromkeys(some, torch.float64))
            with damage_refused(_title(folder)):
                read_state(folder, state)
            for name, tensor in state.items():
                values = tensor.chunks[0][1]
                total[name] = total[name].add_(values) if name in total else values
        for name, values in total.items():
            yield name.removeprefix(PARAMETER), (values / len(folders)).to(dtype)


def _title(folder: Path) -> str:
    return f"run={folder.parents[1].name} step={step_of(folder)}"
