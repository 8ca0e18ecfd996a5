"""Tests that parts of a user's own model that no run can train are refused in a sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

import parallel3d as p3d
from parallel3d.comm.group import SINGLE, Group
from parallel3d.errors import UserError
from parallel3d.models.flops import ALL_TRAINED
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.own_model import OwnValues, own_config, take_parameters
from parallel3d.models.own_stage import OwnArchitecture

pytestmark = pytest.mark.nightly


@dataclass
class Chain(p3d.Model):
    """Layers of one size, and a block that a test gives."""

    given: Any = None
    num_layers: Any = 1
    seq_length: Any = 4
    vocab_size: Any = 5

    def embedding(self, parallel: p3d.Parallel) -> nn.Module:
        return nn.Embedding(5, 3)

    def block(self, number: int, parallel: p3d.Parallel) -> nn.Module:
        return nn.Linear(3, 3) if self.given is None else self.given()

    def head(self, parallel: p3d.Parallel) -> nn.Module:
        return nn.Linear(3, 5)


class Holding(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(values)


BLOCKS = {
    "lazy": (
        lambda: nn.LazyLinear(3),
        "layers.0.weight has no shape before the first forward; give the layer its sizes in place",
    ),
    "frozen": (
        lambda: nn.Linear(3, 3).requires_grad_(False),
        "layers.0.weight does not require a gradient; keep it in a buffer if it is a constant",
    ),
    "complex": (
        lambda: Holding(torch.ones(3, dtype=torch.complex64)),
        "layers.0.scale is a parameter of torch.complex64, but must be of a floating-point type",
    ),
    "scalar": (
        lambda: Holding(torch.ones(())),
        "layers.0.scale is a parameter without dimensions, but must have one at least; give it the",
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_parameter_that_cannot_be_trained_is_refused(name: str) -> None:
    block, said = BLOCKS[name]
    with pytest.raises(UserError, match=re.escape(said)):
        own_config(ModelConfig(), Chain(block))


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [
        ("num_layers", 0, 1),
        ("num_layers", True, 1),
        ("seq_length", "long", 1),
        ("seq_length", None, 1),
        ("vocab_size", 1, 2),
        ("vocab_size", 5.0, 2),
    ],
)
def test_a_size_that_no_run_can_have_is_refused(field: str, value: Any, least: int) -> None:
    said = f"Chain.{field}={value!r} must be a whole number from {least} on"
    with pytest.raises(UserError, match=re.escape(said)):
        own_config(ModelConfig(), replace(Chain(), **{field: value}))


class ByValue(nn.Linear):
    def forward(self, x: torch.Tensor, inputs: Any = None) -> torch.Tensor:
        return super().forward(x) if float(x.sum()) > 0 else x


class Ids(nn.Embedding):
    def forward(self, inputs: Any) -> torch.Tensor:
        return super().forward(inputs.batch["ids"])


class ByValues(Chain):
    def embedding(self, parallel: p3d.Parallel) -> nn.Module:
        return Ids(5, 3)


def test_the_flops_of_a_model_that_needs_values_follow_from_its_parameters() -> None:
    config = own_config(ModelConfig(), ByValues(lambda: ByValue(3, 3)))
    batch = {"ids": torch.zeros(2, 4, dtype=torch.int64)}
    inputs = LayerInputs(samples=torch.arange(2), batch=batch)
    flops, formula = OwnArchitecture().flops_per_token(config, ALL_TRAINED, lambda: (inputs,))
    assert flops == 6 * (5 * 3 + 3 * 3 + 3 + 3 * 5 + 5)
    assert formula == "6 × parameters, as the model does not run on the meta device"


def test_a_layer_of_this_package_must_be_split_over_the_ranks_of_tp() -> None:
    values = OwnValues(torch.float32, torch.device("cpu"), torch.float32)
    tp = Group("tp", (0, 1), 0, None)
    with pytest.raises(
        UserError,
        match=re.escape("layers.0.weight has shape (8, 4) on this rank, but must have (4, 4) with"),
    ):
        take_parameters(p3d.ColumnParallelLinear(4, 8, SINGLE), "layers.0", tp, values)
