"""Decides which keys may change when a run resumes.

Free keys affect only rounding: they determine where and how a run computes (layout, schedule,
launcher, logger). Reported keys change the next steps (learning rate, batch, length, precision).
Refused keys define the weights and the order of samples (model, data, seed, optimizer), and a run
with another value needs another name.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from parallel3d.config.fields import all_keys, show, values_of
from parallel3d.config.values import FREE, LAYOUT, REFUSED, REPORTED
from parallel3d.models.keys import ModelConfig
from parallel3d.models.survey import TARGET, OwnModelConfig, tree_of
from parallel3d.run_config import Config

# Keys of the model that may differ from the source of `init_from`, which determines all others.
MAY_DIFFER = (
    *("name", "seq_length", "vocab_multiple", "embedding", "parallel_output", "dropout"),
    *("init_std",),
)


class ConfigChange(NamedTuple):
    """Key whose value now differs from its value in the checkpoint."""

    key: str
    there: Any
    here: Any
    of_own_model: bool = False  # whether it is a field of a user's own model, or its class

    @property
    def kind(self) -> str:
        """Returns the class of the change: "free", "reported" or "refused".

        Momentum may change, but neither from nor to 0: at 0 the optimizer has no state for it.
        """
        if self.key == "optim.momentum" and bool(self.there) == bool(self.here):
            return REPORTED
        return FREE if self.is_layout else _resume(self.key, self.of_own_model)

    @property
    def is_layout(self) -> bool:
        """Returns whether the key is part of the layout."""
        return _resume(self.key, self.of_own_model) == LAYOUT

    def __str__(self) -> str:
        return f"{self.key} is {show(self.there)} there, now {show(self.here)}"


def _resume(key: str, of_own_model: bool) -> str:
    """Returns the effect of a key's change; that of a user's own model must not change."""
    return REFUSED if of_own_model else all_keys(Config)[key].resume


def changes(there: Mapping[str, Any], here: Config) -> list[ConfigChange]:
    """Returns the keys whose values differ between a checkpoint and `here`.

    `there` is the checkpoint's configuration as nested dicts. A key that it lacks counts as having
    its default, since the key was added later; a null key of the model counts as its effective
    value. With `train.eval_only`, data and seed are not compared, since no training sample is read.
    """
    theirs, new = flat(there), _of_run(here)
    is_own = theirs.get(TARGET) is not None or here.model._target_ is not None
    if is_own:
        usual = {k: v for k, v in values_of(Config()).items() if not k.startswith("model.")}
        old = {TARGET: None} | usual | theirs
        keys = sorted(old.keys() | new.keys())
        if old[TARGET] != here.model._target_:  # other fields are those of another class
            keys = [key for key in keys if not key.startswith("model.") or key == TARGET]
    else:
        old = _in_effect(values_of(Config()) | theirs, here.model)
        keys = sorted(new)
    if here.train.eval_only:
        keys = [key for key in keys if key != "seed" and not key.startswith("data.")]
    return [
        ConfigChange(key, old.get(key), new.get(key), is_own and key.startswith("model."))
        for key in keys
        if not same(old.get(key), new.get(key))
    ]


def _in_effect(values: dict[str, Any], here: ModelConfig) -> dict[str, Any]:
    """Fills in null keys of the model with the values that they have in the model `here`.

    If a key that determines such a value differs, the change of that key is reported.
    """
    nulls: dict[str, Any] = dict.fromkeys(here.in_effect)
    held = dataclasses.replace(here, **nulls).in_effect
    named = {f"model.{key}": value for key, value in held.items()}
    return values | {key: value for key, value in named.items() if values[key] is None}


def _of_run(config: Config) -> dict[str, Any]:
    """Returns the effective values of a run's keys, without the options of subcommands.

    A user's own model has its fields in place of the transformer's keys.
    """
    values = {name: attrgetter(name)(config) for name in all_keys(Config)}
    if not isinstance(config.model, OwnModelConfig):
        return _in_effect(values, config.model)
    fields = {f"model.{name}": value for name, value in tree_of(config.model).items()}
    return {k: v for k, v in values.items() if not k.startswith("model.")} | fields


def of_all_ranks(config: Config) -> dict[str, Any]:
    """Returns the keys that must be equal on all ranks, with their values.

    Most keys of `data` are left out, since paths may differ between hosts.
    """
    keys, is_own = all_keys(Config), isinstance(config.model, OwnModelConfig)
    return {
        name: value
        for name, value in _of_run(config).items()
        if (is_own and name.startswith("model."))
        or keys[name].meta["alike"]
        or keys[name].resume == LAYOUT
        or (keys[name].resume != FREE and not name.startswith("data."))
    }


def decisive(config: Config) -> dict[str, str]:
    """Returns the keys that determine the results of a run's steps, with their values as text."""
    is_own = isinstance(config.model, OwnModelConfig)
    return {
        key: show(value)
        for key, value in _of_run(config).items()
        if _resume(key, is_own and key.startswith("model.")) not in (FREE, LAYOUT)
    }


def first_difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> ConfigChange | None:
    """Returns the first key whose values differ, or None; `theirs` was read from JSON."""
    both = ((key, value, ours.get(key)) for key, value in theirs.items())
    return next((ConfigChange(*each) for each in both if not same(*each[1:])), None)


def refusal(run: str | None, found: list[ConfigChange]) -> str | None:
    """Returns the sentence that refuses to resume, or None if no change is refused."""
    bad = [change for change in found if change.kind == REFUSED]
    if not bad:
        return None
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    of_model = {c.key.removeprefix("model.") for c in bad if c.key.startswith("model.")}
    source = f", with init_from={run} to begin from these weights"
    if of_model - {*MAY_DIFFER}:
        source = ""
    return (
        f"run={run} cannot resume with another configuration: "
        f"{', '.join(map(str, bad[:3]))}{more}; choose another run={source}"
    )


def same(a: Any, b: Any) -> bool:
    """Returns whether two values are equal as JSON, where tuples are lists and names are text."""
    return bool(json.loads(json.dumps(a)) == json.loads(json.dumps(b)))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested dicts to dotted names; a value of a key of type dict stays whole."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        key = all_keys(Config).get(f"{prefix}{name}")
        if isinstance(value, Mapping) and (key is None or key.kind is not dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
