"""The words that Hydra is given, in the order that it wants, and what it says of a sweep."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig

from parallel3d.config.overrides import (
    check_length,
    explain_override_error,
    groups,
    presets,
)
from parallel3d.config.schema import Config
from parallel3d.errors import UserError

# Typed → key: `tokenizer` as `parallel3d data` has it; `async` is a word of Python's own, which no
# dataclass can have as a field, and `Config.num_microbatches` is worked out from the batch.
ALIASES = {
    "tokenizer": "data.tokenizer",
    "checkpoint.async": "checkpoint.async_save",
    "num_microbatches": "schedule.num_microbatches",
}
QUIET = ("none", "disabled", "false", "null", "[]")  # values that ask for no logging
READ_FILES = ("plan", "train")  # of machines that were measured, as cluster=FILE.yaml


def without_alias(word: str, app: str = "train") -> str:
    """The override with its key's own name; a machine's file is read by `READ_FILES` alone."""
    key, equals, value = word.partition("=")
    bare = key.lstrip("+~")
    is_file = value.endswith((".yaml", ".yml")) or "/" in value
    if app in READ_FILES and bare == "cluster" and is_file:
        return f"cluster.file={value}"
    return key.replace(bare, ALIASES[bare]) + equals + value if bare in ALIASES else word


def numbered(config: Config) -> Config:
    """The configuration with a run name of its own in a sweep, whose jobs would share one."""
    if config.run is None or not is_sweep():
        return config
    return dataclasses.replace(config, run=f"{config.run}-{HydraConfig.get().job.num}")


def failed_elsewhere(code: int) -> str:
    """What the one who typed a sweep is told of a job that said its error into a log."""
    sweep = HydraConfig.get()
    log = f"{sweep.sweep.dir}/.submitit/{sweep.job.id}"
    return f"job {sweep.job.num} of the sweep ended with code {code}; {log} has its log."


def is_sweep() -> bool:
    return HydraConfig.get().mode is not None and HydraConfig.get().mode.name == "MULTIRUN"


def order_words(words: list[str]) -> list[str]:
    """The same words, flags first: argparse wants all overrides side by side.

    Raises UserError for a flag that Hydra does not have, and for flags that exclude each other.
    """
    parser = get_args_parser()
    parser.error = _raise_argument_error  # type: ignore[method-assign]
    known, rest = parser.parse_known_args(words)
    for word in rest:
        if word.startswith("-"):
            raise explain_override_error(f"unrecognized arguments: {word}")
    commands = ("run", "multirun", "cfg", "info", "shell_completion")
    given = [f"--{name.replace('_', '-')}" for name in commands if getattr(known, name)]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} exclude each other; give one of them.")
    if known.resolve and not (known.cfg or known.help):
        raise UserError("--resolve goes with --cfg, as in: --cfg job --resolve.")
    if known.config_path and not Path(known.config_path).is_absolute():
        raise UserError(
            f"--config-path={known.config_path} would take the place of all presets; "
            f"--config-dir={known.config_path} adds a folder of your own to them instead."
        )
    overrides = [*known.overrides, *rest]
    flags = list(words)
    for word in overrides:
        check_length(word)
        _check_has_effect(word)
        flags.remove(word)
    _check_logs(overrides, known.multirun or "hydra.mode=multirun" in map(str.lower, overrides))
    return [*flags, *overrides]


def _check_has_effect(word: str) -> None:
    """Raises UserError for what Hydra would take and parallel3d would not act upon."""
    name, _, value = word.partition("=")
    if name.lstrip("+") == "hydra.run.dir":
        raise UserError(f"{word} has no effect; give runs_dir={value} instead.")
    if name.lstrip("+") == "hydra.job.chdir" and value.lower() == "true":
        raise UserError(f"{word} must be false: a run stays in the folder it was started in.")
    if name.startswith("~") and name[1:] in groups():
        raise UserError(
            f"{word} has no effect: {name[1:]} must be one of {', '.join(presets(name[1:]))}."
        )


def _check_logs(overrides: Sequence[str], sweeps: bool) -> None:
    """Raises UserError for an override of Hydra's logging that would change nothing.

    No line of parallel3d goes through Python's logging, and its ranks are processes of their own,
    which Hydra does not configure: what is left to be logged are Hydra's own lines about a sweep.
    """
    loud = {}
    for word in overrides:
        key, _, value = word.partition("=")
        if value.lower() not in QUIET:
            loud[key.lstrip("+~")] = word
    for key, word in loud.items():
        if key == "hydra/job_logging" or key.startswith("hydra.job_logging"):
            raise UserError(
                f"{word} has no effect, for parallel3d logs nothing through Python's logging: "
                "hydra/job_logging must be none; a run's figures are in its metrics.jsonl."
            )
        if key == "hydra/hydra_logging" and not sweeps:
            raise UserError(
                f"{word} has no effect on a single run: it must be none, or go with --multirun, "
                "of whose jobs Hydra then tells."
            )
        if key == "hydra.verbose" and not (sweeps and "hydra/hydra_logging" in loud):
            raise UserError(
                f"{word} has no effect: it must be false, or go with --multirun and "
                "hydra/hydra_logging=default, for Hydra's own lines about a sweep."
            )


def _raise_argument_error(message: str) -> NoReturn:
    raise UserError(f"{message}; parallel3d train --hydra-help lists Hydra's flags.")
