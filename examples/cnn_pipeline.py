"""A small convolutional net whose layers are spread over the ranks of a pipeline.

    python examples/cnn_pipeline.py
    torchrun --nproc-per-node 2 examples/cnn_pipeline.py zb_h1

The losses are the same for 1 to 3 ranks and every schedule. (A schedule with two stages a rank
needs a block for each stage.)
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import parallel3d as p3d

torch.set_default_dtype(torch.float64)


def batch(step, size=32):
    """Returns images (size, 1, 8, 8) with a bright corner, and the corner's number."""
    random = torch.Generator().manual_seed(step)
    corners = torch.randint(4, (size,), generator=random)
    images = torch.randn(size, 1, 8, 8, generator=random)
    for image, corner in zip(images, corners.tolist(), strict=True):
        image[0, corner // 2 * 4 :, corner % 2 * 4 :][:4, :4] += 1.0
    return images, corners


groups = p3d.init(pp=None, dp=1)  # all ranks in one pipeline
torch.manual_seed(0)
blocks = nn.Sequential(
    nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()),
    nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
    nn.Linear(8 * 4 * 4, 4),
).to(groups.device)
schedule = sys.argv[1] if len(sys.argv) > 1 else "1f1b"
pipe = p3d.Pipeline(
    blocks, groups.pp, loss_fn=F.cross_entropy, schedule=schedule, num_microbatches=8
)
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
for step in range(20):
    optimizer.zero_grad()
    images, corners = (t.to(groups.device) for t in batch(step))
    loss = pipe.step(images, corners)  # forwards and backwards of all micro-batches
    optimizer.step()
    if groups.rank == 0:
        print(f"step {step}: loss {loss:.4f}")
weights = pipe.state_dict()  # of `blocks`; collective: whole on every rank
groups.close()
