"""Reads the overrides of a command line: checks each of them, and then composes them with Hydra.

A mistake in an override is therefore reported in one sentence with the key, its value, the allowed
values and the nearest one. A mistake in a user's file is found only when Hydra composes it, and is
reported with Hydra's message.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from yaml.error import MarkedYAMLError

from parallel3d.checkpoint.identity import flat
from parallel3d.cli.own_model import completed, of_schema, own_model_of, schema_of
from parallel3d.cli.preset_files import experiment_files
from parallel3d.cli.words import as_typed, braces, in_one_line, last_of_each, option, quoted_twice
from parallel3d.config.fields import (
    REQUIRED,
    Key,
    all_keys,
    allowed,
    nearest_key,
    sections_of,
    show,
    unknown_key,
    values_of,
    with_values,
)
from parallel3d.config.text import read_yaml, with_text
from parallel3d.errors import UserError, nearest_hint, readable
from parallel3d.private_names import HydraFiles, hydra_sources
from parallel3d.run_config import (
    ALTERNATIVES,
    AnyConfig,
    Config,
    check_config,
    conf_dir,
    register_schema,
)

VERSION = "1.3"  # Hydra's `version_base`: its defaults are those of this version


def compose(
    *overrides: str, world_size: int | None = None, schema: type[Config] = Config
) -> Config:
    """Returns the checked configuration that `parallel3d train` has with the same overrides.

    Args:
        overrides: words as on the command line: "tp=2", "model=llama_tiny", "train.steps=100".
        world_size: number of ranks, from which `dp` follows; None stands for the ranks of the
            layout, with one replica unless `dp` is given.
        schema: `Config` for a run, or `CommandConfig`, which adds the options of subcommands.

    Raises:
        UserError: an override is invalid. The sentence has the key, its value, the allowed values
            and the nearest one.
    """
    config = composed(overrides, schema)
    check_filled(config, overrides)
    return check_config(config, world_size)


def composed(overrides: Sequence[str], schema: type[Config] = Config) -> Config:
    """Composes a configuration without checking it as a whole. Raises UserError."""
    try:
        schema, preset = schema_of(schema, overrides, None, None)
        kept = check_overrides(overrides, schema=schema)
        config = config_of(compose_tree([*kept, *preset], schema=schema))
    except Exception as error:  # Hydra also passes on errors of Python's conversions
        raise composing_error(error, overrides, schema) from None
    return completed(typed_alternatives(config, overrides), schema)


def config_of(tree: DictConfig) -> Config:
    """Converts a composed tree to a configuration, with text exactly as it was written.

    A user's own model has the fields that have values; `completed` makes it of them.

    Raises OmegaConf's errors for values of a wrong type, and UserError for text with a reference
    that has no value.
    """
    schema = typing.cast(type[Config], OmegaConf.get_type(tree))
    left = [] if own_model_of(schema) is None else list(OmegaConf.missing_keys(tree))
    left = [key for key in left if key.startswith("model.")]
    if left:  # OmegaConf would refuse to convert a tree without them
        tree, kinds = tree.copy(), all_keys(schema)
        for key in left:
            OmegaConf.update(tree, key, kinds[key].kind())
    config = OmegaConf.to_object(tree)
    assert isinstance(config, Config)  # it has the class of the registered schema
    config = with_values(config, dict.fromkeys(left, REQUIRED))
    keys = all_keys(type(config))
    values = {name: value for name, value in values_of(config).items() if isinstance(value, str)}
    # OmegaConf replaces a reference without a value with the word None.
    if suspects := {name: value for name, value in values.items() if "None" in value}:
        written = flat(typing.cast(dict[str, Any], OmegaConf.to_container(tree, resolve=False)))
        for name, value in suspects.items():
            text = str(written[name])
            if "${" in text and value.count("None") > text.count("None"):
                raise UserError(
                    f"{name}={text}: the reference ${{…}} has no value, and the text would be "
                    f"{value}; give it a value, or leave it out."
                )
    held = {name: braces(value) for name, value in values.items() if keys[name].kind is dict}
    return of_schema(with_text(with_values(config, held)))


def compose_tree(
    overrides: Sequence[str], with_hydra: bool = False, schema: type[Config] = Config
) -> DictConfig:
    """Composes the overrides into a tree; `with_hydra` adds Hydra's own keys."""
    register(schema)
    with hydra.initialize_config_dir(str(conf_dir()), version_base=VERSION):
        return hydra.compose("config", list(overrides), return_hydra_config=with_hydra)


class FileConfigSource(HydraFiles):
    """Makes Hydra read a user's YAML files with `read_yaml`, which keeps text as it is written.

    It has the same name as Hydra's own class: a job of the submitit launcher gets this process's
    table of sources, registers Hydra's class again, and would refuse a class with another name.
    """

    def load_config(self, config_path: str) -> ConfigResult:
        """Returns the keys of a file; `config_path` is a path such as "data/web"."""
        found = super().load_config(config_path)
        group = config_path.rpartition("/")[0].replace("/", ".")
        if Path(self.path) == conf_dir() or group.partition(".")[0] == "hydra":
            return found
        package = found.header.get("package") or group
        path = Path(self.path, f"{config_path.removesuffix('.yaml')}.yaml")
        tree = read_yaml(path, all_keys(Config), "" if package == "_global_" else package)
        if isinstance(tree, dict):
            if "hydra" in tree:  # Hydra's own keys have no types, so text would stay text
                tree["hydra"] = found.config["hydra"]
            found.config = OmegaConf.create(tree)
        return found


def register(schema: type[Config] = Config) -> None:
    """Registers a schema and `FileConfigSource` with Hydra; may be called repeatedly."""
    register_schema(schema)
    Plugins.instance()  # registers Hydra's own reader, which the next line replaces
    hydra_sources.instance().types[FileConfigSource.scheme()] = FileConfigSource


def presets(group: str, own: Path | None = None) -> list[str]:
    """Returns the options of a config group: the files of `conf/<group>/`, sorted.

    `own` is the folder of --config-dir, or None. Its options are listed too.
    """
    folders = [folder / group for folder in (conf_dir(), own) if folder is not None]
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def groups() -> list[str]:
    """Returns the names of the config groups: the folders of `conf/`, sorted."""
    return sorted(path.name for path in conf_dir().iterdir() if path.is_dir())


def typed_alternatives(config: AnyConfig, overrides: Sequence[str]) -> AnyConfig:
    """Resets keys of an experiment that a key on the command line excludes.

    `experiment=llama_1b_sft train.steps=20` trains 20 steps, although the file sets two epochs.
    """
    typed = {override.lstrip("+").partition("=")[0] for override in overrides}
    for keys in ALTERNATIVES:
        if any(attrgetter(key)(config) for key in typed.intersection(keys)):
            config = with_values(config, {k: all_keys(Config)[k].default for k in {*keys} - typed})
    return config


def check_filled(config: Config, overrides: Sequence[str], own: Path | None = None) -> None:
    """Raises UserError if nothing sets a key that the experiment leaves open by `key: ???`.

    Hydra itself would replace `???` with the default, and every key has one. Keys of a group are
    not required if the command line selects a preset of the group: data=blend needs no data.path.

    Args:
        config: the configuration composed from the overrides.
        overrides: the words of the command line.
        own: the folder of --config-dir, or None. Its experiments come first.
    """
    typed = {override.partition("=")[0].lstrip("+"): override for override in overrides}
    keys = all_keys(Config)
    name = option(typed["experiment"]) if "experiment" in typed else None
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
    """Returns the keys that the files of an experiment set to `???`."""
    missing = [OmegaConf.missing_keys(values) for values in experiment_files(experiment, own)]
    return [key for key in all_keys(Config) if any(key in keys for keys in missing)]


def check_overrides(
    words: Sequence[str],
    own: Path | None = None,
    sweeps: bool = False,
    schema: type[Config] = Config,
) -> list[str]:
    """Returns the overrides, with text in quotes where Hydra's grammar needs them.

    For two overrides of one key the last is returned, and two names of a run are refused. Raises
    UserError for the first override that is not KEY=VALUE for a key, a section or a group.
    Overrides of Hydra's own keys pass unchanged. Values are checked after composing.

    Args:
        words: the words of the command line.
        own: the folder of --config-dir, or None if it is not given.
        sweeps: whether a key may have several values, each of which gets a run.
        schema: the schema whose keys are allowed.
    """
    kept, _ = last_of_each(words)
    return [_check_override(word, schema, own, sweeps) for word in kept]


def _check_override(word: str, schema: type[Config], own: Path | None, sweeps: bool) -> str:
    """Checks and quotes one override for `check_overrides`. Raises UserError."""
    word = in_one_line(word)
    bare, is_set, value = word.partition("=")
    keys, sections = all_keys(schema), sections_of(schema)
    key = keys.get(bare.lstrip("+"))
    has_text = key is None or key.kind in (str, dict) or key.item is str
    is_ours = not re.match("hydra([./]|$)", bare.lstrip("+~"))
    if key is not None and _is_of_another_form(value, key):
        raise UserError(_not_allowed(word, key))
    kept = word
    try:
        if is_set and is_ours and has_text:
            kept = as_typed(word, key)
        parsed = OverridesParser.create().parse_override(kept)
    except (HydraException, ValueError) as error:  # ValueError: too many digits for Python
        if isinstance(error, UserError):
            raise
        parsed = None
    if parsed is None or not parsed.key_or_group:
        raise UserError(_not_read(word, schema))
    name = parsed.key_or_group
    if not is_ours:
        return word
    if name not in {*groups(), *sections, *keys} or parsed.package is not None:
        raise UserError(unknown_key(name, schema, value or None))
    if parsed.is_add() or parsed.is_delete():
        raise UserError(
            f"{word}: {name} is always there: it can be neither added nor deleted; the nearest is "
            f"{name}=…."
        )
    if parsed.is_sweep_override():
        if not sweeps:
            also = ""
            if "(" not in value and (key is None or key.item is not None or key.meta["list_of"]):
                also = f", or a list as {name}=[{value}]"
            elif "(" not in value and key is not None and key.kind is str:
                also = f", or one text as {quoted_twice(name, value)}"
            raise UserError(
                f"{word} gives several values for one key; give --multirun to run each one{also}."
            )
        return kept
    given = parsed.value()
    if name in groups():
        known = presets(name, own)
        for chosen in given if isinstance(given, list) else [given]:
            if chosen is not None and chosen not in known:
                raise UserError(_wrong_preset(name, show(chosen), known, word))
    elif name in sections and not isinstance(given, dict):
        inside = next(key for key in keys if key.startswith(f"{name}."))
        raise UserError(
            f"{word}: {name} is a group of keys, not a single key; set one of them, such as "
            f"{inside}=…."
        )
    elif key is not None and key.item is str and not _may_be_list(given):
        raise UserError(_not_allowed(word, key))
    return kept


def _may_be_list(value: object) -> bool:
    return value is None or isinstance(value, list) or "${" in str(value)


def _is_of_another_form(value: str, key: Key) -> bool:
    """Returns whether a value is a list or in braces although the key takes no such value.

    It uses no parser, which would take seconds for a list of thousands of values.
    """
    is_list, is_braces = (value[:1] + value[-1:] == pair for pair in ("[]", "{}"))
    takes_list = key.item is not None or key.meta["list_of"]
    return (is_list and not takes_list) or (is_braces and key.kind is not dict)


def _not_allowed(typed: str, key: Key) -> str:
    usual = "" if key.default == REQUIRED else f"; the default is {key.spelled(key.default)}"
    value = typed.partition("=")[2]
    also = ""
    if key.kind is str and not key.meta["choices"] and value[:1] in ("[", "{"):
        also = f"; text in brackets is quoted twice, as {quoted_twice(key.name, value)}"
        if key.holds is Path and "," in value:
            names = ",".join(name.strip() for name in value.strip("[]").split(","))
            also += f", and several names without them, as {quoted_twice(key.name, names)}"
    return f"{typed}: {key.name} must be {allowed(key)}{also}{usual}."


def _not_read(word: str, schema: type[Config]) -> str:
    """Returns the sentence that refuses a word that Hydra cannot read as KEY=VALUE."""
    left, equals, value = (part.strip() for part in word.partition("="))
    if left.startswith("-"):
        return unknown_key(left, schema, value or None)
    keys = all_keys(schema)
    if not equals or not left.strip("+~"):
        name = nearest_key(left or value, schema) or "tp"
        return (
            f"{word.strip() or repr(word)} is not of the form KEY=VALUE; the nearest is "
            f"{keys[name].spelled(keys[name].default) if name in keys else f'{name}=…'}."
        )
    key = keys.get(left.lstrip("+"))
    if key is None and left not in groups():
        return unknown_key(left.strip("+~"), schema, value)
    if key is not None and key.kind in (bool, int, float):
        return _not_allowed(word, key)
    plain = value.strip("'\"")
    advice = f"a value with special characters is quoted twice, as {quoted_twice(left, plain)}"
    takes_list = key is not None and (key.item is not None or key.meta["list_of"])
    if value.startswith("{") or (takes_list and value.startswith("[")):
        where = "braces have no quotes" if value.startswith("{") else "a list have no quotes"
        advice = f"names in {where}; the nearest is '{left}={_in_brackets(value)}'"
    return f"{word} is not of the form KEY=VALUE; {advice}."


def _in_brackets(value: str) -> str:
    """Returns a value in brackets without quotes, empty items and open brackets."""
    close, found, open_ones = {"{": "}", "[": "]"}, "", ""
    for letter in value:
        if letter in close:
            open_ones = close[letter] + open_ones
        elif letter in close.values():
            if not open_ones.startswith(letter):
                continue
            found, open_ones = found.rstrip(", "), open_ones[1:]
        elif letter in "\"'" or (letter == "," and found.rstrip()[-1:] in ("", ",", *close)):
            continue
        found += letter
    return found.rstrip(", ") + open_ones


def _wrong_preset(group: str, option: str, known: Sequence[str], word: str | None = None) -> str:
    typed = word or f"{group}={option}"
    if option.endswith((".yaml", ".yml")) or "/" in option:
        name = option.rpartition("/")[2].partition(".")[0]
        return (
            f"{typed} must be one of {', '.join(known)}, or {group}={name} for "
            f"{group}/{name}.yaml in your own folder, given as --config-dir=FOLDER."
        )
    return f"{typed} must be one of {', '.join(known)}{nearest_hint(option, known, f'{group}=')}."


def composing_error(
    error: BaseException, overrides: Sequence[str] = (), schema: type[Config] = Config
) -> UserError:
    """Converts an error of Hydra or OmegaConf to a UserError.

    The overrides have been checked, so the error is about a user's file or about the value of a
    reference `${…}`. The sentence does not repeat that value, as it may be a secret from an
    environment variable.
    """
    if isinstance(error, UserError):
        return error
    if isinstance(error, MarkedYAMLError) and (mark := error.problem_mark) is not None:
        return UserError(
            readable(
                f"{mark.name}, line {mark.line + 1}, must be YAML: {error.problem}; write each "
                "line as KEY: VALUE, with the keys of a section indented below its name."
            )
        )
    if isinstance(error, RecursionError):
        return UserError(
            f"{' '.join(overrides)}: a file's defaults must not lead back to the file itself; give "
            "it a name that differs from that of the file on which it is based."
        )
    text, keys = str(error), all_keys(schema)
    merging = re.match(r"Error merging override (\+*([^=]*).*)", text, re.DOTALL)
    if merging and merging[2] in keys:
        return UserError(readable(_not_allowed(merging[1], keys[merging[2]])))
    file = re.search(r"In '(?!hydra/)(([^'/]+)/[^']+)': (.*)", text, re.DOTALL)
    if file:
        text = file[3]
    said = re.sub(r"^\w+ raised while composing config:", "", text)
    said = " ".join(re.split("Config search path:|full_key:", said)[0].split()).rstrip(".")
    name = re.sub(r"\[\d+\]$", "", (re.findall(r"full_key: (\S+)", text) or [""])[0])
    typed = next((w for w in overrides if w.lstrip("+").startswith(f"{name}=")), name)
    missing = re.search(r"Could not find '(?:hydra/)?([^'/]+)/([^']*)'", text)
    other = re.search(r"Interpolation key '([^']*)' not found", text)
    if missing:
        listed = re.search(r"Available options in '[^']*':\n((?:\t\S+\n?)+)", text)
        explained = _wrong_preset(missing[1], missing[2], listed[1].split() if listed else [])
    elif file and (name == file[2] or "@" in said):
        explained = (
            "its first line must be '# @package _global_', as in all experiments; put "
            "comments below it."
        )
    elif other:
        explained = f"{typed}: {unknown_key(other[1], schema)}"
    elif name in keys:
        why = "its value has another type" if "While dereferencing" in said else said
        explained = _not_allowed(f"{typed}: {why}", keys[name])
    elif name:
        explained = unknown_key(name, schema)
    else:
        line = said if file else " ".join([*overrides, said])
        explained = f"{line}; docs/own_configuration.md shows what works."
    return UserError(readable((f"{file[1]}.yaml: " if file else "") + explained))
