"""Orders the arguments, checks Hydra's flags and keys, and runs Hydra.

This module also makes the folder of a sweep private.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

import hydra
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.experimental.callback import Callback
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, open_dict

from parallel3d.cli.overrides import (
    VERSION,
    check_overrides,
    compose_tree,
    composing_error,
    register,
)
from parallel3d.cli.own_model import ModelClass, schema_of
from parallel3d.config.paths import at_home, check_path
from parallel3d.errors import USER_ERROR, UserError, print_line
from parallel3d.private_names import hydra_arguments
from parallel3d.run_config import Config, conf_dir

# Short forms of keys. They exist because `parallel3d data` has a key `tokenizer`, a dataclass
# cannot have a field `async`, and the property `Config.num_microbatches` is derived from the batch.
ALIASES = {
    "tokenizer": "data.tokenizer",
    "checkpoint.async": "checkpoint.async_save",
    "num_microbatches": "schedule.num_microbatches",
}
TYPED = ("tasks", "to", "batch_tokens", "step", "weights")  # eval takes these keys without `eval.`
QUIET = ("none", "disabled", "false", "null", "[]")  # values that turn logging off
# Prefixes of Hydra's own keys that only have an effect in a sweep, or none at all.
OF_SWEEPS = ("hydra/hydra_logging", "hydra.verbose")
NO_EFFECT = {
    "hydra.run.dir": "give runs_dir=… instead",
    "hydra.job.chdir": "it must be false, as a run stays in the folder in which it was started",
    "hydra/job_logging": "it must be none; a run's figures are in its metrics.jsonl",
    "hydra.job_logging": "it must be none; a run's figures are in its metrics.jsonl",
} | dict.fromkeys(
    OF_SWEEPS,
    "it must be none or false without --multirun, because only a sweep logs Hydra's messages",
)
READ_FILES = ("plan", "train")  # subcommands that take a calibrated machine as cluster=FILE.yaml


def without_alias(word: str, app: str = "train") -> str:
    """Returns an override with the full name of its key.

    In the subcommands `READ_FILES`, cluster=FILE is short for cluster.file=FILE. logger=[a,b] is
    short for logger.name=[a,b].
    """
    key, equals, value = word.partition("=")
    bare = key.lstrip("+~")
    if app == "eval" and bare in TYPED:
        return f"eval.{bare}={value}"
    is_file = value.strip("'\"").endswith((".yaml", ".yml")) or "/" in value
    if app in READ_FILES and bare == "cluster" and is_file:
        return f"cluster.file={value}"
    if bare == "logger" and value.startswith("["):  # Hydra would only use the last preset
        return f"logger.name={value}"
    return key.replace(bare, ALIASES[bare]) + equals + value if bare in ALIASES else word


def numbered(run: str | None) -> str | None:
    """Returns the run's name, to which a sweep appends the job's number."""
    if run is None or not is_sweep():
        return run
    return f"{run}-{HydraConfig.get().job.num}"


def check_sweep_words(words: Sequence[str], schema: type[Config] = Config) -> None:
    """Raises UserError for an override in a sweep whose value Hydra would change.

    Such overrides come from `hydra.sweeper.params` in a file; those of the command line were
    checked earlier.
    """
    for word in words if is_sweep() else ():
        kept = check_overrides([word], OwnFolder.path, schema=schema)[0]
        if kept != word:
            raise UserError(
                f"hydra.sweeper.params: Hydra would change the value of {word}; put the value into "
                f"a second pair of quotes, as {kept.partition('=')[2]}, or give it on the command "
                "line."
            )


def failed_elsewhere(code: int) -> str:
    """Returns a sentence that names the log of a failed job in a sweep under submitit."""
    sweep = HydraConfig.get()
    log = f"{sweep.sweep.dir}/.submitit/{sweep.job.id}"
    return f"job {sweep.job.num} of the sweep ended with code {code}; its log is {log}."


def is_sweep() -> bool:
    mode = HydraConfig.get().mode
    return mode is not None and mode.name == "MULTIRUN"


class Arguments(NamedTuple):
    """The arguments of a command line, as Hydra takes them.

    Attributes:
        words: the flags, which argparse needs first, and the checked overrides.
        own: the folder of --config-dir; None without that flag.
        schema: the schema of the subcommand, with the fields of a user's own model if one is named.
    """

    words: list[str]
    own: Path | None
    schema: type[Config]


def order_arguments(
    arguments: list[str], schema: type[Config] = Config, model: ModelClass | None = None
) -> Arguments:
    """Orders and checks the arguments of a command line.

    Imports the class of a user's own model if an argument or a file that it chooses names it.
    Raises UserError for an unknown flag, and for overrides that are invalid or would have no
    effect.

    Args:
        arguments: the arguments.
        schema: the schema of the subcommand.
        model: what a script gives as `fit(model=…)`, or None.
    """
    parser = hydra_arguments()
    parser.error = _raise_argument_error
    known, rest = parser.parse_known_args(arguments)
    flags = [word.partition("=")[0] for word in arguments if word.startswith("--config-")]
    if len(flags) > len(set(flags)):
        twice = max(flags, key=flags.count)
        print_line(f"{twice} is given twice, and the last counts")
    if known.config_path and not Path(known.config_path).is_absolute():
        raise UserError(
            f"--config-path={known.config_path} would replace all presets; "
            f"--config-dir={known.config_path} adds a folder of your own to them instead."
        )
    OwnFolder.path = own = _own_folder(known.config_dir, known.config_name)
    Plugins.instance().register(OwnFolder)
    overrides = [*known.overrides, *rest]
    sweeps = known.multirun or "hydra.mode=multirun" in map(str.lower, overrides)
    for word in overrides:
        _check_has_effect(word, sweeps)
    flags = list(arguments)
    for word in overrides:
        flags.remove(word)
    if known.config_dir and known.config_dir.startswith("~"):  # Hydra does not expand it
        ends = known.config_dir
        flags = [w.removesuffix(ends) + str(own) if w.endswith(ends) else w for w in flags]
    if not known.shell_completion:  # otherwise the argument is install=…, which is not an override
        try:
            schema, preset = schema_of(schema, overrides, own, model)
        except Exception as error:  # of a user's file, which is read here before Hydra reads it
            raise composing_error(error, overrides, schema) from None
        overrides = [*check_overrides(overrides, own, sweeps, schema), *preset]
    return Arguments([*flags, *overrides], own, schema)


def _check_has_effect(word: str, sweeps: bool) -> None:
    """Raises UserError for an override of one of Hydra's keys that would have no effect.

    parallel3d chooses the folders and does not let Hydra configure logging in the ranks' processes.
    Therefore only the logging of Hydra's own messages about a sweep can be changed.
    """
    name, _, value = word.lstrip("+~").partition("=")
    if value.lower() in QUIET or (sweeps and name in OF_SWEEPS):
        return
    reason = next((why for start, why in NO_EFFECT.items() if name.startswith(start)), None)
    if reason:
        raise UserError(f"{word} has no effect: {reason}.")


def _raise_argument_error(message: str) -> NoReturn:
    raise UserError(f"{message}; parallel3d train --hydra-help lists Hydra's flags.")


class OwnFolder(SearchPathPlugin):
    """Lets Hydra search the folder of --config-dir before parallel3d's own presets.

    By default, Hydra searches it last and would ignore an edited copy of an experiment that has
    kept its name.

    Attributes:
        path: the folder; None without --config-dir.
    """

    path: ClassVar[Path | None] = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.path is not None:
            search_path.prepend("own", f"file://{self.path}", SearchPathQuery("main"))


def _own_folder(given: str | None, config_name: str | None) -> Path | None:
    """Returns the folder of --config-dir, or None without it. Raises UserError for a bad folder."""
    if given is None:
        return None
    check_path("--config-dir", at_home(given))
    folder, typed = Path(at_home(given)).absolute(), f"--config-dir={given}"
    if not folder.is_dir():
        raise UserError(f"{typed} is not a folder; give one with experiment/, model/, … inside")
    primary = folder / f"{NAME}.yaml"
    if primary.exists() and not folder.samefile(conf_dir()) and config_name in (None, NAME):
        raise UserError(
            f"{typed}: {primary.name} in this folder would replace all defaults; rename it, for "
            "example to experiment/mine.yaml, and give experiment=mine"
        )
    return folder


class PrivateSweepFolder(Callback):
    """Creates `runs_dir/.multirun`, accessible only to its owner, before Hydra would create it.

    submitit stores the jobs there as pickles and executes them when Slurm starts the jobs, so
    nobody else may replace them.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Creates the folder.

        Raises SystemExit if the folder belongs to another user or `runs_dir` is not a valid path,
        because Hydra turns other exceptions in a callback into warnings.
        """
        folder = Path(config.hydra.sweep.dir)
        try:
            check_path("runs_dir", str(config.runs_dir))
        except UserError as error:
            print_line(str(error))
            raise SystemExit(USER_ERROR) from None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.lstat().st_uid != os.getuid():
            print_line(
                f"runs_dir={config.runs_dir}: {folder} belongs to another user, who could replace "
                "the sweep's jobs; choose another runs_dir."
            )
            raise SystemExit(USER_ERROR)
        folder.chmod(0o700)


NAME = "config"


def run(
    job: Callable[[DictConfig], None], arguments: Sequence[str], schema: type[Config] = Config
) -> None:
    """Composes `arguments`, which are also in `sys.argv`, and runs `job` on the result.

    `@hydra.main` composes the configuration twice, to find out whether it runs a sweep, and so
    takes 0.1 s longer. It is only used if an argument is for Hydra itself or may belong to a sweep.
    """
    if any(map(_is_hydras, arguments)):
        register(schema)
        hydra.main(version_base=VERSION, config_path=str(conf_dir()), config_name=NAME)(job)()
        return
    composed = compose_tree(arguments, with_hydra=True, schema=schema)
    HydraConfig.instance().set_config(composed)
    with open_dict(composed):
        del composed["hydra"]
    job(composed)


def _is_hydras(word: str) -> bool:
    """Returns whether Hydra itself must read an argument.

    Hydra must read flags, its own keys, and arguments with several values, such as 1,2 or range(3).
    """
    return word.startswith("-") or "hydra" in word or bool(set(",(") & set(word))
