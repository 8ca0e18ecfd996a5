"""Decides which keys may change when a run resumes.

Free keys change nothing but rounding: where and how a run computes (layout, schedule, launcher,
logger). Reported keys change the next steps (learning rate, batch, length, precision). Refused keys
define the weights and the order of samples (model, data, seed, optimizer): another value needs
another run name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from parallel3d.config.fields import all_keys, show, values_of
from parallel3d.config.schema import Config, ModelConfig
from parallel3d.config.values import FREE, LAYOUT, REFUSED, REPORTED


class ConfigChange(NamedTuple):
    """A key with its values in the checkpoint and now."""

    key: str
    there: Any
    here: Any

    @property
    def kind(self) -> str:
        """The class of the change: "free", "reported" or "refused".

        Momentum may change, but neither from nor to 0, where the optimizer has no state for it.
        """
        if self.key == "optim.momentum" and bool(self.there) == bool(self.here):
            return REPORTED
        return FREE if self.is_layout else all_keys()[self.key].resume

    @property
    def is_layout(self) -> bool:
        """Whether the key is part of the layout."""
        return all_keys()[self.key].resume == LAYOUT

    def __str__(self) -> str:
        return f"{self.key} is {self.there!r} there, now {self.here!r}"


def changes(there: Mapping[str, Any], here: Config) -> list[ConfigChange]:
    """Returns every key whose value differs between a checkpoint and `here`.

    `there`: the checkpoint's configuration as nested dicts. A key that it lacks, as it was added
    later, has its default there; a null key of the model counts as its effective value. Data and
    seed are not compared for `train.eval_only`, which reads no training samples.
    """
    old = _in_effect(values_of(Config()) | flat(there), here.model)
    new = _of_run(here)
    keys = sorted(new)
    if here.train.eval_only:
        keys = [key for key in keys if key != "seed" and not key.startswith("data.")]
    return [ConfigChange(key, old[key], new[key]) for key in keys if not same(old[key], new[key])]


def _in_effect(values: dict[str, Any], here: ModelConfig) -> dict[str, Any]:
    """Fills null model keys with their effective values in the model `here`.

    Where the keys from which they follow differ, these are reported as changes themselves.
    """
    nulls: dict[str, Any] = dict.fromkeys(here.in_effect)
    held = dataclasses.replace(here, **nulls).in_effect
    named = {f"model.{key}": value for key, value in held.items()}
    return values | {key: value for key, value in named.items() if values[key] is None}


def _of_run(config: Config) -> dict[str, Any]:
    """Returns the effective values of a run's keys, without options of subcommands."""
    values = {name: attrgetter(name)(config) for name in all_keys()}
    return _in_effect(values, config.model)


def of_all_ranks(config: Config) -> dict[str, Any]:
    """Returns the keys that must be equal on all ranks; paths may differ between hosts."""
    keys = all_keys()
    return {
        name: value
        for name, value in _of_run(config).items()
        if keys[name].meta["alike"]
        or keys[name].resume == LAYOUT
        or (keys[name].resume != FREE and not name.startswith("data."))
    }


def decisive(config: Config) -> dict[str, str]:
    """Returns the keys that determine the results of a run's steps, with their values as text."""
    return {
        key: show(value)
        for key, value in _of_run(config).items()
        if all_keys()[key].resume not in (FREE, LAYOUT)
    }


def first_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> ConfigChange | None:
    """Returns the first key with another value; `theirs` came as JSON."""
    both = ((key, value, ours.get(key)) for key, value in theirs.items())
    return next((ConfigChange(*each) for each in both if not same(*each[1:])), None)


def refusal(run: str | None, found: list[ConfigChange]) -> str | None:
    """Returns the sentence that refuses to resume, with the changed keys; None if none is
    refused."""
    bad = [change for change in found if change.kind == REFUSED]
    if not bad:
        return None
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return (
        f"run={run} cannot resume with another configuration: "
        f"{', '.join(map(str, bad[:3]))}{more}; choose another run="
    )


def same(a: Any, b: Any) -> bool:
    """Compares values as JSON keeps them: tuples as lists, keys as text."""
    return bool(json.loads(json.dumps(a)) == json.loads(json.dumps(b)))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts by dotted names; values in braces stay whole."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = all_keys().get(f"{prefix}{name}")
        if isinstance(value, Mapping) and (key is None or key.kind is not dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
