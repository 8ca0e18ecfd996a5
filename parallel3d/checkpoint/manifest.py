"""Defines the folder of a checkpoint with its manifest, and lists the checkpoints of a run.

    runs/<run>/checkpoints/ latest                          the name of the newest step-00000500/
        manifest-<SHA-256>.json       steps, samples, configuration, data, the other files' digests
        rank-00000.safetensors …      see `storage`

The manifest's name contains its digest, so digests cover every byte of a checkpoint. A folder is
made under a name that begins with `.saving-`, and is renamed to `step-…` when it is complete on the
disk; a folder named `step-…` is therefore complete. This module only reads and writes JSON and
text, and does not import torch.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from parallel3d.config.length import clock_of
from parallel3d.errors import TrainingFailure
from parallel3d.files import parse_json, plain, read_bounded, write_durably
from parallel3d.optim.thaws import THAWS, read_thaws

if TYPE_CHECKING:
    from parallel3d.data.same_text import DataFacts

CHECKPOINTS = "checkpoints"
LATEST = "latest"
UNFINISHED = ".saving-"
REMOVED = ".removed-"
DAMAGED = "damaged-"
CLAIM = ".claim"
FORMAT = "parallel3d checkpoint"
VERSION = 1
# Kind of the weights in a checkpoint. Other kinds are the average of the weights, states of the
# model that no optimizer updates, and states of the optimizer.
PARAMETER = "parameter"
KINDS = {"model": PARAMETER, "ema": "ema"}  # value of weights=… → kind
_STEP_FOLDER = re.compile(r"step-([0-9]{8,18})")
_MANIFEST = re.compile(r"manifest-([0-9a-f]{64})\.json")
_LARGEST_MANIFEST = 16 << 20  # bytes, enough for a hundred thousand ranks
OPTIMIZER = "optimizer"  # entry of `progress` with a script's own optimizer (`optim.own`)
HOOKS = "hooks"  # entry of `progress` with the states of a script's hooks (`hook_states`)
# Counts that `Trainer.restore` needs, in addition to the loss scale.
COUNTS = ("steps", "consumed_samples", "updates", "good_steps", "overflows")


class DamagedCheckpoint(Exception):
    """Raised if a checkpoint provably differs from what was written; the message is a sentence."""

    def __init__(self, sentence: str) -> None:
        super().__init__(plain(sentence))


class IncompleteCheckpoint(DamagedCheckpoint):
    """Raised if files of a checkpoint are missing, perhaps only in this host's view of the folder.

    A network file system may show a stale list of files.
    """


class UnreadableCheckpoint(Exception):
    """Raised if the system cannot read a checkpoint, which does not prove that it is damaged."""

    def __init__(self, what: str, error: OSError) -> None:
        super().__init__(plain(f"{what} cannot be read ({reason(error)})"))


def reason(error: OSError) -> str:
    """Returns the error's symbolic name and description, such as `ESTALE: Stale file …`."""
    name = errno.errorcode.get(error.errno or 0)
    return f"{name}: {error.strerror}" if name else str(error.strerror or error)


@contextmanager
def unreadable(what: str) -> Iterator[None]:
    """Turns an OSError in the `with` block, which reads `what`, into UnreadableCheckpoint."""
    try:
        yield
    except OSError as error:
        raise UnreadableCheckpoint(what, error) from error


@dataclass(frozen=True)
class FileDigest:
    """Describes a file in the manifest.

    Attributes:
        name: name in the checkpoint's folder.
        size: size in bytes.
        header: SHA-256 of the file's header, including the header's length.
    """

    name: str
    size: int
    header: str


@dataclass(frozen=True)
class Manifest:
    """Describes a checkpoint and lists its files.

    Attributes:
        step: optimizer steps done.
        progress: the result of `Trainer.progress()`.
        config: the whole configuration of the session that saved the checkpoint, as nested dicts.
        data: facts about the training text; empty if the caller brought its own samples.
        saved_at: time of the save in UTC, in ISO 8601.
        versions: versions of parallel3d and torch.
        files: digests of the ranks' files; a rank that has nothing to write has no file.
        lines: lines of metrics.jsonl that were not yet on the disk at the time of the save.
    """

    step: int
    progress: dict[str, Any]
    config: dict[str, Any]
    data: DataFacts
    saved_at: str
    versions: dict[str, str]
    files: tuple[FileDigest, ...]
    lines: tuple[str, ...] = ()

    @property
    def has_ema(self) -> bool:
        """Returns whether the checkpoint holds the weights' average (kind "ema").

        It does if `optim.ema_decay` was set in its run.
        """
        decay = self.config.get("optim", {}).get("ema_decay")
        return decay is not None and not self.has_weights_alone

    @property
    def has_weights_alone(self) -> bool:
        """Returns whether the checkpoint holds no optimizer state.

        Importing a model and averaging checkpoints create such checkpoints; their step is 0.
        """
        return self.step == 0

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def step_folder(step: int) -> str:
    return f"step-{step:08d}"


def entries(run_dir: Path) -> list[Path]:
    """Returns the paths in a run's checkpoint folder, or [] if there is no such folder.

    Raises OSError.
    """
    try:
        return sorted((run_dir / CHECKPOINTS).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Returns the folders that are named like checkpoints of a run, newest first."""
    found = [path for path in entries(run_dir) if _STEP_FOLDER.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)


def list_damaged(run_dir: Path) -> list[Path]:
    return [path for path in entries(run_dir) if path.name.startswith(DAMAGED)]


def step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Writes the manifest to a file whose name contains its digest, and returns the path.

    The file is flushed to the disk, and only its owner can read it. Raises OSError, also if
    `read_manifest` would refuse the manifest for its size.
    """
    content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
    text = (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()
    if len(text) > _LARGEST_MANIFEST:  # `read_manifest` would refuse it
        raise OSError(
            None,
            f"the values beside the tensors take {len(text) >> 20} MiB, but may take "
            f"{_LARGEST_MANIFEST >> 20} MiB; keep long lists in a buffer of the module",
        )
    path = folder / f"manifest-{hashlib.sha256(text).hexdigest()}.json"
    write_durably(path, text)
    return path


def read_manifest(folder: Path) -> Manifest:
    """Reads and verifies a manifest, and checks the sizes of the files that it lists.

    Raises DamagedCheckpoint and UnreadableCheckpoint.
    """
    with unreadable(folder.name):
        names = {path.name for path in folder.iterdir()}
    found = [m for name in names if (m := _MANIFEST.fullmatch(name))]
    if len(found) != 1:
        kind = DamagedCheckpoint if found else IncompleteCheckpoint
        raise kind(f"{folder.name} has {len(found)} manifests instead of one")
    path = folder / found[0][0]
    try:
        with unreadable(f"{folder.name}/{path.name}"):
            text = read_bounded(path, _LARGEST_MANIFEST)
        if hashlib.sha256(text).hexdigest() != found[0][1]:
            raise DamagedCheckpoint(f"{folder.name} has a manifest that is not what was written")
        manifest = _parsed(parse_json(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(
            f"{folder.name} has no valid manifest written by parallel3d ({error!r})"
        ) from error
    expected = {file.name for file in manifest.files} | {path.name}
    if missing := sorted(expected - names):
        raise IncompleteCheckpoint(f"{folder.name} lacks {', '.join(missing[:3])}")
    if more := sorted(names - expected):
        raise DamagedCheckpoint(f"{folder.name} holds unexpected files: {', '.join(more[:3])}")
    if folder.name != step_folder(manifest.step):
        raise DamagedCheckpoint(f"{folder.name} holds the checkpoint of step {manifest.step}")
    for file in manifest.files:
        name = f"{folder.name}/{file.name}"
        with unreadable(name):
            size = (folder / file.name).stat().st_size
        if size != file.size:
            raise DamagedCheckpoint(f"{name} has {size} bytes, but {file.size} were written")
    return manifest


def _parsed(content: dict[str, Any]) -> Manifest:
    """Checks each value of a manifest's content and returns the manifest.

    A valid digest does not make the content trustworthy. Raises ValueError, KeyError and TypeError.
    """
    if content.pop("format") != FORMAT:
        raise ValueError("its format is not that of a checkpoint")
    version = content.pop("version")
    if version != VERSION:
        raise ValueError(f"its version is {version}, but this parallel3d reads version {VERSION}")
    files = tuple(FileDigest(**file) for file in content.pop("files"))
    manifest = Manifest(**content | {"files": files, "lines": tuple(content.get("lines", ()))})
    progress = manifest.progress
    config = manifest.config
    data = manifest.data
    sections, words = ("model", "data", "optim", "precision"), ("tokenizer", "blend", "files")
    fits = {
        **{file.name: _is_file(file) for file in files},
        "lines": all(isinstance(line, str) for line in manifest.lines),
        **{f"progress.{name}": _is_count(progress[name]) for name in COUNTS},
        "progress.loss_scale": _is_number(progress["loss_scale"]),
        "progress.clock": "clock" not in progress or _is_clock(progress),
        f"progress.{THAWS}": _are_thaws(progress),
        f"progress.{OPTIMIZER}": _is_optimizer(progress.get(OPTIMIZER, {})),
        f"progress.{HOOKS}": all(map(_is_hook_state, progress.get(HOOKS, {}).values())),
        "step": progress["steps"] == manifest.step,
        **{f"config.{name}": isinstance(config.get(name, {}), dict) for name in sections},
        "data": not data
        or (isinstance(data["fingerprint"], str) and _is_count(data["train_tokens"])),
        **{f"data.{name}": isinstance(data.get(name, ""), str) for name in words},
        "data.blend": all(map(_is_stage, data.get("blend", "").split())),
    }
    if wrong := [name for name, is_right in fits.items() if not is_right]:
        raise ValueError(f"{wrong[0]!r} has an invalid value")
    return manifest


def _is_clock(progress: dict[str, Any]) -> bool:
    try:
        clock_of(progress, {})
    except (ValueError, KeyError, TypeError):
        return False
    return True


def _are_thaws(progress: dict[str, Any]) -> bool:
    try:
        read_thaws(progress)
    except (ValueError, TypeError):
        return False
    return True


def _is_optimizer(entry: dict[str, Any]) -> bool:
    scalars = entry.get("scalars", {}).values()
    return isinstance(entry.get("name", ""), str) and all(
        type(scalar) in (int, float) and math.isfinite(scalar) for scalar in scalars
    )


def _is_hook_state(entry: dict[str, Any]) -> bool:
    return all(
        isinstance(dtype, str) and all(map(_is_count, shape)) and math.prod(shape) < 1 << 48
        for dtype, shape in entry["tensors"].values()
    ) and isinstance(entry["values"], dict)


def _is_file(file: FileDigest) -> bool:
    is_name = re.fullmatch(r"rank-\d+\.safetensors", file.name) is not None
    return is_name and _is_count(file.size) and isinstance(file.header, str)


def _is_stage(stage: str) -> bool:
    first, colon, digest = stage.partition(":")
    return bool(colon and digest) and first.isascii() and first.isdigit() and len(first) < 20


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


# Reading on all ranks

PAUSES_S: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)  # seconds before each retry
_WHOLE, _DAMAGED, _INCOMPLETE, _UNREADABLE = range(4)

T = TypeVar("T")
Share = Callable[[Any], list[Any]]  # gathers a value from all ranks, collectively


def read_together(read: Callable[[], T], share: Share) -> tuple[T | None, str | None]:
    """Calls `read` on every rank, and retries on ranks that could not read.

    The call is collective over the ranks of `share`.

    A system error on some rank (a failing file system, a node without the mount, or stale folder
    entries) does not prove that the checkpoint is damaged. All ranks then raise the same error and
    change nothing.

    Returns (this rank's result, None). If the checkpoint is damaged, returns (None, the reason) on
    all ranks.

    Raises TrainingFailure on all ranks if a rank cannot read a file, or misses files that other
    ranks find.
    """
    result = None
    kind = _UNREADABLE
    why = ""
    answers: list[tuple[int, str, str]] = []
    for pause in (0.0, *PAUSES_S):
        time.sleep(pause)
        if kind in (_INCOMPLETE, _UNREADABLE):
            result, kind, why = _tried(read)
        answers = share((kind, why, socket.gethostname()))
        kinds = {answer[0] for answer in answers}
        if _UNREADABLE not in kinds and (_INCOMPLETE not in kinds or _DAMAGED in kinds):
            break
    wrong = [answer[1] for answer in answers if answer[0] in (_DAMAGED, _INCOMPLETE)]
    if _UNREADABLE in kinds or (_INCOMPLETE in kinds and _WHOLE in kinds and _DAMAGED not in kinds):
        worst = _UNREADABLE if _UNREADABLE in kinds else _INCOMPLETE
        rank = next(r for r, answer in enumerate(answers) if answer[0] == worst)
        _, why, host = answers[rank]
        raise TrainingFailure(
            f"on rank {rank}, host {host}: {why}, after {len(PAUSES_S) + 1} tries in "
            f"{sum(PAUSES_S):g} s; no checkpoint was touched: when the file system works again, "
            "run the same command to resume"
        )
    return (None, wrong[0]) if wrong else (result, None)


def _tried(read: Callable[[], T]) -> tuple[T | None, int, str]:
    try:
        return read(), _WHOLE, ""
    except IncompleteCheckpoint as error:
        return None, _INCOMPLETE, str(error)
    except DamagedCheckpoint as error:
        return None, _DAMAGED, str(error)
    except UnreadableCheckpoint as error:
        return None, _UNREADABLE, str(error)
