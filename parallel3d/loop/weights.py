"""Writes the full parameters before the first and after the last step (`train.save_weights`)."""

from __future__ import annotations

from parallel3d.build import Trainer
from parallel3d.files import replace_durably
from parallel3d.run.launch import Worker


def save_weights(trainer: Trainer, worker: Worker, name: str) -> None:
    """Writes the full parameters if `train.save_weights` asks for it; collective."""
    if not trainer.config.train.save_weights:
        return
    worker.phase = f"saving {name}"
    parameters = trainer.full_parameters()
    if worker.rank == 0:
        from safetensors.torch import save

        # A finished run would not write them again after a power failure, so they are flushed.
        whole = {name: parameter.contiguous() for name, parameter in parameters.items()}
        replace_durably(worker.run_dir / name, save(whole))
