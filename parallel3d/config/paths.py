"""Expands `~` in paths, and refuses paths that cannot exist.

Addresses (`s3://…`) are left as they are, and are refused except for keys of corpora.
"""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parallel3d.errors import UserError


def at_home(text: str) -> str:
    """Expands `~` and `~user` in a path, or in several paths joined by commas.

    A shell does not expand them after a `=`, and nothing expands them in YAML. A `~` that stands
    for no home folder is left as it is.
    """
    return ",".join(map(_at_home, text.split(",")))


def _at_home(item: str) -> str:
    path = item.lstrip()
    # With an empty HOME, Python would expand ~ to the root folder.
    if not path.startswith("~") or (path[1:2] in ("", "/") and os.environ.get("HOME") == ""):
        return item
    there = os.path.expanduser(path)
    return item[: len(item) - len(path)] + there if os.path.isabs(there) else item


# Keys of corpora, which may be at an address. `input` and `prefix` are arguments of commands.
OF_ADDRESSES = ("data.path", "data.blend", "data.blend_stages", "data.valid", "input", "prefix")
_ADDRESS = re.compile("[A-Za-z][A-Za-z0-9+.-]*://")
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
_OR_ELSE = re.compile(r"(\$\{oc\.env:[^,{}'\"$]+,)\s*([^,{}'\"$]+?)\s*\}")


def with_texts_of_variables(text: str) -> str:
    """Returns text in which the default of each `${oc.env:NAME,DEFAULT}` is quoted.

    Without the quotes, OmegaConf would read a default such as 1.10 as a number.
    """
    mark = '"' if "'" in text else "'"
    return text if mark in text else _OR_ELSE.sub(rf"\1{mark}\2{mark}}}", text)


def check_path(name: str, text: str) -> None:
    """Raises UserError for an empty path, an unknown home, an unexpanded variable, or an address.

    Addresses are allowed for the keys in OF_ADDRESSES.

    Args:
        name: name of the key.
        text: the path, as `at_home` returns it.
    """
    if not text.strip():
        raise UserError(f"{name}={text} is empty: give a path, or leave {name} out.")
    for item in map(str.strip, text.split(",")):
        if item.startswith("~"):
            raise UserError(
                f"{name}={text} begins with ~, but this host knows no such home directory; give "
                f"the whole path, or ./{item} for a name that begins with ~."
            )
        if item.startswith("$"):
            raise UserError(
                f"{name}={text} begins with $, which parallel3d does not expand; let the shell "
                f"expand it, or give '{name}=${{oc.env:NAME}}/…' with the variable's name, or "
                f"./{item} for a name that begins with $."
            )
        if _ADDRESS.match(item):
            if name in OF_ADDRESSES:
                continue
            raise UserError(
                f"{name}={text} is an address, but must be a path on this host: mount it, or copy "
                "it into a folder here."
            )
        variable = _VARIABLE.search(item)
        if variable is not None and not os.path.lexists(item):
            raise UserError(
                f"{name}={text} has {variable[0]}, which parallel3d does not expand; let the "
                f"shell expand it, or write ${{oc.env:{variable[1]}}} in its place."
            )


def paths_in(value: Any, holds: Any) -> Iterator[str]:
    """Yields the paths in a key's value; `holds` is the key's `Key.holds`."""
    if holds is Path and isinstance(value, str):
        yield value
    elif isinstance(value, Mapping) and typing.get_origin(holds) is dict:
        for pair in value.items():
            for part, kind in zip(pair, typing.get_args(holds), strict=True):
                yield from paths_in(part, kind)
