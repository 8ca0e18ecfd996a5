"""Keeps what a job must know after a requeue: its counts of starts, and nodes that it avoids."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel3d.checkpoint.manifest import CHECKPOINTS
from parallel3d.files import OTHERS_WRITE, read_bounded, replace_durably
from parallel3d.metrics.recovery_log import Cause
from parallel3d.run.failure import RankFailure
from parallel3d.slurm.decide import History, history_from_json

LOGS, STATE = "logs", "job.json"
STATE_BYTES = 1 << 20


@dataclass
class JobState:
    """The starts of a job so far, over all its requeues.

    Attributes:
        starts: number of starts.
        in_row, replaced: those in a row without a new checkpoint, as in `decide.Inputs`.
        newest: name of the newest checkpoint at the last start; "" if there was none.
        steps_begun: number of the run's starts that had reached a step before this job.
        nodes: number of nodes of the first allocation. A job that has given up nodes may get fewer
            after a requeue.
        tasks: number of ranks on each node, if all have as many; 0 if not.
        requeued_for: nodes that a requeue has asked to leave out.
        cause: root cause of the last start's end.
        history: evidence against nodes that found no folder of the run yet.
        host: node of the batch script of a start that has not ended; "" if none is running.
    """

    starts: int = 0
    in_row: int = 0
    replaced: int = 0
    newest: str = ""
    steps_begun: int = 0
    nodes: int = 0
    tasks: int = 0
    requeued_for: tuple[str, ...] = ()
    cause: RankFailure | None = None
    history: History = dataclasses.field(default_factory=dict)
    host: str = ""

    @classmethod
    def read(cls, folder: Path) -> JobState:
        """Returns the state of a job; that of a new one if there is none that this class wrote."""
        try:
            found = json.loads(read_bounded(folder / STATE, STATE_BYTES))
            typed = _typed(found)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return cls()
        return typed

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        replace_durably(folder / STATE, json.dumps(dataclasses.asdict(self)).encode())

    def cut_off(self, environ: Mapping[str, str]) -> Cause | None:
        """Returns why the last start has not ended, if Slurm has queued the job again meanwhile.

        When the node of the batch script dies, nobody is left to write it down.
        """
        if not self.host or environ.get("SLURM_RESTART_COUNT", "0") == "0":
            return None
        why = "the node of the batch script was lost, or Slurm queued the job again"
        return Cause("node", self.host, None, why)

    def see_checkpoints(self, run_dir: Path) -> None:
        """Begins to count anew if there is a newer checkpoint."""
        newest = newest_checkpoint(run_dir)
        if newest != self.newest:
            self.newest, self.in_row, self.replaced = newest, 0, 0


def _typed(found: dict[str, Any]) -> JobState:
    counts = ("starts", "in_row", "replaced", "steps_begun", "nodes", "tasks")
    made: dict[str, Any] = {name: int(found[name]) for name in counts}
    if min(made.values()) < 0:
        raise ValueError("a negative count")
    cause = found["cause"]
    return JobState(
        **made,
        newest=str(found["newest"]),
        requeued_for=tuple(map(str, found["requeued_for"])),
        cause=None if cause is None else RankFailure(**cause),
        history=history_from_json(found["history"]),
        host=str(found.get("host", "")),
    )


def newest_checkpoint(run_dir: Path) -> str:
    """Returns the name of the run's newest checkpoint, or ""."""
    try:
        names = os.listdir(run_dir / CHECKPOINTS)
    except OSError:
        return ""
    return max((name for name in names if name.startswith("step-")), default="")


def private_folder(job: str) -> Path | None:
    """Makes the folder of a job's logs; returns None if it does not belong to this user alone.

    The batch process reads it and the ranks write to it, even if others may write to `logs`.
    Raises OSError.
    """
    os.makedirs(LOGS, exist_ok=True)
    folder = Path(LOGS, job)
    if not os.path.lexists(folder):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return folder if ours and not found.st_mode & OTHERS_WRITE else None
