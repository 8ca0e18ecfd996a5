"""Keeps text as it is written, in YAML files and in values in braces.

YAML and Hydra read `1.10`, `0123`, `1:30`, `on` and `5e10423` as numbers or truth values. Here such
a scalar becomes a number only if Python prints that number in the same way. Otherwise it stays
text. A text key keeps this text, and a numeric key converts it by Python's rules: 0123 becomes 123,
and 1:30 is refused.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from parallel3d.config.fields import AnyKeys, Key, all_keys, values_of, with_values
from parallel3d.config.paths import at_home, with_texts_of_variables
from parallel3d.config.values import INTERVAL, RANKS
from parallel3d.errors import UserError

_YAML = "tag:yaml.org,2002:"
_BASED = re.compile("[-+]?0[xb][0-9a-fA-F_]+")  # hexadecimal and binary numbers


class _Loader(yaml.SafeLoader):
    """Reads YAML; a scalar stays text if its value would be printed differently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Returns values by name; names stay text, so that 1, 1.0 and True are three names.

        Raises ConstructorError for a duplicate name.
        """
        names = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                continue
            if name.tag != f"{_YAML}merge":
                name.tag = f"{_YAML}str"
            if name.value in names:
                raise yaml.constructor.ConstructorError(
                    "while constructing a mapping",
                    node.start_mark,
                    f"found duplicate key {name.value}",
                    name.start_mark,
                )
            names.add(name.value)
        return super().construct_mapping(node, deep=deep)

    def spelled(self, node: yaml.ScalarNode) -> Any:
        """Returns a number or truth value if Python prints it as it is written, else the text."""
        kind = node.tag.removeprefix(_YAML)
        try:
            value = getattr(self, f"construct_yaml_{kind}")(node)
        except ValueError:  # too many digits for Python
            return node.value
        return value if str(value) == node.value else node.value


for _kind in ("int", "float", "bool"):
    _Loader.add_constructor(f"{_YAML}{_kind}", _Loader.spelled)
for _kind in ("timestamp", "value"):  # dates, and a lone "="
    _Loader.add_constructor(f"{_YAML}{_kind}", _Loader.construct_scalar)


def read_yaml(path: Path, keys: Mapping[str, Key], package: str = "") -> Any:
    """Returns the content of a YAML file of the configuration.

    Args:
        path: the file.
        keys: all keys by name, whose types its text gets.
        package: dotted name of the section to which its keys belong; "" stands for the top level.

    Raises OSError, and yaml's errors.
    """
    with path.open(encoding="utf-8") as file:
        return _in_place(yaml.load(file, _Loader), keys, package)


def _in_place(value: Any, keys: Mapping[str, Key], place: str) -> Any:
    """Returns a value with `~` in paths expanded, and hexadecimal and binary numbers converted."""
    key = keys.get(place)
    if isinstance(value, str):
        value = with_texts_of_variables(value)
    if isinstance(value, list):
        return [_in_place(item, keys, f"{place}[]") for item in value]
    if key is None:
        if not isinstance(value, dict):
            return value
        dot = f"{place}." if place else ""
        return {name: _in_place(inside, keys, f"{dot}{name}") for name, inside in value.items()}
    if isinstance(value, str) and key.holds is Path:
        return at_home(value)
    if isinstance(value, str) and key.kind in (int, float) and _BASED.fullmatch(value):
        return int(value, 0)
    return value


def number_of(text: Any) -> Any:
    """Converts text to the number or truth value that it spells; returns other values as given."""
    if not isinstance(text, str) or not text.isascii():
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:  # no number, or too many digits for Python
            continue
    return text


def with_text(config: AnyKeys) -> AnyKeys:
    """Returns the configuration with values in braces converted to their declared types.

    OmegaConf has no types for these; `Key.holds` declares them. `~` is expanded in paths. Raises
    UserError if two names in the same braces are the same number.
    """
    old, keys = values_of(config), all_keys(type(config))
    new = {name: _typed(value, keys[name].holds, name) for name, value in old.items()}
    for name, key in keys.items():
        if key.meta["list_of"] == RANKS and isinstance(old[name], list):
            new[name] = [number_of(item) for item in old[name]]
    changed = {k: v for k, v in new.items() if repr(v) != repr(old[k])}
    return with_values(config, changed) if changed else config


def _typed(value: Any, holds: Any, key: str) -> Any:
    if value is None or holds is None:
        return value
    if holds in (float, INTERVAL):
        return number_of(value)
    if holds in (str, Path):
        text = str(value) if isinstance(value, (bool, int, float)) else value
        return at_home(text) if holds is Path and isinstance(text, str) else text
    if not isinstance(value, Mapping):  # one word in place of braces
        return value
    of_names, of_values = typing.get_args(holds)
    written: dict[Any, Any] = {}
    for name in value:
        other = written.setdefault(_typed(name, of_names, key), name)
        if other is not name:
            raise UserError(f"{key}: {other} and {name} are the same name; leave one of them out.")
    return {new: _typed(value[old], of_values, key) for new, old in written.items()}
