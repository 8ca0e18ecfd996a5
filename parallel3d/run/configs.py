"""The configurations of a run's starts in its folder: config.yaml, config-2.yaml, …

Each is written atomically and only once; the newest is the one that runs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from parallel3d.checkpoint.manifest import (
    list_checkpoints,
    read_manifest,
)
from parallel3d.config import identity
from parallel3d.config.checks.run import check_plain
from parallel3d.config.fields import REMOVED, RENAMED
from parallel3d.config.schema import Config
from parallel3d.files import replace_durably

CONFIG_FILE = "config.yaml"
CONFIGS = re.compile(r"config(?:-(\d+))?\.yaml")
# Raised by reading a file that is no configuration: torn, empty, of another kind.
NO_CONFIG = (OmegaConfBaseException, YAMLError, TypeError, ValueError, RecursionError)


def save_config(
    config: Config, directory: Path, name: str = CONFIG_FILE, comment: str = ""
) -> None:
    """Writes the whole resolved configuration durably, after the line `comment`."""
    replace_durably(directory / name, f"{comment}{_text(config)}".encode())


def is_newest(config: Config, directory: Path) -> bool:
    """Returns whether the newest start had this configuration. Raises OSError and UserError."""
    text = config_files(directory)[-1].read_text("utf-8", "replace")
    if re.sub("^#.*\n", "", text) == _text(config):
        return True
    try:
        return load_config(directory) == config
    except NO_CONFIG:
        return False


def _text(config: Config) -> str:
    check_plain(config)
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)), resolve=True)


def load_config(directory: Path) -> Config:
    """Returns the configuration of a run's newest start. Raises OSError and NO_CONFIG."""
    return _read(config_files(directory)[-1])


def last_config(directory: Path) -> Config:
    """Returns the configuration of the newest start whose file is readable.

    Skips files torn by a power cut, and falls back to the checkpoints' manifests. Raises as
    `load_config` if there is nothing else.
    """
    problem: Exception | None = None
    for path in reversed(config_files(directory)):
        try:
            return _read(path)
        except NO_CONFIG as error:
            problem = problem or error
    for folder in list_checkpoints(directory):
        try:
            return _typed(read_manifest(folder).config)
        except Exception:
            continue  # reported when the checkpoint is to be loaded
    raise problem or FileNotFoundError(directory / CONFIG_FILE)


def config_files(directory: Path) -> list[Path]:
    """Returns the paths of the starts' configurations, oldest first; at least config.yaml."""
    found = [m for path in directory.iterdir() if (m := CONFIGS.fullmatch(path.name))]
    names = [m[0] for m in sorted(found, key=lambda m: int(m[1] or 1))]
    return [directory / name for name in names or [CONFIG_FILE]]


def next_name(directory: Path) -> str:
    newest = CONFIGS.fullmatch(config_files(directory)[-1].name)
    assert newest is not None  # config_files returns such names only
    return f"config-{int(newest[1] or 1) + 1}.yaml"


def _read(path: Path) -> Config:
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except OSError as error:
        if error.errno is None:  # raised by OmegaConf for a file with a single word in it
            raise ValueError(str(error)) from None
        raise
    if not tree:
        raise ValueError("it is empty")
    return _typed(tree)


def _typed(tree: object) -> Config:
    """Returns the tree as a configuration. Nothing is resolved: it may be somebody else's."""
    if "${" in json.dumps(tree):
        raise ValueError("it holds ${, which is not followed")
    if not isinstance(tree, Mapping):
        raise TypeError(f"it holds a {type(tree).__name__}")
    # An older run may have keys that were renamed or removed; they do not change its computation.
    known = _without(tree, (*RENAMED, *REMOVED))
    config = OmegaConf.to_object(OmegaConf.merge(_schema(), known))
    if not isinstance(config, Config):
        raise TypeError(f"it holds a {type(config).__name__}")
    return config


def _without(tree: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Returns the tree without the keys of these dotted names."""
    inside = {
        section: tuple(name.partition(".")[2] for name in names if name.startswith(f"{section}."))
        for section in tree
    }
    return {
        name: _without(value, inside[name]) if isinstance(value, Mapping) else value
        for name, value in tree.items()
        if name not in names
    }


@functools.cache
def _schema() -> DictConfig:
    """Returns the schema with types; building it takes most of a configuration's reading time."""
    return OmegaConf.structured(Config)


# Keys of where and how a run is watched; they do not change its computation.
NOT_IDENTITY = ("run", "runs_dir", "train.progress", "launch.", "logger.")


def differences(there: Config, here: Config) -> list[tuple[str, Any, Any]]:
    """Returns keys in which two runs differ, with both values: (key, there, here)."""
    old, new = (identity.flat(dataclasses.asdict(config)) for config in (there, here))
    return [
        (key, old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not _is_outside_identity(key)
    ]


def _is_outside_identity(key: str) -> bool:
    return any(key.startswith(n) if n.endswith(".") else key == n for n in NOT_IDENTITY)
