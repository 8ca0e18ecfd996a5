"""Restores and saves a run's checkpoints for the training loop.

A checkpoint is only set aside if it is provably damaged (`manifest.read_together`).
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch

from parallel3d.build import Trainer
from parallel3d.checkpoint import hook_states, identity
from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    PARAMETER,
    Manifest,
    Share,
    list_checkpoints,
    list_damaged,
    read_manifest,
    read_together,
    reason,
    step_folder,
    step_of,
    unreadable,
)
from parallel3d.checkpoint.saver import (
    ElementSums,
    Lease,
    Save,
    Saver,
    describe_newest,
    remove_leftovers,
    set_aside,
)
from parallel3d.checkpoint.storage import State, chunks_by_name, read_state
from parallel3d.comm import collectives
from parallel3d.comm.exchange import all_gather_json, broadcast_json
from parallel3d.comm.operation_log import blocking
from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.config.fields import show, spell
from parallel3d.config.length import Length
from parallel3d.config.values import BatchSizes
from parallel3d.data.same_text import CHOOSE_TEXT, DATE, DATE_OF_OLDER, compare_text, facts_of
from parallel3d.data.sampler import TrainingText
from parallel3d.data.tokens import TextComparison
from parallel3d.errors import TrainingFailure, UserError
from parallel3d.files import plain
from parallel3d.metrics.provenance import versions
from parallel3d.metrics.units import units_of
from parallel3d.models.declared import full_shapes_of, parameter_shapes_of, states_of
from parallel3d.models.keys import ModelConfig
from parallel3d.models.survey import loss_of
from parallel3d.optim.keys import OptimConfig
from parallel3d.optim.optimizer import EMA, kept_states
from parallel3d.optim.thaws import frozen_in
from parallel3d.parameters.slices import STATE
from parallel3d.run_config import Config, saved_tree
from parallel3d.text import count


def names_of_all(run: str | None, run_dir: Path, share: Share) -> list[str]:
    """Returns the names of all checkpoints that at least one rank sees, newest first.

    The call is collective over the world.

    Raises UserError if all of the run's checkpoints are marked as damaged: the run would start over
    although these checkpoints may still be needed. Raises TrainingFailure as `read_together` does.
    """

    def here() -> tuple[list[str], list[str]]:
        with unreadable(str(run_dir)):
            found = list_checkpoints(run_dir), list_damaged(run_dir)
        return [p.name for p in found[0]], [p.name for p in found[1]]

    seen, _ = read_together(here, share)
    everyones = share(seen)
    names = {name for good, _ in everyones for name in good}
    damaged = sorted({name for _, bad in everyones for name in bad})
    if damaged and not names:
        raise UserError(
            f"run={run} has only damaged checkpoints ({', '.join(damaged[:3])}"
            f"{' …' if damaged[3:] else ''} in {run_dir}), and starting over at step 1 could "
            "overwrite them: rename one of them to step-… if it is intact, or choose another run="
        )
    return sorted(names, key=lambda name: step_of(Path(name)), reverse=True)


def compared_with(
    manifest: Manifest, config: Config, corpus: TrainingText | None
) -> TextComparison:
    """Compares a checkpoint with the configuration and the text of a run.

    The result has the reason if the run cannot resume from the checkpoint; otherwise it may have a
    note on the data files.
    """
    found = identity.changes(manifest.config, config)
    refusal = identity.refusal(config.run, found)
    if refusal is not None or corpus is None:
        return TextComparison(refusal)
    before = {change.key: change.there for change in found if change.key in CHOOSE_TEXT}
    if DATE in before and "chat_date" not in manifest.config.get("data", {}):
        before[DATE] = DATE_OF_OLDER
    words = [spell(key, value) for key, value in before.items()]
    samples = None if config.train.eval_only else int(manifest.progress["consumed_samples"])
    return compare_text(manifest.data, corpus, config.run, config.model.seq_length, samples, words)


LOSS = "loss"  # the entry of a checkpoint's progress with the name of a user's own loss


def changed_keys(found: list[identity.ConfigChange]) -> list[identity.ConfigChange]:
    """Returns the changes that affect the results of the steps after a checkpoint."""
    return [change for change in found if change.kind == "reported"]


def to_go(length: Length, sizes: BatchSizes, model: ModelConfig, steps: int, samples: int) -> str:
    """Describes the steps or tokens that a resuming run has done, and the steps that remain.

    `sizes` gives the size of the global batch for any number of samples read.
    """
    seq_length, units = model.seq_length, units_of(model)
    done = f"{steps:,} of {length.last_step:,} steps are done"
    if length.budget is not None:
        tokens = samples * seq_length, length.budget * seq_length
        done = f"{tokens[0]:,} of {tokens[1]:,} {units.work} are done"
    batches = [sizes.at(samples), sizes.at(length.sizes.samples(max(steps, length.last_step - 1)))]
    words = " to ".join(f"{size:,}" for size in dict.fromkeys(batches))
    left = length.last_step - steps
    return f"{done}, {count(left, 'step')} of {words} {units.samples} to go"


# Restoring and saving


def expected_elements(
    model: ModelConfig, optim: OptimConfig, states: tuple[tuple[str, ...], ...] | None = None
) -> ElementSums:
    """Counts the elements that a checkpoint of this model and of this optimizer has.

    `states`: the names of the optimizer's states, or None for those of `kept_states`.
    """
    states = kept_states(optim) if states is None else states
    kept = parameter_shapes_of(model)
    sizes = {name: math.prod(shape) for name, shape in full_shapes_of(model).items()}
    parameters = sum(sizes[name] for name in kept)
    trained = sum(sizes[name] for name in kept if not optim.treatment(name).frozen)
    return {
        (PARAMETER,): parameters,
        (STATE,): sum(sizes[name] for name in states_of(model)),
        **({} if optim.ema_decay is None else {(EMA,): parameters}),
        # A parameter has the states of one of the optimizer's kinds of steps.
        **dict.fromkeys(product(*states), trained),
    }


def _to_read(trainer: Trainer, manifest: Manifest) -> State:
    """Returns the trainer's chunks that the checkpoint holds, and sets the others to zero.

    A checkpoint of step 0 holds no optimizer state, and no checkpoint needs to hold the moments of
    parameters that were frozen in its run. If the checkpoint lacks the average of the weights,
    `start_ema` fills it afterwards.
    """
    state = chunks_by_name(trainer.parameter_slices(), shared=False)
    kept = (f"{PARAMETER}/", f"{STATE}/")
    if manifest.has_weights_alone:
        return clear_others(state, [name for name in state if name.startswith(kept)])
    if not manifest.has_ema:
        state = {k: v for k, v in state.items() if not k.startswith(f"{EMA}/")}
    return without_frozen(state, manifest)


def without_frozen(state: State, manifest: Manifest) -> State:
    """Returns `state` without the moments of what was frozen in the run of a checkpoint.

    These moments are set to zero, and a checkpoint need not hold them: the moments of a parameter
    that is trained now, and was not before, begin at zero (`optim/thaws.py`).
    """
    there = OptimConfig(freeze=[*frozen_in(manifest.config)])

    def begins(name: str) -> bool:
        kind, _, full = name.partition("/")
        return kind not in (PARAMETER, STATE, EMA) and there.treatment(full).frozen

    return clear_others(state, [name for name in state if not begins(name)])


def clear_others(state: State, names: Collection[str]) -> State:
    """Returns the chunks of the tensors `names`; sets the chunks of all other tensors to zero."""
    for name in state.keys() - set(names):
        for _, values in state[name].chunks:
            values.zero_()
    return {name: state[name] for name in names}


class CheckpointFailure(RuntimeError):
    """Raised on all ranks if a save failed because of a bug rather than a disk error."""


Lines = Callable[[], tuple[str, ...]]


class Checkpoints:
    """Restores, saves and closes a run's checkpoints on one rank.

    Every method is collective: all ranks of the world must call it at the same step.

        checkpoints = Checkpoints(config, run_dir, groups, say)
        first_step = checkpoints.restore(trainer)     # before anything else
        …train a step…; checkpoints.after_step(trainer)
        checkpoints.close()                           # waits for the save in flight

    Args:
        say: called on rank 0 with each sentence to log for the user.
        hooks: the hooks of a script whose states are saved, by name.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        groups: ProcessGroups,
        say: Callable[[str], None],
        hooks: Mapping[str, hook_states.Stateful] = {},
    ) -> None:
        self.config = config
        self.hooks = hooks
        self.run_dir = run_dir
        self.groups = groups
        self.say = say
        self.saver: Saver | None = None
        self.step_in_flight: int | None = None
        self.saved_step = 0  # newest step whose checkpoint is written or in flight
        self.resumed = False  # whether `restore` has found a checkpoint
        # Whether keys that affect results beyond rounding have changed since the checkpoint.
        self.changed = False
        self.last_failed = False
        self.number = 0
        self.logged: set[str] = set()
        self.lines: tuple[str, ...] = ()  # `lines` of the manifest from which the run resumes
        # `restore` replaces these two with the trainer's values.
        self.device = torch.device("cpu")
        self.length = config.planned_length.after()

    @property
    def is_first_rank(self) -> bool:
        return self.groups.rank == 0

    def restore(self, trainer: Trainer) -> int:
        """Restores the newest intact checkpoint, if any, and returns the first step to run.

        A damaged checkpoint is logged and set aside, and the previous one is used; a checkpoint
        that a rank cannot read is left unchanged. Without a checkpoint, the trainer is not changed.
        A run may call this again to go back to its newest checkpoint.

        Raises:
            UserError: on all ranks, if the run cannot resume with this configuration or text, or
                has no intact checkpoint left.
            TrainingFailure: on all ranks, if a checkpoint cannot be read.
        """
        if self.saver is not None:
            self._settle(wait=True)
        self.device = trainer.device
        self.length = trainer.length
        names = names_of_all(self.config.run, self.run_dir, self._from_all_ranks)
        first_step = 1
        for name in names:
            manifest = self._load(trainer, self.run_dir / CHECKPOINTS / name)
            if manifest is not None:
                trainer.restore(manifest.progress, manifest.config)
                self.length = trainer.length
                changed = changed_keys(identity.changes(manifest.config, self.config))
                self.changed = bool(changed) or self._other_loss(manifest) is not None
                resumes = manifest.step < self.length.last_step and not self.config.train.eval_only
                if self.is_first_rank and resumes:
                    self._log_changes(manifest)
                self.saved_step = manifest.step
                self.lines = manifest.lines
                first_step = manifest.step + 1
                self.resumed = True
                break
        else:
            if names:
                raise UserError(
                    f"run={self.config.run} has no intact checkpoint left; those that could not be "
                    f"loaded are in {self.run_dir / CHECKPOINTS}: copy an intact one there, or "
                    "choose another run="
                )
            if self.is_first_rank and not self.config.train.eval_only:
                # Earlier starts under this name may have failed before their first checkpoint.
                has_rows = os.path.exists(self.run_dir / "metrics.jsonl")
                again = ": it has no checkpoint yet and starts over at step 1" if has_rows else ""
                model, data = self.config.model.name, self.config.data.name
                self.say(f"run={self.config.run} is a new run{again} (model={model}, data={data})")
        if self.config.train.eval_only:
            return first_step  # an evaluation saves nothing
        saver = self._prepare_saver()
        if self._copies_ahead(first_step - 1):
            saver.staging.prepare(chunks_by_name(trainer.saved_slices(), shared=True))
        return first_step

    def _prepare_saver(self) -> Saver:
        """Returns this session's saver; rank 0 also claims the run's folder and removes leftovers.

        Leftovers are files of saves and removals that were interrupted.
        """
        if self.saver is None:
            session = self._from_first_rank(lambda: uuid.uuid4().hex[:12])
            self.saver = Saver(
                self.run_dir,
                self.config.checkpoint,
                self.groups.rank,
                self.groups.world.size,
                session,
                self.config.launch.timeout_s,
                Lease(self.run_dir, session) if self.is_first_rank else None,
            )
        if self.saver.lease is not None:
            notes = self.saver.lease.take() if self.config.checkpoint.every else []
            self._log_once([*notes, *remove_leftovers(self.run_dir)])
        return self.saver

    def _log_once(self, sentences: Iterable[str]) -> None:
        for sentence in sentences:
            if sentence not in self.logged:
                self.logged.add(sentence)
                self.say(sentence)

    def _copies_ahead(self, step: int) -> bool:
        """Returns whether a later save will copy the values, and will need memory for the copy.

        Every background save copies them, except the save after the last step. `step` is the number
        of steps done.
        """
        settings, steps = self.config.checkpoint, self.length.last_step
        if not (settings.async_save and settings.every):
            return False
        every = 1 if settings.is_timed else settings.every
        return bool((step // every + 1) * every < steps)

    def is_due(self, step: int) -> bool:
        """Returns whether a save follows a step, for whatever time it ends."""
        settings = self.config.checkpoint
        if settings.every == 0:
            return False
        return step == self.length.last_step or (
            not settings.is_timed and step % settings.every == 0
        )

    def after_step(
        self, trainer: Trainer, unwritten: Lines = tuple, *, by_time: bool = False
    ) -> None:
        """Saves if a save is due; `unwritten` is as in `save`.

        `by_time`: whether one is due because of the time that has passed (`StepResult.save`).
        Raises CheckpointFailure if the previous save failed because of a bug.
        """
        self._settle(wait=False)
        if by_time or self.is_due(trainer.steps_done):
            self.save(trainer, unwritten, wait=not self.config.checkpoint.async_save)

    def save(self, trainer: Trainer, unwritten: Lines = tuple, *, wait: bool = True) -> bool:
        """Saves now, after waiting for any save in flight.

        `unwritten` returns the lines of metrics.jsonl that are not on disk yet; the checkpoint has
        them too. Returns False, after logging the reason, if a disk error prevented a save.
        """
        if self.saver is None:
            raise RuntimeError("call restore before the first save")
        written = self._settle(wait=True)
        step = trainer.steps_done
        if step == self.saved_step:
            return written
        # With zero=1, an all-gather in flight also writes this rank's own parameters.
        trainer.data_parallel.wait_for_all_gathers()
        state = chunks_by_name(trainer.saved_slices(), shared=True)
        self.number += 1
        of_hooks = hook_states.collect(
            self.hooks, self._from_all_ranks, self.groups.rank, self.device
        )
        state |= of_hooks.state
        facts = self._facts(trainer, unwritten(), of_hooks.progress)
        expected = expected_elements(self.config.model, self.config.optim, trainer.optimizer.kept)
        if self.hooks:
            expected = {**expected, (hook_states.KIND,): of_hooks.elements}
        save = Save(step, self.number, state, facts, expected, trainer.copied)
        self.step_in_flight = self.saved_step = step
        # After the last step, the values no longer change, so no copy of them is needed.
        copies = step < self.length.last_step
        self.saver.start(save, background=not wait, copies=copies)
        return self._settle(wait=True) if wait else True

    def close(self) -> bool:
        """Waits for the save in flight. Returns False if the last save did not succeed."""
        self._settle(wait=True)
        return not self.last_failed

    def _settle(self, *, wait: bool) -> bool:
        """Reports the result of the save in flight, if the save has ended on rank 0.

        Returns False if the checkpoint was not written because of a disk error. With `wait`, waits
        for the end of the save first.
        """
        if self.step_in_flight is None:
            return True
        assert self.saver is not None  # the saver has a save in flight
        if wait:
            self.saver.join()
        ended = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.is_first_rank:
            ended += self.saver.outcome is not None
        collectives.all_reduce(ended, self.groups.world)
        with blocking(self.groups.world):
            if not int(ended):
                return True
        mine = self.saver.join()
        problem, is_bug, is_overtaken = self._from_first_rank(
            lambda: [mine.problem, mine.is_bug, mine.is_overtaken]
        )
        step = self.step_in_flight
        self.step_in_flight = None
        self.last_failed = problem is not None
        if self.is_first_rank:
            self._log_once(mine.notes)
        if problem is None:
            return True
        self.saved_step = -1  # allows the same step to be saved again
        if is_overtaken:
            raise TrainingFailure(f"{step_folder(step)} was not written: {problem}")
        if is_bug:
            raise CheckpointFailure(f"the checkpoint of step {step} could not be saved: {problem}")
        if self.is_first_rank:
            stays = describe_newest(self.run_dir)
            self.say(f"{step_folder(step)} could not be written: {problem}; {stays}")
        return False

    def _load(self, trainer: Trainer, folder: Path) -> Manifest | None:
        """Loads a checkpoint on every rank; if it is damaged, sets it aside and returns None."""

        def read() -> tuple[Manifest, TextComparison, hook_states.RestoredStates]:
            manifest = read_manifest(folder)
            compared = compared_with(manifest, self.config, trainer.corpus)
            if compared.refusal is None and manifest.step:
                of_optimizer = trainer.optimizer.refusal(manifest.progress, manifest.config)
                compared = compared if of_optimizer is None else TextComparison(of_optimizer)
            of_hooks = hook_states.RestoredStates.of(manifest, self.hooks, self.device)
            if compared.refusal is None:
                read_state(folder, _to_read(trainer, manifest) | of_hooks.state)
            return manifest, compared, of_hooks

        found, damage = read_together(read, self._from_all_ranks)
        if found is None:
            self._set_aside(folder, damage)
            return None
        manifest, compared, of_hooks = found
        everyone = self._from_all_ranks(compared.refusal)
        if refusals := [refusal for refusal in everyone if refusal is not None]:
            raise UserError(refusals[0])
        if not manifest.has_ema:
            trainer.optimizer.start_ema()
        if self.is_first_rank:
            self._log_once([compared.note] if compared.note is not None else [])
            self._log_once(hook_states.notes(manifest.progress, self.hooks, manifest.step))
        of_hooks.give(self.hooks, self.device)
        return manifest

    def _set_aside(self, folder: Path, damage: str | None) -> None:
        def rename() -> list[str | None]:
            try:
                return [set_aside(folder).name, None]
            except OSError as error:
                return [None, reason(error)]

        aside, problem = self._from_first_rank(rename)
        if problem is not None:
            raise TrainingFailure(f"{damage}, and {folder.name} cannot be set aside ({problem})")
        if self.is_first_rank:
            self.say(
                f"{damage}: the checkpoint is renamed to {aside}, and the previous one is tried"
            )

    def _log_changes(self, manifest: Manifest) -> None:
        found = identity.changes(manifest.config, self.config)
        parts = [f"resumes at step {manifest.step + 1}"]
        groups = {
            "layout": [change for change in found if change.is_layout],
            "changed": changed_keys(found),
        }
        for title, some in groups.items():
            if some:
                shown = ", ".join(f"{c.key} {plain(show(c.there))} → {show(c.here)}" for c in some)
                parts.append(f"{title}: {shown}")
        samples = int(manifest.progress["consumed_samples"])
        if (other := self._other_loss(manifest)) is not None:
            parts.append(other)
        sizes, model = self.config.batch_sizes, self.config.model
        parts.append(to_go(self.length, sizes, model, manifest.step, samples))
        self.say(f"run={self.config.run} {'; '.join(parts)}")
        if manifest.has_ema and self.config.optim.ema_decay is None:
            self.say("optim.ema_decay=null: the average of the weights is dropped")
        elif not manifest.has_ema and self.config.optim.ema_decay is not None:
            self.say(f"the average of the weights starts from the weights of step {manifest.step}")

    def _facts(
        self, trainer: Trainer, lines: tuple[str, ...], of_hooks: dict[str, Any]
    ) -> Manifest:
        return Manifest(
            step=trainer.steps_done,
            progress=trainer.progress() | of_hooks | self._loss(),
            config=saved_tree(self.config),
            data=facts_of(trainer.corpus) if trainer.corpus is not None else {},
            saved_at="",
            versions=versions(),
            files=(),
            lines=lines,
        )

    def _loss(self) -> dict[str, str]:
        """Returns the entry of a checkpoint with the name of the loss of a user's own model."""
        name = loss_of(self.config.model)
        return {} if name is None else {LOSS: name}

    def _other_loss(self, manifest: Manifest) -> str | None:
        """Returns words on a loss of another name than that of a checkpoint, or None."""
        there, now = manifest.progress.get(LOSS), loss_of(self.config.model)
        if there is None or there == now:
            return None
        return f"another loss: {plain(show(there))} → {now}"

    def _from_first_rank(self, make: Callable[[], Any]) -> Any:
        value = make() if self.is_first_rank else None
        return broadcast_json(value, self.groups.world.handle, self.device)

    def _from_all_ranks(self, value: Any) -> list[Any]:
        return all_gather_json(value, self.groups.world.handle, self.device)
