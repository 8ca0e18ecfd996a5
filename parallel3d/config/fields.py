"""Lists the keys of a schema with their types and ranges, and checks values.

A schema is a dataclass with keys and with sections, which are dataclasses of keys. `run_config` has
the schema of a run, and `commands/options.py` that of all subcommands.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from parallel3d.config.conflicts import Conflict
from parallel3d.config.paths import check_path, paths_in
from parallel3d.config.values import INTERVAL, RANKS, REPORTED, nearest_interval, words_of
from parallel3d.errors import UserError, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

AnyKeys = TypeVar("AnyKeys", bound="DataclassInstance")


@dataclass(frozen=True)
class Key:
    """One key of the configuration: dotted name, default, type and metadata."""

    name: str
    default: Any
    kind: type  # int, float, bool, str, list, or dict for names and values in braces
    item: type | None  # type of a list's elements; None for other kinds
    optional: bool
    meta: dict[str, Any]

    @property
    def holds(self) -> Any:
        """Returns the value's type in more detail than `kind`.

        It is `Path` for text that is a path, INTERVAL for a number of steps that may also be a time
        or auto, a type of dict for values in braces, and None for other keys.
        """
        return self.meta["holds"]

    @property
    def resume(self) -> str:
        """Returns the effect of a change on a resumed run: FREE, LAYOUT, REPORTED or REFUSED."""
        return str(self.meta["resume"])

    @property
    def tried(self) -> tuple[Any, ...]:
        """Returns values other than the default, for tests.

        These are the values that the key declares, or else its other choices or truth value.
        """
        if self.meta["tried"]:
            return tuple(self.meta["tried"])
        others = self.meta["choices"] or ((not self.default,) if self.kind is bool else ())
        return tuple(value for value in others if value != self.default)

    @property
    def leaf(self) -> str:
        """Returns the name without its section."""
        return self.name.rpartition(".")[2]

    @property
    def typed(self) -> str:
        """Returns the name on the command line: a preset's group, or the name itself."""
        return self.name.removesuffix(".name") if self.meta["choices"] else self.name

    def spelled(self, value: Any) -> str:
        """Returns `key=value` as on the command line."""
        return f"{self.typed}={show(value)}"


REQUIRED = "???"  # the default of a key without one, as OmegaConf spells it

# New names of keys that were renamed, by their old names.
RENAMED = {"trace": "schedule.timeline"}

# New names of values that were renamed, by key and old value.
RENAMED_VALUES = {("device", "pretend"): "simulated"}

# Replacements for removed values, by key and old value.
REMOVED_VALUES = {("ddp.comm_hook", "powersgd"): "bf16"}


class RemovedKey(NamedTuple):
    """Advice on replacing a removed key, and its default, at which it had no effect."""

    instead: str
    default: Any = None


_TEXTBOOK_FORMS = (
    "the textbook forms of collectives are an example of the repository now: "
    "torchrun --nproc-per-node 4 -m examples.collectives.compare"
)
_LOW_RANK = "PowerSGD is gone, and ddp.comm_hook=bf16 sends half the bytes"
REMOVED = {
    "bench.algorithms": RemovedKey(_TEXTBOOK_FORMS, False),
    "algorithms": RemovedKey(_TEXTBOOK_FORMS, False),
    "topology.width": RemovedKey("text is as wide as the terminal, or as COLUMNS says"),
    "tensor_parallel.symmetric_memory": RemovedKey(
        "tensor_parallel.chunks overlaps the same communication", False
    ),
    "ddp.powersgd_rank": RemovedKey(_LOW_RANK, 4),
    "ddp.powersgd_start": RemovedKey(_LOW_RANK, 10),
    "ddp.bucket_order": RemovedKey("buckets are in the reverse order of the model", "model"),
    "launch.huge_pages": RemovedKey("CPU ranks always keep freed memory for reuse", True),
    "train.noise_scale": RemovedKey(
        "compare the losses of short runs with two values of global_batch_size", False
    ),
}


def show(value: Any) -> str:
    """Returns a value as it is written on the command line, on one line."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int) and not fits_64_bits(value):
        return f"{value:#x}"  # Python refuses to print very long numbers in decimal
    if isinstance(value, (list, tuple)):
        return f"[{','.join(show(v) for v in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{k}:{show(v)}' for k, v in value.items())}}}"
    if isinstance(value, str):
        plain = re.fullmatch(r"[^\s'\"]+", value) and value.isprintable()
        return value if plain else repr(value)
    return " ".join(repr(value).split())


def fits_64_bits(number: int) -> bool:
    """Returns whether a number fits into 64 bits, the limit of torch and of checkpoints."""
    return -(2**63) <= number < 2**63


def spell(name: str, value: Any) -> str:
    """Returns `key=value` as on the command line, with a preset's group: `precision=fp16`.

    `name` must not be the name of a preset that only logs show; `Key.spelled` spells any key.
    """
    return f"{name.removesuffix('.name')}={show(value)}"


def sections_of(schema: type) -> dict[str, type]:
    """Returns the sections of a schema and their dataclasses, by name."""
    found: dict[str, type] = _sections_of(typing.cast(Any, schema))
    return found


@functools.cache
def _sections_of(schema: type) -> dict[str, type]:
    return {
        n: type(value) for n, value in vars(schema()).items() if dataclasses.is_dataclass(value)
    }


def all_keys(schema: type) -> dict[str, Key]:
    """Returns all keys of a schema by their dotted names, in the order of declaration."""
    found: dict[str, Key] = _all_keys(typing.cast(Any, schema))
    return found


@functools.cache
def _all_keys(schema: type) -> dict[str, Key]:
    sections = {"": schema} | sections_of(schema)
    keys = [key for section, cls in sections.items() for key in _keys_of(section, cls)]
    return {key.name: key for key in keys}


def _keys_of(section: str, cls: type) -> Iterator[Key]:
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        if dataclasses.is_dataclass(hint):
            continue
        # Hydra accepts new names in braces only for keys of any type, so these are typed Any.
        braces = str if f.metadata["list_of"] else dict | None
        if hint is Any:
            hint = int if f.metadata["holds"] == INTERVAL else braces
        arms = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
        kind = arms[0]
        # A class may set metadata for all keys that it declares.
        owner = vars(next(c for c in cls.__mro__ if f.name in vars(c).get("__annotations__", ())))
        meta = dict(f.metadata)
        meta["resume"] = meta["resume"] or owner.get("RESUME", REPORTED)
        meta["alike"] = meta["alike"] or owner.get("ALIKE", False)
        meta["once"] = meta["once"] or owner.get("ONCE", False)
        yield Key(
            name=f"{section}.{f.name}" if section else f.name,
            default=getattr(cls(), f.name),
            kind=typing.get_origin(kind) or kind,
            item=(typing.get_args(kind) or (None,))[0],
            optional=type(None) in arms,
            meta=meta,
        )


def values_of(config: DataclassInstance) -> dict[str, Any]:
    """Returns the values of all keys by their dotted names."""
    return {name: get(config) for name, get in _getters(typing.cast(Any, type(config)))}


@functools.cache
def _getters(schema: type) -> list[tuple[str, attrgetter[Any]]]:
    return [(name, attrgetter(name)) for name in all_keys(schema)]


def with_values(config: AnyKeys, values: Mapping[str, Any]) -> AnyKeys:
    """Returns a copy of the configuration with new values, which are given by dotted names."""
    changed: dict[str, Any] = {name: value for name, value in values.items() if "." not in name}
    for section in sections_of(type(config)):
        inside = {n.partition(".")[2]: v for n, v in values.items() if n.startswith(f"{section}.")}
        if inside:
            changed[section] = dataclasses.replace(getattr(config, section), **inside)
    return dataclasses.replace(config, **changed)


class OtherNames(NamedTuple):
    """Names that other trainers have for a key, and how their meaning differs.

    Attributes:
        flags: the flags of Megatron-LM.
        differs: how the flags' meaning differs, or None if it is the same.
        names: names of further trainers, with how the meaning of each differs.
    """

    flags: tuple[str, ...] = ()
    differs: str | None = None
    names: Mapping[str, str | None] = MappingProxyType({})


@functools.cache
def other_names() -> dict[str, OtherNames]:
    """Returns other trainers' names by key, as `other_trainers.yaml` lists them."""
    import yaml  # imported here, because a script's environment may lack PyYAML

    file = Path(__file__).with_name("other_trainers.yaml")
    rows = yaml.safe_load(file.read_text(encoding="utf-8"))
    return {
        name: OtherNames(tuple(row.get("flags", ())), row.get("differs"), row.get("names", {}))
        for name, row in rows.items()
    }


def nearest_key(given: str, schema: type) -> str | None:
    """Returns the key that `given` most likely means, or None if nothing is close.

    It tries the names of keys, Megatron-LM's flags, other trainers' names, names of keys without
    their section, and then similar spellings of all but other trainers' names. Dashes count as
    underscores; leading ones are ignored.
    """
    given = given.lstrip("-+~").replace("-", "_").lower()
    keys = all_keys(schema)
    flags = {
        flag.lstrip("-").replace("-", "_"): name
        for name, row in other_names().items()
        if name in keys
        for flag in row.flags
    }
    leaves: dict[str, str] = {}
    for name, key in keys.items():
        leaves.setdefault(key.leaf, name)
    section, _, leaf = given.rpartition(".")
    theirs = {
        theirs: name for name, row in other_names().items() if name in keys for theirs in row.names
    }
    exact = given if given in keys else flags.get(given) or theirs.get(given) or leaves.get(leaf)
    names = {name: name for name in (*keys, *sections_of(schema))}
    spellings = names if section else leaves | names | flags
    close = exact or nearest(given, spellings)
    return close and spellings.get(close, close)


def unknown_key(given: str, schema: type, value: Any = None) -> str:
    """Returns the sentence that refuses an unknown key and names the nearest one."""
    typed = given if value is None else f"{given}={show(value)}"
    if given in RENAMED:
        return f"{typed}: {given} is now {RENAMED[given]}."
    if given in REMOVED:
        return f"{typed}: {given} is no longer a key; {REMOVED[given].instead}."
    name = nearest_key(given, schema)
    if name is None:
        close = "docs/configuration.md lists all keys"
    else:
        row = other_names().get(name, OtherNames())
        flags, differs = [flag.strip("-") for flag in row.flags], row.differs
        key = all_keys(schema).get(name)
        close = f"the nearest is {key.typed if key else name}"
        if given.strip("-").replace("_", "-") not in flags:
            differs = row.names.get(given.strip("-").replace("-", "_"))
        if differs:
            close += f" ({differs})"
    if given.startswith("-"):
        close += ", and keys are written without dashes, as KEY=VALUE"
    return f"{typed}: {given} is not a key of the configuration; {close}."


NOUNS = {int: "whole number", float: "number", bool: "true or false", str: "text", list: "list"}
NOUNS[dict] = "names and values in braces"


def allowed(key: Key) -> str:
    """Returns the allowed values of a key in words, such as "a whole number of at least 1"."""
    choices = key.meta.get("choices")
    if choices:
        text, items = f"one of {', '.join(choices)}", key.meta["list_of"]
        return f"{text} or a list of {', '.join(items)}" if items else text
    noun = NOUNS[key.kind]
    if key.kind in (int, float):
        noun = f"a {noun}"
    if key.item is not None:
        noun = f"a list of {NOUNS[key.item]}s".replace("texts", "words")
    bounds = {"minimum": "at least", "above": "above", "maximum": "at most", "below": "below"}
    limits = [f"{bounds[b]} {key.meta[b]:g}" for b in bounds if key.meta[b] is not None]
    text = f"{noun} {' and '.join(limits)}".strip().replace("number at", "number of at")
    if key.holds == INTERVAL:
        text = f"{text} steps, a time such as 10min, 90s or 2h, or auto"
    return f"null or {text}" if key.optional else text


def _has_type(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _nearest_to(key: Key, value: Any) -> Any:
    """Returns `value` itself if it is allowed, else the nearest allowed value or the default."""
    meta, choices = key.meta, key.meta["choices"]
    if words := meta["list_of"]:
        return _nearest_words(key, value, lambda w: _is_rank(w) if words is RANKS else w in words)
    if key.holds == INTERVAL and isinstance(value, str):
        return nearest_interval(value, key.default)
    if key.holds == INTERVAL and isinstance(value, float) and math.isfinite(value):
        value = round(value)
    if not _has_type(value, key.kind):
        return key.default
    if key.item is not None and not all(_has_type(item, key.item) for item in value):
        return key.default
    if choices:
        return value if value in choices else nearest(value, choices) or key.default
    if key.kind not in (int, float):
        return value
    if not (fits_64_bits(value) if isinstance(value, int) else math.isfinite(value)):
        return key.default
    low, high, above, below = (meta[b] for b in ("minimum", "maximum", "above", "below"))
    if low is not None and value < low:
        return low
    if high is not None and value > high:
        return high
    is_out = (above is not None and value <= above) or (below is not None and value >= below)
    return key.default if is_out else value


def _nearest_words(key: Key, value: Any, fits: Callable[[Any], bool]) -> Any:
    """Returns `value` itself if it is a choice or a list of words that fit, else the nearest."""
    choices, words = key.meta["choices"], (*key.meta["choices"], *key.meta["list_of"])
    if isinstance(value, str):
        given = words_of(value)
        is_good = value in choices or (given and all(fits(word) for word in given))
        return value if is_good else nearest(value, words) or key.default
    if not isinstance(value, (list, tuple)):
        return key.default
    if all(fits(item) for item in value) and (value or words[-1:] != RANKS):
        return value
    close = (item if fits(item) else nearest(str(item), words) for item in value)
    return [item for item in close if item is not None and fits(item)] or key.default


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 0


def check_value(name: str, value: Any, schema: type) -> None:
    """Raises UserError if the key `name` cannot have this value."""
    key = all_keys(schema)[name]
    if value is None and key.optional:
        return
    if isinstance(value, str) and (now := RENAMED_VALUES.get((key.name, value))):
        raise UserError(f"{key.spelled(value)}: {value} is now {now}; use {key.spelled(now)}.")
    if isinstance(value, str) and (close := REMOVED_VALUES.get((key.name, value))):
        raise UserError(
            f"{key.spelled(value)}: {value} is no longer a value of {key.typed}; "
            f"the nearest is {key.spelled(close)}."
        )
    near = _nearest_to(key, value)
    if near is not value:
        is_long = isinstance(value, int) and not fits_64_bits(value)
        also = ", and fit into 64 bits" if is_long else ""
        close = "" if near == REQUIRED else f"; the nearest is {key.spelled(near)}"
        raise UserError(f"{key.name}={show(value)} must be {allowed(key)}{also}{close}.")
    for path in paths_in(value, key.holds):
        check_path(key.name, path)


def check_fields(config: DataclassInstance) -> None:
    """Raises UserError for an unknown key, and for a key whose type or range is wrong."""
    schema = type(config)
    for section, cls in ({"": schema} | sections_of(schema)).items():
        found = getattr(config, section) if section else config
        if not isinstance(found, cls):
            name = cls.__name__
            raise UserError(f"{section}={show(found)} must be a {name}; the default is {name}().")
        declared = {f.name for f in dataclasses.fields(found)}
        for name in vars(found):
            if name not in declared:
                given = f"{section}.{name}".lstrip(".")
                raise UserError(unknown_key(given, schema, getattr(found, name)))
    for name, value in values_of(config).items():
        check_value(name, value, schema)


def check_at_most(name: str, value: float, limit: str, most: float) -> None:
    """Raises UserError if the value of key `name` is above `most`, the value of key `limit`."""
    if value > most:
        raise UserError(
            f"{spell(name, value)} must be at most {spell(limit, most)}; the nearest is "
            f"{spell(name, most)}."
        )


def check_conflicts(rows: Iterable[Conflict], value: Callable[[str], Any]) -> None:
    """Raises UserError for the first conflict that exists; `value` maps a key to its value."""
    for row in rows:
        if row.holds(value):
            raise UserError(row.sentence(value, spell))
