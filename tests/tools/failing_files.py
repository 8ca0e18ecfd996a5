"""Makes Python's system calls below one folder fail on purpose.

    with FailingFiles(folder) as calls:                      # counts calls; nothing fails save()
    for point in calls.points():                             # ("fsync", 2): the third fsync
        with FailingFiles(folder, Fault("EIO"), point):
            save()

It reaches the functions of `os`, `io.open` (and so `open`, `Path.read_text`, `os.fdopen` …: reads
and writes of their files count as well) and `fcntl.flock`, with paths or descriptors below the
folder, in all threads of this process. It does not reach other processes, or extensions that call
the system themselves (safetensors' reader and writer, numpy's, mmap, `DirEntry.stat`).
"""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

Point = tuple[str, int]  # (kind of call, number of earlier calls of its kind)

# Function of os → its kind. A kind's first argument is a path or a descriptor.
KINDS = {
    **{name: "stat" for name in ("stat", "lstat", "fstat")},
    **{name: "read" for name in ("read", "pread", "readv", "preadv")},
    **{name: "write" for name in ("write", "pwrite")},
    **{name: "unlink" for name in ("unlink", "remove")},
    **{name: name for name in ("open", "close", "lseek", "fsync", "fdatasync", "ftruncate")},
    **{name: name for name in ("listdir", "scandir", "mkdir", "rmdir", "rename", "replace")},
    **{name: name for name in ("truncate", "link", "symlink", "readlink", "chmod", "utime")},
}
SHORT, SLOW, LOST, BLOCK = "short", "slow", "lost answer", "blocks for ever"
# Calls whose second path counts as well.
_TWO_PATHS = ("rename", "replace", "link", "symlink")


@dataclass(frozen=True)
class Fault:
    """The event at the point: an error's name, `SHORT`, `SLOW`, `LOST` (done, then EIO) or `BLOCK`
    (a server that is gone: the call does not return).

    `lasts`: "once"; "kind": also at all later calls of that kind; "all": at all later calls.
    """

    what: str
    lasts: str = "once"
    slow_s: float = 0.02

    def __str__(self) -> str:
        return self.what if self.lasts == "once" else f"{self.what}, from there on {self.lasts}"


class FailingFiles:
    """Counts calls below `folder` inside the block, and makes them fail by `fault` from `point`
    on."""

    def __init__(
        self, folder: Path, fault: Fault | None = None, point: Point | None = None
    ) -> None:
        self.folder = os.path.realpath(folder)
        self.fault, self.point = fault, point
        self.counts: Counter[str] = Counter()
        self.failed = 0  # number of calls with the fault
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}  # paths of open descriptors below the folder
        self._began = False
        self._patches: list[Any] = []

    def points(self) -> list[Point]:
        """Returns every counted call."""
        return [(kind, n) for kind, count in sorted(self.counts.items()) for n in range(count)]

    def __enter__(self) -> Self:
        for name, kind in KINDS.items():
            self._patches.append(patch.object(os, name, self._wrapped(getattr(os, name), kind)))
        self._patches.append(patch.object(fcntl, "flock", self._wrapped(fcntl.flock, "flock")))
        real = io.open
        for module in (io, builtins):
            self._patches.append(patch.object(module, "open", self._opener(real)))
        for one in self._patches:
            one.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._patches:
            self._patches.pop().stop()

    def meets(self, kind: str) -> Fault | None:
        """Counts a call; returns the fault if it applies to this call."""
        with self._lock:
            number = self.counts[kind]
            self.counts[kind] += 1
            if self.fault is None or self.point is None:
                return None
            at_point = self.point == (kind, number)
            self._began = self._began or at_point
            later = self._began and (
                self.fault.lasts == "all" or (self.fault.lasts == "kind" and kind == self.point[0])
            )
            if not (at_point or later):
                return None
            self.failed += 1
            return self.fault

    def act(self, kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Makes one call, unchanged or with the fault."""
        fault = self.meets(kind)
        if fault is None:
            return call(*args, **kwargs)
        if fault.what == SLOW:
            time.sleep(fault.slow_s)
            return call(*args, **kwargs)
        while fault.what == BLOCK:
            time.sleep(3600)
        if fault.what == SHORT:
            return call(*_shortened(kind, args), **kwargs)
        if fault.what == LOST or kind == "close":  # the file is closed even so
            call(*args, **kwargs)
        number = errno.EIO if fault.what == LOST else getattr(errno, fault.what)
        path = args[0] if args and isinstance(args[0], (str, os.PathLike)) else None
        raise OSError(number, os.strerror(number), path)

    def _wrapped(self, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            found = self._path_of(args, kwargs)
            if found is None and kind in _TWO_PATHS:
                found = self._path_of(args[1:], kwargs)
            if found is None:
                return call(*args, **kwargs)
            if kind == "close":
                self._paths.pop(args[0], None)
            result = self.act(kind, call, *args, **kwargs)
            if kind == "open":
                self._paths[result] = found
            return result

        return wrapped

    def _path_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Returns the path of a call, if it is below the folder."""
        subject = args[0] if args else kwargs.get("path", ".")
        if isinstance(subject, int):
            return self._paths.get(subject)
        within = self._paths.get(kwargs.get("dir_fd") or kwargs.get("src_dir_fd") or -1)
        path = os.path.join(within or os.getcwd(), os.fsdecode(subject))
        inside = path == self.folder or path.startswith(f"{self.folder}{os.sep}")
        return path if inside else None

    def _opener(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            path = self._path_of((file,), {})
            if path is None:
                return real(file, mode, buffering, encoding, errors, newline, closefd, opener)
            plain = mode.replace("b", "").replace("t", "")
            raw = _FailingIO(self, path, file, plain, closefd, opener)
            if buffering == 0:
                return raw
            both = "+" in plain
            buffered: Any = io.BufferedReader(raw) if plain == "r" else io.BufferedWriter(raw)
            if both:
                buffered = io.BufferedRandom(raw)
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)

        return opened


class _FailingIO(io.FileIO):
    """A file object whose calls count like calls of `os`."""

    def __init__(
        self, files: FailingFiles, path: str, file: Any, mode: str, closefd: bool, opener: Any
    ) -> None:
        self.files = files
        if isinstance(file, int):
            super().__init__(file, mode, closefd, opener)
        else:
            files.act("open", super().__init__, file, mode, closefd, opener)
        with files._lock:
            files._paths[self.fileno()] = path

    def readinto(self, buffer: Any, /) -> int:
        return self.files.act("read", super().readinto, buffer)

    def read(self, size: int = -1, /) -> Any:
        return self.files.act("read", super().read, size)

    def readall(self) -> bytes:
        return self.files.act("read", super().readall)

    def write(self, content: Any, /) -> int:
        return self.files.act("write", super().write, content)

    def close(self) -> None:
        if self.closed:
            return
        self.files._paths.pop(self.fileno(), None)
        self.files.act("close", super().close)


def _shortened(kind: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the arguments of a read or write for half of its bytes, but at least one."""
    if kind not in ("read", "write") or not args:  # no limit: all bytes, in as many reads as needed
        return args
    place = 1 if isinstance(args[0], int) and len(args) > 1 else 0
    value = args[place]
    if isinstance(value, int):
        half: Any = max(1, value // 2) if value > 0 else value
    elif isinstance(value, list):
        view = memoryview(value[0])
        half = [view[: max(1, len(view) // 2)]]
    else:
        view = memoryview(value)
        half = view[: max(1, len(view) // 2)]
    return (*args[:place], half, *args[place + 1 :])
