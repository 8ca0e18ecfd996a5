"""Reads the files of presets and experiments that a command line chooses, before Hydra does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from parallel3d.config.fields import all_keys
from parallel3d.config.text import read_yaml
from parallel3d.run_config import Config, conf_dir


def experiment_files(experiment: str | None, own: Path | None = None) -> list[DictConfig]:
    """Returns the contents of an experiment's file and of the files in its `defaults`.

    `own` is the folder of --config-dir, or None. Its experiments come first.
    """
    folders = [folder for folder in (own, conf_dir()) if folder is not None]
    paths = [folder / "experiment" / f"{experiment}.yaml" for folder in folders]
    path = next((path for path in paths if path.is_file()), None)
    tree = None if path is None else read_yaml(path, all_keys(Config))
    if not isinstance(tree, dict):
        return []
    values = OmegaConf.create(tree)
    found = [values]
    for entry in values.get("defaults", ()):
        if isinstance(entry, str) and entry not in ("_self_", experiment):
            found += experiment_files(entry.removeprefix("/experiment/"), own)
    return found


def own_presets(preset: str | None, own: Path | None) -> list[dict[str, Any]]:
    """Returns the contents of a preset of `model` in the user's folder, and of those it builds on.

    `own` is the folder of --config-dir, or None.
    """
    path = None if own is None or preset is None else own / "model" / f"{preset}.yaml"
    tree = read_yaml(path, {}) if path is not None and path.is_file() else None
    if not isinstance(tree, dict):
        return []
    found = [{name: value for name, value in tree.items() if name != "defaults"}]
    for entry in tree.get("defaults") or ():
        if isinstance(entry, str) and entry not in ("_self_", preset):
            found += own_presets(entry, own)
    return found
