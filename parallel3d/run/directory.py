"""Manages the run directory `runs/<run>/`: creates it atomically, locks it, never overwrites it.

A resumed run continues in its directory. Its first start writes `config.yaml`, and each later start
with different keys adds a file: `config-2.yaml`, `config-3.yaml`, …
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import pickle
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from parallel3d.blueprint.layout import Layout
from parallel3d.checkpoint import identity
from parallel3d.checkpoint.identity import flat
from parallel3d.checkpoint.manifest import (
    CHECKPOINTS,
    CLAIM,
    list_checkpoints,
    list_damaged,
    read_manifest,
    reason,
)
from parallel3d.checkpoint.runs import CONFIG_FILE, TEMPORARY
from parallel3d.config.fields import REMOVED, RENAMED, RemovedKey, all_keys, show, spell
from parallel3d.config.text import read_yaml, with_text
from parallel3d.data.keys import DataConfig
from parallel3d.data.tokenizer import FOLDER
from parallel3d.errors import UserError, nearest_hint
from parallel3d.files import flush_folder, is_ours, lock, no_link, replace_durably
from parallel3d.metrics.starts import STARTS, starts_of
from parallel3d.models.survey import model_of_tree
from parallel3d.resolve import layout_of
from parallel3d.run_config import OPTIONS, Config, check_plain, saved_tree

# Each start of a run writes its configuration atomically and only once. The newest configuration is
# the one in use.

CONFIGS = re.compile(r"config(?:-(\d+))?\.yaml")
# Errors raised for a file that is torn, empty, or not a configuration.
NO_CONFIG = (OmegaConfBaseException, YAMLError, TypeError, ValueError, RecursionError)


def save_config(
    config: Config, directory: Path, name: str = CONFIG_FILE, comment: str = ""
) -> None:
    """Writes the whole resolved configuration durably, after the line `comment` if there is one."""
    check_plain(config)
    text = OmegaConf.to_yaml(OmegaConf.create(saved_tree(config)), resolve=True)
    replace_durably(directory / name, f"{comment}{text}".encode())


def newest_config(directory: Path) -> Config | None:
    """Returns the configuration of the newest start; None if its file is not a configuration.

    Raises OSError and UserError.
    """
    try:
        return load_config(directory)
    except UserError:
        raise
    except NO_CONFIG:
        return None


def load_config(directory: Path) -> Config:
    """Returns the configuration of a run's newest start.

    Raises OSError, or one of the errors in NO_CONFIG.
    """
    return read_config(config_files(directory)[-1])


def last_config(directory: Path) -> Config:
    """Returns the configuration of the last start that reached its first step.

    If no start has reached one, the newest configuration counts. Files torn by a power cut are
    skipped; if no file is left, the manifest of a checkpoint gives the configuration. If that
    fails, too, the function raises the error of the first file, like `load_config`.
    """
    problem: Exception | None = None
    for path in _last_first(directory):
        try:
            return read_config(path)
        except UserError:
            raise
        except NO_CONFIG as error:
            problem = problem or error
    for folder in list_checkpoints(directory):
        try:
            return typed_config(read_manifest(folder).config)
        except Exception:
            continue  # loading the checkpoint reports the error
    raise problem or FileNotFoundError(directory / CONFIG_FILE)


def _last_first(directory: Path) -> list[Path]:
    """Returns the paths of a run's configurations, in the order in which to try them.

    The configuration of the last start that reached a step comes first, then the others, newest
    first.
    """
    begun = config_of_last_start(directory)
    return sorted(config_files(directory)[::-1], key=lambda path: path.name != begun)


def config_of_last_start(directory: Path) -> str | None:
    """Returns the file name of the configuration of the last start that reached its first step.

    It returns None if no start has. `starts.jsonl` records the name, because a start that is
    refused before its first step leaves a newer file behind.
    """
    starts = starts_of(directory / STARTS)
    name = starts[-1].line.get("config") if starts else None
    return name if isinstance(name, str) else None


def has_begun(directory: Path) -> bool:
    """Returns whether a run has a checkpoint, good or damaged. Raises OSError.

    Before its first checkpoint, a run may continue with any keys.
    """
    return bool(list_checkpoints(directory) or list_damaged(directory))


def left_out(directory: Path) -> str | None:
    """Returns a sentence that names the removed keys in a run's last configuration, or None."""
    found: Mapping[str, Any] = {}
    for path in _last_first(directory):
        try:
            read_config(path)
        except NO_CONFIG:
            continue  # the file is torn, and `last_config` skips it, too
        tree: Any = read_yaml(path, all_keys(Config))
        found = flat(tree)
        break
    words = []
    gone = {key: RemovedKey(f"now {new}", False) for key, new in RENAMED.items()} | REMOVED
    for key, removed in gone.items():
        is_set = show(found.get(key)) not in ("null", show(removed.default))
        if is_set and key.partition(".")[0] not in OPTIONS:
            words.append(f"{spell(key, found[key])} ({removed.instead})")
    if not words:
        return None
    listed = ", ".join(words)
    return f"run={directory.name}: keys that this version no longer has are left out: {listed}"


def keeps_tokenizer(data: DataConfig, directory: Path) -> bool:
    """Returns whether a run's copy of the tokenizer is valid for the next start.

    The copy is valid if the run has a checkpoint, or if the next start reads the same data as the
    last one. Raises OSError, or one of the errors in NO_CONFIG.
    """
    if has_begun(directory):
        return True
    there = dataclasses.replace(last_config(directory).data, tokenizer=None)
    return there == data


def config_files(directory: Path) -> list[Path]:
    """Returns the paths of a run's configurations, oldest first, or config.yaml if none exists."""
    found = [m for path in directory.iterdir() if (m := CONFIGS.fullmatch(path.name))]
    names = [m[0] for m in sorted(found, key=lambda m: int(m[1] or 1))]
    return [directory / name for name in names or [CONFIG_FILE]]


def next_name(directory: Path) -> str:
    newest = CONFIGS.fullmatch(config_files(directory)[-1].name)
    assert newest is not None  # `config_files` returns only names of this form
    return f"config-{int(newest[1] or 1) + 1}.yaml"


def read_config(path: Path) -> Config:
    """Returns the configuration in a file. Raises OSError, or one of the errors in NO_CONFIG."""
    try:
        tree = read_yaml(path, all_keys(Config))
    except UnicodeDecodeError as error:
        raise ValueError(str(error)) from None
    if not tree:
        raise ValueError("it is empty")
    model = tree.get("model") if isinstance(tree, Mapping) else None
    if isinstance(model, Mapping) and "_target_" in model:
        # No type is known for the fields of a user's own model, so they have those of YAML.
        tree = {**tree, "model": yaml.safe_load(path.read_text(encoding="utf-8"))["model"]}
    return typed_config(tree)


def typed_config(tree: object) -> Config:
    """Converts a tree to a typed configuration.

    It refuses `${…}` instead of resolving it, as the file may be another user's.
    """
    if "${" in json.dumps(tree):
        raise ValueError("it contains ${, but references are not resolved here")
    if not isinstance(tree, Mapping):
        raise TypeError(f"it holds a {type(tree).__name__}")
    # The configuration of an older run may hold keys that have been renamed or removed, none of
    # which change its computation, and options of subcommands, which used to be part of it.
    known = _without(tree, (*RENAMED, *REMOVED, *OPTIONS, "prompt"))
    model = known.get("model")
    own = model_of_tree(model) if isinstance(model, Mapping) else None
    if own is not None:
        del known["model"]
    typed: DictConfig = pickle.loads(_schema())
    typed.merge_with(known)
    config = OmegaConf.to_object(typed)
    if not isinstance(config, Config):
        raise TypeError(f"it holds a {type(config).__name__}")
    return with_text(config if own is None else dataclasses.replace(config, model=own))


def _without(tree: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Returns a copy of the tree without the keys that have these dotted names."""
    inside = {
        section: tuple(name.partition(".")[2] for name in names if name.startswith(f"{section}."))
        for section in tree
    }
    return {
        name: _without(value, inside[name]) if isinstance(value, Mapping) else value
        for name, value in tree.items()
        if name not in names
    }


@functools.cache
def _schema() -> bytes:
    """Returns the pickled schema: to load it takes a third of the time of building or copying it,
    which is most of the time of reading a configuration."""
    return pickle.dumps(OmegaConf.structured(Config))


# The directory


LEFT_S = 86400.0  # age in seconds of a temporary folder at which its creator counts as dead
FAILURES = "failures"
PLACEMENT_FILE = "placement.json"
# A file of this name in the run directory asks the batch process to requeue the job.
REQUEUE = "requeue"
HOW = ("run", "train.progress", "launch.", "logger.")  # prefixes of keys that do not affect results


def new_folder(runs: Path) -> Path:
    """Creates an empty, private temporary folder inside `runs`. Raises OSError."""
    return Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=runs))


def remove_temporary(runs: Path) -> None:
    """Removes temporary folders of this user that are more than a day old."""
    with suppress(OSError):  # leftovers are harmless
        for path in runs.glob(f"{TEMPORARY}*"):
            status = path.lstat()
            is_old = time.time() - status.st_mtime > LEFT_S
            if is_old and stat.S_ISDIR(status.st_mode) and is_ours(status, runs):
                shutil.rmtree(path, ignore_errors=True)


def make_run_directory(
    config: Config,
    job_id: str | None = None,
    job_number: int | None = None,
    *,
    may_resume: bool = False,
) -> tuple[Config, Path]:
    """Creates `runs_dir/<run>`, private to the user, with its config.yaml.

    A run without a name gets one from the time, the model, the layout, Slurm's `job_id` and a
    sweep's `job_number`. Returns the configuration with the run's name, and the directory. With
    `may_resume`, the directory of a run that can continue is returned unchanged; the caller then
    calls `take_run`. Raises UserError if the name is taken or the directory cannot be created.
    """
    runs = Path(config.runs_dir)
    if config.run is None:
        name = _made_name(layout_of(config), config.model.name, job_id, job_number)
        candidates = [name, *(f"{name}-{n}" for n in range(2, 1000))]
    else:
        candidates = [config.run]
    for name in candidates:
        named = dataclasses.replace(config, run=name)
        directory = runs / name
        if config.train.eval_only and not os.path.lexists(directory):
            raise UserError(
                f"train.eval_only=true needs a run with a checkpoint, and there is no {directory}: "
                "give run= the name of such a run"
                f"{nearest_hint(name, os.listdir(runs) if runs.is_dir() else [])}"
            )
        try:
            made = not os.path.lexists(directory) and _is_first(
                filled_directory(named, directory, comment=_maker())
            )
        except OSError as error:
            raise UserError(
                f"runs_dir={config.runs_dir}: cannot make {directory}: {error.strerror}"
            ) from None
        if made:
            return named, directory
        if config.run is not None:
            check_run(named, may_resume=may_resume)
            return named, directory
    raise UserError(
        f"runs_dir={config.runs_dir} holds a thousand runs named {candidates[0]}-…: give another "
        "name with run="
    )


def folder_in_run(runs_dir: str, run: str, name: str) -> Path:
    """Returns the folder `name` of an existing run, and creates it if needed. Raises UserError."""
    folder = Path(runs_dir, run, name)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(
            f"run={run}: cannot make {folder} ({error.strerror}): make the run's folder writable"
        ) from None
    return folder


def _is_first(making: AbstractContextManager[object]) -> bool:
    """Runs `making`, which creates a run directory; returns False if another start was faster.

    Raises OSError if the directory cannot be created for another reason.
    """
    try:
        with making:
            pass
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


@contextmanager
def filled_directory(config: Config, directory: Path, comment: str = "") -> Iterator[Path]:
    """Creates a run directory with its config.yaml, and lets the `with` block add files.

    The directory appears when the block ends, or never if the block raises an error. The block must
    flush its files. Raises OSError, and UserError if `runs_dir` is not a folder.
    """
    runs = directory.parent
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"runs_dir={config.runs_dir} is not a folder") from None
    remove_temporary(runs)
    fresh = new_folder(runs)
    try:
        save_config(config, fresh, comment=comment)
        yield fresh
        os.rename(fresh, directory)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    flush_folder(runs)


def _maker() -> str:
    """Returns the first line of config.yaml, which names the process that made the directory."""
    return f"# made by process {os.getpid()} on {socket.gethostname()}\n"


def check_run(config: Config, *, may_resume: bool = False) -> None:
    """Checks that the given `run` is new or, with `may_resume`, can continue. Raises UserError."""
    directory = Path(config.runs_dir) / str(config.run)
    if config.run is None or not os.path.lexists(directory):
        return
    there = config_there(config.run, directory)
    if may_resume and not config.checkpoint.load:
        raise UserError(
            f"run={config.run} exists already in {directory}, and checkpoint.load=false: "
            "choose another run=, or remove this folder"
        )
    try:
        saved = [*list_checkpoints(directory), *list_damaged(directory)]
    except OSError as error:
        raise UserError(
            f"run={config.run} exists, and its checkpoints in {directory} cannot be listed "
            f"({reason(error)}): start again when they can, or choose another run="
        ) from None
    found = identity.changes(saved_tree(there), config)
    is_over = not saved and status(directory) == "finished"
    if may_resume and not is_over:
        # Without a checkpoint, the run starts over, and any keys are allowed.
        if saved and (refusal := identity.refusal(config.run, found)):
            raise UserError(refusal)
        return
    why = ", with no checkpoint to resume from" if may_resume else ""
    differing = [str(change) for change in found if not change.key.startswith(HOW)]
    if not differing:
        raise UserError(
            f"run={config.run} exists already in {directory}{why}: choose another run=, or remove "
            "this folder"
        )
    more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
    raise UserError(
        f"run={config.run} exists already with another configuration: {', '.join(differing[:3])}"
        f"{more}; choose another run="
    )


def take_run(config: Config, directory: Path) -> int | None:
    """Locks a run until this process ends, and writes the configuration if it is new.

    Returns the descriptor that holds the lock, or None on a file system without locks. Raises
    UserError if another process holds the run, as two starts would overwrite each other.
    """
    held: int | None = None
    try:
        held = _locked(directory / CONFIG_FILE)
        keep_failures(directory)
        own = directory / FOLDER
        if own.is_dir() and not keeps_tokenizer(config.data, directory):
            gone = new_folder(directory.parent)
            os.rename(own, gone)  # so that no start sees the folder half removed
            shutil.rmtree(gone)
        # A mere evaluation does not count as a start.
        newest = newest_config(directory)
        is_new = newest is None or saved_tree(newest) != saved_tree(config)
        if not config.train.eval_only and is_new:
            save_config(config, directory, next_name(directory))
    except BlockingIOError:
        raise UserError(
            f"run={config.run} is running already: wait for it, or choose another run=; if this "
            "process is to be a rank of that run, pass the variables of torchrun, srun or mpirun "
            "on to it"
        ) from None
    except OSError as error:
        if held is not None:
            with suppress(OSError):  # the descriptor is closed even if this raises an error
                os.close(held)
        raise UserError(
            f"run={config.run}: {directory} cannot be written ({error.strerror}): make it "
            "writable, or choose another run="
        ) from None
    return held


def is_running(directory: Path) -> bool:
    """Returns whether a process on any host that shares the file system holds the run."""
    try:
        held = _locked(directory / CONFIG_FILE, shared=True)
    except BlockingIOError:
        return True
    except OSError:
        return False
    if held is not None:
        os.close(held)
    return False


def _locked(path: Path, *, shared: bool = False) -> int | None:
    """Locks a file and returns its descriptor; None if the file system has no locks.

    Raises BlockingIOError if another process holds the lock.
    """
    descriptor = no_link(path, os.O_RDONLY if shared else os.O_RDWR)
    held = None
    try:
        held = descriptor if lock(descriptor, shared=shared) else None
    finally:
        if held is None:
            os.close(descriptor)
    return held


def keep_failures(directory: Path) -> None:
    """Renames an earlier start's failure records, so that only those of this start are read."""
    old, number = directory / FAILURES, 1
    while (kept := directory / f"{FAILURES}-{number}").exists():
        number += 1
    if old.exists():
        os.rename(old, kept)


def status(directory: Path) -> str | None:
    """Returns the status of a run's last start, such as "finished", or None without a summary."""
    return read_json(directory / "summary.json").get("status")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file of a run, or {} if it holds none or cannot be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def discard_unused(directory: Path) -> None:
    """Removes a run directory created by this process if nothing was computed in it."""
    ours = {FAILURES, PLACEMENT_FILE}
    claimed = directory / CHECKPOINTS
    # A failing disk may have ended the run: the folder then stays, and the run can continue.
    with suppress(OSError):
        for path in directory.iterdir():
            is_config = CONFIGS.fullmatch(path.name) is not None
            unused = path == claimed and os.listdir(path) == [CLAIM]
            known = path.name in ours or path.name.endswith(".traceback.txt")
            if not (is_config or unused or known):
                return
        if (directory / CONFIG_FILE).read_text("utf-8", "replace").startswith(_maker()):
            gone = new_folder(directory.parent)
            os.rename(directory, gone)  # so that no start sees the folder half removed
            shutil.rmtree(gone)


def _made_name(layout: Layout, model: str, job_id: str | None, job_number: int | None) -> str:
    model = re.sub(r"[^A-Za-z0-9._+=-]", "_", model)
    context = f"cp{layout.cp}" if layout.cp > 1 else ""
    sizes = f"tp{layout.tp}pp{layout.pp}{context}dp{layout.dp}"
    job = f"-job{job_id}" if job_id else ""
    number = "" if job_number is None else f"-{job_number}"
    return f"{datetime.now():%Y%m%d-%H%M%S}-{model}-{sizes}{job}{number}"


def config_there(run: str, directory: Path) -> Config:
    """Returns the last configuration of `run`, whose `directory` must belong to this user."""
    try:
        for status in (directory.lstat(), directory.stat()):
            if not is_ours(status, directory.parent):
                raise UserError(
                    f"run={run} exists, and {directory} belongs to another user "
                    f"(uid {status.st_uid}): choose another run= or runs_dir="
                )
        if not (directory / CONFIG_FILE).is_file():
            raise UserError(
                f"run={run}: {directory} exists and is not a run directory: choose another run="
            )
        return last_config(directory)
    except UserError:
        raise
    except (OSError, *NO_CONFIG) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UserError(
            f"run={run} exists, and its {CONFIG_FILE} cannot be read ({reason}): "
            "choose another run="
        ) from None
