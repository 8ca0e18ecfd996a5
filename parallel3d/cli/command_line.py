"""Runs a command line, whose first argument selects the subcommand.

This module does not import torch. It checks the configuration and the data first, so that mistakes
are refused before anything is written.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import parallel3d
from parallel3d.checkpoint.init_from import RATE, begun_from, check_own_weights
from parallel3d.checkpoint.manifest import reason
from parallel3d.cli import help_text, hydra_run
from parallel3d.cli.continued import GivenKeys, continued, given_by
from parallel3d.cli.hydra_run import (
    failed_elsewhere,
    is_sweep,
    numbered,
    order_arguments,
    without_alias,
)
from parallel3d.cli.overrides import check_filled, composing_error, config_of, typed_alternatives
from parallel3d.cli.own_model import (
    NO_PRESET,
    ModelClass,
    check_takes_text,
    completed,
    own_model_of,
)
from parallel3d.cli.subcommands import SUBCOMMANDS, TRAIN, Subcommand, refuse_options_of_others
from parallel3d.cli.verbs import HELP, Verb
from parallel3d.cli.words import last_of_each
from parallel3d.commands import data as data_command
from parallel3d.commands import slurm as slurm_command
from parallel3d.commands.checkpoint import command as checkpoint_command
from parallel3d.commands.from_run import (
    GENERATE,
    config_from_run,
    run_on_checkpoint,
    take_prompt,
    weights_lines,
)
from parallel3d.commands.options import CommandConfig
from parallel3d.commands.recipes import INIT_VERBS, init, recipes
from parallel3d.commands.recipes import VERBS as RECIPES_VERBS
from parallel3d.commands.report.command import KEYS as REPORT_KEYS
from parallel3d.commands.report.command import report
from parallel3d.config.fields import check_fields
from parallel3d.data.chat import with_date
from parallel3d.data.corpus import check_data, check_sets
from parallel3d.data.keys import DataConfig
from parallel3d.data.own_tokenizer import with_own_tokenizer
from parallel3d.data.tokenizer import FOLDER
from parallel3d.device.checks import check_precision_of
from parallel3d.errors import USER_ERROR, UserError, nearest_hint, print_line, readable
from parallel3d.host.devices import (
    HostError,
    check_numerics,
    choose_device,
    gpu_environment,
)
from parallel3d.host.processes import prepare_streams
from parallel3d.metrics.checks import check_loggers
from parallel3d.metrics.keys import LoggerConfig
from parallel3d.optim.checks import check_own
from parallel3d.run.agreement import CAN_RESUME, tell_rank_0
from parallel3d.run.checks import check_batch_process
from parallel3d.run.directory import (
    check_run,
    config_there,
    has_begun,
    keeps_tokenizer,
    left_out,
    make_run_directory,
    take_run,
)
from parallel3d.run.failure import full_stop, note_earlier
from parallel3d.run.keys import LaunchConfig
from parallel3d.run.launch import or_end
from parallel3d.run.launcher_environment import (
    RankAssignment,
    alone_in_a_job,
    detect,
    prints_for_all,
    refuse_lost_variables,
)
from parallel3d.run.local_workers import listen_here, run_here
from parallel3d.run.rendezvous import OtherStart
from parallel3d.run.worker import count_ranks_here, run_joined
from parallel3d.run_config import Config
from parallel3d.text import count
from parallel3d.versions import OF_A_RUN, check_versions, newer

CGROUPS = Path("/proc/self/cgroup")
FAILED = 1
INTERRUPTED = 130
READER_GONE = 141
# Subcommands that do not use Hydra, with their verbs; report has keys but no verbs.
FAMILIES: dict[str, tuple[Callable[[Sequence[str]], int], Mapping[str, Verb]]] = {
    "checkpoint": (checkpoint_command.checkpoint, checkpoint_command.VERBS),
    "data": (data_command.data, data_command.VERBS),
    "init": (init, INIT_VERBS),
    "recipes": (recipes, RECIPES_VERBS),
    "report": (report, {"": REPORT_KEYS}),
    "slurm": (slurm_command.slurm, slurm_command.VERBS),
}
ALL = (
    *SUBCOMMANDS,
    *(f"{word} {verb}".strip() for word, (_, verbs) in FAMILIES.items() for verb in verbs),
)
# This variable is set in jobs of a sweep that Hydra's submitit launcher runs without a terminal.
SUBMITIT = "SUBMITIT_EXECUTOR"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (`sys.argv` by default) and returns the exit code.

    The code is 0 if the command succeeded, 1 if a rank failed or verify found a difference, 2 if
    the user's input is invalid, and 128 + n if signal n stopped the command.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return _code_of(lambda: _run(_without_marks(words)))


def run_script(
    command: Subcommand, arguments: Sequence[str], model: ModelClass | None = None
) -> int:
    """Runs a subcommand with a script's own work, as `main` would; returns the exit code.

    `model` is what the script gives as `fit(model=…)`, or None.
    """
    return _code_of(lambda: _run_hydra(command, _without_marks(arguments), model))


def _code_of(run: Callable[[], int | None]) -> int:
    """Runs a command line, and returns its exit code once its output is written."""
    prepare_streams()
    try:
        code = _caught(run)
    except BrokenPipeError:  # a refusal was written to a pipe, as in `2>&1 | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        code = _reader_gone()
    try:
        sys.stdout.flush()  # a failing flush at exit would print lines of Python
    except OSError as error:
        gone = _reader_gone()
        if isinstance(error, BrokenPipeError):
            return code or gone
        if not code:
            print_line(readable(full_stop(f"output cannot be written: {reason(error)}")))
        return code or FAILED
    return code


def _caught(run: Callable[[], int | None]) -> int:
    """Runs a command line, and logs its errors; returns the exit code."""
    try:
        return run() or 0
    except UserError as error:
        return _refuse(error)
    except KeyboardInterrupt:
        print_line("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader is gone, as in `parallel3d checkpoint ls | head`
        return _reader_gone()
    except OSError as error:  # no rank has failed; ranks log their own errors
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exc()
        what = f"{os.fsdecode(error.filename)} cannot be used: " if error.filename else ""
        if error.errno == errno.ENOSPC and not what:
            what = "output cannot be written: "
        print_line(readable(full_stop(f"{what}{reason(error)}")))
        return FAILED
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _run(arguments: list[str]) -> int:
    """Runs a command line; returns its exit code. Output may be left in the buffer."""
    if not arguments or arguments[0] in ("help", *HELP):
        names = arguments[1:] if arguments[:1] == ["help"] else []
        print(help_text.of_names(names) if names else help_text.overview())
    elif arguments[0] in ("-V", "--version"):
        print(f"parallel3d {parallel3d.__version__}")
    elif arguments[0] in ("-sc", "--shell-completion"):
        if any(word.startswith("query=") for word in arguments):
            verbs = {word: verbs for word, (_, verbs) in FAMILIES.items()}
            help_text.complete(ALL, verbs)
        else:
            _run_hydra(SUBCOMMANDS[TRAIN], arguments)
    elif arguments[0] in FAMILIES:
        return FAMILIES[arguments[0]][0](arguments[1:])
    elif " ".join(arguments[:2]) in SUBCOMMANDS:
        _run_hydra(SUBCOMMANDS[" ".join(arguments[:2])], arguments[2:])
    elif arguments[0] in SUBCOMMANDS:
        _run_hydra(SUBCOMMANDS[arguments[0]], arguments[1:])
    else:
        raise UserError(_unknown_subcommand(arguments))
    return 0


def _without_marks(words: Sequence[str]) -> list[str]:
    """Returns the words without carriage returns at ends of lines and byte order marks before them.

    A shell that reads words from a list leaves these there if the list was edited on Windows.
    """
    kept = [re.sub(r"\r+(?=\n|\Z)", "", word.removeprefix("\ufeff")) for word in words]
    if changed := sum(new != old for new, old in zip(kept, words, strict=True)):
        print_line(
            f"{count(changed, 'word')} of the command line had a carriage return at the end of a "
            "line or a byte order mark, as in a list edited on Windows; neither is part of a word"
        )
    return [new for new, old in zip(kept, words, strict=True) if new or not old]


def _reader_gone() -> int:
    """Discards output that Python flushes at exit, as nobody reads it. Returns the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return READER_GONE


def _run_hydra(command: Subcommand, arguments: list[str], model: ModelClass | None = None) -> None:
    """Composes the configuration and runs the subcommand with it, as `@hydra.main` would.

    `model` is what a script gives as `fit(model=…)`, or None.

    Raises UserError if the configuration cannot be composed, and SystemExit with the job's exit
    code if that is not 0: without an exception, Hydra would start the next job of a sweep.
    """
    # Duplicates are found before aliases are replaced, so that messages name the user's words.
    arguments, lines = last_of_each(arguments)
    for line in lines if prints_for_all(os.environ) else ():
        print_line(line)
    arguments, prompt = take_prompt(arguments) if command.name == GENERATE else (arguments, None)
    arguments = [without_alias(word, command.name) for word in arguments]
    refuse_options_of_others(command, arguments)
    arguments, own, schema = order_arguments(arguments, command.schema, model)
    command = replace(command, schema=schema)
    if HELP & set(arguments):
        print(help_text.of_subcommand(command, own))
        return
    # With this variable, Hydra raises errors instead of printing them in many lines.
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = ["parallel3d", *arguments]

    begun = False

    def job(composed: DictConfig) -> None:
        nonlocal begun
        begun = True
        code = _run_job(command, composed, prompt, own)
        if code and SUBMITIT in os.environ:
            raise UserError(failed_elsewhere(code))
        if code:
            raise SystemExit(code)

    try:
        hydra_run.run(job, arguments, command.schema)
    except Exception as error:
        # While it composes, Hydra may also raise errors such as OverflowError for a user's value.
        if begun and not isinstance(error, (HydraException, OmegaConfBaseException)):
            raise
        # Output failed, as of --cfg job; Hydra's own errors for missing files have no number.
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise
        if wants_traceback:
            traceback.print_exc()
        raise composing_error(error, arguments, command.schema) from None
    finally:
        if not wants_traceback:
            os.environ.pop("HYDRA_FULL_ERROR", None)


def _run_job(
    command: Subcommand, composed: DictConfig, prompt: str | None = None, own: Path | None = None
) -> int:
    """Checks a composed configuration and runs the subcommand with it. Returns the exit code.

    Logs user errors instead of raising them.

    Args:
        prompt: the text that generate continues, or None for that of the configuration.
        own: the folder of --config-dir, or None.
    """
    place: RankAssignment | None = None
    try:
        config = config_of(composed)
        if command.alone is None:
            place = _place(command, config.launch, config.world_size)
        # Under srun, every task runs this code with the same configuration.
        first = place.rank == 0 if place else prints_for_all(os.environ)
        _check_versions(command, config.logger, first)
        given_words = HydraConfig.get().overrides.task
        typed = [word for word in given_words if word.partition("=")[0] != NO_PRESET]
        hydra_run.check_sweep_words(typed, command.schema)
        config = typed_alternatives(config, typed)
        if command.of_run:
            assert isinstance(config, CommandConfig)  # the subcommand's schema
            if prompt is not None:
                config = replace(config, prompt=prompt)
            return _run_on_run(command, config, typed, place)
        given = given_by(typed, own, own_model_of(command.schema))
        config, lines = _with_earlier(command, config, given, place)
        config = completed(config, command.schema)
        if command.name == TRAIN and config.init_from is not None:
            with _time_limit(config.launch.timeout_s, config.runs_dir):
                if not has_begun(Path(config.runs_dir, str(config.run))):
                    check_own_weights(config)
        if command.own is None and command.alone is None:  # those that need one ask themselves
            check_own(config.optim, has_own=False)
        if command.alone is not None:
            return _run_alone(command, config, typed) if first else 0
        return _run_ranks(command, config, typed, place, own, lines)
    except UserError as error:
        return _refuse(error, place)
    except OmegaConfBaseException as error:
        # The overrides are not resolved, as an interpolation that failed would fail again here.
        arguments = OmegaConf.to_container(HydraConfig.get().overrides.task)
        assert isinstance(arguments, list)
        return _refuse(composing_error(error, arguments, command.schema), place)


def _run_alone(command: Subcommand, config: Config, typed: Sequence[str]) -> int:
    """Runs a subcommand that needs only this process; returns its exit code."""
    assert command.alone is not None
    function = getattr(importlib.import_module(command.alone), command.name)
    try:
        more = {} if command.own is None else {"own": command.own}
        return int(function(config, typed, **more))
    except BrokenPipeError:  # it is caught here because Hydra would print a line about it
        return _reader_gone()


def _run_on_run(
    command: Subcommand, config: CommandConfig, typed: Sequence[str], place: RankAssignment | None
) -> int:
    """Runs a subcommand on the model of a run; returns the exit code. Raises UserError."""
    app = command.name
    if command.starts_ranks and place is not None:
        raise UserError(f"{app} starts its tp × pp ranks itself: run it without {place.launcher}")
    config = config_from_run(app, config, typed, place.world_size if place else None)
    if place is None:
        return run_on_checkpoint(app, config)
    store = None
    if not place.local_world_size:
        place, store = count_ranks_here(config.launch, config.run, place)
    for line in weights_lines(app, config) if place.rank == 0 else ():
        print_line(line)
    return run_joined(app, config, place, _checked_here(command, config, place), store)


def _run_ranks(
    command: Subcommand,
    config: Config,
    typed: Sequence[str],
    place: RankAssignment | None,
    own: Path | None,
    lines: Sequence[str],
) -> int:
    """Checks the configuration of a subcommand that needs ranks, and starts or joins its ranks.

    Logs `lines` before the ranks start. Returns the exit code. Raises UserError.
    """
    if command.name == TRAIN:
        check_batch_process(config.launch.spares, config.recovery.shrink, os.environ)
    if command.needs_data:
        check_filled(config, typed, own)
        check_takes_text(config)
        with _time_limit(config.launch.timeout_s, config.runs_dir):
            data, dated = with_date(_data_of(config))
        if dated:
            config = replace(config, data=replace(config.data, chat_date=data.chat_date))
            lines = [*lines, *dated]
    store = None
    if command.name == TRAIN and config.layout == "auto":
        # The planner is imported here, because it would slow the start of every command by 0.1 s.
        from parallel3d.commands.best_layout import take_layout

        if place is not None and not place.local_world_size:
            place, store = count_ranks_here(config.launch, config.run, place)
        config = take_layout(config, typed, place, command.own)
    config = command.checked(config, typed, place.world_size if place else None)
    if place is None:
        return _start(command, config, lines)
    if not place.local_world_size:
        place, store = count_ranks_here(config.launch, config.run, place)
    kind = _checked_here(command, config, place)
    for line in lines if place.rank == 0 else ():
        print_line(line)
    return run_joined(command.name, config, place, kind, store, command.work)


def _place(command: Subcommand, launch: LaunchConfig, world_size: int) -> RankAssignment | None:
    """Returns the rank that a launcher gave this process; None if this process starts the ranks."""
    # A subcommand that starts its own ranks does not depend on a launcher's number of ranks.
    addr, starts = launch.master_addr, None if command.starts_ranks else world_size
    place = detect(os.environ, addr, launch.master_port, starts)
    if starts is not None and (line := alone_in_a_job(os.environ, place)) is not None:
        print_line(line)
    if place is not None:
        return place
    if addr is not None:
        raise UserError(
            f"launch.master_addr={addr} is for ranks that srun or mpirun starts, and must be null "
            "where this process starts the ranks: leave it out, or put srun before parallel3d"
        )
    if starts is not None and CGROUPS.is_file():
        refuse_lost_variables(os.environ, CGROUPS.read_text())
    return None


def _with_earlier(
    command: Subcommand, config: Config, given: GivenKeys, place: RankAssignment | None
) -> tuple[Config, list[str]]:
    """Completes `config` with values of the run's last start, or of the source of its weights.

    Returns the completed configuration, and lines to log about the values that were taken over.
    """
    config = replace(config, run=numbered(config.run))
    if not command.resumes and config.init_from is None:
        return config, []
    check_fields(config)
    with _time_limit(config.launch.timeout_s, config.runs_dir):
        return _taken(command, config, given, place.world_size if place else None)


def _taken(
    command: Subcommand, config: Config, given: GivenKeys, world_size: int | None
) -> tuple[Config, list[str]]:
    """Does the work of `_with_earlier`, which sets the time limit."""
    directory = Path(config.runs_dir) / str(config.run)
    resumes = command.resumes_run(config.runs_dir, config.run)
    # A user's own primary configuration (--config-name) gives every key, so nothing is taken over.
    if resumes and HydraConfig.get().job.config_name == hydra_run.NAME:
        there = config_there(str(config.run), directory)
        if (directory / FOLDER).is_dir():  # the run has its own copy of the tokenizer
            there = replace(there, data=replace(there.data, tokenizer=None))
        begun = has_begun(directory)
        config, taken = continued(config, there, given, world_size, has_begun=begun)
        lines = [line for line in (left_out(directory), taken) if line is not None]
        if config.init_from is not None and not begun:
            # No step was trained yet, and the source may have a newer checkpoint by now. The first
            # start has decided whether routers' biases stay.
            config, line = begun_from(config, lambda key: key == RATE or key in given)
            lines.append(line)
        return config, lines
    if config.init_from is not None and not resumes:
        config, line = begun_from(config, given.__contains__)
        return config, [line]
    return config, []


def _start(command: Subcommand, config: Config, lines: Sequence[str]) -> int:
    """Logs `lines` and runs the subcommand on the layout's ranks, which this process starts."""
    world_size = config.world_size
    may_resume = command.name in CAN_RESUME
    with _time_limit(config.launch.timeout_s, config.runs_dir):
        check_run(config, may_resume=may_resume)
        _check_data(command, config)
    device = choose_device(config.device, world_size)
    check_precision_of(device.kind, config.precision.name)
    check_numerics(device.kind, config.precision.name, os.environ)
    if world_size > 1:
        listen_here(config.launch.master_port).close()  # a port in use is refused before any write
    job_id = os.environ.get("SLURM_JOB_ID")
    number = HydraConfig.get().job.num if is_sweep() else None
    with _time_limit(config.launch.timeout_s, config.runs_dir):
        config, run_dir = make_run_directory(config, job_id, number, may_resume=may_resume)
        note_earlier(run_dir)
        take_run(config, run_dir)
    for line in lines:
        print_line(line)
    return run_here(command.name, config, run_dir, device, in_sweep=is_sweep(), work=command.work)


def _time_limit(seconds: float, runs_dir: str) -> AbstractContextManager[None]:
    """Limits the time of a block that accesses files, because a file server may never answer."""
    where = f"runs_dir={runs_dir} or a folder of the data"
    return or_end(seconds, f"{where} has not answered for {seconds:g} s: is the file server down?")


def _checked_here(command: Subcommand, config: Config, place: RankAssignment) -> str:
    """Runs the checks that depend on this host; returns the device type of its ranks.

    The environment variables of GPU ranks are set first, because counting the GPUs initializes
    CUDA, which reads them.
    """
    try:
        os.environ.update(
            gpu_environment(
                config.device, os.environ, config.cluster, tp=config.tp, zero=config.zero
            )
        )
        device = choose_device(config.device, place.local_world_size, launched=True)
        check_precision_of(device.kind, config.precision.name)
        check_numerics(device.kind, config.precision.name, os.environ)
        _check_data(command, config, place.rank == 0)
    except UserError as error:
        if place.rank == 0:
            raise
        of_host = HostError(f"on host {socket.gethostname()}: {error}")
        tell_rank_0(config.launch, config.run, place, of_host)
        raise of_host from None
    if place.rank == 0:
        print_line(device.line)
    return device.kind


def _check_versions(command: Subcommand, logger: LoggerConfig, first: bool) -> None:
    """Raises UserError for a package that is too old; if `first`, warns about untested versions."""
    if not command.needs_torch:
        return
    used = [*OF_A_RUN, "wandb"] if command.name == TRAIN and "wandb" in logger.names else OF_A_RUN
    check_versions(used)
    if first and (sentence := newer(used)):
        print_line(sentence)


def _check_data(command: Subcommand, config: Config, first: bool = True) -> None:
    """Raises UserError for invalid loggers or data; if `first`, logs warnings about the data."""
    if command.name == TRAIN and first:
        check_loggers(config.logger, os.environ)
    if command.needs_data:
        data, model = _data_of(config), config.model
        # Only a blend needs the number of samples, and train.epochs excludes blends.
        is_open = config.train.epochs is not None
        samples = 0 if is_open else config.batch_sizes.samples(config.train_steps)
        length, vocab_size = model.seq_length, model.vocab_size
        sentences = check_data(data, length, vocab_size=vocab_size, samples=samples)
        check_sets(data, length, vocab_size)
        for sentence in sentences:
            if first:
                print_line(readable(sentence))


def _data_of(config: Config) -> DataConfig:
    """Returns the `data` section with the tokenizer of the run, if the run has one."""
    run_dir = Path(config.runs_dir) / str(config.run)
    if (run_dir / FOLDER).is_dir() and keeps_tokenizer(config.data, run_dir):
        return with_own_tokenizer(config.data, run_dir)
    return config.data


def _refuse(error: UserError, place: RankAssignment | None = None) -> int:
    """Logs a user error, and returns the exit code.

    All ranks find the same error, so only one rank logs it, or one rank per host for a HostError.
    """
    first_of_host = place is not None and place.local_rank == 0
    of_host = isinstance(error, HostError) and first_of_host
    if place is None or place.rank == 0 or of_host or isinstance(error, OtherStart):
        print_line(readable(full_stop(str(error))))
    return USER_ERROR


def _unknown_subcommand(arguments: list[str]) -> str:
    word = arguments[0]
    names = [*SUBCOMMANDS, *FAMILIES]
    hint = nearest_hint(word.lstrip("-"), names)
    if "=" in word:
        hint = f"; overrides come after the subcommand, as in: parallel3d train {word}"
    return f"{word} is not a subcommand: it must be one of {', '.join(names)}{hint}."
