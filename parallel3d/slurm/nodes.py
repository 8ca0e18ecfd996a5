"""Keeps `nodes.json` of a run: the evidence against nodes, which outlives jobs and requeues.

The file maps a node to its entries, oldest first: `evidence` (the end of a sentence about the
node), `time`, `start`, and `decisive`, as in `decide.Evidence`. Decisive evidence excludes a node,
and so do two strikes, until they are older than `recovery.exclude_days`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from parallel3d.errors import UserError, nearest_hint, readable
from parallel3d.files import (
    flush_folder,
    is_ours,
    no_link,
    others_may_write,
    parse_json,
    read_into,
    replace_durably,
)
from parallel3d.slurm.decide import STRIKES, Evidence, History, is_out, merged, unexpired
from parallel3d.text import aligned

NODES = "nodes.json"
MOST_BYTES = 4 << 20  # of thousands of nodes with a dozen entries each
FIELDS: dict[str, type | tuple[type, ...]] = {
    "evidence": str,
    "time": (int, float),
    "start": int,
    "decisive": bool,
}
# Errors of opening a file that tell a strange one, and not a disk that fails for the moment.
STRANGE = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO)
LATEST = 1e11  # seconds; a later time is no Unix time
Say = Callable[[str], None]


def read(
    run_dir: Path, now: float, exclude_days: float, say: Say
) -> dict[str, tuple[Evidence, ...]]:
    """Returns the entries that have not expired; {} if there is no file.

    A file that no job of this user wrote is renamed and does not count, and `say` gets a sentence.
    """
    path = run_dir / NODES
    try:
        return unexpired(_history(path), now, exclude_days)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        where = ""
        if isinstance(error, ValueError) or error.errno in STRANGE:
            kept = _put_aside(path)
            where = f"; it is kept as {kept.name}" if kept else "; it cannot be renamed either"
        say(f"{path} does not count, so no node is left out because of it ({_why(error)}){where}")
        return {}


def add(
    run_dir: Path, new: History, now: float, exclude_days: float, say: Say
) -> dict[str, tuple[Evidence, ...]]:
    """Adds entries to the file, and returns all that have not expired.

    If the file cannot be written, `say` gets a sentence: the job goes on, and only a later one does
    not know of the entries.
    """
    history = merged(read(run_dir, now, exclude_days, say), new)
    if new:
        _write(run_dir, history, say)
    return history


def _write(run_dir: Path, history: History, say: Say) -> None:
    path = run_dir / NODES
    try:
        if os.path.lexists(path):
            _history(path)  # a file that could not be read or renamed stays
        replace_durably(path, _text(history))
    except (OSError, ValueError) as error:
        later = f"a later job will not know of {_names(history)}"
        say(f"{path} cannot be written ({_why(error)}), so {later}")


def _text(history: History) -> bytes:
    content = {node: [vars(entry) for entry in entries] for node, entries in history.items()}
    return f"{json.dumps(content, indent=1, allow_nan=False)}\n".encode()


def _history(path: Path) -> dict[str, tuple[Evidence, ...]]:
    """Returns all entries in a file. Raises OSError, and ValueError for a strange file."""
    content = parse_json(_content(path))
    if not isinstance(content, dict):
        raise ValueError("it holds no object")
    return {node: _entries(node, found) for node, found in content.items()}


def _content(path: Path) -> bytes:
    """Returns the bytes of a file that is this user's alone. Raises OSError and ValueError."""
    descriptor = no_link(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        if not is_ours(status, path.parent) or others_may_write(status, path.parent):
            raise ValueError("others may write to it")
        if status.st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        content = bytearray(status.st_size)
        return bytes(content[: read_into(descriptor, memoryview(content), 0)])
    finally:
        os.close(descriptor)


def _entries(node: str, found: Any) -> tuple[Evidence, ...]:
    if not isinstance(found, list):
        raise ValueError(f"its entry {readable(node)} is no list")
    return tuple(_entry(node, each) for each in found)


def _entry(node: str, found: Any) -> Evidence:
    fits = isinstance(found, Mapping) and found.keys() == FIELDS.keys()
    # In Python, true is a number.
    if not fits or any(
        not isinstance(found[name], kind) or (kind is not bool and isinstance(found[name], bool))
        for name, kind in FIELDS.items()
    ):
        raise ValueError(f"an entry of {readable(node)} has not {', '.join(FIELDS)}")
    if not 0 <= found["time"] < LATEST:
        raise ValueError(f"an entry of {readable(node)} has no time")
    return Evidence(**found)


def _put_aside(path: Path) -> Path | None:
    """Renames a file, and returns its new path; None if that is not possible."""
    number = 1
    while os.path.lexists(kept := path.with_name(f"{path.name}.{number}")):
        number += 1
    try:
        os.rename(path, kept)
        flush_folder(path.parent)
    except OSError:
        return None
    return kept


# The subcommand


def report(
    run_dir: Path, now: float, exclude_days: float, forget: str | None, say: Say
) -> list[str]:
    """Returns the lines of `parallel3d slurm nodes`, after it has forgotten a node if asked.

    Raises UserError if the node to forget is not there, or if the file cannot be written.
    """
    history = read(run_dir, now, exclude_days, say)
    if forget is not None:
        if forget not in history:
            known = f"it has entries of {_names(history)}" if history else "it has no entries"
            raise UserError(
                f"forget={readable(forget)}: {run_dir / NODES} has no entry of this node; {known}"
                f"{nearest_hint(forget, history, 'forget=')}"
            )
        del history[forget]
        try:
            replace_durably(run_dir / NODES, _text(history))
        except OSError as error:
            raise UserError(f"{run_dir / NODES} cannot be written ({error.strerror})") from None
    if not history:
        return [f"{run_dir.name}: no node is left out, and none has a strike"]
    rows = [("node", "now", "since", "start", "evidence")]
    for node, entries in sorted(history.items()):
        standing = "left out" if is_out(entries) else f"{len(entries)} of {STRIKES} strikes"
        for entry in entries:
            when = f"{datetime.fromtimestamp(entry.time):%Y-%m-%d %H:%M}"
            rows.append((readable(node), standing, when, str(entry.start), entry.evidence))
            node = standing = ""
    return [readable(line) for line in aligned(rows, "<<<><")]


def _why(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _names(history: History) -> str:
    return ", ".join(readable(node) for node in sorted(history))
