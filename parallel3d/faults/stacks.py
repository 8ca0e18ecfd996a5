"""What this process is in, as Python's stacks tell it."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from pathlib import Path
from types import FrameType

from parallel3d.files.durable import no_link
from parallel3d.run.failure import place_in

Stack = list[tuple[str, int, str]]  # (file, line, function), outermost first
# The main thread's innermost frame while a backward runs.
BACKWARD = "_engine_run_backward"


def dump(path: Path) -> None:
    """Writes the stacks of all Python threads. Raises OSError."""
    with os.fdopen(no_link(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def of_the_work() -> Stack:
    """The stack of what the rank works on: the main thread's, and autograd's where it waits for it.

    The backward of tensors on an accelerator runs on a thread of that device, which autograd made.
    """
    frames = sys._current_frames()
    main = _stack(frames.get(threading.main_thread().ident or 0))
    if not main or main[-1][2] != BACKWARD:
        return main
    known = {t.ident for t in threading.enumerate() if not _is_foreign(t)}
    others = (_stack(frame) for ident, frame in frames.items() if ident not in known)
    return main + next((stack for stack in others if place_in(stack)), [])


def _is_foreign(thread: threading.Thread) -> bool:
    """Whether Python did not start it, and knows it for having asked who it is."""
    return isinstance(thread, threading._DummyThread)


def _stack(frame: FrameType | None) -> Stack:
    found = []
    while frame is not None:
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return found[::-1]


def in_torch_distributed(stack: Stack) -> str:
    """The call of torch.distributed in which the stack ends; "" if it ends elsewhere."""
    name = ""
    for file, _, function in reversed(stack):
        if "/torch/distributed/" not in Path(file).as_posix():
            break
        name = function if function != "wrapper" else name
    return name
