"""Keeps token caches and packing plans in a folder; one process builds an entry, others read it.

An entry consists of files `<key><suffix>` and of `<key>.json`, which records their sizes and
digests. The JSON file is written last, so that it never describes an incomplete entry. The kernel
releases a builder's lock when the builder dies.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from parallel3d.data.tokens import (
    REBUILD,
    LocalFile,
    Proof,
    WatchedFile,
    prove,
    size_of,
    whole_digest,
)
from parallel3d.errors import UserError
from parallel3d.files import (
    is_ours,
    lock,
    no_link,
    others_may_write,
    parse_json,
    replace_durably,
)

if TYPE_CHECKING:
    from parallel3d.data.keys import DataConfig

T = TypeVar("T")
_log = logging.getLogger(__name__)

_PAUSE_S = 0.02
_LARGEST_FACTS = 1 << 20


# Makes a result from an entry's open files, by suffix, and the facts that its builder returned.
CacheOpener = Callable[[dict[str, WatchedFile], dict[str, Any]], T]


def kept(
    folder: Path,
    key: str,
    ends: Sequence[str],
    build: Callable[[Path], dict[str, Any]],
    opened: CacheOpener[T],
) -> T:
    """Returns the result of `opened` for the entry `key`; builds the entry first if necessary.

    An entry is built if it is missing or damaged; one process builds while all others wait. Raises
    UserError if the folder cannot be used.

    Args:
        ends: the suffixes of the entry's files.
        build: writes these files, given their path without the suffix, and returns
            JSON-serializable facts.
        opened: makes the result from the open files and the facts; raises ValueError for damaged
            files.
    """
    prefix = folder / key
    load = partial(_load, prefix, ends, opened)
    try:
        check_owner(folder)
        found = load()
        if found is None:
            # The folder is private, because its texts may be private. An existing folder keeps its
            # permissions.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _build_lock(prefix.with_suffix(".lock")) as locked:
                found = load()  # another process may have just built it
                if found is None:
                    if locked:  # without the lock, another builder may use the files
                        for leftover in folder.glob(f".{key}.*.partial"):
                            leftover.unlink(missing_ok=True)
                    _build(prefix, ends, build)
                    found = load()
    except OSError as error:
        raise unusable(folder, error.strerror or str(error)) from error
    if found is None:
        raise unusable(folder, "the files written there are damaged when read back")
    return found


def _build(prefix: Path, ends: Sequence[str], build: Callable[[Path], dict[str, Any]]) -> None:
    prefix.with_suffix(".json").unlink(missing_ok=True)
    facts = build(prefix)
    files = {}
    for end in ends:
        with open(f"{prefix}{end}", "rb", buffering=0) as file:
            files[end] = [size_of(file), whole_digest(file)]
    content = json.dumps({"files": files, "facts": facts})
    replace_durably(prefix.with_suffix(".json"), content.encode())


def _load(prefix: Path, ends: Sequence[str], opened: CacheOpener[T]) -> T | None:
    """Opens an entry; returns None if it is missing or damaged, or if other users may write it."""
    path, problem = prefix.with_suffix(".json"), "is damaged"
    if not path.exists():
        return None
    with contextlib.ExitStack() as stack:
        try:
            files = {}
            for end in (".json", *ends):
                name = f"{prefix}{end}"
                file = stack.enter_context(LocalFile(name, opener=no_link))
                files[end] = file
                if not is_trusted(os.fstat(file.fileno()), prefix.parent):
                    problem = "can be changed by other users"
                    raise ValueError
            content = parse_json(files.pop(".json").read(_LARGEST_FACTS))
            watched = {}
            for end, file in files.items():
                size, digest = content["files"][end]
                proof = partial(prove, file, digest)
                watched[end] = WatchedFile(file, proof, REBUILD, digest)
                if size_of(file) != size or proof() is Proof.CHANGED:
                    raise ValueError
            found = opened(watched, content["facts"])
            stack.pop_all()  # the files stay open
            return found
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            _log.info(f"{path} {problem}, so it is built again")
            return None


@contextlib.contextmanager
def _build_lock(path: Path) -> Iterator[bool]:
    """Locks a file while the caller builds; yields False if the file system has no locks.

    Some network file systems have none. Two runs may then both build, but each file is renamed into
    place, so no reader sees an incomplete file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    told = False
    try:
        while True:
            try:
                locked = lock(descriptor)
                break
            except BlockingIOError:
                if not told:
                    _log.info("another run is building the token cache: waiting for it")
                told = True
                # The lock is polled, because a process blocked in a system call would look to a
                # watchdog like one that waits for a dead disk.
                time.sleep(_PAUSE_S)
        if not locked:
            _log.info(
                f"{path.parent} is on a file system without locks, so other runs may build the "
                "same token cache at the same time"
            )
        yield locked
    finally:
        # Closing releases the lock; the file stays, because removing it would race with other
        # processes.
        os.close(descriptor)


# The folder


def folder_of(data: DataConfig) -> Path:
    """Returns `data.cache_dir`, or else `$XDG_CACHE_HOME/parallel3d` or `~/.cache/parallel3d`.

    Raises UserError if none of them can be used because the user has no home folder.
    """
    if data.cache_dir is not None:
        return Path(data.cache_dir).absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification ignores relative paths
        base = os.path.expanduser("~/.cache")
    if not os.path.isabs(base):
        raise UserError(
            "data.cache_dir is null, but this user has no home folder to hold the token cache; "
            "give data.cache_dir=FOLDER"
        )
    return Path(base) / "parallel3d"


def digest_of(facts: list[Any]) -> str:
    """Returns a digest of the JSON-serializable `facts`."""
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def check_can_store(folder: Path, key: str) -> None:
    """Raises UserError if `folder` has no trusted entry `key` and cannot hold a new one."""
    path, existing = folder / f"{key}.json", folder
    while not os.path.lexists(existing):
        existing = existing.parent
    try:
        if not existing.is_dir():
            raise unusable(folder, f"{existing} is not a folder")
        check_owner(folder)
        if os.path.isfile(path) and is_trusted(path.lstat(), folder):
            return
    except OSError as error:
        raise unusable(folder, error.strerror or str(error)) from error
    if not os.access(existing, os.W_OK | os.X_OK):
        raise unusable(folder, f"{existing} is not writable")


def unusable(folder: Path, reason: str) -> UserError:
    other = Path(tempfile.gettempdir()) / f"parallel3d-cache-{os.geteuid()}"
    example = "" if other == folder else f", such as data.cache_dir={other}"
    return UserError(
        f"data.cache_dir={folder} cannot hold the token cache: {reason}; give a folder that you "
        f"can write to{example}"
    )


def check_owner(folder: Path) -> None:
    """Raises UserError if the folder belongs to another user, who could put any text into it."""
    try:
        status = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if status.st_uid != 0 and not is_ours(status, folder):
        raise unusable(folder, f"it belongs to another user (uid {status.st_uid})")


def is_trusted(status: os.stat_result, folder: Path) -> bool:
    """Returns whether a file is regular, owned by this user or root, and not writable by others."""
    ours = status.st_uid == 0 or is_ours(status, folder)
    return stat.S_ISREG(status.st_mode) and ours and not others_may_write(status, folder)
