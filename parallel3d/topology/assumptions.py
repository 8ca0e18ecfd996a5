"""Completes a configuration for commands that only calculate; reads and protects users' files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from parallel3d.config.fields import show
from parallel3d.errors import UserError
from parallel3d.files import text_of_file
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import AnyConfig, conf_dir

# assumed if no model is given, because the default model has too few layers to be instructive
MODEL = "llama3_70b"
MICROBATCHES_PER_STAGE = 4  # the bubble of 1F1B is then less than a quarter of a step


def preset(group: str, name: str) -> dict[str, Any]:
    """Returns the values of `group=name` in `conf/`."""
    values = OmegaConf.to_container(OmegaConf.load(conf_dir() / group / f"{name}.yaml"))
    return cast(dict[str, Any], values)


def chosen_keys(typed: Sequence[str]) -> set[str]:
    """Returns the keys and groups that overrides set: `+model=gpt_tiny` → `model`."""
    return {word.lstrip("+~").partition("=")[0].partition("@")[0] for word in typed}


def assume_model(config: AnyConfig, typed: Sequence[str]) -> tuple[AnyConfig, list[str]]:
    """Returns the configuration with an assumed model and micro-batch size, and the assumptions.

    The assumptions have the form of overrides. `typed`: overrides of the command line; if they
    choose an experiment or a model, nothing is assumed.
    """
    keys = chosen_keys(typed)
    if "experiment" in keys or any(k == "model" or k.startswith("model.") for k in keys):
        return config, []
    told = [f"model={MODEL}"]
    config = dataclasses.replace(config, model=ModelConfig(**preset("model", MODEL)))
    if "micro_batch_size" not in keys:
        config = dataclasses.replace(config, micro_batch_size=1)
        told.append("micro_batch_size=1")
    return config, told


def full_batch(micro_batch_size: int, pp: int, dp: int) -> tuple[int, str]:
    """Returns a global batch size that fills the pipeline, and a text with this assumption."""
    microbatches = MICROBATCHES_PER_STAGE * pp
    batch = micro_batch_size * dp * microbatches
    return batch, f"global_batch_size={batch} ({microbatches} micro-batches a replica)"


def read_given(key: str, name: str) -> str:
    """Returns the text of the file `name`, which was given as `key`.

    Raises UserError if the file cannot be read.
    """
    try:
        return text_of_file(name)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"{key}={show(name)} cannot be read: {reason}.") from None


def check_free(name: str, wanted: str | None, mark: str | None, made_by: str) -> None:
    """Raises UserError if the file `wanted`, given as key `name`, cannot or must not be written.

    A file with `mark` in its first 1,000 characters was written by the command `made_by` and may be
    overwritten. If `mark` is None, no file may be overwritten; if `wanted` is None, there is
    nothing to check.
    """
    if wanted is None:
        return
    path, key = Path(wanted), f"{name}={show(wanted)}"
    if path.is_dir():
        raise UserError(f"{key} is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise UserError(f"{key}: the folder {path.parent} does not exist; create it first.")
    if not os.path.lexists(path):
        return
    if not path.is_file():
        raise UserError(f"{key} is not a regular file or a link to one; name another file.")
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            ours = mark is not None and mark in file.read(1000)
    except OSError as error:
        raise UserError(f"{key} cannot be read: {error.strerror}.") from None
    if not ours:
        other = "" if mark is None else f" and was not written by {made_by}"
        raise UserError(
            f"{key} exists{other}; it is never overwritten: name another file, or remove it."
        )


def write(name: str, wanted: str, text: str) -> None:
    """Writes the file `wanted`, given as key `name`, atomically. Raises UserError on failure."""
    path = Path(wanted)
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        half.write_text(text, encoding="utf-8")
        half.replace(path)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise UserError(f"{name}={show(wanted)} cannot be written: {error.strerror}.") from None
