"""Asks the train command for the keys that the batch process needs, as the ranks will see them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from parallel3d.blueprint.layout import Layout
from parallel3d.config.fields import check_fields
from parallel3d.errors import USER_ERROR, UserError
from parallel3d.run.directory import NO_CONFIG, typed_config
from parallel3d.run_config import Config

NAME_LENGTH = 100


@dataclass(frozen=True)
class TrainKeys:
    """Values of keys of a run.

    Attributes:
        words: the overrides, with the name of the run.
        sizes: tp, pp, cp and dp; dp is 0 if the number of ranks decides.
        config: the configuration by these words alone, for `recovery.shrink`; None without that.
    """

    words: tuple[str, ...]
    run: str
    runs_dir: str
    sizes: Mapping[str, int]
    max_restarts: int
    exclude_days: float
    heartbeat_s: float
    spares: int
    config: Config | None = None

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir, self.run)

    @property
    def ranks(self) -> int | None:
        """Returns the number of ranks of the layout; None if the layout takes all there are."""
        tp, pp, cp, dp = (self.sizes[name] for name in ("tp", "pp", "cp", "dp"))
        return tp * pp * cp * dp or None

    def layout(self, ranks: int) -> Layout:
        """Returns the layout of so many ranks, by which failures name a rank's place."""
        tp, pp, cp = (self.sizes[name] for name in ("tp", "pp", "cp"))
        return Layout(tp=tp, pp=pp, cp=cp, dp=max(1, ranks // (tp * pp * cp)))


def asked(train: Sequence[str], words: Sequence[str], job_name: str, job: str) -> TrainKeys:
    """Returns the keys' values; without run= the job names its run, so that it finds it again.

    The train command has said what is wrong if this raises SystemExit; UserError has a sentence.
    """
    try:
        done = subprocess.run(
            [*train, "--cfg", "job", "--resolve", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            check=False,
        )
    except OSError as error:
        raise UserError(
            f"{train[0]} cannot be run on this node ({error.strerror}): set PARALLEL3D to the "
            "command of parallel3d, as in PARALLEL3D=/venv/bin/parallel3d"
        ) from None
    if done.returncode:
        raise SystemExit(USER_ERROR)
    try:
        tree: Any = yaml.safe_load(done.stdout)
        recovery, launch, run = tree["recovery"], tree["launch"], tree["run"]
        sizes = {name: int(tree[name] or 0) for name in ("tp", "pp", "cp", "dp")}
        kept = tuple(words)
        if run is None:
            run = f"{plain_name(job_name)}-{job}"
            kept = (*(word for word in words if not word.startswith("run=")), f"run={run}")
        return TrainKeys(
            kept,
            str(run),
            str(tree["runs_dir"]),
            sizes,
            int(recovery["max_restarts"]),
            float(recovery["exclude_days"]),
            float(recovery["heartbeat_s"]),
            int(launch["spares"]),
            _checked(tree) if recovery["shrink"] else None,
        )
    except UserError:
        raise
    except (*NO_CONFIG, KeyError):
        raise UserError(
            f"{' '.join(train)} --cfg job does not print the configuration alone: a script must "
            "print nothing before it calls parallel3d.fit"
        ) from None


def _checked(tree: Any) -> Config:
    """Returns a configuration whose values are in their ranges. Raises UserError."""
    config = typed_config(tree)
    check_fields(config)
    return config


def plain_name(name: str) -> str:
    """Returns a job's name without characters that mean something to Hydra or in a path."""
    return re.sub(r"[^A-Za-z0-9._+-]", "_", name)[:NAME_LENGTH]
