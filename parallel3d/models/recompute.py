"""Activation recomputation: memory for compute (Chen et al. 2016; Korthikanti et al. 2022 §5).

| `recompute` | kept of a layer | made again in the backward |
|---|---|---|
| none | what every operator saves | nothing |
| selective | all but the inside of attention | attention, from the fused projection on; no GEMM |
| full | its input alone | the layer, up to the input of its last GEMM |

`recompute_layers` has only the first layers of a stage do so: early stages hold the activations of
most micro-batches.

The forward that is run again only computes and communicates. Gradients are added and buckets told
by the backward, which runs once. Communication is repeated in the same order on every rank of a
tensor group: without sequence parallelism one all-reduce a layer (`full`), with it two all-gathers
and a reduce-scatter. The last GEMM of a layer and its reduction are not repeated (see
`tensor_parallel.linear_nodes`; compiled blocks drop them as dead code).
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
