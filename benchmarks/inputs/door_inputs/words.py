"""Draws words for keys of type text, wherever they enter: hashes, versions, numbers, truth values,
dates, paths.

The right answer is the word itself, and for a path that begins with `~` the path in the home;
`null` in any case is no value. Names in braces and items of lists are words as well.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import pwd
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from benchmarks.inputs.door_inputs.answers import REFUSAL, Input
from parallel3d.cli.overrides import check_overrides, config_of
from parallel3d.cli.verbs import Verb, parse
from parallel3d.config.fields import Key, all_keys, check_value
from parallel3d.config.text import read_yaml
from parallel3d.run.checks import check_run_name
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
# Characters in names, including those that Hydra's grammar lacks.
ODD = [*"üñéö漢#!&;<>^§~|@%?*+-_./"]
NULLS = ("null", "Null", "NULL")
DIGITS = "0123456789abcdef"


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
    merged = OmegaConf.merge(pickle.loads(_defaults()), OmegaConf.create(tree))
    assert isinstance(merged, DictConfig)
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


def checked(name: str, config: Config) -> Any:
    """Returns the value of a key that the checks accept."""
    value = attrgetter(name)(config)
    check_value(name, value, Config)
    check_run_name(config.run, config.runs_dir)
    return value


def some_word(rng: random.Random) -> str:
    """Draws a word; most of them look like something else."""
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(GUESSED)
    if kind == 3:  # short hashes, only of digits or with an e among them
        return "".join(rng.choices("0123456789e", k=rng.randint(5, 10))).lstrip("e") or "5e1"
    if kind == 4:
        return "".join(rng.choices(DIGITS, k=rng.choice((7, 8, 12, 40))))
    if kind == 5:
        return ".".join(str(rng.randint(0, 20)) for _ in range(rng.randint(2, 4)))
    if kind == 6:
        return f"{rng.randint(0, 99):02d}{rng.choice('_:-e.x')}{rng.randint(0, 99):02d}"
    word = list(rng.choice(("run", "größe", "web", "a.b", "1.10")))
    word.insert(rng.randint(0, len(word)), rng.choice(ODD))
    return "".join(word)


def some_path(rng: random.Random) -> tuple[str, object]:
    """Draws a path that begins with `~` or `$`, with the right answer."""
    user = pwd.getpwuid(os.getuid())
    rest = rng.choice(("runs", "data/1.10", "a b", "007", "5e3/x"))
    return rng.choice(
        (
            (f"~/{rest}", f"{os.path.expanduser('~')}/{rest}"),
            (f"~{user.pw_name}/{rest}", f"{user.pw_dir}/{rest}"),
            (f"~nobody-of-this-name/{rest}", REFUSAL),
            (f"$SCRATCH/{rest}", REFUSAL),
            (f"/scratch/$USER/{rest}", REFUSAL),
            (f"/scratch/run-$SLURM_JOB_ID/{rest}", REFUSAL),
            (f"./~{rest}", f"./~{rest}"),
        )
    )


def is_plain_yaml(word: str) -> bool:
    """Returns whether YAML reads a word without quotes as one scalar."""
    return re.fullmatch(r"[\w.+-][\w.+:/*-]*", word) is not None and not word.endswith(":")


def _right(name: str, word: str) -> object:
    if name == "run" and (re.search(r"[/\\]|^~", word) or word in (".", "..")):
        return REFUSAL
    if name in PATHS and word.startswith("~"):
        home = os.path.expanduser(word)
        return home if home.startswith("/") else REFUSAL
    return REFUSAL if name in PATHS and word.startswith("$") else word


def _one(rng: random.Random, folder: Path) -> Input:
    ways = ("typed", "twice", "file", "section", "resume", "sweep", "list", "braces", "verb")
    way = rng.choice(ways)
    key, word = rng.choice(TEXT), some_word(rng)
    right = _right(key.name, word)
    if key.name in PATHS and rng.random() < 0.3:
        word, right = some_path(rng)
    is_common = word in GUESSED and "," not in word and right == word
    if way == "sweep":
        return _sweep(key, rng)
    if way == "twice":
        return _twice(rng)
    if way == "list":
        return _list(rng, folder)
    if way == "braces":
        return _braces(rng, folder)
    if way == "verb":
        name = rng.choice(("run", "runs_dir"))
        right = word if name == "run" else _right(name, word)
        return Input(f"checkpoint ls {name}={word}", lambda: taken_by_verb(name, word), right)
    if rng.random() < 0.05 and key.optional:
        word, right, is_common = rng.choice(NULLS), None, True
    take: Callable[[], object]
    if way in ("file", "section"):
        value = word if is_plain_yaml(word) else json.dumps(word, ensure_ascii=False)
        section, _, leaf = key.name.rpartition(".")
        text = f"{leaf}: {value}\n"
        if way == "file":  # as in an experiment
            text, section = (f"{section}:\n  {text}", "") if section else (text, "")

        def take() -> object:
            return checked(key.name, taken_from_file(text, folder, section))

        return Input(f"{key.name} in {text!r}", take, right, is_common)

    def typed() -> object:
        config = taken_from_words([f"{key.name}={word}"])
        return checked(key.name, taken_again(config) if way == "resume" else config)

    return Input(f"{key.name}={word} ({way})", typed, right, is_common)


def _twice(rng: random.Random) -> Input:
    """Draws a key that is given twice: as in Hydra, the last value counts; but a run has one name.

    In a shell script, words of its own come before `"$@"`.
    """
    name = rng.choice(("run", "data.path", "logger.project", "tp", "optim.lr", "train.steps"))
    values: list[Any] = rng.sample(("1.10", "v2", "a/b", "5e3"), 2)
    if name in ("tp", "train.steps"):
        values = rng.sample(range(1, 9), 2)
    elif name == "optim.lr":
        values = rng.sample((1e-3, 3e-4, 0.01), 2)
    elif name == "run":
        values = rng.sample(("1.10", "v2", "5e3"), 2)
    words = [f"{rng.choice(('', '', '++'))}{name}={value}" for value in values]
    words.insert(rng.randint(0, 2), "pp=2")
    right: object = REFUSAL if name == "run" else values[1]
    text = " ".join(words)
    return Input(
        f"{text} (twice)",
        lambda: checked(name, taken_from_words(words)),
        right,
        accepted=name == "run",
    )


def _sweep(key: Key, rng: random.Random) -> Input:
    words = [some_word(rng) for _ in range(3)]
    words = [word for word in words if "," not in word] + ["v2"]
    right = [_right(key.name, word) for word in words]
    if REFUSAL in right:  # in a run's own configuration
        words, right = ["1.10", "v2"], ["1.10", "v2"]
    typed = f"{key.name}={','.join(words)} (sweep)"
    return Input(typed, lambda: taken_from_sweep(key.name, words), right)


def _list(rng: random.Random, folder: Path) -> Input:
    key = rng.choice(LISTS)
    words = [word for word in (some_word(rng) for _ in range(3)) if "," not in word]
    is_common = all(word in GUESSED for word in words)
    if rng.random() < 0.5:
        typed = f"{key.name}=[{','.join(words)}]"
        return Input(
            typed, lambda: attrgetter(key.name)(taken_from_words([typed])), words, is_common
        )
    items = [w if is_plain_yaml(w) else json.dumps(w, ensure_ascii=False) for w in words]
    section, _, leaf = key.name.rpartition(".")
    text = f"{section}:\n  {leaf}: [{', '.join(items)}]\n"

    def take() -> object:
        return attrgetter(key.name)(taken_from_file(text, folder))

    return Input(repr(text), take, words, is_common)


def _braces(rng: random.Random, folder: Path) -> Input:
    name, value = rng.choice([*NAMED.items()])
    words = [word for word in (some_word(rng) for _ in range(2)) if not re.search("[,:~]", word)]
    words = list(dict.fromkeys(words))
    is_common = all(word in GUESSED for word in words) and bool(words)
    if rng.random() < 0.5 or not words:
        typed = f"{name}={{{','.join(f'{word}:{value}' for word in words)}}}"

        def take() -> object:
            return list(attrgetter(name)(taken_again(taken_from_words([typed]))))

        return Input(typed, take, words, is_common)
    section, _, leaf = name.partition(".")
    names = [w if is_plain_yaml(w) else json.dumps(w, ensure_ascii=False) for w in words]
    inside = value.replace(":", ": ")
    text = f"{section}:\n  {leaf}:\n" + "".join(f"    {each}: {inside}\n" for each in names)

    def taken() -> object:
        return list(attrgetter(name)(taken_from_file(text, folder)))

    return Input(repr(text), taken, words, is_common)


def inputs(rng: random.Random, folder: Path) -> Iterator[Input]:
    """Yields words, wherever they enter, without end."""
    while True:
        yield _one(rng, folder)
