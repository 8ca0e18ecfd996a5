"""Checks of how the optimizer treats each parameter by its name (`OptimConfig.treatment`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from parallel3d.config.fields import show
from parallel3d.config.schema import MULTIPLIERS, ModelConfig, OptimConfig, full_shapes_of
from parallel3d.errors import UserError, nearest, nearest_hint


def check_treatment(optim: OptimConfig, model: ModelConfig) -> None:
    """Raises UserError for a pattern that matches no parameter, and for factors that are none."""
    if not (optim.freeze or optim.groups):
        return
    names = full_shapes_of(model)
    for pattern in optim.freeze or ():
        _check_matches(f"optim.freeze={show(optim.freeze)}", pattern, names)
    typed = {p: f"optim.groups={{{p}:{show(f)}}}" for p, f in (optim.groups or {}).items()}
    for pattern, factors in (optim.groups or {}).items():
        _check_factors(typed[pattern], factors)
    if all(optim.treatment(name).frozen for name in names):
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
    if pattern.startswith("head"):  # which is tied to the embedding
        close = "embedding.word.weight"
    raise UserError(
        f"{typed}: {pattern} must match a parameter of the model, and matches none; the nearest "
        f"is {close}."
    )


def _prefixes(name: str) -> list[str]:
    """Returns `layers.0.*`, `layers.0.mlp.*` … of a name."""
    words = name.split(".")
    return [".".join([*words[:n], "*"]) for n in range(1, len(words))]
