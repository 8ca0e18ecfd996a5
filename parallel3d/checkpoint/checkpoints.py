"""A run's checkpoints, as the training loop sees them: restore, save now and then, close."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from parallel3d import collectives
from parallel3d.checkpoint import identity
from parallel3d.checkpoint.boxes import logical_tensors
from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    DamagedCheckpoint,
    Manifest,
    list_checkpoints,
    read_manifest,
    step_folder,
)
from parallel3d.checkpoint.retention import remove_leftovers, set_aside
from parallel3d.checkpoint.saver import Outcome, Save, Saver
from parallel3d.config import Config
from parallel3d.data.corpus import Corpus
from parallel3d.errors import UserError
from parallel3d.exchange import all_gather_json, broadcast_json
from parallel3d.metrics.flops import parameter_count
from parallel3d.operation_log import blocking
from parallel3d.topology.process_groups import ProcessGroups
from parallel3d.trainer import Trainer

_RUNNING, _WRITTEN, _NOT_WRITTEN, _BUG = range(4)


class CheckpointFailure(RuntimeError):
    """A checkpoint was not written, and that cannot be passed over; raised on all ranks alike."""


class Checkpoints:
    """One rank's view; every call is collective over the world, at the same step on all ranks.

        checkpoints = Checkpoints(config, run_dir, groups, say)
        first_step = checkpoints.restore(trainer)     # before anything else
        …train a step…; checkpoints.after_step(trainer)
        checkpoints.close()                           # waits for what is being written

    Args:
        say: takes a sentence for the user; called on rank 0 alone.
    """

    def __init__(
        self, config: Config, run_dir: Path, groups: ProcessGroups, say: Callable[[str], None]
    ) -> None:
        self.config, self.run_dir, self.groups, self.say = config, run_dir, groups, say
        self.saver: Saver | None = None
        self.under_way: int | None = None  # its step
        self.saved_step = 0  # the newest that is written or under way
        self.last_failed = False
        self.number = 0
        self.device = torch.device("cpu")  # the trainer's, as soon as there is one

    @property
    def is_first_rank(self) -> bool:
        return self.groups.rank == 0

    def restore(self, trainer: Trainer) -> int:
        """Go on from the newest good checkpoint, if there is one; returns the first step to run.

        A damaged one is said and set aside, and the one before it is taken. May be called again
        in mid-run, to go back. Raises UserError if the run cannot go on with this configuration or
        text, or if none of its checkpoints is good. Without any, the trainer stays as it is.
        """
        if self.saver is not None:
            self._settle(wait=True)
        self.device = trainer.device
        session, names = self._word_of_first_rank(self._tidy)
        if self.saver is None:
            self.saver = Saver(
                self.run_dir,
                self.config.checkpoint,
                self.groups.rank,
                self.groups.world.size,
                session,
                self.config.launch.timeout_s,
            )
        first_step = 1
        for name in names:
            manifest = self._load(trainer, self.run_dir / CHECKPOINTS / name)
            if manifest is not None:
                trainer.restore(manifest.progress)
                self.saved_step = manifest.step
                first_step = manifest.step + 1
                break
        else:
            if names:
                raise UserError(
                    f"run={self.config.run} has no checkpoint that is whole: start another run="
                )
            if self.is_first_rank and (self.run_dir / "metrics.jsonl").exists():
                self.say(f"run={self.config.run} has no checkpoint yet: it begins again at step 1")
        if self._copies_ahead(first_step - 1):
            self.saver.staging.prepare(logical_tensors(trainer.parameter_slices(), shared=True))
        return first_step

    def _copies_ahead(self, step: int) -> bool:
        """Whether a save will be copied after `step`: memory that is lacking is found out first."""
        settings, steps = self.config.checkpoint, self.config.train.steps
        if not (settings.async_save and settings.every):
            return False
        return (step // settings.every + 1) * settings.every < steps

    def after_step(self, trainer: Trainer) -> None:
        """Call after every step: saves when it is time, and says how a save has ended.

        Raises CheckpointFailure if a save failed for another reason than the disk's.
        """
        self._settle(wait=False)
        every, step = self.config.checkpoint.every, trainer.steps_done
        if every and (step % every == 0 or step == self.config.train.steps):
            self.save(trainer, wait=not self.config.checkpoint.async_save)

    def save(self, trainer: Trainer, *, wait: bool = True) -> bool:
        """Save now, whatever `checkpoint.every` says; with `wait` until it is on the disk.

        A save under way is waited for first. Returns False if it is known that none was written:
        the disk is full or broken, which is said.
        """
        if self.saver is None:
            raise RuntimeError("restore comes before the first save")
        written = self._settle(wait=True)
        step = trainer.steps_done
        if step == self.saved_step:
            return written
        # With zero=1 parameters may be on their way: they are written over this rank's own too.
        trainer.data_parallel.wait_for_all()
        state = logical_tensors(trainer.parameter_slices(), shared=True)
        if not wait:
            trainer.before_update = self.saver.copied.wait
        self.number += 1
        elements = parameter_count(self.config.model)
        save = Save(step, self.number, state, self._facts(trainer), elements)
        self.under_way = self.saved_step = step
        # After the last step nobody changes the values: they are written from where they are.
        copies = step < self.config.train.steps
        self.saver.start(save, background=not wait, copies=copies)
        return self._settle(wait=True) if wait else True

    def close(self) -> bool:
        """Wait for the save under way. Returns False if the last one was not written."""
        self._settle(wait=True)
        return not self.last_failed

    def _settle(self, *, wait: bool) -> bool:
        """Learn, on all ranks alike, how the save under way has ended, if it has.

        Returns False if it was not written.
        """
        if self.under_way is None:
            return True
        outcome = self.saver.join() if wait else self.saver.outcome
        code = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.is_first_rank:
            code += _code(outcome)
        collectives.all_reduce(code, self.groups.world)
        with blocking(self.groups.world):
            code = int(code)
        if code == _RUNNING:
            return True
        self.last_failed = code != _WRITTEN
        self.saver.join()
        step, self.under_way = self.under_way, None
        if code == _WRITTEN:
            return True
        self.saved_step = -1  # another try at the same step is not in vain
        if code == _BUG:
            problem = self._word_of_first_rank(lambda: outcome.problem)
            raise CheckpointFailure(f"the checkpoint of step {step} could not be made: {problem}")
        if self.is_first_rank:
            old = list_checkpoints(self.run_dir)
            stays = f"{old[0].name} stays the newest" if old else "there is none yet"
            self.say(f"{step_folder(step)} could not be written: {outcome.problem}; {stays}")
        return False

    def _load(self, trainer: Trainer, folder: Path) -> Manifest | None:
        """Load one checkpoint on every rank, or say on rank 0 why it cannot be, and return None."""
        from parallel3d.checkpoint.storage import read_state  # DCP takes half a second to import

        problem = refusal = manifest = None
        try:
            manifest = read_manifest(folder)
            refusal = self._refusal(manifest, trainer.corpus)
            if refusal is None:
                read_state(folder, logical_tensors(trainer.parameter_slices(), shared=False))
        except DamagedCheckpoint as error:
            problem = str(error)
        problems = [p for p in self._words_of_all(problem) if p is not None]
        if not problems and refusal is not None:
            raise UserError(refusal)
        if not problems:
            if self.is_first_rank and manifest.step < self.config.train.steps:
                self._say_what_changed(manifest)
            return manifest
        if self.is_first_rank:
            aside = set_aside(folder)
            self.say(f"{problems[0]}: it is now {aside.name}, and the checkpoint before it is used")
        return None

    def _refusal(self, manifest: Manifest, corpus: Corpus | None) -> str | None:
        sentence = identity.refusal(self.config.run, identity.changes(manifest.config, self.config))
        if sentence is not None or corpus is None or not manifest.data:
            return sentence
        here = _facts_of(corpus)
        if manifest.data == here:
            return None
        return (
            f"run={self.config.run} cannot go on with another text: its fingerprint is "
            f"{manifest.data['fingerprint'][:12]} there, now {here['fingerprint'][:12]} "
            f"({manifest.data['train_tokens']} and {here['train_tokens']} tokens to train on); "
            f"give the data.path of the first start, or choose another run="
        )

    def _say_what_changed(self, manifest: Manifest) -> None:
        found = identity.changes(manifest.config, self.config)
        parts = [f"goes on at step {manifest.step + 1}"]
        for word, some in (("layout", identity.layout(found)), ("changed", identity.said(found))):
            if some:
                shown = ", ".join(f"{c.key} {c.there} → {c.here}" for c in some)
                parts.append(f"{word}: {shown}")
        self.say(f"run={self.config.run} {'; '.join(parts)}")

    def _facts(self, trainer: Trainer) -> Manifest:
        versions = {"torch": torch.__version__}
        try:
            versions["parallel3d"] = version("parallel3d")
        except PackageNotFoundError:
            versions["parallel3d"] = "source"
        return Manifest(
            step=trainer.steps_done,
            progress=trainer.progress(),
            config=dataclasses.asdict(self.config),
            data=_facts_of(trainer.corpus) if trainer.corpus is not None else {},
            saved_at="",
            versions=versions,
            files=(),
        )

    def _tidy(self) -> tuple[str, list[str]]:
        """Rank 0: a name for this session, and the checkpoints that there are."""
        remove_leftovers(self.run_dir)
        return uuid.uuid4().hex[:12], [p.name for p in list_checkpoints(self.run_dir)]

    def _word_of_first_rank(self, make: Callable[[], Any]) -> Any:
        word = make() if self.is_first_rank else None
        return broadcast_json(word, self.groups.world.handle, self.device)

    def _words_of_all(self, word: str | None) -> list[str | None]:
        return all_gather_json(word, self.groups.world.handle, self.device)


def _code(outcome: Outcome | None) -> int:
    if outcome is None:
        return _RUNNING
    if outcome.problem is None:
        return _WRITTEN
    return _BUG if outcome.is_bug else _NOT_WRITTEN


def _facts_of(corpus: Corpus) -> dict[str, str | int]:
    return {"fingerprint": corpus.fingerprint, "train_tokens": len(corpus.train)}
