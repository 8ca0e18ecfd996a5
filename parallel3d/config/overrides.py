"""Turns Hydra's and OmegaConf's errors about an override into one sentence.

They are recognised by their text: Hydra wraps OmegaConf's errors, and `@hydra.main`, `compose` and
the argument parser word the same mistake differently.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from parallel3d.config.fields import (
    Key,
    all_keys,
    allowed,
    nearest_key,
    refusal,
    spell,
    unknown_key,
)
from parallel3d.config.schema import Config, conf_dir
from parallel3d.errors import UserError, nearest, nearest_hint, readable

# Keys of which one is given.
ALTERNATIVES = (
    {"train.steps", "train.tokens", "train.epochs"},
    {"optim.lr_warmup_fraction", "optim.lr_warmup_steps"},
)
MOST_ENTRIES = 1000  # of a list: Hydra parses a thousand in a quarter of a second


def check_length(override: str) -> None:
    """Raises UserError for a list that would take long to parse."""
    key, _, value = override.partition("=")
    if value.count(",") > MOST_ENTRIES and not value.startswith(("'", '"')):
        raise UserError(
            f"{key}={value}: {key} is given {value.count(',') + 1} entries, and must have at most "
            f"{MOST_ENTRIES}."
        )


def presets(group: str) -> list[str]:
    """Returns the options of a config group: the files of `conf/<group>/`, sorted."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def groups() -> list[str]:
    """Returns the config groups: the folders of `conf/`, sorted."""
    return sorted(path.name for path in conf_dir().iterdir() if path.is_dir())


def typed_alternatives(config: Config, overrides: Sequence[str]) -> Config:
    """Returns the configuration without what an experiment sets beside a typed alternative of it.

    `experiment=llama_1b_sft train.steps=20` has 20 steps, and no two epochs.
    """
    typed = {override.lstrip("+").partition("=")[0] for override in overrides}
    for keys in ALTERNATIVES:
        if any(attrgetter(key)(config) for key in keys & typed):
            for key in keys - typed:
                section, _, leaf = key.partition(".")
                changed = {leaf: all_keys()[key].default}
                changed = {section: dataclasses.replace(getattr(config, section), **changed)}
                config = dataclasses.replace(config, **changed)
    return config


def check_filled(config: Config, overrides: Sequence[str], own: Path | None = None) -> None:
    """Raises UserError for keys that the experiment leaves open, `key: ???`, and that nothing sets.

    Hydra drops a `???` over a default, which every key has here. Keys of a group that is chosen
    anew do not count: data=blend has no data.path.

    Args:
        config: what the overrides composed to.
        overrides: as typed.
        own: the folder of --config-dir, whose experiments come first.
    """
    typed = {name.lstrip("+"): value for name, _, value in (o.partition("=") for o in overrides)}
    name, keys = typed.get("experiment"), all_keys()
    missing = [
        keys[key]
        for key in left_open(name, own)
        if key.partition(".")[0] not in typed and attrgetter(key)(config) == keys[key].default
    ]
    if missing:
        names = " and ".join(key.name for key in missing)
        given = ", ".join(f"{key.name}=… ({key.meta['help']})" for key in missing)
        raise UserError(f"experiment={name} leaves {names} to you: give {given}.")


def left_open(experiment: str | None, own: Path | None = None) -> list[str]:
    """Returns the keys of `???` in an experiment's file and in those that its defaults name."""
    folders = [folder for folder in (own, conf_dir()) if folder is not None]
    paths = [folder / "experiment" / f"{experiment}.yaml" for folder in folders]
    path = next((path for path in paths if path.is_file()), None)
    if experiment is None or path is None:
        return []
    from omegaconf import DictConfig, OmegaConf  # absent where the trainer alone is used

    values = OmegaConf.load(path)
    if not isinstance(values, DictConfig):
        return []
    found = [key for key in all_keys() if key in OmegaConf.missing_keys(values)]
    for entry in values.get("defaults", ()):
        if isinstance(entry, str) and entry not in ("_self_", experiment):
            found += left_open(entry.removeprefix("/experiment/"), own)
    return list(dict.fromkeys(found))


def explain_override_error(error: BaseException | str, overrides: Sequence[str] = ()) -> UserError:
    """Returns a UserError for an error of Hydra or OmegaConf.

    It names the key, the value, what is allowed and the nearest key or preset. An unknown error
    keeps its own words, on one line.

    Args:
        error: the exception, or its printed text.
        overrides: as typed, for errors that do not quote the override.
    """
    if isinstance(error, UserError):
        return error
    from yaml.error import MarkedYAMLError  # as above

    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark) is not None:
        return UserError(
            readable(
                f"{mark.name}, line {mark.line + 1}, must be YAML: {error.problem}; a line of it "
                "is written KEY: VALUE, with the keys of a section indented below its name."
            )
        )
    text = str(error)
    override = getattr(error, "override", None)
    if isinstance(error, BaseException) and error.__cause__ is not None:
        text += f"\n{error.__cause__}"
    explained = (
        _own_file(error, text, overrides)
        or _unknown_key(text)
        or _unknown_preset(text)
        or _ambiguous(text)
        or _twice(text)
        or _deleted(text)
        or _value(text, overrides)
        or _too_long_a_number(text, overrides)
        or _syntax(text, override)
        or _not_a_preset(text, overrides)
        or _no_key(overrides)
    )
    return UserError(readable(explained or f"The configuration cannot be read: {_one_line(text)}."))


def _own_file(error: BaseException | str, text: str, overrides: Sequence[str]) -> str | None:
    """Explains what a preset of the user's own says wrongly, by its file."""
    where = re.search(r"In '(?!hydra/)([^']+/[^']+)': (.*)", text, re.DOTALL)
    if where:
        group, file, said = where[1].partition("/")[0], f"{where[1]}.yaml", where[2]
        unknown = re.match(r"Could not override '([^']*)'", said)
        if f"Key '{group}' not in 'Config'" in said or (unknown and "@" in unknown[1]):
            return (
                f"{file}: its first line must be '# @package _global_', as those of all "
                "experiments; give comments below it."
            )
        if unknown:
            hint = nearest_hint(unknown[1], groups())
            return f"{file}: override {unknown[1]} must be of {', '.join(groups())}{hint}."
        reason = _one_line(said.partition("config:")[2] or said)
        return f"{file}: {_value(text, overrides) or f'{reason}; it must be keys and values.'}"
    twice = re.search(r"Multiple values for (\S+)\. To override a value use 'override", text)
    if twice:
        return (
            f"the defaults of an experiment give {twice[1]} anew, which must be written: "
            f"override /{twice[1]}: …."
        )
    if isinstance(error, RecursionError):
        typed = [word for word in overrides if word.partition("=")[0].lstrip("+") in groups()]
        return (
            f"{' '.join(typed)}: a file's defaults must not come back to the file itself; give it "
            "another name than that of the file that it starts from."
        )
    return None


def _no_key(overrides: Sequence[str]) -> str | None:
    """Returns the sentence for the first override of an unknown key, as a last resort."""
    for override in overrides:
        name, equals, value = override.lstrip("+~").partition("=")
        if equals and name not in all_keys() and not re.match("-|hydra[./]", name):
            return unknown_key(name, value)
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _unknown_key(text: str) -> str | None:
    found = re.search(r"Could not override '([^']*)'", text)
    if not found:
        return None
    name = found[1]
    typed = re.search(rf"use \+{re.escape(name)}=(.*)", text)
    return unknown_key(name, typed[1].strip() if typed else None)


def _unknown_preset(text: str) -> str | None:
    found = re.search(r"Could not (?:find|load) '([^']*)/([^'/]*)'", text)
    if not found:
        return None
    listed = re.search(r"Available options in '[^']*':\n((?:\t\S+\n?)+)", text)  # own ones too
    return _wrong_preset(found[1], found[2], listed[1].split() if listed else None)


def _wrong_preset(group: str, option: str, listed: list[str] | None = None) -> str:
    if group.startswith("hydra/"):
        kind = group.removeprefix("hydra/")
        if kind not in ("launcher", "sweeper"):
            return f"{group}={option} is not installed here; the nearest is {group}=default."
        return (
            f"{group}={option} is no plugin that is installed here; its package is most likely "
            f"hydra-{option.partition('_')[0]}-{kind}, and the nearest is {group}=basic."
        )
    first, _, rest = group.partition("/")
    if first in groups():  # model=./my.yaml
        group, option = first, f"{rest}/{option}" if rest else option
    if option.endswith((".yaml", ".yml")) or "/" in option:
        name = option.rpartition("/")[2].partition(".")[0]
        return (
            f"{group}={option} must be one of {', '.join(presets(group))}, or {group}={name} for "
            f"{group}/{name}.yaml in a folder of yours that --config-dir=FOLDER names."
        )
    key = all_keys().get(f"{group}.name")
    later = refusal(key.name, option) if key else None
    if later:
        return later
    known = listed or presets(group)
    if not known:
        close = nearest(group, groups())
        hint = f"the nearest is {close}" if close else f"there are {', '.join(groups())}"
        return f"{group}={option}: {group} is not a group of presets; {hint}."
    hint = nearest_hint(option, known, f"{group}=")
    return f"{group}={option} must be one of {', '.join(known)}{hint}."


def _ambiguous(text: str) -> str | None:
    found = re.search(r"Ambiguous value for argument '([^=']*)=(.*)'", text) or re.search(
        r"Sweep parameters '([^=']*)=(.*)' requires --multirun", text
    )
    if not found:
        return None
    name, value = found[1], found[2]
    also = "" if "(" in value else f", or a list as {name}=[{value}]"
    several = f"{name}={value} is several values for one key"
    return f"{several}; give --multirun to run each of them{also}."


def _twice(text: str) -> str | None:
    there = re.search(r"Could not append to config\. An item is already at '([^']*)'", text)
    if there:
        name = there[1]
        return f"+{name}=… adds a key, and {name} is there already; the nearest is {name}=…."
    name, twice, _ = text.partition(" appears more than once in the final defaults list")
    if not twice:
        return None
    name = name.split()[-1]
    return f"+{name}=… adds a preset beside the one chosen already; write {name}=… instead."


def _deleted(text: str) -> str | None:
    found = re.search(r"Could not delete (?:from config\. )?'([^\n]+)'(?: does|\. No)", text)
    return unknown_key(found[1]) if found else None


def _value(text: str, overrides: Sequence[str]) -> str | None:
    """Explains an existing key with an invalid value."""
    found = re.search(r"full_key: (\S+)", text)
    if not found:
        return None
    name = re.sub(r"\[\d+\]$", "", found[1])
    key = all_keys().get(name)
    if key is None:
        inside = [known for known in all_keys() if known.startswith(f"{name}.")]
        if inside:
            return f"{name} is a group of keys, not one; set one of them, as {inside[0]}=…."
        return unknown_key(name)
    default = spell(name, key.default)
    if "does not support deletion" in text:
        return f"~{name} cannot be deleted; set it, for example to its default, {default}."
    if "missing mandatory value" in text:
        return f"{name} has no value; it must be {allowed(key)}, and the default is {default}."
    missing = re.search(r"Interpolation key '([^']*)' not found", text)
    if missing:
        close = nearest_key(missing[1])
        hint = f"the nearest is ${{{close}}}" if close else f"the default is {default}"
        return f"{name}=${{{missing[1]}}}: {missing[1]} is not a key of the configuration; {hint}."
    if "nterpolation" in text:
        return _unresolved(key, text, overrides)
    merged = re.search(rf"Error merging override \+*({re.escape(name)}\S*?)=([^\n]*)", text)
    bad = re.search(r"Value '([^\n]*)' (?:of type|is not)", text) or re.search(
        r"value: ([^\n]*)", text
    )
    value = merged[2] if merged else bad[1] if bad else _typed(name, overrides)
    typed = f"{merged[1] if merged else name}={value}" if value is not None else name
    return _not_allowed(typed, key)


def _not_allowed(typed: str, key: Key) -> str:
    default = spell(key.name, key.default)
    return f"{typed}: {key.name} must be {allowed(key)}; the default is {default}."


def _unresolved(key: Key, text: str, overrides: Sequence[str]) -> str:
    """Explains `${…}` without its value, which may be a secret of the environment."""
    typed = f"{key.name}={_typed(key.name, overrides) or '${…}'}"
    if "While dereferencing" in text:
        return _not_allowed(f"{typed} comes to what it cannot be", key)
    reason = _one_line(text.partition("full_key:")[0])
    return _not_allowed(f"{typed} cannot be resolved ({reason})", key)


def _typed(name: str, overrides: Sequence[str]) -> str | None:
    """Returns the last value typed for a key."""
    values = (override.lstrip("+").partition("=") for override in overrides)
    return next((value for key, _, value in reversed(list(values)) if key == name), None)


def _too_long_a_number(text: str, overrides: Sequence[str]) -> str | None:
    """Explains Python's limit on digits, whose error names no key."""
    if "for integer string conversion" not in text:
        return None
    left, _, value = max(overrides, key=len, default="").partition("=")
    key = all_keys().get(left.lstrip("+"))
    return _not_allowed(f"{left}={value}", key) if key else unknown_key(left, value)


def _syntax(text: str, override: str | None) -> str | None:
    """Explains what is not KEY=VALUE: a flag, a missing or second equals sign, a quote."""
    quoted = re.search(r"Error parsing override '([^\n]*)'", text)
    lexed = re.search(r"LexerNoViableAltException: ([^\n]*)", text)
    flags = re.search(r"unrecognized arguments: (\S+)", text)
    merged = re.search(r"Error merging override ([^\n]*)", text)
    known = quoted or lexed or flags or merged
    typed = override or (known[1] if known else None)
    if typed is None and text.startswith("-") and "\n" not in text:
        typed = text
    if typed is None:
        return None
    if typed.startswith("-"):
        left, _, value = typed.partition("=")
        sentence = unknown_key(left.split()[0], value or None)
        return f"{sentence[:-1]}, and keys are written without dashes, as KEY=VALUE."
    left, equals, value = typed.partition("=")
    left, value = left.strip(), value.strip()
    if not equals or not left:
        name = nearest_key(left or value) or "tp"
        return (
            f"{_one_line(typed) or repr(typed)} is not of the form KEY=VALUE; the nearest is "
            f"{spell(name, all_keys()[name].default) if name in all_keys() else f'{name}=…'}."
        )
    key = all_keys().get(left.lstrip("+"))
    if value.startswith("="):
        advice = f"the nearest is {left}={value.lstrip('=')}"
    elif re.search(r"\s\S+=", value):
        advice = f"the nearest is {_one_line(typed)} without quotes around it, as two overrides"
    elif key is None and left not in groups():
        return unknown_key(left.strip("+~"), _one_line(value))
    elif key is not None and key.kind in (bool, int, float):
        return _not_allowed(_one_line(typed), key)
    elif key is not None and value.startswith("{"):
        plain = value.replace('"', "").replace("'", "")
        advice = f"names in braces stand without quotes, the nearest is '{left}={plain}'"
    else:
        plain = value.replace('"', "").replace("'", "")
        advice = f"a value with special characters is quoted twice, as '{left}=\"{plain}\"'"
    return f"{_one_line(typed)} is not of the form KEY=VALUE; {advice}."


def _not_a_preset(text: str, overrides: Sequence[str]) -> str | None:
    """Explains a group whose value is no name (`model=3`), for which Hydra quotes no override."""
    for override in overrides:
        name, _, value = override.lstrip("+~").partition("=")
        if not name.strip():
            typed = override if override.strip() else repr(override)
            return f"{typed} is not of the form KEY=VALUE; the nearest is tp={value or 1}."
        if name in groups() and value not in presets(name):
            return _wrong_preset(name, value)
    if "Config group override must be" not in text:
        return None
    return "A group of presets takes the name of one; the nearest is model=gpt_tiny."
