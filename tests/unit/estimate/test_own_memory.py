"""Tests the planner's memory of a user's own model against dry runs."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel3d as p3d
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.config.fields import with_values
from parallel3d.models.keys import ModelConfig
from parallel3d.models.own_model import own_config
from parallel3d.run_config import Config, check_config
from parallel3d.topology.assumptions import preset
from tests.e2e.ready import run_code

H = 256
pytestmark = pytest.mark.nightly


class Series(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, H)

    def forward(self, inputs: p3d.Inputs) -> Tensor:
        return self.linear(inputs.batch["x"])


class Block(nn.Module):
    """Has layers of this package, a plain one, and a dropout."""

    def __init__(self, parallel: p3d.Parallel) -> None:
        super().__init__()
        self.norm, self.plain = nn.LayerNorm(H), nn.Linear(H, H)
        self.up = p3d.ColumnParallelLinear(H, 4 * H, parallel.tp)
        self.down = p3d.RowParallelLinear(4 * H, H, parallel.tp)
        self.dropout = parallel.dropout("down", 0.1)

    def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + self.dropout(y, inputs) + torch.tanh(self.plain(x)).cumsum(1)


class Direct(Block):
    """Its split layer reads the gradient of the block's result itself."""

    def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
        y = F.gelu(self.up(self.norm(x)))
        return x + torch.tanh(self.plain(x)) + self.down(y)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, 10)

    def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
        return self.linear(x.mean(1))


@dataclass
class OfSeries(p3d.Model):
    num_layers: int = 8

    def embedding(self, parallel: p3d.Parallel) -> nn.Module:
        return Series()

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return Block(parallel)

    def head(self, parallel: p3d.Parallel) -> nn.Module:
        return Mean()

    def loss(self, outputs: Tensor, inputs: p3d.Inputs) -> p3d.Loss:
        total = F.cross_entropy(outputs, inputs.batch["kind"], reduction="sum")
        return p3d.Loss(total, len(outputs), {"square": outputs.square().sum()})


class OfDirect(OfSeries):
    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return Direct(parallel)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)

    def forward(self, inputs: p3d.Inputs) -> Tensor:
        return F.relu(self.conv(inputs.batch["image"]))


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 2 if outputs > inputs else 1
        self.one = nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.two = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.norm, self.skip = nn.GroupNorm(8, outputs), nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
        return F.relu(self.two(F.relu(self.norm(self.one(x)))) + self.skip(x))


class Pooled(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, 10)

    def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
        return self.linear(x.mean((2, 3)))


@dataclass
class OfImages(p3d.Model):
    """Blocks differ, and so does the shape between them."""

    num_layers: int = 4

    def embedding(self, parallel: p3d.Parallel) -> nn.Module:
        return First()

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return Residual(16 * 2 ** (number // 2), 16 * 2 ** ((number + 1) // 2))

    def head(self, parallel: p3d.Parallel) -> nn.Module:
        return Pooled(64)

    def loss(self, outputs: Tensor, inputs: p3d.Inputs) -> p3d.Loss:
        total = F.cross_entropy(outputs, inputs.batch["kind"], reduction="sum")
        return p3d.Loss(total, len(outputs))


@dataclass
class OfManyImages(OfImages):
    num_layers: int = 8

    def head(self, parallel: p3d.Parallel) -> nn.Module:
        return Pooled(256)


EXAMPLES: dict[type[p3d.Model], dict[str, object]] = {
    OfSeries: {"x": np.zeros((64, 16), np.float32), "kind": 0},
    OfDirect: {"x": np.zeros((64, 16), np.float32), "kind": 0},
    OfImages: {"image": np.zeros((3, 48, 48), np.float32), "kind": 0},
    OfManyImages: {"image": np.zeros((3, 48, 48), np.float32), "kind": 0},
}


def config_of(of: type[p3d.Model], **keys: object) -> Config:
    model = replace(own_config(ModelConfig(), of()), example=EXAMPLES[of])
    cluster = ClusterConfig(**preset("cluster", "dgx_h100"))
    config = replace(Config(), model=model, cluster=cluster, device="cuda")
    batch = {"global_batch_size": 32, "micro_batch_size": 4}
    return check_config(with_values(config, batch | keys), own_samples=True)


CASES: dict[str, tuple[type[p3d.Model], dict[str, object]]] = {
    "zbv": (OfSeries, {"tp": 2, "pp": 2, "vpp": 2, "dp": 2, "zero": 1, "schedule.name": "zbv"}),
    "zb_h1": (
        OfDirect,
        {"tp": 2, "pp": 2, "schedule.name": "zb_h1", "recompute": "full", "micro_batch_size": 8},
    ),
    "interleaved": (OfManyImages, {"pp": 2, "vpp": 2, "schedule.name": "interleaved"}),
    "zero3": (OfSeries, {"pp": 2, "dp": 2, "zero": 3, "recompute": "full"}),
    "bf16": (OfImages, {"pp": 2, "precision.name": "bf16"}),
}
# The simulated device is enabled once and for all in a process, so the dry runs have their own.
SCRIPT = """
import json
from parallel3d.commands.dry_ranks import find_memory
from parallel3d.estimate.memory import peak_memory
from parallel3d.trace.world import machine_without_values
from tests.unit.estimate.test_own_memory import CASES, config_of
machine_without_values()
for name, (of, keys) in CASES.items():
    config = config_of(of, **keys)
    for index in (0, config.pp - 1):
        measured = find_memory(config, index)["peak_bytes"]
        print(json.dumps([name, index, peak_memory(config, index).total, measured]))
"""


def test_the_bound_is_at_most_seven_per_cent_above_a_dry_run() -> None:
    done = run_code(SCRIPT)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 2 * len(CASES)
    for name, index, bound, measured in rows:
        assert measured <= bound <= 1.07 * measured, (name, index)


def test_a_plan_prices_layouts_and_leaves_the_process_free_to_train() -> None:
    """The parts are recorded in a fork, so the planner's own process has no simulated device."""
    code = (
        "import torch\n"
        "from dataclasses import replace\n"
        "from tests.unit.estimate import test_own_memory as of\n"
        "from parallel3d.commands.plan import searched\n"
        "from parallel3d.config.fields import with_values\n"
        "from parallel3d.simulated_device.device import TYPE\n"
        "config = with_values(of.config_of(of.OfSeries), {'precision.name': 'bf16'})\n"
        "plan = searched(config, {'pp': 2, 'zero': 1, 'micro_batch_size': 4, 'vpp': 1}, 8)\n"
        "print({plan.priced.choices[i].tp for i in plan.rows}, hasattr(torch, TYPE))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "{1, 2, 4} False\n", done.stderr


def test_the_process_that_records_ends_with_a_planner_that_is_killed() -> None:
    code = (
        "import multiprocessing, os, sys\n"
        "from tests.unit.estimate import test_own_memory as of\n"
        "from parallel3d.estimate.memory import peak_memory\n"
        "peak_memory(of.config_of(of.OfSeries), 0)\n"
        "(child,) = multiprocessing.active_children()\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    # The child holds the output open, so the call returns only when it has ended too.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == -9 and done.stdout.strip().isdecimal(), done.stderr
