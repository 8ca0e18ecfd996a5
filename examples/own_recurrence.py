"""Trains a block with a recurrence of its own, in plain PyTorch, to continue sums of waves.

    python examples/own_recurrence.py
    python examples/own_recurrence.py pp=2 zero=2 recompute=full    # starts all ranks of this host
    torchrun --nproc-per-node 4 examples/own_recurrence.py pp=2 schedule=zbv

Modules of plain PyTorch are whole on each rank of tp; pipeline, data parallelism, recomputation and
sharded states need nothing of them.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import parallel3d as p3d


class Recurrence(nn.Module):
    """A gated linear recurrence: h = a · h + (1 - a) · x, where x sets the decay a."""

    def __init__(self, hidden, parallel):
        super().__init__()
        self.norm, self.values = nn.LayerNorm(hidden), nn.Linear(hidden, 2 * hidden)
        self.decay, self.out = nn.Parameter(torch.linspace(0, 4, hidden)), nn.Linear(hidden, hidden)
        self.dropout = parallel.dropout("out", 0.1)  # the same elements in every layout

    def forward(self, x, inputs):
        values, gates = self.values(self.norm(x)).chunk(2, -1)
        keep = torch.sigmoid(gates + self.decay)
        state, found = torch.zeros_like(values[:, 0]), []
        for value, a in zip(values.unbind(1), keep.unbind(1), strict=True):
            state = a * state + (1 - a) * value
            found.append(state)
        return x + self.dropout(self.out(torch.tanh(torch.stack(found, 1))), inputs)


class Embedding(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.conv = nn.Conv1d(channels, hidden, 3)

    def forward(self, inputs):
        x = inputs.batch["wave"].transpose(1, 2)
        return self.conv(nn.functional.pad(x, (2, 0))).transpose(1, 2)


class Head(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.out = nn.Linear(hidden, channels)

    def forward(self, x, inputs):
        return self.out(x)


@dataclass
class Waves(p3d.Model):
    hidden: int = 32
    channels: int = 3
    num_layers: int = 4

    def embedding(self, parallel):
        return Embedding(self.channels, self.hidden)

    def block(self, number, parallel):
        return Recurrence(self.hidden, parallel)

    def head(self, parallel):
        return Head(self.channels, self.hidden)

    def loss(self, outputs, inputs):
        error = (outputs.float() - inputs.batch["next"].float()).square().mean(-1)
        mask = inputs.batch["loss_mask"].float()
        return p3d.Loss((error * mask).sum(), mask.sum())


class Samples:
    """Waves of unequal length, so the loss of a micro-batch has another count than the next."""

    def __init__(self, first, windows, length=24):
        self.first, self.windows, self.length = first, windows, length

    def sample(self, i):
        rng = np.random.default_rng(self.first + i % self.windows)
        times, speeds = np.arange(self.length + 1)[:, None], rng.uniform(0.2, 1.5, (1, 3))
        wave = np.sin(times * speeds + rng.uniform(0, 6, (1, 3))).astype("float32")
        mask = np.arange(self.length) < rng.integers(8, self.length)
        return {"wave": wave[:-1], "next": wave[1:], "loss_mask": mask}


if __name__ == "__main__":
    words = ["train.steps=100", "optim.lr=3e-3", "global_batch_size=16", "train.eval_every=50"]
    p3d.fit(words, model=Waves, train=Samples(0, 512), valid=Samples(1000, 64))
