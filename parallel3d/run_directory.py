"""The run directory `runs/<run>/`: named once, made once, never written over."""

from __future__ import annotations

import dataclasses
import re
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from parallel3d.config import Config
from parallel3d.errors import UserError

CONFIG_FILE = "config.yaml"
FAILURES = "failures"
PLACEMENT_FILE = "placement.json"

# Keys that say where and how a run is watched, not what it computes.
NOT_IDENTITY = ("run", "runs_dir", "train.progress", "launch.", "logger.")


def make_run_directory(
    config: Config, job_id: str | None = None, job_number: int | None = None
) -> tuple[Config, Path]:
    """Make `runs_dir/<run>`, private to the user, and write config.yaml into it.

    A run without a name gets one from the time and the layout. `job_id` (of Slurm) is part of a
    made name; `job_number` (of a sweep) is part of every name. Returns the configuration with its
    name, and the directory. Raises UserError if the name is taken or the directory cannot be made.
    """
    number = "" if job_number is None else f"-{job_number}"
    runs = Path(config.runs_dir)
    if config.run is None:
        name = _made_name(config, job_id) + number
        candidates = [name, *(f"{name}-{n}" for n in range(2, 1000))]
    else:
        candidates = [config.run + number]
    for name in candidates:
        named = dataclasses.replace(config, run=name)
        directory = runs / name
        try:
            runs.mkdir(parents=True, exist_ok=True)
            directory.mkdir(mode=0o700)
        except FileExistsError:
            if config.run is None and directory.exists():
                continue
            _refuse_existing(named, directory)
        except OSError as error:
            raise UserError(
                f"runs_dir={config.runs_dir}: cannot make {directory}: {error.strerror}"
            ) from None
        save_config(named, directory)
        return named, directory
    raise UserError(f"runs_dir={config.runs_dir} holds a thousand runs named {candidates[0]}-…")


def check_run_is_free(config: Config, job_number: int | None = None) -> None:
    """Raise UserError, before anything starts, if a given `run` is taken; makes nothing."""
    if config.run is None:
        return
    number = "" if job_number is None else f"-{job_number}"
    directory = Path(config.runs_dir) / (config.run + number)
    if directory.exists():
        _refuse_existing(dataclasses.replace(config, run=config.run + number), directory)


def save_config(config: Config, directory: Path) -> None:
    """Write the whole configuration, nothing left to resolve, as config.yaml."""
    text = OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True)
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def load_config(directory: Path) -> Config:
    """The configuration of a run, typed and checked against the schema."""
    loaded = OmegaConf.load(directory / CONFIG_FILE)
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), loaded))
    if not isinstance(config, Config):
        raise TypeError(f"{directory / CONFIG_FILE} holds a {type(config).__name__}")
    return config


def discard_unused(directory: Path) -> None:
    """Remove a run directory in which nothing was computed, so that its name is free again."""
    ours = {CONFIG_FILE, FAILURES, PLACEMENT_FILE}
    for path in directory.iterdir():
        if path.name not in ours and not path.name.endswith(".traceback.txt"):
            return
    shutil.rmtree(directory)


def _made_name(config: Config, job_id: str | None) -> str:
    model = re.sub(r"[^A-Za-z0-9._+=-]", "_", config.model.name)
    context = f"cp{config.cp}" if config.cp > 1 else ""
    layout = f"tp{config.tp}pp{config.pp}{context}dp{config.dp}"
    job = f"-job{job_id}" if job_id else ""
    return f"{datetime.now():%Y%m%d-%H%M%S}-{model}-{layout}{job}"


def _refuse_existing(config: Config, directory: Path) -> None:
    """Say why `directory` cannot be used. Always raises UserError."""
    if not (directory / CONFIG_FILE).is_file():
        if directory.parent.is_dir():
            raise UserError(f"run={config.run}: {directory} exists and is not a run directory")
        raise UserError(f"runs_dir={config.runs_dir} is not a folder")
    try:
        there = load_config(directory)
    except (OmegaConfBaseException, YAMLError, OSError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"run={config.run} exists, and its {CONFIG_FILE} cannot be read ({reason}): "
            "choose another run="
        ) from None
    differing = differences(there, config)
    if not differing:
        raise UserError(
            f"run={config.run} exists already in {directory}: choose another run= or remove it"
        )
    shown = ", ".join(f"{key} is {old!r} there, now {new!r}" for key, old, new in differing[:3])
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    raise UserError(
        f"run={config.run} exists already with another configuration: {shown}{more}; "
        "choose another run="
    )


def differences(there: Config, here: Config) -> list[tuple[str, Any, Any]]:
    """Keys that make two runs different, with both values (key, there, here)."""
    old, new = _flat(dataclasses.asdict(there)), _flat(dataclasses.asdict(here))
    return [
        (key, old.get(key), new.get(key))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not _is_outside_identity(key)
    ]


def _is_outside_identity(key: str) -> bool:
    return any(key.startswith(n) if n.endswith(".") else key == n for n in NOT_IDENTITY)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
