"""Checks a run's health after each step: skipped steps, loss spikes, replicas that drift apart."""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallel3d.build import Trainer
from parallel3d.checkpoint.checkpoints import Checkpoints
from parallel3d.comm import collectives
from parallel3d.comm.exchange import all_gather_json
from parallel3d.comm.group import Group
from parallel3d.errors import TrainingFailure
from parallel3d.parameters.copies import copy_groups
from parallel3d.parameters.state import spec_of
from parallel3d.run.failure import who
from parallel3d.text import count
from parallel3d.trainer import StepResult

SPIKE_WINDOW = 50  # a loss is compared with the median of this many steps
SPIKE_PAUSE = 10  # no spike is reported within this many steps of the last one
# integer types by their number of bytes
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Health:
    """Checks the health of a run on one rank; `say` logs a sentence for the user."""

    trainer: Trainer
    checkpoints: Checkpoints
    say: Callable[[str], None]
    skipped: int = 0  # number of consecutive skipped steps
    rollbacks: int = 0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=SPIKE_WINDOW))
    last_spike: int = -SPIKE_PAUSE

    def after_step(self, result: StepResult) -> None:
        """Checks a step. After too many skips, all ranks roll back or raise TrainingFailure."""
        settings = self.trainer.config.recovery
        if result.loss is not None:  # a step without unmasked tokens is not checked
            self._check_step(result, result.loss)
        if settings.drift_every and result.step % settings.drift_every == 0:
            self.compare_replicas(result.step)

    def _check_step(self, result: StepResult, loss: float) -> None:
        settings = self.trainer.config.recovery
        self.skipped = self.skipped + 1 if self._is_lost(result, loss) else 0
        if self.skipped > settings.max_skipped:
            self._act(result)
        elif not result.skipped:
            self._check_for_spike(result.step, loss)

    def _is_lost(self, result: StepResult, loss: float) -> bool:
        """Returns whether a step was skipped for a reason other than finding fp16's loss scale."""
        scale, config = self.trainer.loss_scale, self.trainer.config.precision
        finds_scale = scale.is_dynamic and scale.scale > config.min_loss_scale
        return result.skipped and not (finds_scale and math.isfinite(loss))

    def _act(self, result: StepResult) -> None:
        trainer, config = self.trainer, self.trainer.config
        bad = first_bad_gradient(trainer)
        row = f"{count(self.skipped, 'step')} in a row"
        why = f"step {result.step}: gradients were not finite for {row}; {bad}"
        if config.recovery.after_skipped != "rollback":
            raise TrainingFailure(why)
        if not self.checkpoints.saved_step > 0 or self.rollbacks >= config.recovery.max_restarts:
            none = "there is no checkpoint to go back to"
            many = f"recovery.max_restarts={config.recovery.max_restarts} allows no more rollbacks"
            has_checkpoint = self.checkpoints.saved_step > 0
            raise TrainingFailure(f"{why}; {many if has_checkpoint else none}")
        self.rollbacks += 1
        self.skipped = 0
        steps = trainer.steps_done
        samples = trainer.consumed_samples
        step = self.checkpoints.restore(trainer) - 1
        # The counts of steps and samples are kept, to skip the samples that led to the rollback.
        trainer.steps_done = steps
        trainer.consumed_samples = samples
        if trainer.groups.rank == 0:
            times = f"rollback {self.rollbacks} of {config.recovery.max_restarts}"
            self.say(
                f"{why}; back to the parameters of step {step}, "
                f"continuing with new samples ({times})"
            )

    def _check_for_spike(self, step: int, loss: float) -> None:
        factor = self.trainer.config.recovery.spike_factor
        if factor and len(self.losses) == SPIKE_WINDOW and self.trainer.groups.rank == 0:
            usual = statistics.median(self.losses)
            if loss > factor * usual and step - self.last_spike >= SPIKE_PAUSE:
                self.last_spike = step
                self.say(
                    f"step {step}: loss {loss:.4f} is {loss / usual:.1f} "
                    f"times the median {usual:.4f} of the last {SPIKE_WINDOW} steps "
                    f"(recovery.spike_factor={factor:g})"
                )
        self.losses.append(loss)

    def compare_replicas(self, step: int) -> None:
        """Compares the copies of parameters and of routers' biases between ranks, bit by bit.

        The first difference in each group of ranks is logged.
        """
        trainer = self.trainer
        if trainer.config.zero >= 2:
            return  # parameters are sharded: no two ranks hold the same elements
        held: dict[Group, dict[str, Tensor]] = {}
        for name, parameter in trainer.parameters.items():
            spec = spec_of(parameter)
            for group in copy_groups(spec, trainer.groups).of_whole(spec):
                held.setdefault(group, {})[name] = parameter
        if trainer.balance is not None:
            for group in (trainer.groups.dp_cp, trainer.groups.tp):
                held.setdefault(group, {}).update(trainer.balance.states)
        trainer.data_parallel.wait_for_all_gathers()  # zero=1 may still be gathering parameters
        # All ranks of a stage take the groups in the same order; otherwise they could deadlock.
        for group in sorted(held, key=lambda group: group.name):
            self._compare(step, held[group], group)

    def _compare(self, step: int, held: dict[str, Tensor], group: Group) -> None:
        if group.size == 1 or not held:
            return
        sums = torch.stack([bit_sum(values) for values in held.values()])
        if not collectives.differs(sums, group):
            return
        everyone = all_gather_json(sums.tolist(), group.handle, self.trainer.device)
        if group.index > 0:
            return
        for name, *values in zip(held, *everyone, strict=True):
            if len(set(values)) > 1:
                self.say(f"step {step}: {self._drift(name, values, group)}")
                return  # later differences in the model's order may follow from the first one

    def _drift(self, name: str, values: list[int], group: Group) -> str:
        layout = self.trainer.groups.layout
        (usual, copies), *_ = Counter(values).most_common()
        odd = [rank for rank, v in zip(group.ranks, values, strict=True) if v != usual]
        if 2 * copies > len(values):
            ranks = ", ".join(who(layout, rank) for rank in odd[:3])
            return (
                f"{ranks} drifted: {name} differs from its replicas on other ranks of {group.name}"
            )
        ranks = " and ".join(who(layout, rank) for rank in (group.ranks[0], odd[0]))
        return f"{ranks} drifted apart: {name}, which is replicated over {group.name}, differs"


def bit_sum(parameter: Tensor) -> Tensor:
    """Returns the sum of a tensor's elements, read as integers, in int64.

    A single flipped bit changes the sum.
    """
    flat = parameter.detach().reshape(-1)
    # The widest integers that fit are used, as a CPU sums narrow ones ten times more slowly.
    width = next(w for w in (8, 4, 2, 1) if flat.nbytes % w == 0)
    if flat.storage_offset() * flat.itemsize % width:
        flat = flat.clone()
    return flat.view(INTEGERS[width]).sum(dtype=torch.int64)


def _bad_gradients(trainer: Trainer) -> Iterator[str]:
    for segment in trainer.optimizer.segments:
        offset = 0
        for span in segment.spans:
            if not bool(segment.grad[offset : offset + span.numel].isfinite().all()):
                yield span.name
            offset += span.numel


def first_bad_gradient(trainer: Trainer) -> str:
    """Returns a clause about the model's first gradient that is not finite.

    The call is collective over the world.
    """
    groups, order = trainer.groups, list(trainer.parameters)
    bad = sorted({order.index(name) for name in _bad_gradients(trainer)})
    found = None
    if bad:
        parameter = trainer.parameters[order[bad[0]]]
        pieces = spec_of(parameter).shards
        name = pieces[0].name if pieces else order[bad[0]]
        state = (
            "" if bool(parameter.isfinite().all()) else ", and this parameter is not finite either"
        )
        place = who(groups.layout, groups.rank)
        # The minimum is taken by stage, then by position in the stage, then by rank.
        found = (groups.pp.index, bad[0], groups.rank, f"{name} on {place}{state}")
    of_ranks = all_gather_json(found, groups.world.handle, trainer.device)
    known = [entry for entry in of_ranks if entry is not None]
    if not known:
        return "no gradient is bad now: only the loss is not finite"
    return f"the first bad gradient in the model's order is that of {min(known)[3]}"
