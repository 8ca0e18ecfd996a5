"""Runs Hydra: its arguments in order, its flags and logging checked, its sweeps' folder private."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.version import setbase
from omegaconf import DictConfig

from parallel3d.config.fields import unknown_key
from parallel3d.config.overrides import check_overrides
from parallel3d.config.schema import Config, conf_dir
from parallel3d.errors import USER_ERROR, UserError, print_line

# Typed → key. `tokenizer` is the spelling of `parallel3d data`; a dataclass cannot have a field
# `async`, and `Config.num_microbatches` is derived from the batch.
ALIASES = {
    "tokenizer": "data.tokenizer",
    "checkpoint.async": "checkpoint.async_save",
    "num_microbatches": "schedule.num_microbatches",
}
TYPED = ("tasks", "to", "batch_tokens", "step", "weights")  # of eval, without `eval.`
QUIET = ("none", "disabled", "false", "null", "[]")  # values that turn logging off
READ_FILES = ("plan", "train")  # read files of measured machines, as cluster=FILE.yaml


def without_alias(word: str, app: str = "train") -> str:
    """Returns the override under its key's own name.

    cluster=FILE is cluster.file in READ_FILES, and logger=[a,b] is logger.name.
    """
    key, equals, value = word.partition("=")
    bare = key.lstrip("+~")
    if app == "eval" and bare in TYPED:
        return f"eval.{bare}={value}"
    is_file = value.endswith((".yaml", ".yml")) or "/" in value
    if app in READ_FILES and bare == "cluster" and is_file:
        return f"cluster.file={value}"
    if bare == "logger" and value.startswith("["):  # of several presets Hydra would take the last
        return f"logger.name={value}"
    return key.replace(bare, ALIASES[bare]) + equals + value if bare in ALIASES else word


def numbered(config: Config) -> Config:
    """Returns the configuration with a run name of its own in a sweep."""
    if config.run is None or not is_sweep():
        return config
    return dataclasses.replace(config, run=f"{config.run}-{HydraConfig.get().job.num}")


def failed_elsewhere(code: int) -> str:
    """Returns the sentence on a sweep's job that failed under submitit, whose log has the error."""
    sweep = HydraConfig.get()
    log = f"{sweep.sweep.dir}/.submitit/{sweep.job.id}"
    return f"job {sweep.job.num} of the sweep ended with code {code}; {log} has its log."


def is_sweep() -> bool:
    mode = HydraConfig.get().mode
    return mode is not None and mode.name == "MULTIRUN"


def order_arguments(arguments: list[str]) -> list[str]:
    """Puts flags first, as argparse needs. Raises UserError for what cannot work.

    So are refused: an unknown flag, and overrides that Hydra would take without an effect.
    """
    parser = get_args_parser()
    parser.error = _raise_argument_error  # type: ignore[method-assign]
    known, rest = parser.parse_known_args(arguments)
    for word in rest:
        if word.startswith("-"):
            name, _, value = word.partition("=")
            raise UserError(unknown_key(name, value or None))
    if known.config_path and not Path(known.config_path).is_absolute():
        raise UserError(
            f"--config-path={known.config_path} would take the place of all presets; "
            f"--config-dir={known.config_path} adds a folder of your own to them instead."
        )
    _take_own_folder(known.config_dir, known.config_name)
    overrides = [*known.overrides, *rest]
    sweeps = known.multirun or "hydra.mode=multirun" in map(str.lower, overrides)
    for word in overrides:
        _check_has_effect(word, overrides, sweeps)
    if not known.shell_completion:  # whose words are query=… and install=…
        check_overrides(overrides, OwnFolder.path, sweeps)
    flags = list(arguments)
    for word in overrides:
        flags.remove(word)
    return [*flags, *overrides]


def _check_has_effect(word: str, overrides: Sequence[str], sweeps: bool) -> None:
    """Raises UserError for an override of Hydra's that would change nothing.

    parallel3d chooses the folders, does not use Python's logging, and Hydra does not configure its
    ranks' processes: only Hydra's own lines about a sweep can be logged.
    """
    name, _, value = word.lstrip("+~").partition("=")
    logs = any(w.startswith("hydra/hydra_logging=") for w in overrides)
    reason = None
    if name == "hydra.run.dir":
        reason = f"give runs_dir={value} instead"
    elif name == "hydra.job.chdir" and value.lower() == "true":
        reason = "it must be false, as a run stays in the folder it was started in"
    elif value.lower() in QUIET:
        reason = None
    elif re.match(r"hydra[./]job_logging", name):
        reason = "hydra/job_logging must be none; a run's figures are in its metrics.jsonl"
    elif name == "hydra/hydra_logging" and not sweeps:
        reason = "it must be none, or go with --multirun, of whose jobs Hydra then tells"
    elif name == "hydra.verbose" and not (sweeps and logs):
        reason = "it must be false, or go with --multirun and hydra/hydra_logging=default"
    if reason:
        raise UserError(f"{word} has no effect: {reason}.")


def _raise_argument_error(message: str) -> NoReturn:
    raise UserError(f"{message}; parallel3d train --hydra-help lists Hydra's flags.")


class OwnFolder(SearchPathPlugin):
    """Puts the folder of --config-dir before parallel3d's own, so that a preset of it wins.

    Hydra alone puts it behind: a copied and edited experiment would be ignored under its old name.
    """

    path: ClassVar[Path | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.path is not None:
            search_path.prepend("own", f"file://{self.path}", SearchPathQuery("main"))


def _take_own_folder(given: str | None, config_name: str | None) -> None:
    """Sets the folder of --config-dir for what is composed next. Raises UserError for a bad one."""
    OwnFolder.path = None
    Plugins.instance().register(OwnFolder)
    if given is None:
        return
    folder, typed = Path(given).absolute(), f"--config-dir={given}"
    if not folder.is_dir():
        raise UserError(f"{typed} is not a folder; give one with experiment/, model/, … inside")
    primary = folder / f"{NAME}.yaml"
    if primary.exists() and not folder.samefile(conf_dir()) and config_name in (None, NAME):
        raise UserError(
            f"{typed}: {primary.name} in it would take the place of all defaults; rename it, as to "
            "experiment/mine.yaml, which experiment=mine takes"
        )
    OwnFolder.path = folder


class PrivateSweepFolder(Callback):
    """Creates `runs_dir/.multirun` for its user alone, before Hydra would.

    submitit stores its jobs there as pickles, which run when Slurm starts them: nobody else may
    exchange them.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Raises SystemExit if the folder is another user's: Hydra only warns of exceptions."""
        folder = Path(config.hydra.sweep.dir)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.lstat().st_uid != os.getuid():
            print_line(
                f"runs_dir={config.runs_dir}: {folder} belongs to another user, who could exchange "
                "the sweep's jobs; choose another runs_dir."
            )
            raise SystemExit(USER_ERROR)
        folder.chmod(0o700)


VERSION = "1.3"  # Hydra's defaults are those of this version
NAME = "config"


def run(job: Callable[[DictConfig], None], arguments: Sequence[str], conf: Path) -> None:
    """Composes `arguments`, which are those of `sys.argv` too, over `conf` and runs `job` on it.

    `@hydra.main` composes everything twice to see whether `hydra.mode` is a sweep, a tenth of a
    second more for each single job. Words that are neither Hydra's own nor a sweep's are composed
    once, and the mode is read from that.
    """
    if not any(map(_is_hydras, arguments)) and _ran_single(job, arguments, conf):
        return
    hydra.main(version_base=VERSION, config_path=str(conf), config_name=NAME)(job)()


def _is_hydras(word: str) -> bool:
    """Returns whether a word may be Hydra's: a flag, its key, or several values (1,2, range())."""
    return word.startswith("-") or "hydra" in word or bool(set(",(") & set(word))


def _ran_single(job: Callable[[DictConfig], None], arguments: Sequence[str], conf: Path) -> bool:
    """Runs a single job; False, with nothing run, where a file of `conf` asks for a sweep."""
    begun = False

    def told(composed: DictConfig) -> None:
        nonlocal begun
        begun = True
        job(composed)

    setbase(VERSION)
    search_path = create_automatic_config_search_path(None, None, str(conf))
    try:
        Hydra.create_main_hydra2(job.__module__, search_path).run(NAME, told, list(arguments))
    except AssertionError:  # Hydra's, that hydra.mode is that of a single run
        if begun:
            raise
        return False
    finally:
        GlobalHydra.instance().clear()
    return True
