"""Tests of `moe.overlap`: the same bits, while tokens of a forward travel during a backward."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import Tensor

from parallel3d.blueprint.layout import Layout
from tests.distributed.cases import Case
from tests.distributed.harness import Sizes, make_trainer, plain_groups
from tests.distributed.pool import Pool
from tests.distributed.seams import LAYER_OF_EXPERTS, Seam
from tests.distributed.test_experts_bits import differ, pair, problem
from tests.distributed.test_mutations_experts import ADAMW, EP, SGD, experts

pytestmark = pytest.mark.nightly

GRADIENT = Seam("experts.grouped:add_grouped_gradient")


def both(case: Case) -> list[Case]:
    """Returns the case without and with overlap."""
    return [
        dataclasses.replace(case, keys=(*case.keys, ("moe.overlap", on))) for on in (False, True)
    ]


@pytest.mark.parametrize("way", ["gather", "all_to_all"])
@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        (EP, {}),
        (EP, {"microbatches": 1}),  # no other micro-batch to overlap with
        (EP, {"keys": {"recompute": "full"}}),
        ((1, 1, 4, 1, 2), {"keys": {"zero": 1, "recompute": "[mlp]"}}),
        ((2, 1, 2, 1, 4), {}),
        ((1, 1, 2, 2, 2), {"microbatches": 4}),
    ],
)
def test_overlap_changes_no_bit(way: str, sizes: Sizes, more: dict[str, Any], pool: Pool) -> None:
    case = experts(SGD, way, **more)
    assert differ(*pair(pool, sizes, both(case))) == set()


def test_overlap_changes_no_bit_in_bf16(pool: Pool) -> None:
    case = experts(problem("bf16", 3), "all_to_all", microbatches=2)
    assert differ(*pair(pool, EP, both(case))) == set()


@pytest.mark.more
def test_overlap_changes_no_bit_of_compiled_layers(pool: Pool) -> None:
    case = dataclasses.replace(experts(ADAMW, "all_to_all", microbatches=4), compile=True)
    assert differ(*pair(pool, EP, both(case))) == set()


def events(sizes: Sizes, case: Case) -> list[str]:
    """Returns the beginnings and ends of experts' forwards, and gradients of their weights, in
    their order in one step of this rank."""
    found: list[str] = []

    def forward(sound: Any, *how: Any) -> Tensor:
        found.append("begin")
        result = sound(*how)
        found.append("end")
        return result

    def gradient(sound: Any, *how: Any) -> Any:
        found.append("gradient")
        return sound(*how)

    groups = plain_groups(Layout(*sizes))
    trainer = make_trainer(case, groups)
    with LAYER_OF_EXPERTS.replaced(forward), GRADIENT.replaced(gradient):
        trainer.train_step()
    groups.close()
    return found


@pytest.mark.parametrize("way", ["gather", "all_to_all"])
def test_a_backward_computes_while_tokens_of_a_forward_are_under_way(way: str, pool: Pool) -> None:
    """Of two micro-batches the second one's forward runs during the first one's backward; without
    overlap no gradient is computed inside of a forward."""
    inside = []
    for case in both(experts(SGD, way, microbatches=2)):
        found = pool.run(2, events, EP, case)
        assert found[0] == found[1], "both ranks call in the same order"
        layers = sum(event == "begin" for event in found[0]) // 2
        depth = within = 0
        for event in found[0]:
            depth += (event == "begin") - (event == "end")
            within += event == "gradient" and depth > 0
        inside.append((layers, within))
    (layers, none), (_, some) = inside
    assert none == 0
    assert some >= layers
