"""The words that Hydra is given, in the order that it wants, and what it says of a sweep."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from hydra.version import setbase
from omegaconf import DictConfig, OmegaConf

from parallel3d.config.fields import unknown_key
from parallel3d.config.overrides import (
    check_length,
    explain_override_error,
    groups,
    presets,
)
from parallel3d.config.schema import Config
from parallel3d.errors import USER_ERROR, UserError, print_line

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


# The folder that Hydra keeps a sweep in: nobody else may exchange what its jobs will run.


class PrivateSweepFolder(Callback):
    """Makes `runs_dir/.multirun` before Hydra would, for its user alone.

    submitit leaves its jobs there as pickles, which are run when Slurm starts them.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Raises SystemExit where the folder is another user's: Hydra only warns of exceptions."""
        folder = Path(config.hydra.sweep.dir)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.lstat().st_uid != os.getuid():
            print_line(
                f"runs_dir={config.runs_dir}: {folder} belongs to another user, who could exchange "
                "the sweep's jobs; choose another runs_dir."
            )
            raise SystemExit(USER_ERROR)
        folder.chmod(0o700)


# Hydra's way from words to a job, once through it where once is enough.


VERSION = "1.3"  # whose defaults Hydra has
NAME = "config"


def run(job: Callable[[DictConfig], None], words: Sequence[str], conf: Path) -> None:
    """Composes `words`, which are those of `sys.argv` too, over `conf` and runs `job` on it.

    `@hydra.main` composes everything a first time to see whether `hydra.mode` asks for a sweep, a
    tenth of a second before each single job. Words that neither are for Hydra itself nor may be a
    sweep's values go without: then what was composed for the job says whether it is one.
    """
    if not any(map(_is_hydras, words)) and _ran_single(job, words, conf):
        return
    hydra.main(version_base=VERSION, config_path=str(conf), config_name=NAME)(job)()


def check_shown(words: Sequence[str], conf: Path) -> None:
    """Raises UserError where `--cfg` or `--info` would print keys that a run refuses.

    Hydra prints what it has composed and calls no job, which is what knows the keys: `+new.key=1`
    makes one of any name. Values are not looked at, for one may wait for a sweep to give it.
    """
    asked = get_args_parser().parse_args(words)
    if asked.cfg is None and asked.info not in ("all", "config"):
        return
    setbase(VERSION)
    search_path = create_automatic_config_search_path(None, None, str(conf))
    if asked.config_dir is not None:
        folder, schema = f"file://{Path(asked.config_dir).absolute()}", SearchPathQuery("schema")
        search_path.prepend("command-line", folder, schema)
    try:
        hydra = Hydra.create_main_hydra2(NAME, search_path)
        composed = hydra.compose_config(asked.config_name or NAME, asked.overrides, RunMode.RUN)
        HydraConfig.instance().set_config(composed)  # which `${hydra:…}` reads
        _check_keys(hydra.get_sanitized_cfg(composed, "job"), "")
    finally:
        GlobalHydra.instance().clear()


def _check_keys(section: DictConfig, prefix: str) -> None:
    """Raises UserError for the key that `config.fields.check_fields` would name of a run."""
    type = OmegaConf.get_type(section)
    if not dataclasses.is_dataclass(type):
        return
    known = {f.name for f in dataclasses.fields(type)}
    for name in map(str, section):
        if name not in known:
            value = section[name]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            raise UserError(unknown_key(prefix + name, value))
    for name in known:
        inside = None if OmegaConf.is_missing(section, name) else section._get_node(name)
        if isinstance(inside, DictConfig) and not inside._is_none():
            _check_keys(inside, f"{prefix}{name}.")


def _is_hydras(word: str) -> bool:
    """Whether a word may be Hydra's: a flag, one of its keys, several values, as 1,2 or range()."""
    return word.startswith("-") or "hydra" in word or bool(set(",(") & set(word))


def _ran_single(job: Callable[[DictConfig], None], words: Sequence[str], conf: Path) -> bool:
    """False, and nothing was run, where a file of `conf` says that it is a sweep."""
    begun, collects = False, gc.isenabled()

    def told(composed: DictConfig) -> None:
        nonlocal begun
        begun = True
        if collects:
            gc.enable()
        job(composed)

    gc.disable()  # composing makes little garbage, and takes a fifth longer if one looks for it
    setbase(VERSION)
    search_path = create_automatic_config_search_path(None, None, str(conf))
    try:
        Hydra.create_main_hydra2(job.__module__, search_path).run(NAME, told, list(words))
    except AssertionError:  # that hydra.mode is a single run's
        if begun:
            raise
        return False
    finally:
        if collects:
            gc.enable()
        GlobalHydra.instance().clear()
    return True
