"""The state that parallel training keeps about a parameter, in one attribute of the tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel3d.comm.group import SINGLE, Group
from parallel3d.parameters.spec import ParameterSpec

DeferredGradient = Callable[[], None]  # adds one deferred weight gradient to its bucket


class WeightGradients:
    """Queues deferred weight gradients of linear layers.

    Zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241) compute the gradient of a stage's input
    first (I) and the gradients of its weights later (W), when the rank would otherwise be idle. All
    linear layers call `add_weight_gradient`, so deferring these calls splits a backward. Between I
    and W only the layer's input and its output gradient are kept. Norms, biases and embeddings
    belong to I.
    """

    def __init__(self) -> None:
        self.queue: list[DeferredGradient] | None = None  # if None, gradients are computed at once

    @contextmanager
    def deferred(self) -> Iterator[list[DeferredGradient]]:
        """Defers weight gradients inside the block; yields the queue, to be called in order."""
        queue: list[DeferredGradient] = []
        self.queue = queue
        try:
            yield queue
        finally:
            self.queue = None


@dataclass
class ParameterState:
    """All that parallel training keeps about one parameter (see `state_of`).

    Attributes:
        spec: the shards of full tensors that it holds, or None outside of this package's layers.
        tp: the group of the tensor-parallel layer to which it belongs.
        pp: the group of the `Pipeline` to which it belongs, whose other ranks do not hold it.
        main_grad: view of a bucket to which gradients are added, or None if `.grad` takes them.
        additions: number of additions to `main_grad` that make one gradient.
        added: number of additions since the last complete gradient.
        register_grad_ready: notifies the reducer of a gradient that was added to `main_grad`.
        weight_gradients: queue of its pipeline stage, or None if its gradients are never deferred.
        compute_dtype: dtype in which FSDP2 gathers it, or None if FSDP2 does not shard it.
        is_partial: whether a rank of tp has only the gradient of its own features or tokens, and
            `sum_gradients_over` was called for it.
        unhook: removes the hook by which `sum_gradients_over` sums its gradients.
    """

    spec: ParameterSpec | None = None
    tp: Group = SINGLE
    pp: Group = SINGLE
    main_grad: Tensor | None = None
    additions: int = 1
    added: int = 0
    register_grad_ready: Callable[[], None] = lambda: None
    weight_gradients: WeightGradients | None = None
    compute_dtype: torch.dtype | None = None
    is_partial: bool = False
    unhook: Callable[[], None] = lambda: None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles to an empty placeholder, because process groups cannot be pickled."""
        return OrderedDict, ()  # `torch.load(weights_only=True)` allows this type


def state_of(parameter: Tensor) -> ParameterState:
    """Returns the parameter's state, the only attribute that this package adds to a tensor."""
    state = getattr(parameter, "parallel_state", None)
    # A new tensor has no such attribute, and a parameter from a file has the empty placeholder.
    if not isinstance(state, ParameterState):
        state = ParameterState()
        parameter.parallel_state = state  # type: ignore[attr-defined]
    return state


def spec_of(parameter: Tensor) -> ParameterSpec:
    """Returns a parameter's spec, which every parameter of this package's layers has."""
    spec = state_of(parameter).spec
    assert spec is not None
    return spec
