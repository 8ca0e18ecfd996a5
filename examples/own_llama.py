"""Trains a Llama with an MLP of its own, squared ReLU with a gate, on text.

    python examples/own_llama.py data=stdlib
    python examples/own_llama.py data=stdlib tp=2 pp=2 sp=true      # starts four ranks
    torchrun --nproc-per-node 8 examples/own_llama.py tp=2 zero=3
    python examples/own_llama.py verify tp=2 pp=2 sp=true           # is the layout right?

Its layers are those of parallel3d, so tp splits heads and inner features, and sp the sequence.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import parallel3d as p3d


class Block(nn.Module):
    def __init__(self, hidden, heads, inner, parallel):
        super().__init__()
        tp = parallel.tp
        how = {"bias": False, "sequence_parallel": parallel.sequence_parallel}
        self.size = hidden // heads
        self.norm_1, self.norm_2 = norm(hidden, parallel), norm(hidden, parallel)
        self.qkv = p3d.ColumnParallelLinear(hidden, dict.fromkeys("qkv", hidden), tp, **how)
        self.out = p3d.RowParallelLinear(hidden, hidden, tp, **how)
        self.up = p3d.ColumnParallelLinear(hidden, {"gate": inner, "up": inner}, tp, **how)
        self.down = p3d.RowParallelLinear(inner, hidden, tp, **how)

    def forward(self, x, inputs):
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, -1, self.size))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norm_2(x)).chunk(2, -1)
        return x + self.down(F.relu(gate).square() * up)


def norm(hidden, parallel):
    module = nn.RMSNorm(hidden, eps=1e-5)
    if parallel.sequence_parallel:  # it sees this rank's part of the sequence alone
        p3d.sum_gradients_over(module, parallel.tp)
    return module


def rotate(x):
    pairs = x.shape[-1] // 2
    rates = 10_000.0 ** -torch.arange(pairs, device=x.device).div(pairs)
    angles = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1) * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Words(p3d.VocabParallelEmbedding):
    def forward(self, inputs):
        return super().forward(inputs.batch["tokens"])


class Head(nn.Module):
    def __init__(self, vocab, hidden, parallel):
        super().__init__()
        self.norm, self.tp = norm(hidden, parallel), parallel.tp
        how = {"bias": False, "sequence_parallel": parallel.sequence_parallel}
        self.out = p3d.ColumnParallelLinear(hidden, vocab, parallel.tp, **how)

    def forward(self, x, inputs):
        return self.out(self.norm(x)), self.tp  # logits of this rank's part of the vocabulary


@dataclass
class OwnLlama(p3d.Model):
    hidden: int = 128
    heads: int = 8
    inner: int = 256
    num_layers: int = 4
    seq_length: int = 128
    vocab_size: int = 264  # bytes and the end of a document, in a multiple of 8

    def embedding(self, parallel):
        how = {"sequence_parallel": parallel.sequence_parallel}
        return Words(self.vocab_size, self.hidden, parallel.tp, **how)

    def block(self, number, parallel):
        return Block(self.hidden, self.heads, self.inner, parallel)

    def head(self, parallel):
        return Head(self.vocab_size, self.hidden, parallel)

    def loss(self, outputs, inputs):
        labels, mask = inputs.batch["labels"], inputs.batch["loss_mask"]
        logits, tp = outputs
        return p3d.vocab_parallel_cross_entropy(logits, labels, mask, tp)


if __name__ == "__main__":
    p3d.fit(["train.steps=100", "optim.lr=3e-3"], model=OwnLlama)
