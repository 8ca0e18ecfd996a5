"""Trains a network of digits' sums on two losses, each logged, with an optimizer of its own.

    python examples/own_two_losses.py
    python examples/own_two_losses.py pp=2 zero=1          # starts all ranks of this host
    python examples/own_two_losses.py tp=2 model.weight=0.3

A sample is a row of digits; the head guesses the parity of their sum, and the sum itself.
"""

import functools
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import parallel3d as p3d


class Lion(torch.optim.Optimizer):
    """Steps by the sign of an average of gradients (Chen et al. 2023)."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.lerp(p.grad, average, fast).sign())
                average.lerp_(p.grad, 1 - slow)


class Embedding(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.digits = nn.Embedding(10, hidden)

    def forward(self, inputs):
        return self.digits(inputs.batch["digits"]).sum(1)


class Block(nn.Module):
    def __init__(self, hidden, parallel):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = p3d.ColumnParallelLinear(hidden, 4 * hidden, parallel.tp)
        self.down = p3d.RowParallelLinear(4 * hidden, hidden, parallel.tp)

    def forward(self, x, inputs):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Guesses(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.parity, self.total = nn.Linear(hidden, 2), nn.Linear(hidden, 1)

    def forward(self, x, inputs):
        return self.parity(x).float(), self.total(x).float().squeeze(-1)


@dataclass
class Sums(p3d.Model):
    hidden: int = 64
    num_layers: int = 4
    weight: float = 0.1  # of the second loss

    def embedding(self, parallel):
        return Embedding(self.hidden)

    def block(self, number, parallel):
        return Block(self.hidden, parallel)

    def head(self, parallel):
        return Guesses(self.hidden)

    def loss(self, outputs, inputs):
        (parity, guess), total = outputs, inputs.batch["digits"].sum(1)
        entropy = F.cross_entropy(parity, total % 2, reduction="sum")
        square = (guess - total / 10).square().sum()
        terms = {"parity": entropy, "square": square}
        return p3d.Loss(entropy + self.weight * square, len(total), terms)


class Digits:
    def sample(self, i):
        return {"digits": np.random.default_rng(i).integers(0, 10, 6)}


if __name__ == "__main__":
    words = ["train.steps=100", "optim.lr=1e-3", "global_batch_size=32"]
    lion = functools.partial(Lion, betas=(0.9, 0.98))
    p3d.fit(words, model=Sums, train=Digits(), optimizer=lion)
