"""Activation recomputation: memory for compute (Chen et al. 2016; Korthikanti et al. 2022 §5).

| a part in `recompute` | no longer kept of a layer | made again in the backward |
|---|---|---|
| norm | what both norms give | both norms, from the stream between the blocks, which they keep |
| activation | the input of `down` | the non-linearity, from the result of `up` |
| attention | all between `qkv` and `out`, the input of `out` too | attention, from the projection |
| mlp | the same, and the result of `up` | its GEMM and the non-linearity, from the norm's result |
| layer | all but its input | the layer, up to the input of its last GEMM |

With norm and mlp the MLP is made again from the stream. `none` is no part, `selective` attention,
`full` layer. `recompute_layers` has only the first layers of a stage do so: early stages hold the
activations of most micro-batches.

The forward that is run again only computes and communicates. Gradients are added and buckets told
by the backward, which runs once. Communication is repeated in the same order on every rank of a
tensor group: by `layer`, without sequence parallelism one all-reduce, with it two all-gathers and a
reduce-scatter; by `mlp` one all-gather with it; by other parts none. A segment ends in a linear
layer, whose GEMM and reduction are not repeated.
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
from parallel3d.device.fused import deterministic_inductor


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """`function(*args)`, of which only the tensors in `args` are kept for the backward.

    Works in eager mode and inside of compiled blocks. No generator's state is kept or restored:
    dropout's masks are a function of their place (`models/dropout.py`).
    """
    if not torch.is_grad_enabled():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def checkpoint_up_to_linear(
    linear: Callable[[Tensor], Tensor], function: Callable[..., Tensor], *args: Any, again: bool
) -> Tensor:
    """`linear(function(*args))`; with `again` the linear layer's input is made again in the
    backward, from `args`, and its GEMM is not.

    The layer stands inside of what is checkpointed, which ends with its input (see
    `tensor_parallel.linear_nodes`). To a compiler it stands behind: of a result from the inside the
    compiler keeps nothing, and would run the GEMM again.
    """
    if not again:
        return linear(function(*args))
    if torch.compiler.is_compiling():
        return linear(recomputed(function, *args))
    return recomputed(lambda *given: linear(function(*given)), *args)


# torch.compile for ranks that share a host: on CPU each graph is lowered by one of them.
#
# Ranks of equal place hold equal graphs. Left alone they would all lower the same one at the same
# time, each on its share of the cores. Here the first takes a lock while it does; the others wait
# for it and then find the result in TorchInductor's cache, which the ranks of a host share.
#
# Accelerators have an index, it is part of the cache's key, and so no rank would find what another
# lowered. There all lower theirs at the same time, on the host's many cores.


def shared_inductor(
    graph: GraphModule, inputs: Sequence[Any], *, saves_operands: bool = False
) -> Callable[..., Any]:
    """A backend for `torch.compile`: TorchInductor, on CPU one rank of the host at a time.

    The lock is held while a graph is compiled and never while one runs, so that a rank that
    waits in a collective is never waited for here. A rank that dies loses its lock.

    Args:
        saves_operands: linear layers hold on to the operands of their weight gradients after the
            graph has run (`parameters.gradients`), so no memory that an operator has read may be
            written again: to the compiler it is dead behind the last operator that it can see.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def one_at_a_time(graph: GraphModule, inputs: Sequence[Any], **how: Any) -> Any:
        with _lock(graph, inputs):
            return compile_fx_inner(graph, inputs, **how)

    kept = {"allow_buffer_reuse": False, "inplace_buffers": False} if saves_operands else {}
    if not any(isinstance(x, torch.Tensor) and is_on_accelerator(x) for x in inputs):
        return compile_fx(graph, inputs, inner_compile=one_at_a_time, config_patches=kept)
    return compile_fx(graph, inputs, config_patches={**deterministic_inductor(), **kept})


def without_inplace_reuse(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """`shared_inductor` where weight gradients are put off. (To `torch.compile` a backend is what
    it is by name: a new object for each model would share no code with the one before.)"""
    return shared_inductor(graph, inputs, saves_operands=True)


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
