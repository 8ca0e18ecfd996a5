"""Starts `parallel3d generate`: finds the run, its model and the prompt. Imports no torch."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from parallel3d.checkpoint.manifest import list_checkpoints, reason
from parallel3d.commands.checkpoint.listing import (
    check_ema,
    find_checkpoint,
    find_run,
    run_names,
)
from parallel3d.config.checks.whole import check_config
from parallel3d.config.schema import Config
from parallel3d.config.values import in_other_precision
from parallel3d.data.corpus import check_vocabulary
from parallel3d.data.tokenizer import FOLDER, tokenizer_of
from parallel3d.errors import UserError
from parallel3d.host.devices import choose_device
from parallel3d.run.directory import CONFIG_FILE, last_config
from parallel3d.run.worker import run_here

GENERATE = "generate"
# All other keys are given by the run.
MAY_BE_SET = ("run", "runs_dir", "prompt", "tp", "pp", "device", "seed", "generate.*", "launch.*")


def take_prompt(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Returns overrides without prompt=… and the prompt as typed: Hydra would strip blanks."""
    prompts = [word.removeprefix("prompt=") for word in arguments if word.startswith("prompt=")]
    rest = [word for word in arguments if not word.startswith("prompt=")]
    return rest, prompts[-1] if prompts else None


def start_generate(config: Config, overrides: Sequence[str], prompt: str | None) -> int:
    """Generates with this process as the launcher. Returns the exit code.

    Args:
        overrides: without the prompt.
        prompt: None: the configuration's.

    Raises:
        UserError: no such run, no checkpoint, or a key that only training may set.
    """
    check_overrides(GENERATE, overrides, MAY_BE_SET)
    config = config_of_run(GENERATE, dataclasses.replace(config, dp=1))
    if prompt is not None:
        config = dataclasses.replace(config, prompt=prompt)
    return run_on_checkpoint(GENERATE, config)


def run_on_checkpoint(app: str, config: Config) -> int:
    """Runs `app` on a checkpoint of the run, on all ranks of the layout; returns the exit code."""
    checkpoints_of(config)
    world_size = config.world_size
    device = choose_device(config.device, world_size)
    # Failures go to a folder of their own: nothing is added to the run.
    folder = Path(tempfile.mkdtemp(prefix=f"parallel3d-{app}-"))
    code = None
    try:
        code = run_here(app, config, folder, world_size, device)
    finally:
        if code != 1:  # else it holds the failure's traceback
            shutil.rmtree(folder, ignore_errors=True)
    return code


def check_overrides(app: str, overrides: Sequence[str], may_be_set: Sequence[str]) -> None:
    """Raises UserError for a key that `app` takes from the run."""
    for word in overrides:
        key = word.partition("=")[0].lstrip("+~")
        section = f"{key.partition('.')[0]}.*"
        if key not in may_be_set and section not in may_be_set:
            raise UserError(
                f"{word}: {app} takes {key} from the run; what may be set is "
                f"{', '.join(may_be_set)}"
            )


def config_of_run(app: str, config: Config, world_size: int | None = None) -> Config:
    """Returns `config` with the run's model and tokenizer, checked. Raises UserError.

    `world_size`: of a launcher's ranks.
    """
    run = load_config_of(app, config)
    precision = "fp64" if run.precision.name == "fp64" else "fp32"
    config = dataclasses.replace(
        config,
        micro_batch_size=1,
        global_batch_size=config.dp or 1,
        model=run.model,
        attention_kernel=in_other_precision(run.attention_kernel),
        data=dataclasses.replace(config.data, tokenizer=_tokenizer(config, run)),
        precision=dataclasses.replace(config.precision, name=precision),
    )
    return check_config(config, world_size, own_samples=True)


def _tokenizer(config: Config, run: Config) -> str:
    """Returns the run's tokenizer, by a name that ranks elsewhere can open. Raises UserError."""
    own = Path(config.runs_dir, str(config.run), FOLDER)
    tokenizer = tokenizer_of(run.data, own.parent)
    check_vocabulary(tokenizer.vocab_size, run.model.vocab_size, tokenizer.name)
    return str(own.absolute()) if own.is_dir() else tokenizer.name


def load_config_of(app: str, config: Config) -> Config:
    """Returns the configuration of the run that `config` names. Raises UserError if none."""
    runs = Path(config.runs_dir)
    if config.run is None:
        known = run_names(runs)
        there = f"for example run={known[-1]}" if known else f"and {runs} has none yet"
        raise UserError(f"{app} needs run=…, the name of a run, {there}")
    try:
        return last_config(find_run(runs, config.run))
    except UserError:
        raise
    except (OmegaConfBaseException, YAMLError, OSError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"run={config.run}: its {CONFIG_FILE} cannot be read ({reason})") from None


def checkpoints_of(config: Config) -> list[Path]:
    """Returns the run's usable checkpoints, newest first. Raises UserError if there are none."""
    run_dir = Path(config.runs_dir) / str(config.run)
    try:
        folders = list_checkpoints(run_dir)
        if folders and config.generate.step is not None:
            folders = [find_checkpoint(run_dir.parent, run_dir.name, config.generate.step)]
    except OSError as error:
        raise UserError(
            f"run={config.run}: its checkpoints in {run_dir} cannot be listed ({reason(error)})"
        ) from None
    if not folders:
        raise UserError(
            f"run={config.run} has no checkpoint in {run_dir}: train it with checkpoint.every=…"
        )
    if config.generate.weights == "ema":
        check_ema(folders[0], "weights")
    return folders
