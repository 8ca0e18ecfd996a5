"""`parallel3d checkpoint branch`: makes a run that continues from another run's checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

from parallel3d.checkpoint.manifest import CHECKPOINTS
from parallel3d.commands.checkpoint.huggingface import KEPT_FILE
from parallel3d.commands.checkpoint.listing import folder_of, read_with_config
from parallel3d.config.checks.run import check_run_name
from parallel3d.config.schema import Config
from parallel3d.data.tokenizer import FOLDER
from parallel3d.errors import print_line
from parallel3d.files import flush_folder, write_durably
from parallel3d.metrics.jsonl import rows_of
from parallel3d.run.directory import check_run, new_folder, save_config

METRICS = "metrics.jsonl"
USUAL_SHARE = 0.1  # of the steps so far, in the proposed cooldown


def branch(runs_dir: Path, source: str, run: str) -> int:
    """Makes a run that resumes from a checkpoint of another one, which stays as it is; returns 0.

    The new run has the checkpoint with its step, position in the data and optimizer's state, the
    configuration of that step, the tokenizer, and the metrics up to there.

    Args:
        source: the other run's name, or its name@step.

    Raises:
        UserError: no such checkpoint, a damaged one, a name that is taken or is none.
    """
    folder = folder_of(runs_dir, source)
    old = folder.parents[1]
    manifest, config = read_with_config(folder)
    config = named(config, old, runs_dir, run)
    fresh = new_folder(runs_dir)
    try:
        save_config(config, fresh)
        copy_tokenizer(old, fresh)
        if (old / METRICS).is_file():
            rows = [row for row in rows_of(old / METRICS) if row.get("step", 0) <= manifest.step]
            lines = "".join(f"{json.dumps(row)}\n" for row in rows)
            write_durably(fresh / METRICS, lines.encode())
        (fresh / CHECKPOINTS).mkdir(0o700)
        shutil.copytree(folder, fresh / CHECKPOINTS / folder.name, copy_function=_link)
        os.rename(fresh, runs_dir / run)
    except BaseException:
        shutil.rmtree(fresh)
        raise
    flush_folder(runs_dir)
    print_line(
        f"run={run} continues from step {manifest.step} of {old.name}; a cooldown is, as in:"
    )
    steps = max(1, round(USUAL_SHARE * manifest.step))
    where = "" if str(runs_dir) == "runs" else f" runs_dir={runs_dir}"
    print(
        f"parallel3d train run={run}{where} train.steps={manifest.step + steps} "
        f"optim.lr_decay_style=wsd optim.wsd_decay_steps={steps}"
    )
    return 0


def named(config: Config, old: Path, runs_dir: Path, run: str) -> Config:
    """Returns the configuration of the run in `old` for the new run `run`, which will have its
    tokenizer. Raises UserError for a name that is taken or is none."""
    config = dataclasses.replace(config, run=run, runs_dir=str(runs_dir))
    check_run_name(config)
    check_run(config)
    if not (old / FOLDER).is_dir():
        return config
    data = dataclasses.replace(config.data, tokenizer=str(runs_dir / run / FOLDER))
    return dataclasses.replace(config, data=data)


def copy_tokenizer(old: Path, new: Path) -> None:
    """Copies a run's tokenizer and the keys that an import kept. Raises OSError."""
    if (old / FOLDER).is_dir():
        shutil.copytree(old / FOLDER, new / FOLDER)
    if (old / KEPT_FILE).is_file():
        shutil.copy2(old / KEPT_FILE, new)


def _link(source: str, target: str) -> None:
    """Links a file of a checkpoint, which nothing changes; copies it where links are refused."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
