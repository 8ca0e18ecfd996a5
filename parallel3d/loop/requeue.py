"""Asks the batch script to queue the job again after a signal from the scheduler."""

from __future__ import annotations

from parallel3d.build import Trainer
from parallel3d.errors import print_line
from parallel3d.metrics.jsonl import write_json
from parallel3d.metrics.recorder import Recorder
from parallel3d.run.directory import REQUEUE
from parallel3d.run.launch import Worker


def leave_marker(
    trainer: Trainer, worker: Worker, recorder: Recorder | None, is_saved: bool
) -> None:
    """Logs that a signal stopped the run, and writes `REQUEUE` if the job is to be queued again.

    The job is queued again after a scheduler's signal if the run was saved, because otherwise it
    would start over. The batch script looks for the file because srun and torchrun do not forward
    exit codes. No-op on ranks without a recorder.
    """
    if recorder is None:
        return
    step, steps = trainer.steps_done, trainer.length.last_step
    recorder.finish("stopped")
    where = f"stopped by {worker.stop.name} after step {step} of {steps}"
    if not trainer.config.checkpoint.every:
        print_line(f"{where}; nothing is saved (checkpoint.every=0)")
    elif not is_saved:
        print_line(f"{where}; no checkpoint was written")
    else:
        print_line(f"{where}; saved: run={trainer.config.run} resumes from there")
        if worker.stop.requeues:
            write_json(worker.run_dir / REQUEUE, {"step": step, "signal": worker.stop.name})
