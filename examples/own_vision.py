"""Trains a vision transformer on pictures that numpy draws: bars, discs and checkerboards.

    python examples/own_vision.py
    python examples/own_vision.py tp=2 pp=2 model.hidden=96 model.num_layers=6   # starts four ranks
    python examples/own_vision.py verify tp=2 pp=2

tp splits heads and inner features; patches, places and classes are whole on each rank.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import parallel3d as p3d


class Patches(nn.Module):
    def __init__(self, hidden, patch):
        super().__init__()
        self.cut = nn.Conv2d(1, hidden, patch, stride=patch)
        self.place = nn.Parameter(0.1 * torch.randn(1, (16 // patch) ** 2, hidden))

    def forward(self, inputs):
        return self.cut(inputs.batch["picture"]).flatten(2).transpose(1, 2) + self.place


class Block(nn.Module):
    def __init__(self, hidden, heads, parallel):
        super().__init__()
        self.size, tp = hidden // heads, parallel.tp
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = p3d.ColumnParallelLinear(hidden, dict.fromkeys("qkv", hidden), tp)
        self.q_norm = nn.LayerNorm(self.size)
        p3d.sum_gradients_over(self.q_norm, tp)  # a rank normalises its own heads
        self.out = p3d.RowParallelLinear(hidden, hidden, tp)
        self.up = p3d.ColumnParallelLinear(hidden, 4 * hidden, tp)
        self.down = p3d.RowParallelLinear(4 * hidden, hidden, tp)
        self.dropout = parallel.dropout("mlp", 0.1)

    def forward(self, x, inputs):
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, -1, self.size))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.q_norm(q), k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), inputs)


class Kinds(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3)

    def forward(self, x, inputs):
        return self.out(self.norm(x).mean(1))


@dataclass
class Vision(p3d.Model):
    hidden: int = 64
    heads: int = 8
    num_layers: int = 4
    patch: int = 4

    def embedding(self, parallel):
        return Patches(self.hidden, self.patch)

    def block(self, number, parallel):
        return Block(self.hidden, self.heads, parallel)

    def head(self, parallel):
        return Kinds(self.hidden)

    def loss(self, outputs, inputs):
        kinds = inputs.batch["kind"]
        losses = F.cross_entropy(outputs.float(), kinds, reduction="none")
        return p3d.Loss(losses.sum(), len(kinds), {"accuracy": (outputs.argmax(-1) == kinds).sum()})


@dataclass
class Pictures:
    first: int
    windows: int  # number of them

    def sample(self, i):
        rng = np.random.default_rng(self.first + i % self.windows)
        kind, (y, x) = int(rng.integers(3)), np.mgrid[:16, :16]
        stripes, width = (x + rng.integers(4)) // rng.integers(2, 4) % 2, rng.uniform(3, 7)
        disc = (x - rng.uniform(5, 10)) ** 2 + (y - rng.uniform(5, 10)) ** 2 < width**2
        picture = (stripes, disc, stripes ^ (y // 3 % 2))[kind] + rng.normal(0, 0.5, (16, 16))
        return {"picture": picture[None].astype("float32"), "kind": kind}


if __name__ == "__main__":
    words = ["train.steps=100", "global_batch_size=32", "train.eval_every=50"]
    p3d.fit(words, model=Vision, train=Pictures(0, 3000), valid=Pictures(5000, 96))
