"""An MLP whose matrices are split over all ranks: each computes its part of every sample.

    python examples/mlp_tensor_parallel.py
    torchrun --nproc-per-node 2 examples/mlp_tensor_parallel.py

The losses are the same for any number of ranks (1, 2, 4 …).
"""

import torch
import torch.nn.functional as F
from torch import nn

import parallel3d as p3d

torch.set_default_dtype(torch.float64)

groups = p3d.init(tp=None, dp=1)  # all ranks in one tensor-parallel group
torch.manual_seed(0)  # the same on all ranks: each keeps its part of the same weights
net = nn.Sequential(
    p3d.ColumnParallelLinear(16, 64, groups.tp),
    nn.GELU(),
    p3d.RowParallelLinear(64, 16, groups.tp),
    nn.LayerNorm(16),
    nn.Linear(16, 1),  # small: every rank has it whole
).to(groups.device)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
for step in range(20):
    random = torch.Generator().manual_seed(step)  # the same on all ranks, too
    x = torch.randn(32, 16, generator=random).to(groups.device)
    loss = F.mse_loss(net(x), torch.sin(x.sum(1, keepdim=True)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if groups.rank == 0:
        print(f"step {step}: loss {loss:.4f}")
weights = net.state_dict()  # whole, and collective: on every rank
groups.close()
