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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


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
