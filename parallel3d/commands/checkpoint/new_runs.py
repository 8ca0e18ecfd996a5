"""Makes a run from another run's checkpoints (`parallel3d checkpoint branch` and `average`).

The mean of the weights at the last steps is often better than the last weights (Izmailov et al.
2018, arXiv:1803.05407). It is computed in fp64, a few tensors at a time, so that memory does not
grow with the model. Checkpoints of different layouts can be combined, because full tensors are
read from each of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    COUNTS,
    PARAMETER,
    Manifest,
    list_checkpoints,
    step_folder,
    step_of,
    write_manifest,
)
from parallel3d.checkpoint.runs import (
    KEPT_FILE,
    KEPT_FOLDER,
    damage_refused,
    find_checkpoint,
    find_run,
    folder_of,
    title,
)
from parallel3d.checkpoint.storage import (
    State,
    TensorChunks,
    read_state,
    stored_shapes,
    write_state,
)
from parallel3d.commands.checkpoint.listing import read_with_config
from parallel3d.data.keys import DataConfig
from parallel3d.data.tokenizer import FOLDER
from parallel3d.device.precision import LossScale, master_dtype
from parallel3d.errors import UserError, print_line
from parallel3d.files import flush_folder, write_durably
from parallel3d.metrics.jsonl import METRICS, rows_of
from parallel3d.metrics.provenance import versions
from parallel3d.models.survey import TARGET
from parallel3d.parameters.slices import STATE
from parallel3d.run.checks import check_run_name
from parallel3d.run.directory import check_run, filled_directory
from parallel3d.run_config import Config, saved_tree

USUAL_SHARE = 0.1  # length of the proposed cooldown as a fraction of the steps so far
AT_ONCE = 1 << 25  # maximum number of elements of full tensors in memory at a time


@contextmanager
def new_run(config: Config) -> Iterator[Path]:
    """Makes a run's folder, which appears after the block has written its files into it.

    Yields a temporary folder (see `filled_directory`). Raises OSError, and UserError if the name of
    the run is taken or invalid.
    """
    check_run_name(config.run, config.runs_dir)
    check_run(config)
    with filled_directory(config, Path(config.runs_dir, str(config.run))) as fresh:
        yield fresh
        for folder, _, _ in os.walk(fresh):
            flush_folder(Path(folder))


def branch(runs_dir: Path, source: str, run: str) -> int:
    """Makes a run that resumes from a checkpoint of another run. Returns the exit code, 0.

    The new run has the checkpoint with its step, its position in the data, its optimizer state and
    its configuration, and also the tokenizer and the metrics up to that step. The other run is not
    changed.

    Args:
        runs_dir: the folder of all runs.
        source: the other run's name, or its name@step.
        run: the new run's name.

    Raises:
        UserError: if the checkpoint is missing or damaged, or if the name is taken or invalid.
    """
    folder = folder_of(runs_dir, source)
    old = folder.parents[1]
    _check_name("run", run, old.name)
    manifest, config = read_with_config(folder)
    data = _with_tokenizer(config.data, old, runs_dir / run)
    config = dataclasses.replace(config, run=run, runs_dir=str(runs_dir), data=data)
    with new_run(config) as fresh:
        _copy_tokenizer(old, fresh)
        if (old / METRICS).is_file():
            rows = [row for row in rows_of(old / METRICS) if row.get("step", 0) <= manifest.step]
            lines = "".join(f"{json.dumps(row)}\n" for row in rows)
            write_durably(fresh / METRICS, lines.encode())
        (fresh / CHECKPOINTS).mkdir(0o700)
        shutil.copytree(folder, fresh / CHECKPOINTS / folder.name, copy_function=_link)
    print_line(
        f"run={run} continues from step {manifest.step} of {old.name}; a cooldown, for example:"
    )
    steps = max(1, round(USUAL_SHARE * manifest.step))
    where = "" if str(runs_dir) == "runs" else f" runs_dir={runs_dir}"
    target = config.model._target_
    of_model = "" if target is None else f" {TARGET}={target}"
    print(
        f"parallel3d train run={run}{where}{of_model} train.steps={manifest.step + steps} "
        f"optim.lr_decay_style=wsd optim.wsd_decay_steps={steps}"
    )
    return 0


def _check_name(key: str, new: str, old: str) -> None:
    """Raises UserError if a new run would have the name of its source."""
    if new == old:
        raise UserError(
            f"{key}={new} is the run itself, which is not changed: choose another {key}="
        )


def _with_tokenizer(data: DataConfig, old: Path, new: Path) -> DataConfig:
    """Returns the `data` section for the run in `new`.

    If the run in `old` has its own tokenizer, the section names its copy in `new`.
    """
    if not (old / FOLDER).is_dir():
        return data
    return dataclasses.replace(data, tokenizer=str(new / FOLDER))


def _copy_tokenizer(old: Path, new: Path) -> None:
    """Copies a run's own tokenizer and the files that an import kept, if any. Raises OSError."""
    if (old / FOLDER).is_dir():
        shutil.copytree(old / FOLDER, new / FOLDER)
    if (old / KEPT_FILE).is_file():
        shutil.copy2(old / KEPT_FILE, new)
    if (old / KEPT_FOLDER).is_dir():
        shutil.copytree(old / KEPT_FOLDER, new / KEPT_FOLDER, copy_function=_link)


def _link(source: str, target: str) -> None:
    """Links a file, which is safe because files of a checkpoint never change.

    The file is copied if the file system refuses links.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def average(runs_dir: Path, run: str, last: int | None, steps: list[int] | None, to: str) -> int:
    """Makes the run `to` from the mean of checkpoints of `run`. Returns the exit code, 0.

    The optimizer state of the new run is zero, as before a first step. A failure removes the new
    run. `run` is not changed.

    Args:
        runs_dir: the folder of all runs.
        run: the run with the checkpoints.
        last: number of newest checkpoints, or None if `steps` selects the checkpoints.
        steps: steps of the checkpoints, or None if `last` selects the checkpoints.
        to: the new run's name.

    Raises:
        UserError: if there are too few checkpoints, if one is damaged, or if the name is taken or
            invalid.
    """
    old, folders = find_run(runs_dir, run), _chosen(runs_dir, run, last, steps)
    _check_name("to", to, run)
    _, config = read_with_config(folders[-1])
    with damage_refused(title(folders[-1])):
        stored = stored_shapes(folders[-1])
    states = {name.partition("/")[2] for name in stored if name.startswith(f"{STATE}/")}
    data = _with_tokenizer(config.data, old, runs_dir / to)
    config = dataclasses.replace(config, run=to, runs_dir=str(runs_dir), data=data)
    with new_run(config) as fresh:
        _copy_tokenizer(old, fresh)
        save_first(config, fresh, _means(folders, master_dtype(config.precision)), states)
    names = ", ".join(str(step_of(folder)) for folder in folders)
    print_line(f"run={to} has, at step 0, the mean of the weights of run={run} at steps {names}")
    return 0


def _chosen(runs_dir: Path, run: str, last: int | None, steps: list[int] | None) -> list[Path]:
    """Returns the folders of the selected checkpoints by ascending step.

    Raises UserError if one is missing.
    """
    if steps is not None:
        return [find_checkpoint(runs_dir, run, step) for step in steps]
    newest = find_checkpoint(runs_dir, run, None)
    folders = list_checkpoints(newest.parents[1])
    assert last is not None
    if last > len(folders):
        raise UserError(
            f"last={last} must be at most {len(folders)}, the number of checkpoints that run={run} "
            f"has (checkpoint.keep decides how many stay); the nearest is last={len(folders)}"
        )
    return folders[:last][::-1]


def _means(folders: list[Path], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yields the name and the mean of each parameter and of each router's bias."""
    with damage_refused(title(folders[0])):
        found = stored_shapes(folders[0])
    kept = (f"{PARAMETER}/", f"{STATE}/")
    left = [(name, shape) for name, shape in found.items() if name.startswith(kept)]
    while left:
        some = dict([left.pop()])
        while left and sum(map(math.prod, (*some.values(), left[-1][1]))) <= AT_ONCE:
            some |= dict([left.pop()])
        total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in some.items()}
        for folder in folders:
            full = {name: torch.empty_like(values) for name, values in total.items()}
            with damage_refused(title(folder)):
                read_state(folder, {name: TensorChunks.whole(t) for name, t in full.items()})
            for name, values in full.items():
                total[name] += values
        for name, values in total.items():
            yield name.partition("/")[2], (values / len(folders)).to(dtype)


def _some_at_a_time(tensors: Iterable[tuple[str, Tensor]], states: Set[str]) -> Iterator[State]:
    state: State = {}
    elements = 0
    for name, tensor in tensors:
        kind = STATE if name in states else PARAMETER
        state[f"{kind}/{name}"] = TensorChunks.whole(tensor)
        elements += tensor.numel()
        if elements >= AT_ONCE:
            yield state
            state, elements = {}, 0
    if state:
        yield state


def save_first(
    config: Config, run_dir: Path, tensors: Iterable[tuple[str, Tensor]], states: Set[str]
) -> None:
    """Writes a checkpoint of step 0 that has only weights. Raises OSError.

    `tensors` yields the names and the full tensors; `states` are the names of those that no
    optimizer updates.
    """
    folder = run_dir / CHECKPOINTS / step_folder(0)
    for made in (folder.parent, folder):
        made.mkdir(mode=0o700)
    files = tuple(
        write_state(folder / f"rank-{number:05d}.safetensors", state)
        for number, state in enumerate(_some_at_a_time(tensors, states))
    )
    scale = LossScale(config.precision).scale
    progress: dict[str, int | float | bool] = {**dict.fromkeys(COUNTS, 0), "loss_scale": scale}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_manifest(folder, Manifest(0, progress, saved_tree(config), {}, now, versions(), files))
