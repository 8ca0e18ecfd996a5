"""Reads words as each place does where a key of type text enters, and lists such words."""

from __future__ import annotations

import functools
import pickle
import tempfile
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from parallel3d.cli.overrides import check_overrides, config_of
from parallel3d.cli.verbs import Verb, parse
from parallel3d.config.fields import all_keys
from parallel3d.config.text import read_yaml
from parallel3d.run.directory import load_config, save_config
from parallel3d.run_config import Config

TEXT = [key for key in all_keys(Config).values() if key.kind is str and not key.meta["choices"]]
LISTS = [key for key in all_keys(Config).values() if key.item is str]
# Keys in braces with a value for a name of type text.
NAMED = {"data.blend": "0.5", "data.valid": "c/v", "optim.groups": "{lr_mult:0.1}"}
PATHS = {key.name for key in TEXT if key.holds is Path}
# Words that people type, and that YAML or Hydra read as something else.
GUESSED = (
    *("5e10423", "7e99999", "67217e15", "1e3", "1E3", "00123", "007", "0123", "1.10", "1.0", "2.0"),
    *("1_000", "1_0", "0x10", "0b11", "0o17", "+5", "-5", "5.", "-0", "1e-3", "3e-4", "10e0"),
    *("true", "True", "TRUE", "false", "on", "off", "yes", "no", "y", "n", "No", "ON"),
    *("1:30", "12:30", "12:30:45", "190:20:30", "2026-01-01", "2026-11-27T10:00", "None", "nan"),
    *("inf", "-inf", "NaN", "Infinity", "1,5", "v1.10", "r2.0", "exp-001", "a_b", "3d", "1.2.3"),
)


@functools.cache
def _defaults() -> bytes:
    return pickle.dumps(OmegaConf.structured(Config))  # unpickling takes a third of the time


def taken_from_words(words: list[str]) -> Config:
    """Returns the configuration of a command line's words, over the defaults."""
    tree = pickle.loads(_defaults())
    for word in check_overrides(words):
        parsed = OverridesParser.create().parse_override(word)
        OmegaConf.update(tree, parsed.key_or_group, parsed.value())
    return config_of(tree)


def taken_from_sweep(name: str, typed: list[str]) -> list[Any]:
    """Returns the values of a key in the runs of a sweep, `name=a,b`."""
    word = check_overrides([f"{name}={','.join(typed)}"], sweeps=True)[0]
    parsed = OverridesParser.create().parse_override(word)
    each = parsed.sweep_string_iterator()
    return [attrgetter(name)(taken_from_words([f"{name}={one}"])) for one in each]


def taken_from_file(text: str, folder: Path, package: str = "") -> Config:
    """Returns the configuration of a user's YAML file, over the defaults."""
    path = folder / "own.yaml"
    path.write_text(text, encoding="utf-8")
    tree: Any = read_yaml(path, all_keys(Config), package)
    for section in reversed(package.split(".") if package else []):
        tree = {section: tree}
    merged: DictConfig = pickle.loads(_defaults())
    merged.merge_with(OmegaConf.create(tree))
    return config_of(merged)


def taken_again(config: Config) -> Config:
    """Returns a configuration as a resume reads it from the run's folder."""
    with tempfile.TemporaryDirectory(prefix="p3d-words-") as folder:
        save_config(config, Path(folder))
        return load_config(Path(folder))


def taken_by_verb(name: str, word: str) -> str:
    """Returns the value that a command with verbs reads for one of its keys."""
    verb = Verb("", {name: ""}, (), "", paths=(name,) if name in PATHS else ())
    return parse("checkpoint ls", verb, [f"{name}={word}"])[0][name]
