"""Tensor, pipeline and data parallelism together: residual MLPs over words.

    python examples/all_three.py
    torchrun --nproc-per-node 8 examples/all_three.py 2 2     # tp=2 pp=2, so dp=2

The losses are the same under every layout.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import parallel3d as p3d

torch.set_default_dtype(torch.float64)


class Block(nn.Module):
    def __init__(self, size, group):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = p3d.ColumnParallelLinear(size, 4 * size, group)
        self.down = p3d.RowParallelLinear(4 * size, size, group)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


tp, pp = (int(size) for size in sys.argv[1:3]) if len(sys.argv) > 2 else (1, 1)
groups = p3d.init(tp=tp, pp=pp)
torch.manual_seed(0)
blocks = nn.Sequential(
    p3d.VocabParallelEmbedding(32, 16, groups.tp),
    Block(16, groups.tp),
    Block(16, groups.tp),
    p3d.ColumnParallelLinear(16, 32, groups.tp, gather_output=True),
).to(groups.device)
pipe = p3d.Pipeline(
    blocks,
    groups.pp,
    loss_fn=lambda out, words: F.cross_entropy(out.flatten(0, 1), words.flatten()),
    num_microbatches=4,
    dp=groups.dp,
)
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
losses = []
for step in range(20):
    random = torch.Generator().manual_seed(step)
    words = (torch.randint(32, (32, 1), generator=random) + 3 * torch.arange(9)) % 32
    mine = words.chunk(groups.dp.size)[groups.dp.index].to(groups.device)  # this replica's samples
    optimizer.zero_grad()
    loss = pipe.step(mine[:, :-1], mine[:, 1:])
    p3d.clip_grad_norm_(pipe.parameters(), 1.0)  # by the whole model's norm
    optimizer.step()
    if groups.dp.size > 1:  # adds up the replicas' losses, to print them
        dist.all_reduce(loss, group=groups.dp.handle)
    losses.append(loss.item() / groups.dp.size)
    if groups.rank == 0:
        print(f"step {step}: loss {losses[-1]:.4f}")
weights = pipe.state_dict()  # whole on every rank, for any layout
groups.close()
