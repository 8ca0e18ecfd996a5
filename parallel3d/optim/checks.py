"""Checks the learning rate's schedule, and the patterns of parameter names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from parallel3d.config.fields import (
    check_at_most,
    show,
)
from parallel3d.errors import UserError, nearest, nearest_hint
from parallel3d.models.declared import full_shapes_of, parameter_shapes_of, states_of
from parallel3d.models.keys import ModelConfig
from parallel3d.optim.keys import MULTIPLIERS, OWN, OptimConfig


def check_learning_rate(optim: OptimConfig, steps: int | None) -> None:
    """Checks learning rate, warm-up and decay against each other; raises UserError.

    `steps`: number of steps of the run, or None if it is unknown until the data is open or the
    position of a resumed run is known.
    """
    check_at_most("optim.min_lr", optim.min_lr, "optim.lr", optim.lr)
    if (span := optim.lr_decay_steps or steps) is not None:  # otherwise the caller checks later
        check_schedule_of_rate(optim, span)


def check_schedule_of_rate(optim: OptimConfig, steps: int) -> None:
    """Raises UserError if warm-up and decay do not fit into the `steps` of the schedule."""
    span = "optim.lr_decay_steps" if optim.lr_decay_steps else "train.steps"
    if optim.lr_warmup_steps >= steps:
        raise UserError(
            f"optim.lr_warmup_steps={optim.lr_warmup_steps} must be below {span}={steps}; the "
            f"nearest is optim.lr_warmup_steps={steps - 1}."
        )
    if optim.lr_decay_style != "wsd":
        return
    warmup = optim.lr_warmup_fraction or optim.lr_warmup_steps / steps
    name, decay, near = "wsd_decay_fraction", optim.wsd_decay_fraction, round(1 - warmup, 9)
    if optim.wsd_decay_steps is not None:
        name, decay = "wsd_decay_steps", optim.wsd_decay_steps / steps
        near = steps - (optim.lr_warmup_steps or round(optim.lr_warmup_fraction * steps))
    # The margin lets 1/3 and 0.666666667, which the message below proposes, add up to 1.
    if warmup + decay > 1 + 1e-9 and getattr(optim, name) > near:
        raise UserError(
            f"optim.{name}={show(getattr(optim, name))} must be at most {show(near)}, the "
            f"part that a warm-up over {warmup:g} of {span}={steps} leaves; the nearest is "
            f"optim.{name}={show(near)}."
        )


def check_own(optim: OptimConfig, has_own: bool) -> None:
    """Raises UserError unless `optim.name` is "own" if and only if a script gives an optimizer."""
    if has_own and optim.name != OWN:
        raise UserError(f"an optimizer of a script's own needs optim.name={OWN}, not {optim.name}")
    if optim.name == OWN and not has_own:
        raise UserError(
            f"optim.name={OWN} is for a script that gives its optimizer to fit(optimizer=…), so "
            "start the script in place of this command; the nearest is optim.name=adamw"
        )


def check_treatment(optim: OptimConfig, model: ModelConfig) -> None:
    """Raises UserError for a pattern that matches no parameter, and for invalid factors."""
    if not (optim.freeze or optim.groups):
        return
    names, trained, states = full_shapes_of(model), parameter_shapes_of(model), states_of(model)
    for pattern in optim.freeze or ():
        _check_matches(f"optim.freeze={show(optim.freeze)}", pattern, names)
    typed = {p: f"optim.groups={{{p}:{show(f)}}}" for p, f in (optim.groups or {}).items()}
    for pattern, factors in (optim.groups or {}).items():
        _check_factors(typed[pattern], factors)
    if all(optim.treatment(name).frozen for name in trained):
        raise UserError(
            f"optim.freeze={show(optim.freeze)} must leave a parameter to train; give fewer "
            "patterns, such as optim.freeze=[embedding.*]."
        )
    left = set(names)
    for pattern in optim.groups or ():
        _check_matches(typed[pattern], str(pattern), names)
        mine = {name for name in left if fnmatchcase(name, str(pattern))}
        if not mine:
            raise UserError(
                f"{typed[pattern]} matches only parameters of the groups before it, and the first "
                "that matches counts; give it first."
            )
        factor = float(optim.groups[pattern].get("lr_mult", 1.0))
        if mine <= states and factor != 0:
            raise UserError(
                f"{typed[pattern]} matches only {min(mine)}, which has no learning rate and no "
                "decay: leave it out and give moe.bias_update_rate, or give lr_mult:0, which keeps "
                "it as it is."
            )
        left -= mine


def _check_factors(typed: str, factors: Any) -> None:
    if not isinstance(factors, dict) or not factors:
        raise UserError(
            f"{typed} must hold lr_mult or wd_mult in braces, as in "
            "'optim.groups={embedding.*:{lr_mult:0.1,wd_mult:0}}'; the nearest is lr_mult:1."
        )
    for key, value in factors.items():
        if key not in MULTIPLIERS:
            hint = nearest_hint(str(key), MULTIPLIERS) or "; the nearest is lr_mult"
            raise UserError(f"{typed} has {key}, which must be lr_mult or wd_mult{hint}.")
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise UserError(
                f"{typed} has {key}:{show(value)}, which must be a number of at least 0; the "
                f"nearest is {key}:{0 if is_number and value < 0 else 1}."
            )


def _check_matches(typed: str, pattern: str, names: Iterable[str]) -> None:
    if any(fnmatchcase(name, pattern) for name in names):
        return
    known = [name for name in names if not name.startswith("layers.") or ".0." in name[:9]]
    ends = [at for name in known for at in _prefixes(name)]
    close = nearest(pattern, dict.fromkeys([*known, *ends])) or "layers.*"
    if pattern.startswith("head"):  # a tied head has no parameter of its own
        close = "embedding.word.weight"
    raise UserError(
        f"{typed}: {pattern} must match a parameter of the model, and matches none; the nearest "
        f"is {close}."
    )


def _prefixes(name: str) -> list[str]:
    """Returns the patterns of the modules around a parameter: `layers.*`, `layers.0.*`, …."""
    words = name.split(".")
    return [".".join([*words[:n], "*"]) for n in range(1, len(words))]
