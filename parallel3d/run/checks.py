"""Checks the name of a run, and keys that need a batch process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from parallel3d.config.fields import (
    show,
)
from parallel3d.errors import UserError

LONGEST_RUN_NAME = 200  # bytes; file systems allow 255, and a sweep adds the job's number

# The number of this start of a Slurm job, which its batch process gives the ranks.
START_VARIABLE = "PARALLEL3D_START"


def check_run_name(run: str | None, runs_dir: str) -> None:
    """Raises UserError unless `run` is None or a plain folder name."""
    if run is None:
        return
    is_plain = run.isprintable() and not re.search(r"[/\\]|^~|^\s|\s$", run)
    if run in ("", ".", "..") or not is_plain or len(os.fsencode(run)) > LONGEST_RUN_NAME:
        raise UserError(
            f"run={show(run)} must be the plain name of a folder inside runs_dir="
            f"{show(runs_dir)}, of at most {LONGEST_RUN_NAME} bytes and without /, \\, unprintable "
            "characters, a ~ at the beginning or spaces at either end; run=null makes a name, and "
            "runs_dir chooses another folder."
        )
    if (variable := re.search(r"\$\{?(\w+)", run)) is not None:
        raise UserError(
            f"run={show(run)} contains {variable[0]}, which parallel3d does not expand, so several "
            "runs would have this name; let the shell expand it, or write "
            f"${{oc.env:{variable[1]}}} in its place."
        )


def check_batch_process(spares: int, shrink: bool, environ: Mapping[str, str]) -> None:
    """Raises UserError for keys that need a batch process if none has started the ranks."""
    if environ.get(START_VARIABLE):
        return
    if spares:
        raise UserError(
            f"launch.spares={spares} is for jobs of slurm/train.sbatch, which keeps nodes idle and "
            "starts the ranks on others if a node fails: submit it by sbatch; the nearest without "
            "it is launch.spares=0"
        )
    if shrink:
        raise UserError(
            "recovery.shrink=true is for jobs of slurm/train.sbatch, which starts the ranks on "
            "fewer nodes if one fails: submit it by sbatch; the nearest without it is "
            "recovery.shrink=false"
        )
