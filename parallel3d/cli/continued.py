"""Composes the configuration with which `train run=NAME` resumes an existing run.

In order of precedence, a value comes from the command line (with the presets and the experiment
that it names), from the run's last start, or from the defaults. Values of the last start that only
its layout allowed, such as an `ep` that does not divide the ranks of now, are reduced or dropped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from parallel3d.blueprint.keys import CHOSEN
from parallel3d.checkpoint.identity import flat
from parallel3d.cli.overrides import groups
from parallel3d.cli.own_model import ModelClass, keys_given
from parallel3d.cli.preset_files import experiment_files
from parallel3d.cli.words import option
from parallel3d.config.fields import (
    Key,
    all_keys,
    check_value,
    sections_of,
    show,
    values_of,
    with_values,
)
from parallel3d.config.values import FREE, LAYOUT
from parallel3d.errors import UserError
from parallel3d.models.survey import TARGET, OwnModelConfig
from parallel3d.run_config import ALTERNATIVES, OPTIONS, Config, check_config, with_derived_keys

EXPERIMENT = "experiment"
SIZES = ("tp", "pp", "cp")
OF_STAGES = ("vpp", "recompute_layers", "offload_layers", "schedule.")  # kept only if pp is kept
OF_RANKS = ("placement", "rank_file")  # kept only if all sizes are kept
OF_THE_PLANNER = (*CHOSEN, *OF_STAGES)
MOST_SHOWN = 6
MOST_REFITTED = 4  # keys that may be reduced or dropped together, which bounds the search
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class GivenKeys:
    """Contains the keys and presets that the overrides of a command line give.

    Attributes:
        keys: the keys given on the command line or by an experiment; a dot at the end marks a whole
            section.
        presets: the sections for which the command line or the experiment chooses a preset.
    """

    keys: set[str]
    presets: set[str]

    def __contains__(self, key: object) -> bool:
        return _is_among(str(key), self.keys | {f"{section}." for section in self.presets})


def given_by(
    words: Sequence[str], own: Path | None = None, model: ModelClass | None = None
) -> GivenKeys:
    """Returns the keys and presets that overrides give.

    Args:
        words: the overrides of the command line.
        own: the folder of --config-dir, or None.
        model: the class of a user's own model, or None.
    """
    pairs = [word.lstrip("+~").partition("=")[::2] for word in words]
    sections = sections_of(Config)
    keys = {f"{n}." if n in sections else n for n, _ in pairs if n not in groups()}
    presets = {name for name, _ in pairs if name in groups() and name in sections}
    chosen = next((option(word) for word in words if word.startswith(f"{EXPERIMENT}=")), None)
    for file in experiment_files(chosen, own):
        for entry in file.pop("defaults", ()):
            if isinstance(entry, DictConfig):  # such as override /model: llama_1b
                presets |= {str(name).rpartition("/")[2] for name in entry}
        tree: Any = OmegaConf.to_container(file)
        keys |= {key for key, value in flat(tree).items() if value != MISSING}
    if model is not None:  # the file of its preset is the user's own, as an experiment is
        keys |= keys_given(words, own, model)
        presets -= {"model"}
    return GivenKeys(keys, presets)


def _is_among(key: str, keys: Collection[str]) -> bool:
    """Returns whether `keys` contains a key, or its section followed by a dot."""
    section, dot, _ = key.partition(".")
    return key in keys or section + dot in keys


def continued(
    config: Config,
    there: Config,
    given: GivenKeys,
    world_size: int | None,
    *,
    has_begun: bool = True,
) -> tuple[Config, str | None]:
    """Returns the configuration with which a run resumes, and a line about the values taken over.

    The line is None if no value is taken over or dropped. Sizes of the layout that are not given
    keep their values from the last start, unless these are incompatible with the given sizes or
    with the launcher's ranks. If dp is not given, it follows from the number of ranks, which is
    `world_size` or that of the last start. Further values that the layout of now does not allow
    are reduced or dropped, if they change no results (`_refitted`).

    Args:
        config: the configuration composed from the overrides alone.
        there: the configuration of the run's last start.
        given: the keys and presets that the overrides give.
        world_size: number of ranks that a launcher started; None without a launcher.
        has_begun: whether the run has a checkpoint, and so no longer reads `init_from`.

    Raises UserError for a value of the last start that this version no longer allows.
    """
    old, new = values_of(with_derived_keys(there)), values_of(with_derived_keys(config))
    config, of_fields = _with_fields(config, there, given)
    left = {name for name, key in all_keys(Config).items() if key.meta["once"]}
    if isinstance(config.model, OwnModelConfig) or isinstance(there.model, OwnModelConfig):
        left |= {"model."}
    left |= {"prompt", *(f"{name}." for name in OPTIONS)}
    if "layout" in given:
        left |= {*OF_THE_PLANNER}
    # A preset other than that of the last start replaces its whole section.
    left |= {f"{s}." for s in given.presets if new[f"{s}.name"] != old[f"{s}.name"]}
    given = replace(given, presets=set())
    of_layout: set[str] = set()
    if "layout" not in given:
        ranks = _ranks(old)
        old |= _sizes(new, old, given, world_size)
        same = all(old[s] == getattr(there, s) for s in SIZES) and old["dp"] in (None, there.dp)
        if not same or world_size not in (None, ranks):
            of_layout |= {*OF_RANKS}
        if old["pp"] != there.pp:
            of_layout |= {*OF_STAGES}
    # Sizes that were given up are reported, like everything else that a change of layout drops.
    lost = {key for key in old if _is_among(key, {*SIZES, *of_layout} - left)}
    left |= of_layout
    left = left.union(*(some for some in ALTERNATIVES if any(k in given for k in some)))
    if "global_batch_size" in given:
        left |= {"train.batch_schedule"}
    # If the source is given again without a step, the step that the first start chose is kept.
    if has_begun and config.init_from == str(there.init_from).rpartition("@")[0]:
        given = replace(given, keys=given.keys - {"init_from"})
    taken = {k: v for k, v in old.items() if k not in given and not _is_among(k, left)}
    changes = {key: value for key, value in taken.items() if new[key] != value}
    for key, value in changes.items():
        try:
            check_value(key, value, Config)
        except UserError as error:  # an older version allowed the value
            raise UserError(f"run={config.run}, at its last start: {error}") from None
    found = with_values(config, taken)
    if "layout" not in given and _has_other_layout(found, there, world_size):
        found = _refitted(found, config, changes, world_size)
    now, before = values_of(found), values_of(with_derived_keys(there))
    lost = {key for key in lost | changes.keys() if key not in given and now[key] != before[key]}
    lost -= {"dp"}  # the ranks decide it anew in every start
    kept = [f"{key}={show(value)}" for key, value in changes.items() if key not in lost]
    kept += of_fields
    parts = []
    if kept:
        parts.append(f"values kept from its last start: {_shown(kept)}")
    if gone := [
        f"{all_keys(Config)[k].spelled(before[k])} (now {show(now[k])})"
        for k in before
        if k in lost
    ]:
        parts.append(f"values that do not fit the layout of now: {_shown(gone)}")
    return found, f"run={config.run}: {'; '.join(parts)}" if parts else None


def _with_fields(config: Config, there: Config, given: GivenKeys) -> tuple[Config, list[str]]:
    """Returns `config` with the fields that its own model had at the last start and are not given.

    Also returns words for those that differ from `config`. Raises UserError if the run has a
    user's own model, and the start names none: a run's configuration alone never runs code.
    """
    old, new = there.model, config.model
    if not isinstance(old, OwnModelConfig):
        return config, []
    if not isinstance(new, OwnModelConfig):
        if "model" in given.presets:
            return config, []
        raise UserError(
            f"run={config.run} has a model of your own, whose code only runs where a start names "
            f"it: give {TARGET}={old._target_}, or start the script that gives it to fit(model=…)"
        )
    if old._target_ != new._target_:
        return config, []
    kept = {name: v for name, v in old.fields.items() if f"model.{name}" not in given}
    words = [f"model.{n}={show(v)}" for n, v in kept.items() if new.fields.get(n, ...) != v]
    model = replace(new, fields=new.fields | kept)
    return replace(config, model=model), words


def _shown(words: Sequence[str]) -> str:
    more = f" and {len(words) - MOST_SHOWN} more" if len(words) > MOST_SHOWN else ""
    return f"{', '.join(words[:MOST_SHOWN])}{more}"


def _has_other_layout(config: Config, there: Config, world_size: int | None) -> bool:
    """Returns whether a key of the layout, or the number of ranks, is not that of the last start.

    Other settings that contradict each other were chosen by the user, who is asked to decide.
    """
    ranks = world_size or config.world_size
    before, now = values_of(there), values_of(config)
    layout = [
        name for name, key in all_keys(Config).items() if key.resume == LAYOUT and name != "dp"
    ]
    return ranks != there.world_size or any(before[name] != now[name] for name in layout)


def _refitted(
    config: Config, fresh: Config, taken: Iterable[str], world_size: int | None
) -> Config:
    """Returns `config`, valid by reducing or dropping as few taken values as possible.

    Only keys that change nothing but rounding are tried: a number of the layout takes its largest
    divisor that fits (a stage of ZeRO, the next lower one), any other key its value in `fresh`. If
    the configuration remains invalid, it is returned unchanged, and the later check says why.
    """
    keys = [key for name, key in all_keys(Config).items() if name in taken]
    keys = [key for key in keys if key.resume in (FREE, LAYOUT) and key.name not in (*SIZES, "dp")]
    usual = values_of(fresh)
    first = _refusal(config, world_size)
    if first is None:
        return config
    # A breadth-first search. A change that leaves the refusal as it was, but for its numbers, has
    # nothing to do with it. Keys of a later declaration, which matter less, give way first. No key
    # changes twice on a path, because each of its values is tried at once.
    states: list[tuple[Config, str, frozenset[str]]] = [(config, first, frozenset())]
    for _ in range(MOST_REFITTED):
        following: list[tuple[Config, str, frozenset[str]]] = []
        for state, sentence, changed in states:
            values = values_of(state)
            for key in (key for key in reversed(keys) if key.name not in changed):
                for value in _smaller(key, values[key.name], usual[key.name]):
                    other = with_values(state, {key.name: value})
                    refusal = _refusal(other, world_size)
                    if refusal is None:
                        return other
                    if NUMBER.sub("", refusal) != NUMBER.sub("", sentence):
                        following.append((other, refusal, changed | {key.name}))
        states = following
    return config


def _refusal(config: Config, world_size: int | None) -> str | None:
    """Returns the sentence that refuses a configuration, or None if it is valid."""
    try:
        check_config(config, world_size, own_samples=True, may_resume=True)
    except UserError as error:
        return str(error)
    return None


def _smaller(key: Key, value: Any, usual: Any) -> list[Any]:
    """Returns the values to try in place of a key's value, the best first."""
    found: list[Any] = []
    if key.kind is int and key.resume == LAYOUT and value:
        least, most = key.meta["minimum"], min(value - 1, 4096)
        found = [n for n in range(most, least - 1, -1) if least == 0 or value % n == 0]
    return [other for other in dict.fromkeys([*found, usual]) if other != value]


def _sizes(
    new: Mapping[str, Any], old: Mapping[str, Any], given: GivenKeys, world_size: int | None
) -> dict[str, int | None]:
    """Returns tp, pp, cp and dp for `continued`; dp is None if the number of ranks determines it.

    `new` and `old` are the values by key, now and at the last start.
    """
    typed = {s: new[s] for s in (*SIZES, "dp") if s in given}
    kept = {s: typed.get(s, old[s]) for s in SIZES}
    ranks = world_size or _ranks(old)
    # Without a launcher, this process starts as many ranks as the sizes need, so any sizes fit.
    if "dp" in typed and world_size is None:
        return kept | typed
    room, odd = divmod(ranks, math.prod(n or 1 for n in typed.values()))
    for size in (s for s in SIZES if s not in typed):
        # Beside typed sizes, another is kept whole or dropped; without them, it may be reduced.
        whole = old[size] if not odd and room % old[size] == 0 else new[size]
        kept[size] = whole if typed else math.gcd(room, old[size])
        room //= kept[size]
    dp, odd = divmod(ranks, math.prod(kept.values()))
    return kept | {"dp": None if world_size or odd or dp == 1 else dp} | typed


def _ranks(values: Mapping[str, Any]) -> int:
    return math.prod(values[size] or 1 for size in (*SIZES, "dp"))
