"""The folder that Hydra keeps a sweep in: nobody else may exchange what its jobs will run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from parallel3d.errors import USER_ERROR, print_line


class PrivateSweepFolder(Callback):
    """Makes `runs_dir/.multirun` before Hydra would, for its user alone.

    submitit leaves its jobs there as pickles, which are run when Slurm starts them.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Raises SystemExit where the folder is another user's: Hydra only warns of exceptions."""
        folder = Path(config.hydra.sweep.dir)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.lstat().st_uid != os.getuid():
            print_line(
                f"runs_dir={config.runs_dir}: {folder} belongs to another user, who could exchange "
                "the sweep's jobs; choose another runs_dir."
            )
            raise SystemExit(USER_ERROR)
        folder.chmod(0o700)
