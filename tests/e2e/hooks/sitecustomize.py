"""Makes one rank of a run fail as FAIL says, if a test puts this on PYTHONPATH.

FAIL=how:rank:step, with how one of raise, stop (SIGSTOP to itself), hang; several are joined by
commas. Two more spoil the step's sum over the world: skip (the rank continues without it) and shape
(it sends a longer tensor). away hangs in the gather of attention over split sequences; nan makes an
element of the gradients of three steps NaN; flip changes a bit of a parameter. The moment is
written to FAILED_AT. parallel3d itself does not know about this: its trainer is patched when it is
imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
from types import ModuleType


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


def _patch(module: ModuleType) -> None:
    train_step = module.RankTrainer.train_step

    def failing(self):
        for fault in os.environ["FAIL"].split(","):
            how, rank, step = fault.split(":")
            if rank == str(self.groups.rank) and self.steps_done + 1 == int(step):
                _fail(how, module, self)
        return train_step(self)

    module.RankTrainer.train_step = failing


def _fail(how: str, module: ModuleType, trainer) -> None:
    with open(os.environ["FAILED_AT"], "w", encoding="utf-8") as file:
        file.write(str(time.time()))
    if how == "raise":
        raise ValueError("planted\nin two lines")
    if how in ("skip", "shape"):
        _spoil(how, module.collectives)
        return
    if how == "away":
        module.collectives.all_gather_bucket = _stay_away
        return
    if how == "nan":
        _spoil_gradients(trainer, steps=3)
        return
    if how == "flip":
        import torch

        next(iter(trainer.parameters.values())).data.view(-1)[:1].view(torch.int32).bitwise_xor_(8)
        return
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)


def _spoil(how: str, collectives: ModuleType) -> None:
    """Skips the next sum over the world, or changes its tensor, on this rank alone."""
    name = "all_reduce_few" if hasattr(collectives, "all_reduce_few") else "all_reduce"
    right = getattr(collectives, name)

    def wrong(tensor, group):
        if group.name != "world":
            return right(tensor, group)
        setattr(collectives, name, right)
        return tensor if how == "skip" else right(tensor.repeat(3), group)[: len(tensor)]

    setattr(collectives, name, wrong)


def _stay_away(*_):
    time.sleep(3600)


def _spoil_gradients(trainer, steps: int) -> None:
    """Makes one element of this rank's last gradients NaN, for that many steps."""
    right, last = trainer.data_parallel.finish_step, trainer.steps_done + steps

    def wrong():
        unused = right()
        if trainer.steps_done < last:
            trainer.optimizer.segments[0].grad[0] = float("nan")
        return unused

    trainer.data_parallel.finish_step = wrong


if "FAIL" in os.environ:
    if "parallel3d.trainer" in sys.modules:  # this process was forked (tests/e2e/ready.py)
        _patch(sys.modules["parallel3d.trainer"])
    else:
        sys.meta_path.insert(0, _PatchTrainer())
