"""A convolutional net that learns to tell generated images apart, on one process.

python examples/image_classifier.py
"""

import torch
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1)
        self.head = nn.Linear(16 * 4 * 4, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.head(x.flatten(1))


def batch(step, size=32):
    """Returns noisy stripes (size, 1, 16, 16) in one of four directions, and its number."""
    random = torch.Generator().manual_seed(step)
    kinds = torch.randint(4, (size,), generator=random)
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    stripes = torch.stack([torch.sin(d) for d in (x, y, x + y, x - y)])[kinds]
    noise = 0.3 * torch.randn(size, 1, 16, 16, generator=random)
    return stripes.unsqueeze(1) + noise, kinds


torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for step in range(20):
    images, kinds = batch(step)
    loss = F.cross_entropy(net(images), kinds)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss:.4f}")
