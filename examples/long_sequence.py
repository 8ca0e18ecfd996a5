"""Attention over sequences that are split over all ranks: each holds a part of every document.

    python examples/long_sequence.py
    torchrun --nproc-per-node 2 examples/long_sequence.py ring     # or gather, heads

The losses are the same for any number of ranks (1, 2, 3 …).
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parallel3d as p3d

torch.set_default_dtype(torch.float64)
WORDS, HEADS, WIDTH = 32, 6, 24
LENGTHS = [[25, 1, 15], [41]]  # documents of two sequences of 41 words


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = p3d.context_parallel_attention(q, k, v, groups.cp, documents=split, style=style)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(41, WIDTH)
        self.blocks = nn.Sequential(Block(), nn.LayerNorm(WIDTH), Block(), nn.Linear(WIDTH, WORDS))

    def forward(self, words):
        return self.blocks(self.word(words) + self.position(split.positions))


style = sys.argv[1] if len(sys.argv) > 1 else "gather"
groups = p3d.init(cp=None, dp=1)  # all ranks in one context-parallel group
split = p3d.SplitSequences(LENGTHS, groups.cp, device=groups.device)
torch.manual_seed(0)
layers = [
    nn.Embedding(WORDS, WIDTH),
    Block(),
    nn.LayerNorm(WIDTH),
    Block(),
    nn.Linear(WIDTH, WORDS),
]
net = nn.Sequential(*layers).to(groups.device)
shared = p3d.DistributedDataParallel(net, process_group=groups.dp_cp)  # sums gradients of parts
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for step in range(20):
    random = torch.Generator().manual_seed(step)
    words = (torch.randint(WORDS, (2, 1), generator=random) + 3 * torch.arange(42)) % WORDS
    inputs, labels = (split.take(t.to(groups.device)) for t in (words[:, :-1], words[:, 1:]))
    counts = split.take(torch.ones(2, 41, device=groups.device))  # 0 for the padding
    losses = F.cross_entropy(shared(inputs).flatten(0, 1), labels.flatten(), reduction="none")
    loss = (losses * counts.flatten()).sum() / (2 * 41)  # this rank's part of the mean
    optimizer.zero_grad()
    (loss * groups.dp_cp.size).backward()  # gradients are averaged over the ranks
    optimizer.step()
    total = loss.detach()
    if groups.cp.size > 1:
        dist.all_reduce(total, group=groups.cp.handle)
    if groups.rank == 0:
        print(f"step {step}: loss {total:.4f}")
weights = net.state_dict()
groups.close()
