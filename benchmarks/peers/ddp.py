"""Times a training step under parallel3d's DistributedDataParallel and under PyTorch's, in turns.

    python -m benchmarks.peers.ddp --dp 2 4

Both wrap the same module on the same ranks (CPU, gloo, fp32, one thread per rank) with the same
options: PyTorch's defaults, and `find_unused_parameters` where a module needs it. A round is a few
steps of one wrapper and then of the other. The time of a step is the time of its slowest rank. A
row is the median over all steps, and its spread is the ratio of the two in each round. Before that
the gradients of both are compared, as the largest difference over the largest gradient.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import parallel3d as p3d
from benchmarks.peers.peer import commit

VOCAB, LENGTH = 1000, 32


def mlp() -> nn.Module:
    """Builds a multi-layer perceptron: 1.8 million parameters in six tensors."""
    return nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 256)
    )


class Block(nn.Module):
    """Two convolutions with BatchNorm around a shortcut (He et al. 2016)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(inner)))


def cnn() -> nn.Module:
    """Builds a deep network: 0.95 million parameters in 41 tensors, and 27 buffers."""
    layers: list[nn.Module] = []
    width = 3
    for wider in (32, 64, 128):
        layers += [nn.Conv2d(width, wider, 3, 2, 1, bias=False), nn.BatchNorm2d(wider)]
        layers += [nn.ReLU(), Block(wider), Block(wider)]
        width = wider
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 256))


class Language(nn.Module):
    """A small transformer over tokens; its head is tied to the embedding, or has a table of its
    own."""

    def __init__(self, layers: int, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 192)
        self.body = nn.ModuleList(
            nn.TransformerEncoderLayer(192, 4, 768, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(192, VOCAB, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.body:
            x = layer(x)
        return self.head(x)


class Unused(nn.Module):
    """A module with four branches, of which each rank uses one, another in every step; one layer is
    never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 512)
        self.branches = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))
        self.never = nn.Linear(512, 128)
        self.last = nn.Linear(512, 256)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        branch = self.branches[(self.calls + dist.get_rank()) % 4]
        return self.last(F.relu(branch(F.relu(self.first(x)))))


MODULES: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
    "MLP": (mlp, "vectors", {}),
    "CNN": (cnn, "images", {}),
    "transformer": (lambda: Language(3, tied=False), "tokens", {}),
    "shared": (lambda: Language(1, tied=True), "tokens", {}),
    "unused": (Unused, "vectors", {"find_unused_parameters": True}),
}


def inputs_of(kind: str, rank: int) -> tuple[Tensor, Tensor]:
    """Returns an input, and the classes to predict."""
    generator = torch.Generator().manual_seed(rank)
    if kind == "tokens":
        tokens = torch.randint(VOCAB, (4, LENGTH + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    shape = (16, 512) if kind == "vectors" else (4, 3, 32, 32)
    labels = torch.randint(256, (shape[0],), generator=generator)
    return torch.randn(shape, generator=generator), labels


class Side:
    """One of the two wrappers, with its own copy of the module."""

    def __init__(self, name: str, theirs: bool, more: dict) -> None:
        make, self.kind, options = MODULES[name]
        torch.manual_seed(0)
        wrap = nn.parallel.DistributedDataParallel if theirs else p3d.DistributedDataParallel
        self.net = wrap(make(), **options, **more)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.inputs, self.labels = inputs_of(self.kind, dist.get_rank())

    def step(self) -> None:
        self.optimizer.zero_grad()
        made = self.net(self.inputs)
        F.cross_entropy(made.flatten(0, -2), self.labels.flatten()).backward()
        self.optimizer.step()

    def take(self, other: Side) -> None:
        """Copies the weights and buffers of another contender."""
        with torch.no_grad():
            for kind in ("parameters", "buffers"):
                pairs = zip(getattr(self.net, kind)(), getattr(other.net, kind)(), strict=True)
                for mine, theirs in pairs:
                    mine.copy_(theirs)

    def seconds(self, steps: int) -> list[list[float]]:
        """Times steps, each of which starts behind a barrier. Returns the time of the slowest rank
        in each step, and the CPU time of a rank in each step: all its threads, averaged over the
        ranks."""
        found = []
        for _ in range(steps):
            dist.barrier()
            start, spent = time.perf_counter(), time.process_time()
            self.step()
            found.append((time.perf_counter() - start, time.process_time() - spent))
        both = torch.tensor(found, dtype=torch.float64).T.contiguous()
        dist.all_reduce(both[0], dist.ReduceOp.MAX)
        dist.all_reduce(both[1])
        return (both / torch.tensor([[1.0], [dist.get_world_size()]])).tolist()


def difference(ours: Side, theirs: Side) -> float:
    """Returns the largest difference between the gradients of the last step, relative to the
    largest gradient of each parameter, on any rank."""
    worst = 0.0
    for a, b in zip(ours.net.parameters(), theirs.net.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            off = (a.grad - b.grad).abs().max() / b.grad.abs().max().clamp(min=1e-12)
            worst = max(worst, off.item())
    found = torch.tensor(worst, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def rank_main(rank: int, world: int, args: argparse.Namespace, store: str, out: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    rows = {}
    more = {"gradient_as_bucket_view": True} if args.views else {}
    for name in args.modules:
        ours, theirs = Side(name, False, more), Side(name, True, more)
        worst = 0.0
        for _ in range(3):  # the first step builds the buckets again
            for side in (ours, theirs):
                side.step()
            worst = max(worst, difference(ours, theirs))
            # A ReLU input that rounding moves across zero would show as a larger difference.
            ours.take(theirs)
        rounds = []
        for turn in range(args.rounds):
            order = (ours, theirs) if turn % 2 == 0 else (theirs, ours)
            times = {side: side.seconds(args.steps) for side in order}
            rounds.append((times[ours], times[theirs]))
        rows[name] = {"difference": worst, "rounds": rounds}
        if rank == 0:
            print(row(name, world, rows[name]), flush=True)
        del ours, theirs
    if rank == 0:
        out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def medians(found: dict, of: int = 0) -> tuple[float, float, list[float]]:
    """Returns the milliseconds of a step, ours and theirs, and the ratio of theirs to ours in every
    round; `of`: 0 for wall time, 1 for CPU time."""
    ours, theirs = ([t for pair in found["rounds"] for t in pair[i][of]] for i in (0, 1))
    each = [statistics.median(b[of]) / statistics.median(a[of]) for a, b in found["rounds"]]
    return 1e3 * statistics.median(ours), 1e3 * statistics.median(theirs), sorted(each)


def row(name: str, world: int, found: dict) -> str:
    ours, theirs, each = medians(found)
    low, high = each[len(each) // 4], each[-1 - len(each) // 4]
    busy = "/".join(f"{ms:.1f}" for ms in medians(found, of=1)[:2])
    return (
        f"| {name} | {world} | {ours:.2f} | {theirs:.2f} | **{theirs / ours:.2f}×** | "
        f"{low:.2f} to {high:.2f} | {busy} | {found['difference']:.0e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--modules", nargs="+", default=list(MODULES), choices=list(MODULES))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--views", action="store_true", help="gradient_as_bucket_view=True of both")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"commit {commit()}, torch {torch.__version__}, {os.cpu_count()} cores\n")
    print(
        "| module | dp | parallel3d, ms | PyTorch, ms | ratio | middle half of the rounds ", end=""
    )
    print("| CPU ms, ours/theirs | gradients |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    everything, ratios = {}, []
    for world in args.dp:
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "rows.json"
            torch.multiprocessing.spawn(
                rank_main, (world, args, f"{name}/store", out), nprocs=world
            )
            everything[world] = rows = json.loads(out.read_text())
        ratios += [theirs / ours for ours, theirs, _ in map(medians, rows.values())]
    print(f"\nPyTorch's time over ours: median {statistics.median(ratios):.2f}, ", end="")
    print(f"least {min(ratios):.2f}")
    if args.json:
        args.json.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
