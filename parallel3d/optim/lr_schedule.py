"""Learning-rate schedules, as functions of the step."""

from __future__ import annotations

import math

from parallel3d.config.schema import OptimConfig


def warmup_steps(optim: OptimConfig, train_steps: int) -> int:
    """Returns the steps of linear warm-up: configured, or a fraction of the decay steps."""
    decay = optim.lr_decay_steps or train_steps
    return optim.lr_warmup_steps or round(optim.lr_warmup_fraction * decay)


def learning_rate(optim: OptimConfig, train_steps: int, step: int) -> float:
    """Returns the learning rate of `step`, counted from 1.

    Linear warm-up reaches `lr` at the last warm-up step. Then: constant; linear or cosine
    (Loshchilov and Hutter 2016) down to `min_lr` at `lr_decay_steps`; or wsd (Hu et al. 2024,
    MiniCPM §4.1): constant, then linear over the last `wsd_decay_fraction` of the decay steps.
    `min_lr` after that.
    """
    warmup = warmup_steps(optim, train_steps)
    end = optim.lr_decay_steps or train_steps
    if step <= warmup:
        return optim.lr * step / warmup
    if optim.lr_decay_style == "constant":
        return optim.lr
    start = warmup
    if optim.lr_decay_style == "wsd":
        start = max(warmup, end - round(optim.wsd_decay_fraction * end))
    if step <= start:
        return optim.lr
    if step >= end:
        return optim.min_lr
    done = (step - start) / (end - start)
    left = 0.5 * (1 + math.cos(math.pi * done)) if optim.lr_decay_style == "cosine" else 1 - done
    return optim.min_lr + (optim.lr - optim.min_lr) * left
