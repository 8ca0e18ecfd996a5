"""Knows what a path is: its `~` is a home, or it is refused; an address (`s3://…`) stays."""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from parallel3d.errors import UserError


def at_home(text: str) -> str:
    """Returns a path, or several joined by commas, with `~` and `~user` as the homes they mean.

    A shell expands neither behind a `=`, in YAML, nor for a program. One that means no home stays.
    """
    return ",".join(map(_at_home, text.split(",")))


def _at_home(item: str) -> str:
    path = item.lstrip()
    # Python takes an empty HOME for the root.
    if not path.startswith("~") or (path[1:2] in ("", "/") and os.environ.get("HOME") == ""):
        return item
    there = os.path.expanduser(path)
    return item[: len(item) - len(path)] + there if os.path.isabs(there) else item


# Keys of corpora, which may lie at an address; by their short names those of commands with verbs.
OF_ADDRESSES = ("data.path", "data.blend", "data.blend_stages", "data.valid", "input", "prefix")
_ADDRESS = re.compile("[A-Za-z][A-Za-z0-9+.-]*://")
_VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
_OR_ELSE = re.compile(r"(\$\{oc\.env:[^,{}'\"$]+,)\s*([^,{}'\"$]+?)\s*\}")


def with_texts_of_variables(text: str) -> str:
    """Returns text with the words of `${oc.env:NAME,WORD}` in quotes, or OmegaConf reads 1.10 as a
    number."""
    mark = '"' if "'" in text else "'"
    return text if mark in text else _OR_ELSE.sub(rf"\1{mark}\2{mark}}}", text)


def check_path(name: str, text: str) -> None:
    """Raises UserError for a path, as `at_home` returns it, that means nothing or a guess.

    `name`: the key, for the sentence.
    """
    if not text.strip():
        raise UserError(f"{name}={text} is empty: give a path, or leave {name} out.")
    for item in map(str.strip, text.split(",")):
        if item.startswith("~"):
            raise UserError(
                f"{name}={text} begins with ~, which is nobody's home on this host; give the whole "
                f"path, or ./{item} for a name that begins so."
            )
        if item.startswith("$"):
            raise UserError(
                f"{name}={text} begins with $, which nothing here expands; let the shell do it, or "
                f"give '{name}=${{oc.env:NAME}}/…' with the variable's name, or ./{item} for a "
                "name that begins so."
            )
        if _ADDRESS.match(item):
            if name in OF_ADDRESSES:
                continue
            raise UserError(
                f"{name}={text} is an address, and must be a path of this host: mount it, or give "
                "a folder here and copy."
            )
        variable = _VARIABLE.search(item)
        if variable is not None and not os.path.lexists(item):
            raise UserError(
                f"{name}={text} has {variable[0]}, which nothing here expands; let the shell do "
                f"it, or type ${{oc.env:{variable[1]}}} in its place."
            )


def paths_in(value: Any, holds: Any) -> Iterator[str]:
    """Yields the paths in a value of a key that holds them."""
    if holds is Path and isinstance(value, str):
        yield value
    elif isinstance(value, Mapping) and typing.get_origin(holds) is dict:
        for pair in value.items():
            for part, kind in zip(pair, typing.get_args(holds), strict=True):
                yield from paths_in(part, kind)
