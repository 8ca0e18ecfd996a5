"""A checkpoint as a folder: its manifest, its name, and where the checkpoints of a run lie.

    runs/<run>/checkpoints/
      latest                          the name of the newest
      step-00000500/
        manifest-<SHA-256>.json       steps, samples, configuration, data, the other files' digests
        rank-00000.safetensors …      see `tensor_file`

The manifest's own digest is in its name, so each byte of a checkpoint is covered. A folder is made
under a name that begins with `.saving-` and renamed when all of it is on the disk: `step-…` is
always whole. Everything here is JSON and text, read without torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel3d.durable import flush_folder as flush_folder
from parallel3d.durable import write_durably

CHECKPOINTS = "checkpoints"
LATEST = "latest"
UNFINISHED = ".saving-"
REMOVED = ".removed-"
DAMAGED = "damaged-"
FORMAT = "parallel3d checkpoint"
VERSION = 1
_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_MANIFEST = re.compile(r"manifest-([0-9a-f]{64})\.json")
_LARGEST_MANIFEST = 1 << 30


class DamagedCheckpoint(Exception):
    """A checkpoint is not what was written: one sentence that says what is wrong with it."""


@dataclass(frozen=True)
class FileDigest:
    """What the manifest says of a file: its bytes, and the SHA-256 of its length and header."""

    name: str
    size: int
    header: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is of, and of which files it consists.

    Attributes:
        step: optimizer steps done. progress: `Trainer.progress()`.
        config: the whole configuration of the session that saved it, as nested dicts.
        data: fingerprint of the training text and its tokens; empty if the caller had own samples.
        saved_at: ISO 8601, UTC. versions: of parallel3d and torch.
        files: one for each rank that had something to write.
    """

    step: int
    progress: dict[str, int | float | bool]
    config: dict[str, Any]
    data: dict[str, str | int]
    saved_at: str
    versions: dict[str, str]
    files: tuple[FileDigest, ...]

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.size for file in self.files)


def step_folder(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The folders of a run's checkpoints, newest first; by their names alone."""
    try:
        found = [p for p in (run_dir / CHECKPOINTS).iterdir() if _STEP_FOLDER.fullmatch(p.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(found, key=_step_of, reverse=True)


def _step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Write the manifest, private and flushed to the disk, with its digest in its name."""
    content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
    text = (json.dumps(content, indent=1, allow_nan=False) + "\n").encode()
    path = folder / f"manifest-{hashlib.sha256(text).hexdigest()}.json"
    write_durably(path, text)
    return path


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, proved; the files that it names are there and no others.

    Raises DamagedCheckpoint.
    """
    try:
        names = {path.name for path in folder.iterdir()}
        found = [m for name in names if (m := _MANIFEST.fullmatch(name))]
        if len(found) != 1:
            raise DamagedCheckpoint(f"{folder.name} has {len(found)} manifests instead of one")
        path = folder / found[0][0]
        if path.stat().st_size > _LARGEST_MANIFEST:
            raise DamagedCheckpoint(f"{folder.name} has a manifest of absurd size")
        text = path.read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{folder.name} cannot be read ({error.strerror})") from error
    if hashlib.sha256(text).hexdigest() != found[0][1]:
        raise DamagedCheckpoint(f"{folder.name} has a manifest that is not what was written")
    try:
        manifest = _parsed(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"{folder.name} has no manifest of ours ({error})") from error
    expected = {file.name for file in manifest.files} | {path.name}
    if missing := sorted(expected - names):
        raise DamagedCheckpoint(f"{folder.name} lacks {', '.join(missing[:3])}")
    if more := sorted(names - expected):
        raise DamagedCheckpoint(f"{folder.name} holds {', '.join(more[:3])}, which was not saved")
    if folder.name != step_folder(manifest.step):
        raise DamagedCheckpoint(f"{folder.name} holds the checkpoint of step {manifest.step}")
    return manifest


def _parsed(content: dict[str, Any]) -> Manifest:
    """Raises ValueError, KeyError or TypeError for what is not a manifest of this version."""
    if content.pop("format") != FORMAT:
        raise ValueError("another format")
    version = content.pop("version")
    if version != VERSION:
        raise ValueError(f"version {version}, this parallel3d reads {VERSION}")
    files = tuple(FileDigest(**file) for file in content.pop("files"))
    for file in files:
        if not re.fullmatch(r"rank-\d+\.safetensors", file.name):
            raise ValueError(f"{file.name!r} is no file of a checkpoint")
    progress = content["progress"]
    if not all(isinstance(v, (int, float)) for v in progress.values()):
        raise ValueError("progress is not made of numbers")
    return Manifest(**content, files=files)
