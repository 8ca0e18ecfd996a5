"""Modules of every kind that DistributedDataParallel may wrap, and the results of a single process.

The reference is plain PyTorch: one module, one backward of the mean over the ranks' losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CLASSES = 5


class Cnn(nn.Module):
    """Convolutions in the channels-last layout, two inputs, a dict of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.deep = nn.Conv2d(8, 12, 3, stride=2).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(0.5))  # a parameter without dimensions
        self.head = nn.Linear(12, CLASSES)
        self.bonus = nn.Linear(12, 1)

    def forward(self, images: Tensor, *, shift: Tensor) -> dict[str, Tensor]:
        hidden = F.gelu(self.norm(self.stem(images))) * self.scale
        pooled = F.relu(self.deep(hidden)).mean((2, 3)) + shift
        return {"logits": self.head(pooled), "bonus": self.bonus(pooled)}


class Shared(nn.Module):
    """One matrix that is used twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(12, 12, bias=False)
        self.again = self.table
        self.head = nn.Linear(12, CLASSES)
        self.head.extra = self.head.weight

    def forward(self, images: Tensor, *, shift: Tensor) -> Tensor:
        x = images.flatten(1)[:, :12] + shift
        return self.head(torch.tanh(self.again(torch.tanh(self.table(x)))))


class Unused(nn.Module):
    """A layer that is never used, and one that only the inputs of some ranks reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.never = nn.Linear(7, 3)
        self.rare = nn.Linear(12, 12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, images: Tensor, *, shift: Tensor) -> Tensor:
        x = torch.tanh(self.first(images.flatten(1)[:, :12]))
        if float(shift) > 0.4:
            x = x + self.rare(x)
        return self.head(x + shift)


class Frozen(Shared):
    """The preceding module with the first matrix frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.table.weight.requires_grad_(False)
        self.head.bias.requires_grad_(False)


class Twice(nn.Module):
    """A layer checkpointed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.layer = nn.Linear(12, 12)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, images: Tensor, *, shift: Tensor) -> Tensor:
        x = self.first(images.flatten(1)[:, :12] + shift)
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=False))
        return self.head(x)


class Mixed(nn.Module):
    """Parameters of two dtypes in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12).float()
        self.head = nn.Linear(12, CLASSES)

    def forward(self, images: Tensor, *, shift: Tensor) -> Tensor:
        x = torch.tanh(self.first(images.flatten(1)[:, :12] + shift))
        return self.head(self.second(x.float()).double())


class Batch(NamedTuple):
    images: Tensor
    shift: Tensor
    labels: Tensor


def batch_of(rank: int, step: int) -> Batch:
    """Returns this rank's inputs of a step; ranks have different shifts."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(2, 3, 6, 6, generator=generator)
    labels = torch.randint(CLASSES, (2,), generator=generator)
    return Batch(images, torch.tensor((rank + step) % 3 * 0.3), labels)


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    made = net(batch.images, shift=batch.shift)
    if isinstance(made, dict):
        return F.cross_entropy(made["logits"], batch.labels) + made["bonus"].square().mean()
    return F.cross_entropy(made, batch.labels)


@dataclass(frozen=True)
class Case:
    """A module, with the settings of its wrapper and its training.

    Attributes:
        micro: number of backwards in a step, all but the last under no_sync.
        to_none: argument of zero_grad.
    """

    make: Callable[[], nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    micro: int = 1
    steps: int = 8
    to_none: bool = True
    shared_memory: bool = True

    def made(self) -> nn.Module:
        torch.manual_seed(7)
        return self.make()

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        # Weight decay and momentum change parameters whose gradient is zero, but not parameters
        # without one.
        return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def expected(case: Case, world: int) -> dict[str, Tensor]:
    """Returns the weights that one process ends with."""
    net = case.made()
    optimizer = case.optimizer(net)
    for step in range(case.steps):
        optimizer.zero_grad(case.to_none)
        for rank in range(world):
            for micro in range(case.micro):
                (loss_of(net, batch_of(rank, case.micro * step + micro)) / world).backward()
        optimizer.step()
    return dict(net.named_parameters())
