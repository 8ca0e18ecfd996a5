"""Builds the two nets to train, small forms of the ResNet and the BERT of Li et al. 2020."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 256
WIDTH, LENGTH = 256, 32


class Block(nn.Module):
    """Two convolutions with BatchNorm around a shortcut (He et al. 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.convolutions[0](x)))
        return F.relu(x + self.norms[1](self.convolutions[1](inner)))


def convolutions() -> nn.Module:
    """Builds a net with many small parameters and much to compute: 2 million numbers in 32
    tensors."""
    layers: list[nn.Module] = []
    width = 3
    for wider in (64, 128, 256):
        layers += [nn.Conv2d(width, wider, 3, stride=2, padding=1), nn.BatchNorm2d(wider)]
        layers += [nn.ReLU(), Block(wider)]
        width = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def matrices() -> nn.Module:
    """Builds a net with a few large parameters and little to compute: 3.2 million numbers in 52
    tensors."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
    )
    body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(nn.Linear(64, WIDTH), body, nn.Linear(WIDTH, CLASSES))


NETS: dict[str, Callable[[], nn.Module]] = {"convolutions": convolutions, "matrices": matrices}


def inputs(name: str, rank: int) -> tuple[Tensor, Tensor]:
    """Returns a rank's batch, and its target classes."""
    generator = torch.Generator().manual_seed(rank)
    shape = (2, 3, 32, 32) if name == "convolutions" else (2, LENGTH, 64)
    labels = shape[:1] if name == "convolutions" else shape[:2]
    return (
        torch.randn(shape, generator=generator),
        torch.randint(CLASSES, labels, generator=generator),
    )


def made(name: str) -> nn.Module:
    """Creates the same weights on every rank."""
    torch.manual_seed(0)
    return NETS[name]()
