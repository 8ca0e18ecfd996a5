"""Prepares `parallel3d generate` and `eval`: finds the run, its model and its checkpoints.

The module does not import torch.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from parallel3d.blueprint.parameters import stage_parameters
from parallel3d.checkpoint.manifest import list_checkpoints, reason
from parallel3d.checkpoint.runs import CONFIG_FILE, check_ema, find_checkpoint, find_run, run_names
from parallel3d.commands.evaluate.rows import take_rows
from parallel3d.commands.options import CommandConfig, EvalConfig, GenerateConfig
from parallel3d.config.fields import with_values
from parallel3d.config.user_files import check_free
from parallel3d.config.values import in_other_precision
from parallel3d.data.tokenizer import FOLDER, check_vocabulary, tokenizer_of
from parallel3d.errors import UserError, closest, first_line, print_line
from parallel3d.host.devices import check_numerics, choose_device
from parallel3d.models.survey import refuse_own
from parallel3d.resolve import blueprint_of
from parallel3d.run.directory import NO_CONFIG, last_config
from parallel3d.run.local_workers import run_here
from parallel3d.run_config import Config, check_config

GENERATE, EVAL = "generate", "eval"
# Keys that the command line may set; all others come from the run.
MAY_BE_SET = {
    GENERATE: (
        *("run", "runs_dir", "prompt", "tp", "pp", "ep", "device", "seed"),
        *("generate.*", "launch.*"),
    ),
    EVAL: (
        *("run", "runs_dir", "tp", "cp", "context_parallel.*", "pp", "dp", "ep", "device"),
        *("eval.*", "launch.*"),
    ),
}


def take_prompt(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Returns the overrides without prompt=…, and the prompt or, if it is not given, None.

    The prompt is taken out because Hydra would strip its whitespace. The last prompt=… counts.
    """
    prompts = [word.removeprefix("prompt=") for word in arguments if word.startswith("prompt=")]
    rest = [word for word in arguments if not word.startswith("prompt=")]
    return rest, prompts[-1] if prompts else None


def config_from_run(
    app: str, config: CommandConfig, overrides: Sequence[str], world_size: int | None
) -> CommandConfig:
    """Returns the checked configuration of `app`, which is GENERATE or EVAL, for a run.

    Args:
        app: the subcommand.
        config: the configuration from the command line.
        overrides: the overrides of the command line.
        world_size: number of ranks that a launcher started, or None without a launcher. For EVAL,
            dp takes the ranks that the other dimensions leave, unless dp is given.

    Raises:
        UserError: if there is no such run or checkpoint, if an override sets a key that comes from
            the run, if a row is invalid, or if the file for the scores exists.
    """
    for word in overrides:
        key = word.partition("=")[0].lstrip("+~")
        section = f"{key.partition('.')[0]}.*"
        if key not in MAY_BE_SET[app] and section not in MAY_BE_SET[app]:
            raise UserError(
                f"{word}: {app} takes {key} from the run; keys that may be set are "
                f"{', '.join(MAY_BE_SET[app])}"
            )
    dp = 1
    if app == EVAL:
        dp = config.dp or max(1, (world_size or 1) // config.replica_size)
    typed = {word.partition("=")[0].lstrip("+~") for word in overrides}
    ep = config.ep if "ep" in typed else None
    config = of_run(app, dataclasses.replace(config, dp=dp), world_size, ep=ep)
    if app == EVAL:
        _check_rows(config.eval)
    keys = config.eval if app == EVAL else config.generate
    checkpoints_of(Path(config.runs_dir, str(config.run)), keys)
    return config


def _check_rows(keys: EvalConfig) -> None:
    """Checks the rows and prints notices about them.

    Raises UserError if the rows are missing or invalid, or if the file for the scores exists.
    """
    if keys.tasks is None:
        raise UserError(
            "eval needs tasks=…, a jsonl or parquet file of rows, as in: eval run=my_run "
            "tasks=questions.jsonl"
        )
    lines = take_rows(keys.tasks).lines
    check_free("to", keys.to, None, "parallel3d eval")
    for line in lines:
        print_line(line)


def run_on_checkpoint(app: str, config: CommandConfig) -> int:
    """Runs `app` on a checkpoint of a run, on all ranks of the layout. Returns the exit code."""
    device = choose_device(config.device, config.world_size)
    for line in weights_lines(app, config):
        print_line(line)
    check_numerics(device.kind, config.precision.name, os.environ)
    # Reports of failures go to a temporary folder, so that nothing is added to the run directory.
    folder = Path(tempfile.mkdtemp(prefix=f"parallel3d-{app}-"))
    code = None
    try:
        code = run_here(app, config, folder, device)
    finally:
        if code != 1:  # after a failure the folder is kept, because it holds the traceback
            shutil.rmtree(folder, ignore_errors=True)
    return code


WORTH_A_LINE = 1e8  # bytes of weights on a rank


def weights_lines(app: str, config: CommandConfig) -> list[str]:
    """Returns a line with the bytes of weights on the fullest rank, and a way to have fewer.

    Returns no line for a small model.
    """
    blueprint, element = blueprint_of(config), 8 if config.precision.name == "fp64" else 4
    held = [
        stage_parameters(config.model, config.tp, s.layers, s.first, s.last, ep=config.ep)
        for s in blueprint.stages
    ]
    most = max(sum(parameter.numel for parameter in stage) for stage in held) * element
    if most < WORTH_A_LINE:
        return []
    divided = f", experts over ep={config.ep}" if config.model.num_experts else ""
    return [
        f"weights: {most / 1e9:.3g} GB on the fullest rank of tp={config.tp} × pp={config.pp}"
        f"{divided}, in fp{8 * element}, in which {app} computes; a larger tp or pp divides them "
        "further"
    ]


def of_run(
    app: str, config: CommandConfig, world_size: int | None = None, *, ep: int | None = None
) -> CommandConfig:
    """Returns the checked configuration with the model and the tokenizer of the run.

    Args:
        app: the subcommand.
        config: the configuration from the command line.
        world_size: number of ranks that a launcher started, or None without a launcher.
        ep: number of ranks over which experts are divided; None: as many as possible of tp × cp.

    Raises:
        UserError: if there is no such run, or if its model does not fit the other keys.
    """
    run = _config_there(app, config.runs_dir, config.run)
    refuse_own(run.model, f"{app} run={config.run}")
    # The path is absolute, so that ranks with another working directory can open it.
    own = Path(config.runs_dir, str(config.run), FOLDER)
    tokenizer = tokenizer_of(run.data, own.parent)
    check_vocabulary(tokenizer, run.model.vocab_size)
    name = str(own.absolute()) if own.is_dir() else tokenizer.name
    # Ranks of dp score rows of their own, so only the ranks of a sequence can share experts.
    shared = config.tp * config.cp
    if ep is not None and shared % ep:
        near = closest(ep, lambda n: shared % n == 0 == run.model.num_experts % n, shared) or 1
        raise UserError(
            f"ep={ep} must divide tp · cp={shared} in {app}, as other ranks have other rows; the "
            f"nearest is ep={near}"
        )
    values = {
        "ep": math.gcd(shared, run.model.num_experts or 1) if ep is None else ep,
        # `check_config` demands sp for experts with tp; decoding itself never uses it.
        "sp": run.model.num_experts > 0 and config.tp > 1,
        "micro_batch_size": 1,
        "global_batch_size": config.dp or 1,
        "model": run.model,
        "attention_kernel": in_other_precision(run.attention_kernel),
        "delta_kernel": in_other_precision(run.delta_kernel),
        "data.tokenizer": name,
        "precision.name": "fp64" if run.precision.name == "fp64" else "fp32",
    }
    return check_config(with_values(config, values), world_size, own_samples=True)


def _config_there(app: str, runs_dir: str, run: str | None) -> Config:
    """Returns the configuration of the run.

    Raises UserError if no run is named, if it does not exist, or if it has no configuration that
    can be read.
    """
    runs = Path(runs_dir)
    if run is None:
        known = run_names(runs)
        there = f"for example run={known[-1]}" if known else f"but {runs} has no runs yet"
        raise UserError(f"{app} needs run=…, the name of a run, {there}")
    try:
        return last_config(find_run(runs, run))
    except UserError:
        raise
    except (OSError, *NO_CONFIG) as error:
        raise UserError(
            f"run={run}: its {CONFIG_FILE} cannot be read ({first_line(error)})"
        ) from None


def checkpoints_of(run_dir: Path, keys: GenerateConfig | EvalConfig) -> list[Path]:
    """Returns the folders of the run's checkpoints, the newest first, or only the chosen step's.

    Raises UserError if there are none, or if the average of the weights is chosen but missing.
    """
    try:
        folders = list_checkpoints(run_dir)
        if folders and keys.step is not None:
            folders = [find_checkpoint(run_dir.parent, run_dir.name, keys.step)]
    except OSError as error:
        raise UserError(
            f"run={run_dir.name}: its checkpoints in {run_dir} cannot be listed ({reason(error)})"
        ) from None
    if not folders:
        raise UserError(
            f"run={run_dir.name} has no checkpoint in {run_dir}: train it with checkpoint.every=…"
        )
    if keys.weights == "ema":
        check_ema(folders[0], "weights")
    return folders
