"""Checks the batch sizes and the profiled steps of a run."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from parallel3d.config.fields import (
    show,
)
from parallel3d.config.values import (
    Replicas,
    number_of_tokens,
)
from parallel3d.errors import UserError, closest, nearest_multiple
from parallel3d.loop.keys import ProfileConfig

LAST_STEP = 2**63 - 1  # with train.epochs, the last step is unknown until the data is open


def check_batch(batch: int, replica: Replicas) -> None:
    """Raises UserError unless the global batch gives every replica whole micro-batches."""
    micro, dp = replica
    if batch % (micro * dp) == 0:
        return
    choices = [f"global_batch_size={nearest_multiple(batch, micro * dp)}"]
    if batch % dp == 0:
        share = batch // dp
        close = closest(micro, lambda n: share % n == 0, share) or 1
        choices.append(f"micro_batch_size={close}")
    raise UserError(
        f"global_batch_size={batch} must be a multiple of {micro * dp}, the product of "
        f"micro_batch_size={micro} and dp={dp}; the nearest is {' or '.join(choices)}."
    )


def check_batch_schedule(given: Mapping[Any, Any], batch: int, replica: Replicas) -> None:
    """Raises UserError unless `train.batch_schedule` is well-formed and ends with the global batch.

    Args:
        given: the schedule, with numbers of samples as keys and global batches as values.
        batch: `global_batch_size`.
        replica: the micro-batch size and dp, whose product divides every batch.
    """
    name, multiple = f"train.batch_schedule={show(given)}", replica.multiple
    firsts = [number_of_tokens(first) for first in given]
    if not given or firsts[0] != 0 or any(a >= b for a, b in pairwise(firsts)):
        raise UserError(
            f"{name} must map increasing numbers of samples, the first of them 0, to global "
            f"batches; the nearest is train.batch_schedule={{0:{batch}}}."
        )
    for size in given.values():
        if type(size) is not int or size < 1 or size % multiple:
            near = nearest_multiple(size, multiple) if type(size) is int else multiple
            raise UserError(
                f"{name}: the global batch {show(size)} must be a multiple of {multiple}, the "
                f"product of micro_batch_size={replica.micro_batch_size} and dp={replica.dp}; the "
                f"nearest is {max(near, multiple)}."
            )
    if size != batch:
        raise UserError(
            f"{name} must end with global_batch_size={batch}, for which memory, "
            f"time and evaluations are planned; the nearest is global_batch_size={size}."
        )


def check_profile(profile: ProfileConfig, steps: int | None, world_size: int | None) -> None:
    """Raises UserError for steps or ranks to profile that the run does not have.

    Args:
        steps: number of steps of the run, or None if it is unknown until the data is open.
        world_size: number of ranks, or None if it is unknown, so that all ranks are accepted.
    """
    last_step = LAST_STEP if steps is None else steps
    if not profile.steps:
        if profile.memory:
            raise UserError(
                "profile.memory=true needs profile.steps, the steps to record; give, for "
                f"example, profile.steps=[{min(10, last_step)},{min(12, last_step)}]."
            )
        return
    first, *_, last = [profile.steps[0], *profile.steps]
    if len(profile.steps) != 2 or not 1 <= first <= last <= last_step:
        near = sorted(
            min(max(1, step), last_step) for step in (min(profile.steps), max(profile.steps))
        )
        most = "on" if steps is None else f"to train.steps={steps}"
        raise UserError(
            f"profile.steps={show(profile.steps)} must be two numbers from 1 {most}, the first and "
            f"the last step to profile; the nearest is profile.steps={show(near)}."
        )
    if profile.ranks != "all" and world_size is not None and max(profile.ranks) >= world_size:
        near = [rank for rank in profile.ranks if rank < world_size] or [world_size - 1]
        raise UserError(
            f"profile.ranks={show(profile.ranks)} must be ranks of this run, from 0 to "
            f"{world_size - 1}; the nearest is profile.ranks={show(near)}."
        )
