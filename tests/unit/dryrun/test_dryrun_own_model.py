"""Dry runs of a user's own model, whose stages are run to find what they send."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import parallel3d as p3d
from parallel3d.blueprint.keys import ClusterConfig
from parallel3d.blueprint.rank import PipelineRank
from parallel3d.config.fields import with_values
from parallel3d.models.keys import ModelConfig
from parallel3d.models.own_model import own_config
from parallel3d.resolve import blueprint_of
from parallel3d.run_config import Config, check_config
from parallel3d.topology.assumptions import preset
from tests.e2e.ready import run_code

PIXELS, KINDS, H = 12, 5, 256
pytestmark = pytest.mark.slow


class Embedding(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(PIXELS, hidden)

    def forward(self, inputs: p3d.Inputs) -> Tensor:
        return self.linear(inputs.batch["image"])


class Block(nn.Module):
    def __init__(self, hidden: int, parallel: p3d.Parallel) -> None:
        super().__init__()
        self.up = p3d.ColumnParallelLinear(hidden, 4 * hidden, parallel.tp)
        self.down = p3d.RowParallelLinear(4 * hidden, hidden, parallel.tp)

    def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Head(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, KINDS)

    def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
        return self.linear(x)


@dataclass
class Images(p3d.Model):
    hidden: int = H
    num_layers: int = 4

    def embedding(self, parallel: p3d.Parallel) -> nn.Module:
        return Embedding(self.hidden)

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return Block(self.hidden, parallel)

    def head(self, parallel: p3d.Parallel) -> nn.Module:
        return Head(self.hidden)

    def loss(self, outputs: Tensor, inputs: p3d.Inputs) -> p3d.Loss:
        losses = nn.functional.cross_entropy(outputs, inputs.batch["kind"], reduction="none")
        return p3d.Loss(losses.sum(), len(losses), {"square": outputs.square().sum()})


class WithoutKernel(Images):
    """Has an operator that fails on tensors without values."""

    def head(self, parallel: p3d.Parallel) -> nn.Module:
        class Fails(Head):
            def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
                raise NotImplementedError("there is no kernel")

        return Fails(self.hidden)


class Recurrent(nn.Module):
    """Has layers that run as fused cells on an accelerator."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.lstm = nn.LSTM(hidden, hidden)

    def forward(self, x: Tensor, inputs: p3d.Inputs) -> Tensor:
        y, _ = self.gru(x.unsqueeze(1))
        return x + self.lstm(y.transpose(0, 1))[0].squeeze(0)


class OfRecurrence(Images):
    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return Recurrent(self.hidden)


def config_of(images: Images | None = None, **keys: object) -> Config:
    example = {"image": np.zeros(PIXELS, np.float32), "kind": 0}
    model = replace(own_config(ModelConfig(), images or Images()), example=example)
    cluster = ClusterConfig(**preset("cluster", "dgx_h100"))
    config = replace(Config(), model=model, cluster=cluster, device="cuda")
    batch = {"global_batch_size": 32, "micro_batch_size": 4}
    return check_config(with_values(config, batch | keys), own_samples=True)


CASES: dict[str, dict[str, object]] = {
    "one": {},
    "tp pp zero1": {"tp": 2, "pp": 2, "dp": 2, "zero": 1},
    "zbv zero3": {"pp": 2, "vpp": 2, "dp": 2, "zero": 3, "schedule.name": "zbv"},
    "full": {"pp": 4, "recompute": "full"},
}
# The simulated device is enabled once and for all in a process, so the dry runs have their own.
SCRIPT = """
import json
from parallel3d.commands.dry_ranks import find_facts
from parallel3d.errors import UserError
from tests.unit.dryrun.test_dryrun_own_model import CASES, OfRecurrence, WithoutKernel, config_of
found = {name: find_facts(config_of(**keys)) for name, keys in CASES.items()}
found["recurrent"] = find_facts(config_of(OfRecurrence()))
try:
    find_facts(config_of(WithoutKernel()))
except UserError as error:
    found["without kernel"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    done = run_code(SCRIPT)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_dry_run_holds_the_states_that_the_blueprint_counts(
    name: str, facts: dict[str, Any]
) -> None:
    config, found = config_of(**CASES[name]), facts[name]
    assert [row["stage"] for row in found["rows"]] == sorted({0, config.pp // 2, config.pp - 1})
    rank = PipelineRank(blueprint_of(config), found["stage"])
    held = sum(parameter.numel for parameter in rank.parameters)
    shards = config.dp if config.zero == 3 else 1
    assert found["live_bytes"]["parameters"] == pytest.approx(4 * held / shards, rel=0.02)
    moments = 2 * 4 * held / (config.dp if config.zero else 1)
    assert found["live_bytes"]["optimizer"] == pytest.approx(moments, rel=0.02)
    assert found["peak_bytes"] > found["between_steps_bytes"]


def test_a_dry_run_counts_every_product_of_a_model(facts: dict[str, Any]) -> None:
    matrices = PIXELS * H + 4 * 8 * H * H + H * KINDS
    samples = config_of().global_batch_size
    # The input of the embedding needs no gradient.
    expected = samples * (6 * matrices - 2 * PIXELS * H)
    assert math.isclose(facts["one"]["flops"], expected, rel_tol=1e-6)


def test_a_dry_run_counts_every_product_of_recurrent_layers(facts: dict[str, Any]) -> None:
    """A gate multiplies the input and the state; the first state needs no gradient."""
    config, found = config_of(OfRecurrence()), facts["recurrent"]
    gates = 4 * (3 + 4) * H * H
    ends = PIXELS * H + H * KINDS
    expected = 6 * ends - 2 * PIXELS * H + gates * (6 + 4)
    assert math.isclose(found["flops"], config.global_batch_size * expected, rel_tol=1e-6)
    held = sum(parameter.numel for parameter in PipelineRank(blueprint_of(config), 0).parameters)
    assert found["live_bytes"]["optimizer"] == pytest.approx(8 * held, rel=0.02)


def test_a_dry_run_of_a_model_that_fails_names_the_part_and_the_line(
    facts: dict[str, Any],
) -> None:
    said = r"WithoutKernel cannot run .* no kernel\. .* in head of WithoutKernel at \S+\.py:\d+"
    assert re.search(said, facts["without kernel"])
