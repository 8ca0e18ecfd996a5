"""Activation checkpointing (Chen et al. 2016; Korthikanti et al. 2022 §5), and compiler backends.

`repeats.py` lists the parts of a layer that may be checkpointed. Communication is repeated in the
same order on every rank of a tensor-parallel group. `layer` repeats one all-reduce without sequence
parallelism, and two all-gathers and a reduce-scatter with it. `mlp` repeats one all-gather with
sequence parallelism. Other parts repeat no communication. A checkpointed part ends in a linear
layer, whose GEMM and reduction are not repeated. Only a whole layer that ends in a norm
(`model.norm_position`) repeats both, because the norm needs their result.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.device.fused import EQUAL_BITS


def recomputed(function: Callable[..., Any], *args: Any, draws: bool = False) -> Any:
    """Returns `function(*args)`, and keeps only the tensors in `args` for the backward.

    `draws`: whether the function may draw from PyTorch's generators, whose states are then restored
    for the repetition. The transformer's dropout masks use none (`models/dropout.py`).
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws)


def checkpoint_up_to_linear(
    linear: Callable[[Tensor], Tensor], function: Callable[..., Tensor], *args: Any, again: bool
) -> Tensor:
    """Returns `linear(function(*args))`.

    With `again`, the backward computes the input of the linear layer again, but not its GEMM. In
    eager mode the linear layer is inside the checkpoint, which ends with its input (see
    `linear_ops._Keep`). In a compiled block it is outside, because the compiler keeps no result
    from inside a checkpoint and would run the GEMM again.
    """
    if not again:
        return linear(function(*args))
    if torch.compiler.is_compiling():
        return linear(recomputed(function, *args))
    return recomputed(lambda *given: linear(function(*given)), *args)


def shared_inductor(
    graph: GraphModule, inputs: Sequence[Any], *, saves_operands: bool = False
) -> Callable[..., Any]:
    """Compiles a graph with TorchInductor; it is a backend for `torch.compile`.

    On a CPU one rank of each host compiles a graph, under a lock, and the others find the result in
    TorchInductor's cache. The lock is never held while a graph runs, so no rank in a collective
    waits for it. On accelerators all ranks compile, because the cache's key contains the index of
    the device.

    Args:
        saves_operands: whether deferred weight gradients keep operands of linear layers after the
            graph has run (`parameters.gradients`). Then buffers that an operator has read must not
            be reused.
    """
    from parallel3d.private_names import compile_fx, compile_fx_inner

    def one_at_a_time(graph: GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        with _lock(graph, inputs):
            return compile_fx_inner(graph, inputs, **how)

    options = {"allow_buffer_reuse": False, "inplace_buffers": False} if saves_operands else {}
    if any(isinstance(x, torch.Tensor) and is_on_accelerator(x) for x in inputs):
        compiled = compile_fx(graph, inputs, config_patches={**EQUAL_BITS, **options})
    else:
        compiled = compile_fx(graph, inputs, inner_compile=one_at_a_time, config_patches=options)
    assert callable(compiled)  # other types come from ahead-of-time compilation
    return compiled


def without_inplace_reuse(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compiles a graph like `shared_inductor`, for runs with deferred weight gradients."""
    # This is not a `functools.partial`, because `torch.compile` identifies a backend by its name,
    # and models share code only if they have the same backend.
    return shared_inductor(graph, inputs, saves_operands=True)


@contextmanager
def _lock(graph: GraphModule, inputs: Sequence[Any]) -> Iterator[None]:
    from parallel3d.private_names import inductor_cache

    kinds = [(x.dtype, x.shape) if isinstance(x, torch.Tensor) else type(x) for x in inputs]
    name = hashlib.sha256(f"{graph.code}{kinds}".encode()).hexdigest()[:16]
    folder = Path(inductor_cache())
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"parallel3d-{name}.lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
