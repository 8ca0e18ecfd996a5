"""The pipeline of plain modules beside one process that takes the micro-batches one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel3d as p3d
from parallel3d.schedules.schedule import FORMS

MICROBATCHES = 6
TOLERANCE = 1e-9  # fp64


class Fork(nn.Module):
    """A tensor in, two of other shapes out; one weight serves twice."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.flatten(2).transpose(1, 2)
        y = self.both(F.gelu(self.both(x)))
        return y, x.mean(1)


class Meet(nn.Module):
    """Two tensors in, one out; an embedding that is also a head, a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.table = nn.LayerNorm(12), nn.Embedding(5, 12)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, y: Tensor, mean: Tensor) -> Tensor:
        x = self.norm(y + mean.unsqueeze(1)).mean(1) + self.table(torch.tensor([1]))
        return x @ self.table.weight.t() + F.linear(x, self.table.weight)


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def modules() -> list[nn.Module]:
    torch.manual_seed(3)
    return [
        Half(),  # without parameters: its backward has nothing to do
        nn.Conv2d(3, 8, 3, stride=2, padding=1),
        nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()),
        nn.Conv2d(8, 12, (3, 1), padding="same", bias=False),
        nn.Conv2d(12, 12, 3, padding=(1, 1), groups=3),
        Fork(),
        Meet(),
        nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4)),
    ]


def batch(step: int) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(step)
    images = torch.randn(2 * MICROBATCHES, 3, 8, 8, generator=stream, dtype=torch.float64)
    return images, torch.randint(4, (2 * MICROBATCHES,), generator=stream)


def alone(replicas: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps and the state after them; of replicas, the mean of their gradients."""
    net = nn.Sequential(*modules()).double()
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.1), []
    for step in range(3):
        optimizer.zero_grad()
        total = 0.0
        for replica in range(replicas):
            images, labels = batch(step * replicas + replica)
            for x, y in zip(images.chunk(MICROBATCHES), labels.chunk(MICROBATCHES), strict=True):
                for module in net:
                    x = module(*x) if isinstance(x, tuple) else module(x)
                loss = F.cross_entropy(x, y) / (MICROBATCHES * replicas)
                loss.backward()
                total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, net.state_dict()


def trained(pipe: p3d.Pipeline, replica: int = 0, replicas: int = 1) -> tuple[list[float], dict]:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        images, labels = batch(step * replicas + replica)
        loss = pipe.step(images if pipe.is_first else None, labels if pipe.is_last else None)
        optimizer.step()
        losses.append(loss.item())
    return losses, pipe.state_dict()


def agrees(got: tuple[list[float], dict], wanted: tuple[list[float], dict], what: str) -> None:
    assert got[0] == pytest.approx(wanted[0], abs=TOLERANCE), what
    assert list(got[1]) == list(wanted[1])
    for name, value in wanted[1].items():
        torch.testing.assert_close(
            got[1][name], value, rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


def every_schedule(ranks: int) -> None:
    groups, wanted = p3d.init(pp=ranks), alone()
    for schedule in FORMS:
        for shared_memory in (True, False):
            pipe = p3d.Pipeline(
                [m.double() for m in modules()],
                groups.pp,
                loss_fn=F.cross_entropy,
                schedule=schedule,
                num_microbatches=MICROBATCHES,
                shared_memory=shared_memory,
            )
            agrees(trained(pipe), wanted, f"{schedule} {shared_memory=}")
            put_off = [j for e in pipe.executors for j in e.put_off]
            assert not put_off and not pipe.executors[0].live


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_schedule_trains_as_one_process_does(ranks: int, pool) -> None:
    pool.run(ranks, every_schedule, ranks)
