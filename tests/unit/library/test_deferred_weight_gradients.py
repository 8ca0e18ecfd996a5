"""Tests which weight gradients of plain modules are deferred, and that results stay equal."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel3d.comm.group import SINGLE
from parallel3d.library.split_backward import SplitBackward
from parallel3d.models.checkpointing import recomputed
from parallel3d.parameters.state import WeightGradients, state_of
from parallel3d.tensor_parallel.linear_ops import linear_node


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Autocast(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return super().forward(x).double()


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=False)[0]


# module, shape of its input, names of the deferred weights
CASES = {
    "linear": (lambda: nn.Linear(6, 4), (3, 6), ["weight"]),
    "one sample": (lambda: nn.Linear(6, 4), (6,), []),
    "without bias": (lambda: nn.Linear(6, 4, bias=False), (2, 3, 6), ["weight"]),
    "conv1d": (lambda: nn.Conv1d(6, 4, 3, padding=2, dilation=2), (2, 6, 9), ["weight"]),
    "conv2d": (lambda: nn.Conv2d(6, 4, (3, 2), (2, 1), groups=2), (2, 6, 8, 8), ["weight"]),
    "conv2d, no batch": (lambda: nn.Conv2d(6, 4, 3), (6, 8, 8), []),
    "conv2d, same": (lambda: nn.Conv2d(6, 4, 3, padding="same"), (2, 6, 8, 8), []),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, bias=False), (2, 2, 4, 4, 4), ["weight"]),
    "norm": (lambda: nn.LayerNorm(6), (3, 6), []),
    "attention": (lambda: Attention(6, 2, batch_first=True), (2, 5, 6), []),
    "checkpointed": (Checkpointed, (3, 6), []),
    "autocast": (lambda: Autocast(6, 6), (3, 6), []),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_equal_and_deferred_where_possible(name: str) -> None:
    make, shape, waiting = CASES[name]
    torch.manual_seed(0)
    theirs = make().double()
    ours, queue = copy.deepcopy(theirs), WeightGradients()
    for parameter in ours.parameters():
        state_of(parameter).weight_gradients = queue
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    data = x.detach().clone().requires_grad_()
    theirs(x).square().sum().backward()
    with SplitBackward():
        y = ours(data)
    with queue.deferred() as jobs:
        y.square().sum().backward()
    assert [n for n, p in ours.named_parameters() if p.grad is None] == waiting
    torch.testing.assert_close(data.grad, x.grad)
    with torch.no_grad():
        for job in jobs:
            job()
    for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)


@pytest.mark.parametrize("name", ["layer", "recomputed layer", "linear", "convolution"])
def test_a_deferred_weight_gradient_does_not_keep_the_graph_of_the_input(name: str) -> None:
    """Operands of deferred weight gradients do not keep the graph that leads to the input."""
    module = nn.Conv1d(5, 5, 1) if name == "convolution" else nn.Linear(6, 6)
    queue = WeightGradients()
    state_of(module.weight).weight_gradients = queue
    x = torch.randn(3, 5, 6, requires_grad=True)

    def stage(x: Tensor) -> Tensor:
        if "layer" in name:
            return linear_node("column", x.square(), module.weight, None, SINGLE, None, True)
        return module(x.square())

    with SplitBackward():
        y = recomputed(stage, x) if name == "recomputed layer" else stage(x)
    with queue.deferred() as jobs:
        y.sum().backward()
    kept = weakref.ref(x)
    del x, y
    assert len(jobs) == 1 and kept() is None
