"""Slows a job's steps from the 12th on until it is released, if a test puts this on PYTHONPATH.

It is released when the file <job's name>.go (for an array: <name>_<element>.go) is in the folder
that LET_GO names; until then a step takes SLOW_STEP_S seconds longer, by default 3. So a test has
time to disturb a run in the middle, however fast or slow the machine is. parallel3d itself does not
know about this: its trainer is patched when it is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
from pathlib import Path
from types import ModuleType

FIRST_SLOW_STEP = 12
SECONDS = float(os.environ.get("SLOW_STEP_S", "3"))


class _PatchTrainer(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "parallel3d.trainer":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _patch(module)

        spec.loader.exec_module = exec_module
        return spec


def _wait(let_go: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not let_go.exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def _patch(module: ModuleType) -> None:
    train_step = module.RankTrainer.train_step
    names = (os.environ["SLURM_JOB_NAME"], os.environ.get("SLURM_ARRAY_TASK_ID"))
    let_go = Path(os.environ["LET_GO"]) / ("_".join(filter(None, names)) + ".go")

    def slow(self):
        if self.steps_done + 1 >= FIRST_SLOW_STEP and not let_go.exists():
            _wait(let_go)
        return train_step(self)

    module.RankTrainer.train_step = slow


if "LET_GO" in os.environ and "SLURM_JOB_NAME" in os.environ:
    sys.meta_path.insert(0, _PatchTrainer())
