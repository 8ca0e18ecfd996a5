"""Tests that a rank dispatches the same with mirrored peers as with real ranks of equal tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from parallel3d.blueprint.layout import Layout
from parallel3d.calibrate.measure import mirrored_group
from parallel3d.comm.group import SINGLE, Group
from parallel3d.experts.balance import Balance
from parallel3d.experts.route import AllToAllRoute, TokenRoute
from parallel3d.models import declared
from parallel3d.models.declared import LayerKind
from parallel3d.models.experts import MixtureOfExperts
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext
from parallel3d.parameters.declaration import named
from parallel3d.parameters.initializer import Initializer
from tests.distributed.harness import plain_groups
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly

MODEL = ModelConfig(
    hidden_size=8, num_attention_heads=2, seq_length=12, activation="swiglu", bias=False,
    num_experts=8, experts_per_token=3, expert_ffn_size=8,
)  # fmt: skip


def dispatch(ep: Group, way: str) -> TokenRoute:
    """Returns the route of a layer's forward and backward on equal tokens."""
    init = Initializer(5, torch.float64, torch.device("cpu"))
    context = BuildContext(init, SINGLE, sp=False, ep=ep, dispatch=way, routing="balanced")
    held = named("layers.1.mlp", declared.experts(MODEL, LayerKind.of(MODEL, 1)))
    layer = MixtureOfExperts(1, held, MODEL, context)
    x = torch.linspace(-1, 1, 2 * 12 * 8, dtype=torch.float64).view(2, 12, 8).requires_grad_()
    lengths = torch.full((2,), 12.0, dtype=torch.float64)
    route, balance = layer.new_route(), Balance(torch.arange(2), None, None, lengths)
    inputs = LayerInputs(balance=balance, route=route)
    layer(x, torch.nn.Identity(), inputs).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    return route


def compare(way: str) -> list[str]:
    """Returns what differs on rank 0 between real and mirrored peers."""
    groups = plain_groups(Layout(dp=4, ep=4))
    real, mirrored = (dispatch(ep, way) for ep in (groups.ep, mirrored_group("ep", 4)))
    groups.close()
    if groups.rank != 0:
        return []
    found = []
    pairs: list[tuple[Any, Any]] = [(real.rows, mirrored.rows)]
    if isinstance(real, AllToAllRoute) and isinstance(mirrored, AllToAllRoute):
        pairs.append((real.messages, mirrored.messages))
    for one, other in pairs:
        for field in dataclasses.fields(one):
            a, b = getattr(one, field.name), getattr(other, field.name)
            same = torch.equal(a, b) if isinstance(a, torch.Tensor) else str(a) == str(b)
            found += [] if same else [field.name]
    return found


@pytest.mark.parametrize("way", ["gather", "all_to_all"])
def test_rows_and_messages_are_those_of_real_ranks(way: str, pool: Pool) -> None:
    assert pool.run(4, compare, way)[0] == []
