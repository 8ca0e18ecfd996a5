"""Compares installed packages with the versions that parallel3d was tried with."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from parallel3d.errors import UserError


class TriedVersions(NamedTuple):
    """A range of versions, up to and including all patch releases of `newest`.

    `oldest` is the lower bound in pyproject.toml, or None if it is unknown.
    """

    oldest: str | None
    newest: str


# Versions newer than these are accepted: most of them work, and a new GPU needs a new torch.
TRIED = {
    "torch": TriedVersions("2.11", "2.15"),
    "hydra-core": TriedVersions("1.3.2", "1.3"),
    "omegaconf": TriedVersions("2.3", "2.3"),
    "tokenizers": TriedVersions(None, "0.23"),
    "transformers": TriedVersions("5", "5.24"),
    "wandb": TriedVersions("0.31", "0.31"),
}
OF_A_RUN = ("torch", "hydra-core", "omegaconf", "tokenizers")
OF_A_SCRIPT = ("torch",)


@functools.cache
def installed(package: str) -> str | None:
    """Returns the installed version of a package (pip's name); None if it is not installed."""
    # The import is here because it takes longer than all others of this module.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def parts(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, such as (2, 15, 0) for "2.15.0a0+git12".

    Returns () for a version that does not begin with a number.
    """
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else ()


def check_versions(packages: Iterable[str]) -> None:
    """Raises UserError if a package is older than the oldest version that was tried."""
    for package in packages:
        oldest, version = TRIED[package].oldest, installed(package)
        if oldest is None or version is None:
            continue
        if parts(version) and parts(version) < parts(oldest):
            raise UserError(
                f"{package} {version} is older than {oldest}, the oldest that parallel3d works "
                f"with: pip install -U '{package}>={oldest}'"
            )


def newer(packages: Iterable[str]) -> str | None:
    """Returns a sentence about packages newer than any tried version; None if there are none.

    A package whose version cannot be compared counts as newer.
    """
    found = [
        (package, version, TRIED[package].newest)
        for package in packages
        if (version := installed(package)) is not None
        and not _within(parts(version), parts(TRIED[package].newest))
    ]
    if not found:
        return None
    names = _listed([f"{package} {version}" for package, version, _ in found])
    newest = _listed([newest for _, _, newest in found])
    how = "is newer than" if len(found) == 1 else "are newer than"
    if not all(parts(version) for _, version, _ in found):
        how = "cannot be compared with"
    return f"{names} {how} {newest}, the newest that parallel3d was tried with"


def _within(version: tuple[int, ...], newest: tuple[int, ...]) -> bool:
    return bool(version) and version[: len(newest)] <= newest


def tried(package: str) -> str:
    """Returns a package with its tried versions, as in "torch 2.11 to 2.15"."""
    oldest, newest = TRIED[package]
    return f"{package} {newest}" if oldest is None else f"{package} {oldest} to {newest}"


def within(package: str) -> str:
    """Returns the range of tried versions in pip's form, as in ">=2.11,<2.16"."""
    oldest, newest = TRIED[package]
    *first, last = parts(newest)
    below = ".".join(map(str, (*first, last + 1)))
    return f"<{below}" if oldest is None else f">={oldest},<{below}"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
