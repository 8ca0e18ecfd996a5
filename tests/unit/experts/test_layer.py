"""Tests the initial values of experts, the choice of dispatch, and that a recomputation exchanges
nothing again."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel3d.blueprint.dispatch import chosen_way, share_sent
from parallel3d.comm.group import SINGLE, Group
from parallel3d.experts.balance import Balance
from parallel3d.models import declared
from parallel3d.models.declared import LayerKind, output_std
from parallel3d.models.experts import MixtureOfExperts
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext
from parallel3d.models.repeats import Repeats
from parallel3d.parameters.declaration import named
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.spec import ParameterSpec, ShardSpec
from tests.distributed.seams import CHOSEN, EXPERTS, Seam

MODEL = ModelConfig(
    num_layers=3, hidden_size=64, num_attention_heads=4, activation="swiglu", bias=False,
    num_experts=8, experts_per_token=2, expert_ffn_size=48, init_std=0.1,
)  # fmt: skip
# It is called once for each order of rows.
ROWS = Seam("experts.rows:evenly")


def layer(recompute: str = "none", ep: Group = SINGLE) -> MixtureOfExperts:
    init = Initializer(5, torch.float64, torch.device("cpu"))
    context = BuildContext(init, SINGLE, sp=False, repeats=Repeats.of(recompute), ep=ep)
    held = named("layers.1.mlp", declared.experts(MODEL, LayerKind.of(MODEL, 1)))
    return MixtureOfExperts(1, held, MODEL, context)


def drawn(name: str, shape: tuple[int, int], std: float) -> Tensor:
    """Returns the initial values of a full tensor."""
    init = Initializer(5, torch.float64, torch.device("cpu"))
    shard = ShardSpec(name, shape, (0, 0), shape, std=std)
    return init.values(ParameterSpec(shape, (shard,), replicated=False))


@pytest.mark.parametrize("index", [0, 1])
def test_an_expert_is_drawn_by_its_number_in_the_model(index: int) -> None:
    held = layer(ep=Group("ep", (0, 1), index, None)).experts
    ups, downs = held.up.view(4, 2, 48, 64), held.down.view(4, 64, 48)
    for number in range(4):
        prefix = f"layers.1.mlp.experts.{4 * index + number}"
        for i, part in enumerate(("gate", "up")):
            expected = drawn(f"{prefix}.{part}.weight", (48, 64), MODEL.init_std)
            assert torch.equal(ups[number, i], expected)
        expected = drawn(f"{prefix}.down.weight", (64, 48), output_std(MODEL))
        assert torch.equal(downs[number], expected)


def test_experts_start_like_an_mlp_and_the_router_like_a_projection() -> None:
    """The last matrices write into the residual stream, so their values are smaller."""
    made = layer()
    assert made.experts.up.std().item() == pytest.approx(0.1, rel=0.02)
    assert made.experts.down.std().item() == pytest.approx(0.1 / 6**0.5, rel=0.02)
    assert made.router.weight.std().item() == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(("experts", "chosen", "ep"), [(8, 2, 2), (8, 3, 4), (6, 2, 3), (4, 4, 2)])
def test_the_share_of_tokens_that_are_sent_is_counted(experts: int, chosen: int, ep: int) -> None:
    sets = list(itertools.combinations(range(experts), chosen))
    here = sum(min(each) < experts // ep for each in sets)
    assert share_sent(experts, chosen, ep) == pytest.approx(here / len(sets), rel=1e-12)


def test_the_way_is_the_one_that_sends_less() -> None:
    """With eight of 128 experts, a token has one on nearly every one of four ranks, and on two
    thirds of eight ranks."""
    assert [chosen_way("auto", 128, 8, ep) for ep in (2, 4, 8)] == [
        "gather",
        "gather",
        "all_to_all",
    ]
    assert chosen_way("auto", 8, 2, 2) == "all_to_all"
    assert chosen_way("gather", 128, 8, 64) == "gather"
    assert chosen_way("all_to_all", 128, 8, 2) == "all_to_all"


@pytest.mark.parametrize(
    ("recompute", "again"), [("none", 0), ("[mlp]", 1), ("[norm,mlp]", 1), ("[attention]", 0)]
)
def test_a_recomputation_runs_the_experts_again_and_chooses_nothing(
    recompute: str, again: int
) -> None:
    """The order of rows, for which the host waits, is also found only once."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        def call(sound: Any, *given: Any) -> Any:
            calls[name] += 1
            return sound(*given)

        return call

    x = torch.randn(2, 6, 64, dtype=torch.float64, requires_grad=True)
    lengths = torch.full((2,), 6.0, dtype=torch.float64)
    balance = Balance(torch.arange(2), None, None, lengths, torch.tensor(0.1))
    made = layer(recompute)
    with ExitStack() as stack:
        for name, seam in (("choices", CHOSEN), ("rows", ROWS), ("experts", EXPERTS)):
            stack.enter_context(seam.replaced(counted(name)))
        y = made(x, nn.Identity(), LayerInputs(balance=balance, route=made.new_route()))
        y.square().sum().backward()
    assert calls == {"choices": 1, "rows": 1, "experts": 1 + again}
    assert made.router.tally.take()[:8].sum() == 2 * 6 * 2
