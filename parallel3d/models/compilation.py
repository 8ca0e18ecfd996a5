"""torch.compile for ranks that share a host: on CPU each graph is lowered by one of them.

Ranks of equal place hold equal graphs. Left alone they would all lower the same one at the same
time, each on its share of the cores. Here the first takes a lock while it does; the others wait
for it and then find the result in TorchInductor's cache, which the ranks of a host share.

Accelerators have an index, it is part of the cache's key, and so no rank would find what another
lowered. There all lower theirs at the same time, on the host's many cores.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.device.fused import equal_on_all_ranks


def shared_inductor(
    graph: GraphModule, inputs: Sequence[Any], *, keeps_operands: bool = False
) -> Callable[..., Any]:
    """A backend for `torch.compile`: TorchInductor, on CPU one rank of the host at a time.

    The lock is held while a graph is compiled and never while one runs, so that a rank that
    waits in a collective is never waited for here. A rank that dies loses its lock.

    Args:
        keeps_operands: linear layers hold on to the operands of their weight gradients after the
            graph has run (`parameters.gradients`), so no memory that an operator has read may be
            written again: to the compiler it is dead behind the last operator that it can see.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def one_at_a_time(graph: GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        with _lock(graph, inputs):
            return compile_fx_inner(graph, inputs, **how)

    kept = {"allow_buffer_reuse": False, "inplace_buffers": False} if keeps_operands else {}
    if not any(isinstance(x, torch.Tensor) and is_on_accelerator(x) for x in inputs):
        return compile_fx(graph, inputs, inner_compile=one_at_a_time, config_patches=kept)
    return compile_fx(graph, inputs, config_patches={**equal_on_all_ranks(), **kept})


def keeping_inductor(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """`shared_inductor` where weight gradients are put off. (To `torch.compile` a backend is what
    it is by name: a new object for each model would share no code with the one before.)"""
    return shared_inductor(graph, inputs, keeps_operands=True)


@contextmanager
def _lock(graph: GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    """Held by one process of the host for this graph; other graphs have locks of their own."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    kinds = [(x.dtype, x.shape) if isinstance(x, torch.Tensor) else type(x) for x in inputs]
    name = hashlib.sha256(f"{graph.code}{kinds}".encode()).hexdigest()[:16]
    folder = Path(cache_dir())
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"parallel3d-{name}.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
