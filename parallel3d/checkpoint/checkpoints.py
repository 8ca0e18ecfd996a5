"""A run's checkpoints, as the training loop sees them: restore, save now and then, close."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    Manifest,
    read_manifest,
    reason,
    step_folder,
    told,
)
from parallel3d.checkpoint.planners import logical_tensors
from parallel3d.checkpoint.restore import compared_with, facts_of, names_of_all, read_together
from parallel3d.checkpoint.retention import (
    Claim,
    bring_back,
    newest_word,
    remove_leftovers,
    set_aside,
)
from parallel3d.checkpoint.saver import Outcome, Save, Saver
from parallel3d.comm import collectives
from parallel3d.comm.exchange import all_gather_json, broadcast_json
from parallel3d.comm.operation_log import blocking
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config import identity
from parallel3d.config.schema import Config
from parallel3d.data.watched import Compared
from parallel3d.errors import TrainingFailure, UserError
from parallel3d.files import plain
from parallel3d.metrics.provenance import versions
from parallel3d.sizes.model import parameter_count
from parallel3d.trainer import Trainer

_RUNNING, _WRITTEN, _NOT_WRITTEN, _BUG, _OVERTAKEN = range(5)


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
        self.said: set[str] = set()
        self.lines: tuple[str, ...] = ()  # those of the manifest that the run goes on from
        self.waiting: Callable[[], tuple[str, ...]] = tuple  # gives those of the next one
        self.device = torch.device("cpu")  # the trainer's, as soon as there is one

    @property
    def is_first_rank(self) -> bool:
        return self.groups.rank == 0

    def restore(self, trainer: Trainer) -> int:
        """Go on from the newest good checkpoint, if there is one; returns the first step to run.

        A damaged one is said and set aside, and the one before it is taken; one that a rank cannot
        read is left as it is. May be called again in mid-run, to go back. Raises, on all ranks
        alike, UserError if the run cannot go on with this configuration or text, or if none of its
        checkpoints is good, and TrainingFailure if one cannot be read. Without any, the trainer
        stays as it is.
        """
        if self.saver is not None:
            self._settle(wait=True)
        self.device = trainer.device
        read_together(self._bring_back, self._words_of_all)
        names = names_of_all(self.config.run, self.run_dir, self._words_of_all)
        first_step = 1
        for name in names:
            manifest = self._load(trainer, self.run_dir / CHECKPOINTS / name)
            if manifest is not None:
                trainer.restore(manifest.progress)
                self.saved_step, self.lines = manifest.step, manifest.lines
                first_step = manifest.step + 1
                break
        else:
            if names:
                raise UserError(
                    f"run={self.config.run} has no checkpoint that is whole: start another run="
                )
            if self.is_first_rank and os.path.exists(self.run_dir / "metrics.jsonl"):
                self.say(f"run={self.config.run} has no checkpoint yet: it begins again at step 1")
        self._prepare_saver()
        if self._copies_ahead(first_step - 1):
            self.saver.staging.prepare(logical_tensors(trainer.parameter_slices(), shared=True))
        return first_step

    def _bring_back(self) -> None:
        if self.is_first_rank:
            with told(str(self.run_dir)):
                bring_back(self.run_dir)

    def _prepare_saver(self) -> None:
        """Rank 0 names this session, claims the run's checkpoints and tidies them up."""
        if self.config.checkpoint.every:
            # Half a second, and many on a cold network file system: not within a save, where the
            # watchdog and the grace time of a preempted run are counting.
            import parallel3d.checkpoint.storage  # noqa: F401
        if self.saver is None:
            session = self._word_of_first_rank(lambda: uuid.uuid4().hex[:12])
            self.saver = Saver(
                self.run_dir,
                self.config.checkpoint,
                self.groups.rank,
                self.groups.world.size,
                session,
                self.config.launch.timeout_s,
                Claim(self.run_dir, session) if self.is_first_rank else None,
            )
        if self.saver.claim is not None:
            said = self.saver.claim.take() if self.config.checkpoint.every else []
            self._say_once([*said, *remove_leftovers(self.run_dir)])

    def _say_once(self, sentences: Iterable[str]) -> None:
        """Of what goes wrong at every save alike, the user hears the first time."""
        for sentence in sentences:
            if sentence not in self.said:
                self.said.add(sentence)
                self.say(sentence)

    def _copies_ahead(self, step: int) -> bool:
        """Whether a save will be copied after `step`: memory that is lacking is found out first."""
        settings, steps = self.config.checkpoint, self.config.train.steps
        if not (settings.async_save and settings.every):
            return False
        return (step // settings.every + 1) * settings.every < steps

    def is_due(self, step: int) -> bool:
        """Whether `checkpoint.every` has a save after this step."""
        every = self.config.checkpoint.every
        return bool(every) and (step % every == 0 or step == self.config.train.steps)

    def after_step(self, trainer: Trainer) -> None:
        """Call after every step: saves when it is time, and says how a save has ended.

        Raises CheckpointFailure if a save failed for another reason than the disk's.
        """
        self._settle(wait=False)
        if self.is_due(trainer.steps_done):
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
        trainer.data_parallel.wait_for_all_gathers()
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
        if self.is_first_rank:
            self._say_once(outcome.notes)
        if code == _WRITTEN:
            return True
        self.saved_step = -1  # another try at the same step is not in vain
        if code in (_BUG, _OVERTAKEN):
            problem = self._word_of_first_rank(lambda: outcome.problem)
            if code == _OVERTAKEN:
                raise TrainingFailure(f"{step_folder(step)} was not written: {problem}")
            raise CheckpointFailure(f"the checkpoint of step {step} could not be made: {problem}")
        if self.is_first_rank:
            stays = newest_word(self.run_dir)
            self.say(f"{step_folder(step)} could not be written: {outcome.problem}; {stays}")
        return False

    def _load(self, trainer: Trainer, folder: Path) -> Manifest | None:
        """Load one checkpoint on every rank, or say on rank 0 why it cannot be, and return None."""
        from parallel3d.checkpoint.storage import read_state

        def read() -> tuple[Manifest, Compared]:
            manifest = read_manifest(folder)
            compared = compared_with(manifest, self.config, trainer.corpus)
            if compared.refusal is None:
                read_state(folder, logical_tensors(trainer.parameter_slices(), shared=False))
            return manifest, compared

        found, damage = read_together(read, self._words_of_all)
        if found is None:
            self._set_aside(folder, damage)
            return None
        manifest, compared = found
        words = self._words_of_all(compared.refusal)
        if refusals := [word for word in words if word is not None]:
            raise UserError(refusals[0])
        if self.is_first_rank and compared.note is not None:
            self._say_once([compared.note])
        if self.is_first_rank and manifest.step < self.config.train.steps:
            self._say_what_changed(manifest)
        return manifest

    def _set_aside(self, folder: Path, damage: str | None) -> None:
        """Raises TrainingFailure on all ranks if the folder cannot be renamed."""

        def rename() -> list[str | None]:
            try:
                return [set_aside(folder).name, None]
            except OSError as error:
                return [None, reason(error)]

        aside, problem = self._word_of_first_rank(rename)
        if problem is not None:
            raise TrainingFailure(f"{damage}, and {folder.name} cannot be set aside ({problem})")
        if self.is_first_rank:
            self.say(f"{damage}: it is now {aside}, and the checkpoint before it is used")

    def _say_what_changed(self, manifest: Manifest) -> None:
        found = identity.changes(manifest.config, self.config)
        parts = [f"goes on at step {manifest.step + 1}"]
        named = (("layout", identity.layout(found)), ("changed", identity.reported(found)))
        for word, some in named:
            if some:
                shown = ", ".join(f"{c.key} {plain(str(c.there))} → {c.here}" for c in some)
                parts.append(f"{word}: {shown}")
        self.say(f"run={self.config.run} {'; '.join(parts)}")

    def _facts(self, trainer: Trainer) -> Manifest:
        return Manifest(
            step=trainer.steps_done,
            progress=trainer.progress(),
            config=dataclasses.asdict(self.config),
            data=facts_of(trainer.corpus) if trainer.corpus is not None else {},
            saved_at="",
            versions=versions(),
            files=(),
            lines=self.waiting(),
        )

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
    if outcome.is_overtaken:
        return _OVERTAKEN
    return _BUG if outcome.is_bug else _NOT_WRITTEN
