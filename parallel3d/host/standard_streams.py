"""Standard output and error of a run: what they refuse is dropped, and the run goes on.

A reader that has gone (`| head`), a full disk under a log, a lost terminal and a closed descriptor
cost the output, never the training. `train` tells at its end how much was lost (`Recorder.finish`).
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


class _Dropping(io.FileIO):
    """A file whose failed writes are counted as lost instead of raised."""

    lost_bytes = 0
    reason: str | None = None

    def write(self, data: bytes | memoryview) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            size = memoryview(data).nbytes
            self.lost_bytes += size
            self.reason = self.reason or error.strerror
            return size


def open_closed_streams() -> None:
    """Open /dev/null in place of a standard descriptor that was closed (`>&-`, some daemons).

    Otherwise the next file that this process opens, a checkpoint perhaps, would get the number of
    standard output, and everything that prints would write into it.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            found = os.open(os.devnull, os.O_RDWR)
            if found != descriptor:
                os.dup2(found, descriptor)
                os.close(found)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


def drop_failed_output() -> None:
    """From here on a write to `sys.stdout` or `sys.stderr` that fails is dropped, not raised."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if _file_of(stream) is not None:
            continue  # an earlier job of a sweep has done it
        try:
            descriptor = stream.fileno()
        except io.UnsupportedOperation:
            continue  # replaced by a test or a notebook: memory, which takes everything
        _flush(stream)
        kept = io.BufferedWriter(_Dropping(descriptor, "w", closefd=False))
        how = {"encoding": stream.encoding, "errors": stream.errors}
        how |= {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        setattr(sys, name, io.TextIOWrapper(kept, **how))


def lost_output() -> dict[str, str | int] | None:
    """What standard output has refused so far: bytes and the first reason; None: nothing."""
    file = _file_of(sys.stdout)
    if file is None or not file.lost_bytes:
        return None
    return {"bytes": file.lost_bytes, "reason": file.reason or "unknown"}


def _file_of(stream: TextIO) -> _Dropping | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Dropping) else None


def _flush(stream: TextIO) -> None:
    """Flush what was written before; what cannot be is given up, or the interpreter's own end would
    fail of it."""
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()
