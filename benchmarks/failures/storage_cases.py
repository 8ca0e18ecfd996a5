"""Defines the runs that benchmarks/failures/storage_faults.py disturbs, and their actions."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from parallel3d.build import Trainer
from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.checkpoint.keys import CheckpointConfig
from parallel3d.checkpoint.manifest import CHECKPOINTS, list_checkpoints, step_folder
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.commands.checkpoint.command import checkpoint
from parallel3d.data.sampler import Sample
from parallel3d.models.keys import ModelConfig
from parallel3d.run.directory import save_config
from parallel3d.run_config import Config

# two steps that were saved before, and the step to save; two checkpoints are kept
OLD, NEW, NEXT = 3, 6, 9
Digests = dict[str, dict[str, str]]  # checkpoint → file → SHA-256


class Noise:
    """A source of random tokens."""

    masks = False
    seq_length = 16

    def sample(self, i: int) -> Sample:
        tokens = np.random.default_rng(i).integers(0, 257, 17)
        return Sample(tokens, np.ones(16, dtype=bool))


@dataclass
class Run:
    """Makes a trainer of a tiny Llama, and a run of two checkpoints to copy."""

    folder: Path
    said: list[str] = field(default_factory=list)
    values: dict[int, str] = field(default_factory=dict)  # step → digest of its parameters

    def __post_init__(self) -> None:
        model = ModelConfig(
            num_layers=1,
            hidden_size=32,
            num_attention_heads=4,
            seq_length=16,
            norm="rmsnorm",
            position_embedding="rope",
            activation="swiglu",
            bias=False,
            ffn_hidden_size=48,
        )
        settings = CheckpointConfig(keep=2)
        self.config = Config(
            run="run", dp=1, device="cpu", model=model, checkpoint=settings, global_batch_size=2
        )
        self.config.micro_batch_size = 2
        groups = ProcessGroups.single()
        self.trainer = Trainer(self.config, groups, torch.device("cpu"), train_source=Noise())
        self.template = self.folder / "template" / "run"
        (self.template / CHECKPOINTS).mkdir(parents=True, mode=0o700)
        save_config(self.config, self.template)
        (self.template / "metrics.jsonl").touch()
        checkpoints = self.checkpoints(self.template)
        checkpoints.restore(self.trainer)
        for step in (OLD, NEW):
            self.trainer.train_step()
            self.trainer.steps_done = step
            assert checkpoints.save(self.trainer), self.said
            self.values[step] = self.digest()
        self.before = digests(self.template)
        for left in (".saving-00000009-old", ".removed-step-00000001-old"):
            (self.template / CHECKPOINTS / left).mkdir()
            (self.template / CHECKPOINTS / left / "rank-00000.safetensors").write_bytes(b"half")

    def checkpoints(self, run_dir: Path) -> Checkpoints:
        return Checkpoints(self.config, run_dir, self.trainer.groups, self.said.append)

    def digest(self) -> str:
        """Returns a digest of the trainer's parameters and moments."""
        parts = [v for s in self.trainer.parameter_slices() for v in s.values.values()]
        return hashlib.sha256(b"".join(v.numpy().tobytes() for v in parts)).hexdigest()

    def copy(self) -> Path:
        """Makes a fresh copy of the run."""
        target = self.folder / "work" / "run"
        shutil.rmtree(target.parent, ignore_errors=True)
        shutil.copytree(self.template, target)
        return target

    def flip(self, run_dir: Path) -> None:
        """Damages the newest checkpoint."""
        path = run_dir / CHECKPOINTS / step_folder(NEW) / "rank-00000.safetensors"
        content = bytearray(path.read_bytes())
        content[-5] ^= 4
        path.write_bytes(content)


def digests(run_dir: Path) -> Digests:
    return {
        folder.name: {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}
        for folder in list_checkpoints(run_dir)
    }


# Actions during which calls fail. Each gets a fresh run and returns a function to call, and for
# saves the steps that may be missing afterwards.
Act = Callable[[], object]


def saving(run: Run, run_dir: Path, *, wait: bool = True, step: int = NEXT) -> Act:
    checkpoints = run.checkpoints(run_dir)
    checkpoints.restore(run.trainer)
    run.trainer.steps_done, checkpoints.saved_step = step, -1

    def act() -> bool:
        checkpoints.save(run.trainer, wait=wait)
        return checkpoints.close()

    return act


def resume(run: Run, run_dir: Path) -> Act:
    return lambda: run.checkpoints(run_dir).restore(run.trainer)


def resume_next_to_damage(run: Run, run_dir: Path) -> Act:
    run.flip(run_dir)
    return resume(run, run_dir)


def command(*words: str) -> Callable[[Run, Path], Act]:
    def prepared(run: Run, run_dir: Path) -> Act:
        given = [w.replace("WORK", str(run_dir.parent)) for w in words]
        return lambda: checkpoint(given)

    return prepared


SCENARIOS: dict[str, Callable[[Run, Path], Act]] = {
    "save": saving,
    "save in the background": lambda run, d: saving(run, d, wait=False),
    "save the same step again": lambda run, d: saving(run, d, step=NEW),
    "resume": resume,
    "resume, the newest damaged": resume_next_to_damage,
    "ls": command("ls", "runs_dir=WORK"),
    "verify": command("verify", "run=run", "runs_dir=WORK"),
    "export": command("export", "run=run", "runs_dir=WORK", "to=WORK/hf"),
}
