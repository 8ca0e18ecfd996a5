"""Finds runs and their checkpoints by name, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel3d.checkpoint.manifest import (
    DamagedCheckpoint,
    UnreadableCheckpoint,
    list_checkpoints,
    read_manifest,
    step_folder,
    step_of,
)
from parallel3d.errors import UserError, nearest_hint

CONFIG_FILE = "config.yaml"  # in the folder of every run
TEMPORARY = ".new-"  # prefix of folders that are not runs yet
KEPT_FILE = "huggingface.json"  # facts that an import records for a later export
KEPT_FOLDER = "huggingface"  # other files that an import of a vision model keeps


def run_names(runs_dir: Path) -> list[str]:
    names = (path.parent.name for path in runs_dir.glob(f"*/{CONFIG_FILE}"))
    return sorted(name for name in names if not name.startswith(TEMPORARY))


def find_run(runs_dir: Path, run: str) -> Path:
    """Returns the folder of a run. Raises UserError with the nearest name if there is none."""
    known = run_names(runs_dir)
    if run in known:
        return runs_dir / run
    none = f", which has none (runs_dir={runs_dir})"
    hint = nearest_hint(run, known, "run=") if known else none
    raise UserError(f"run={run} is not a run in {runs_dir}{hint}")


def find_checkpoint(runs_dir: Path, run: str, step: int | None) -> Path:
    """Returns the folder of a run's checkpoint at `step`, or of the newest if `step` is None.

    Raises UserError, with the nearest step, if there is no such checkpoint.
    """
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
        raise UserError(f"run={run} has no checkpoint at step={step}; the nearest is step={close}")
    return found[0]


def folder_of(runs_dir: Path, word: str) -> Path:
    """Returns the folder of the checkpoint that `word` names: run, or run@step.

    Raises UserError if there is none.
    """
    run, at, step = word.rpartition("@")
    if not at:
        return find_checkpoint(runs_dir, word, None)
    if not step.isascii() or not step.isdigit():
        raise UserError(f"{word}: a step must follow the @, as in {run}@100")
    return find_checkpoint(runs_dir, run, int(step))


def check_ema(folder: Path, key: str) -> None:
    """Raises UserError about `key`=ema if a checkpoint has no average of the weights."""
    with damage_refused(title(folder)):
        if not read_manifest(folder).has_ema:
            raise UserError(
                f"{key}=ema: {title(folder)} has no average of the weights, because it was trained "
                f"with optim.ema_decay=null; give {key}=model instead"
            )


def title(folder: Path) -> str:
    return f"run={folder.parents[1].name} step={step_of(folder)}"


def condition(problem: Exception) -> str:
    """Describes a checkpoint's problem: `damaged: …`, or `unreadable: …` if a retry may succeed."""
    word = "damaged" if isinstance(problem, DamagedCheckpoint) else "unreadable"
    return f"{word}: {problem}"


@contextmanager
def damage_refused(what: str, advice: str = "") -> Iterator[None]:
    """Turns errors of a damaged or unreadable checkpoint into a UserError.

    `what` names the checkpoint, and `advice` ends the message.
    """
    try:
        yield
    except (DamagedCheckpoint, UnreadableCheckpoint) as problem:
        raise UserError(f"{what} is {condition(problem)}{advice}") from None
