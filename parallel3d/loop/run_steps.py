"""Runs the training loop, with hooks around its steps."""

from __future__ import annotations

import time
from collections.abc import Sequence

from parallel3d.device.fused import fuses
from parallel3d.errors import print_line
from parallel3d.loop.rank_run import RankRun
from parallel3d.loop.step_hooks import StepHook


def run_steps(run: RankRun, hooks: Sequence[StepHook]) -> None:
    """Runs the steps to the end, or until a signal stops the run (`worker.stopped`)."""
    trainer, worker = run.trainer, run.worker
    # The first step compiles graphs and an accelerator's fused kernels. This takes minutes on a
    # GPU, while other ranks wait in a collective, so the watchdog is paused in that step, and only
    # the backend's timeout detects a hang.
    may_compile = trainer.config.compile or fuses(trainer.device)
    for hook in hooks:
        hook.before_run()
    for step in range(run.first, run.last + 1):
        worker.phase = phase = f"train step {step}"
        for hook in hooks:
            hook.before_step(step)
        worker.phase = phase  # a user's hook has one of its own
        worker.log.boundary("train step")
        start = time.perf_counter()
        with run.watchdog_paused(when=may_compile and step == run.first):
            result = trainer.train_step()
        seconds = time.perf_counter() - start
        if worker.progress_file is not None:
            worker.progress_file.step_ended()
        if trainer.config.compile and step == run.first and worker.rank == 0:
            print_line(f"compile=true: the first step took {seconds:.1f} s, with compilation")
        for hook in hooks:
            hook.after_step(result, seconds)
        if result.stop and step < run.last:
            worker.stopped = True
            for hook in hooks:
                hook.stopped(step)
            return
