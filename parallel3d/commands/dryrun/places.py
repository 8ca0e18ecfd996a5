"""Where in the program a kernel is launched or memory is asked for, told by the callers' frames.

The innermost frame of a known file decides. A backward that autograd runs by itself has none of
ours on its stack: what no rule knows is of the blocks, whose operators those are.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import NamedTuple

BLOCKS, LOSS, OPTIMIZER, OTHER = "blocks", "loss", "optimizer", "other"
SHARDING = "sharding"

# (part of a file's path, the part of the step), the first that fits; None: that of its caller.
_PARTS = (
    ("/parallel3d/tensor_parallel/head_loss.py", LOSS),
    ("/parallel3d/tensor_parallel/cross_entropy.py", LOSS),
    ("/parallel3d/tensor_parallel/embedding.py", OTHER),
    ("/parallel3d/parameters/gradients.py", None),
    ("/parallel3d/tensor_parallel/mappings.py", None),
    ("/parallel3d/models/ends.py", OTHER),
    ("/parallel3d/models/", BLOCKS),
    ("/parallel3d/tensor_parallel/", BLOCKS),
    ("/parallel3d/optim/", OPTIMIZER),
    ("/parallel3d/data_parallel/", OPTIMIZER),
    ("/torch/distributed/fsdp/", SHARDING),
    ("/parallel3d/pipeline/", OTHER),
    ("/parallel3d/data/", OTHER),
    ("/parallel3d/trainer.py", OTHER),
)
# (part of a file's path, function or None for any, the kind of memory), the first that fits.
_KINDS = (
    ("/parallel3d/tensor_parallel/head_loss.py", "train", "activations"),  # of the hidden states
    ("/parallel3d/tensor_parallel/head_loss.py", None, "logits"),
    ("/parallel3d/tensor_parallel/cross_entropy.py", None, "logits"),
    ("/parallel3d/parameters/gradients.py", None, "buffers"),  # products to be added
    ("/fsdp/_fully_shard/_fsdp_param.py", "to_accumulated_grad_if_needed", "gradients"),
    ("/fsdp/_fully_shard/_fsdp_param.py", None, "parameters"),  # gathered
    ("/torch/distributed/fsdp/", None, "buffers"),
    ("/parallel3d/data_parallel/", None, "buffers"),
    ("/parallel3d/optim/", None, "buffers"),
    ("/parallel3d/models/", None, "activations"),
    ("/parallel3d/tensor_parallel/", None, "activations"),
    ("/parallel3d/pipeline/", None, "activations"),
    ("/parallel3d/trainer.py", None, "buffers"),
)
_PHASES = (
    ("/parallel3d/tensor_parallel/head_loss.py", None, "head and loss"),
    ("/parallel3d/pipeline/executor.py", "_forward", "forward"),
    ("/parallel3d/pipeline/executor.py", "_backward", "backward"),
    ("/parallel3d/pipeline/executor.py", "_weights", "weight gradients"),
    ("/parallel3d/pipeline/executor.py", "_communicate", "messages between stages"),
    ("/parallel3d/optim/optimizer.py", None, "optimizer"),
    ("/parallel3d/data_parallel/", "publish", "optimizer"),
    ("/parallel3d/data_parallel/", "finish_step", "reduction of the gradients"),
)


class FrameFacts(NamedTuple):
    """What the code of a frame says; None: nothing."""

    part: str | None
    kind: str | None
    phase: str | None


_known: dict[CodeType, FrameFacts] = {}


def _facts(code: CodeType) -> FrameFacts:
    found = _known.get(code)
    if found is None:
        path, name = code.co_filename.replace("\\", "/"), code.co_name
        part = next((part for where, part in _PARTS if where in path), None)
        kinds, phases = (
            [what for where, function, what in rules if where in path and function in (None, name)]
            for rules in (_KINDS, _PHASES)
        )
        found = FrameFacts(part, *(next(iter(some), None) for some in (kinds, phases)))
        _known[code] = found
    return found


def _first(index: int, start: FrameType | None) -> str | None:
    frame = start
    while frame is not None:
        found = _facts(frame.f_code)[index]
        if found is not None:
            return found
        frame = frame.f_back
    return None


def part_of_step() -> str:
    """blocks, loss, optimizer, sharding (what FSDP2 copies) or other."""
    return _first(0, sys._getframe(1)) or BLOCKS


def kind_of_memory() -> str:
    """activations, logits, buffers, and what FSDP2 makes of parameters and gradients."""
    return _first(1, sys._getframe(1)) or "activations"


def phase_of_step() -> str:
    """In words."""
    found = _first(2, sys._getframe(1))
    if found is not None:
        return found
    by_autograd = isinstance(threading.current_thread(), threading._DummyThread)
    return "backward" if by_autograd else "between forward and backward passes"


def caller() -> str:
    """file:line of the innermost frame of parallel3d outside of the pretended device."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        inside = path.rpartition("/parallel3d/")[2]
        if inside != path and not inside.startswith(
            ("pretend/", "commands/dryrun/", "device/accelerator.py")
        ):
            return f"{inside}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
