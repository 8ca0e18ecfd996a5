"""Runs a command in a process of its own, with a time limit; reports in one line why it failed."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[2]
# The variable's name from torch 2.9 on, and the earlier one.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
LINUX_SET_PARENT_DEATH_SIGNAL = 1
DYING = "Exception ignored"  # an error in a destructor while the interpreter ends
LONGEST_REASON = 300  # maximum number of characters, for a row of a table rather than a log
TRACEBACK = "Traceback (most recent call last):"
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch.distributed puts this before each line


class Ended(NamedTuple):
    """A process that has ended. `code` None: it reached its limit and was ended."""

    code: int | None
    out: str
    err: str
    seconds: float


def run_limited(words: Sequence[str], limit_s: float) -> Ended:
    """Runs a command in the checkout's root; after `limit_s` seconds it is ended.

    It leads a process group of its own, which is all that is ever ended: when the limit is reached,
    or when an exception (Ctrl-C) leaves this function.
    """
    started = time.perf_counter()
    # Files, not pipes: a grandchild that outlives the command would hold a pipe open for ever.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Nobody has waited for the process yet, so its pid cannot belong to another one.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        seconds = time.perf_counter() - started
        said = []
        for file in (out, err):
            file.seek(0)
            said.append(file.read().decode(errors="replace"))
    return Ended(code, said[0], said[1], seconds)


def environment() -> dict[str, str]:
    """Returns this process's variables; the allocator grows its segments, as in `parallel3d train`,
    unless the user has set it."""
    if any(name in os.environ for name in ALLOCATOR):
        return dict(os.environ)
    return {**os.environ, ALLOCATOR[0]: "expandable_segments:True"}


def reason(ended: Ended, limit_s: float) -> str:
    """Returns the reason for a failure: the limit, the signal, or the line that names the
    exception."""
    if ended.code is None:
        return f"took longer than {limit_s:g} s"
    if ended.code < 0:
        name = signal.Signals(-ended.code).name
        return f"ended by {name}" + (" (is the host out of memory?)" if name == "SIGKILL" else "")
    return _shortened(_said(ended.err) or f"exit code {ended.code}")


def sentence_of(error: BaseException) -> str:
    """Formats an exception by its type and its first line."""
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    return _shortened(f"{name}: {lines[0]}" if lines else name)


def die_with_parent(parent: int) -> None:
    """Asks the system to end this process when its parent ends, for whatever reason (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(LINUX_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def stops_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM (of a scheduler or `timeout`) end this process like Ctrl-C, through every
    `finally`."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _said(err: str) -> str | None:
    """Returns the exception's line of the last traceback, else parallel3d's last sentence, else the
    last line.

    Warnings of dying objects after the traceback do not count.
    """
    lines = [RANK_PREFIX.sub("", line) for line in err.splitlines()]
    found = None
    for i, line in enumerate(lines):
        if line.strip() == TRACEBACK and not "".join(lines[:i][-1:]).startswith(DYING):
            after = lines[i + 1 :]
            found = next((said for said in after if said and not said[0].isspace()), found)
    sentences = [line for line in lines if line.startswith("parallel3d: ")]
    rest = [line for line in lines if line.strip()]
    if found is not None:
        return found
    last = sentences or rest
    return last[-1] if last else None


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 1] + "…"
