"""Draws installed versions of other packages: refused, named or silently accepted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

from packaging.version import InvalidVersion, Version

from benchmarks.inputs.door_inputs.answers import REFUSAL, Input
from parallel3d import versions
from parallel3d.versions import TRIED, check_versions, newer

NAMED, SILENT = "named", "silent"
ENDINGS = (
    *("", "", "+cpu", "+cu132", ".post1", "rc1"),
    *("a0+git1f2e3d", "a0+9f.nv26.10", ".dev20261120+cu132"),
)
ODD = ("git-1f2e3d", "main", "", "unknown", "v2.13.0")  # versions of builds from source


def inputs(rng: random.Random, folder: Path) -> Iterator[Input]:
    packages = list(TRIED)
    while True:
        package = rng.choice(packages)
        version = _version(rng, package)
        right, take = _right(package, version), partial(_taken, package, version)
        yield Input(f"{package} {version!r}", take, right, common=right == SILENT)


def _version(rng: random.Random, package: str) -> str:
    if rng.random() < 0.05:
        return rng.choice(ODD)
    oldest, newest = TRIED[package]
    near = Version(rng.choice([word for word in (oldest, newest) if word])).release
    numbers = [max(0, number + rng.choice((-1, 0, 0, 0, 1))) for number in near]
    numbers += [rng.randrange(12) for _ in range(rng.choice((0, 1, 1)))]
    return ".".join(map(str, numbers[: rng.choice((1, 2, 3, 3, 3))])) + rng.choice(ENDINGS)


def _taken(package: str, version: str) -> str:
    with patch.object(versions, "installed", {package: version}.get):
        check_versions(TRIED)
        sentence = newer(TRIED)
    if sentence is None:
        return SILENT
    return NAMED if sentence.startswith(f"{package} {version} ") else f"names {sentence}"


def _right(package: str, version: str) -> object:
    try:
        release = Version(version).release
    except InvalidVersion:
        return NAMED
    oldest, newest = TRIED[package]
    if oldest is not None and _filled(release) < _filled(Version(oldest).release):
        return REFUSAL
    first = Version(newest).release
    return SILENT if _filled(release)[: len(first)] <= first else NAMED


def _filled(release: tuple[int, ...]) -> tuple[int, ...]:
    return (*release, 0, 0, 0)[:4]
