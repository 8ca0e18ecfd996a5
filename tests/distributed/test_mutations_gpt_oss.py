"""Plants known bugs of gpt-oss's experts and router: each is caught, by exactly the named
quantities.

This continues test_mutations_experts.
"""

from __future__ import annotations

import dataclasses
from copy import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel3d.experts.router import Router
from parallel3d.experts.rows import Rows
from tests.distributed.cases import Case
from tests.distributed.harness import References, Sizes, check_caught
from tests.distributed.pool import Pool
from tests.distributed.seams import ACTIVATION, EXPERT_BIASES, ROUTER, Mutation, planted
from tests.distributed.test_mutations_experts import (
    COUNTED,
    EP,
    EXPERTS_OF,
    ONE,
    SGD,
    experts,
)

pytestmark = pytest.mark.nightly

# As in gpt-oss, with a limit at which gate and up stop.
OF_GPT_OSS = dataclasses.replace(
    SGD,
    model=(
        *EXPERTS_OF[:3],
        ("expert_bias", True),
        ("router_logit_bias", True),
        ("swiglu_limit", 0.2),
        ("init_std", 0.1),
    ),
    moe=(),
    steps=3,
    # The biases of logits begin at zero, and soon change choices.
    optim=(*SGD.optim, ("groups", (("*.logit_bias", (("lr_mult", 30.0),)),))),
)
UNBALANCED = COUNTED - {"aux", "z"}  # without balancing losses


def limited(x: Tensor, limit: float, steep: float = 1.702, both: bool = False) -> Tensor:
    """Returns (u + 1) · g · σ(`steep` · g); with `both`, g stops below −limit too."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(-limit if both else None, limit)
    return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(steep * gate)


@planted(ACTIVATION)
def gate_limited_on_both_sides(_: Any, __: str, x: Tensor, *, limit: float) -> Tensor:
    return limited(x, limit, both=True)


@planted(ACTIVATION)
def gate_of_silu(_: Any, __: str, x: Tensor, *, limit: float) -> Tensor:
    """The gate's sigmoid lacks the factor 1.702."""
    return limited(x, limit, steep=1.0)


@planted(EXPERT_BIASES)
def biases_not_weighed(sound: Any, y: Tensor, weights: Tensor, *more: Any) -> Tensor:
    """The last biases of experts are added as they are."""
    return sound(y, torch.ones_like(weights) + 0 * weights, *more)


@planted(EXPERT_BIASES)
def biases_of_other_ranks_too(
    sound: Any, y: Tensor, weights: Tensor, bias: Tensor, rows: Rows
) -> Tensor:
    """Each rank of ep adds a bias for the choices of other ranks' experts too."""
    here = copy(rows)
    object.__setattr__(here, "experts", lambda: rows.experts() % len(rows.groups.ends))
    return sound(y, weights, bias, here)


def without_logit_bias(sound: Any, router: Router, *given: Any) -> Tensor:
    bias, router.logit_bias = router.logit_bias, None
    try:
        return sound(router, *given)
    finally:
        router.logit_bias = bias


@planted(ROUTER)
def logit_bias_only_chooses(sound: Any, router: Router, *given: Any) -> Tensor:
    """The trained bias of logits is left out of the weights, as the other bias is."""
    with torch.no_grad():
        sound(router, *given)
    assert router.logit_bias is not None
    return without_logit_bias(sound, router, *given) + 0 * router.logit_bias.sum()


@planted(ROUTER)
def logit_bias_after_the_choice(sound: Any, router: Router, *given: Any) -> Tensor:
    """The trained bias of logits is added when the experts are chosen already."""
    with torch.no_grad():
        without_logit_bias(sound, router, *given)
    return sound(router, *given)


PLANTED: dict[str, tuple[Mutation, Sizes, Case, set[str]]] = {
    "gate-limited-below": (gate_limited_on_both_sides, ONE, experts(OF_GPT_OSS), UNBALANCED),
    "gate-of-silu": (gate_of_silu, ONE, experts(OF_GPT_OSS), UNBALANCED),
    "biases-not-weighed": (biases_not_weighed, ONE, experts(OF_GPT_OSS), UNBALANCED),
    "biases-of-other-ranks": (biases_of_other_ranks_too, EP, experts(OF_GPT_OSS), UNBALANCED),
    "biases-of-other-ranks-all-to-all": (
        *(biases_of_other_ranks_too, EP, experts(OF_GPT_OSS, "all_to_all")),
        UNBALANCED,
    ),
    "logit-bias-only-chooses": (logit_bias_only_chooses, ONE, experts(OF_GPT_OSS), UNBALANCED),
    "logit-bias-after-choice": (logit_bias_after_the_choice, ONE, experts(OF_GPT_OSS), UNBALANCED),
}


@pytest.mark.parametrize(
    ("mutation", "sizes", "case", "told_by"), PLANTED.values(), ids=PLANTED.keys()
)
def test_a_bug_of_gpt_oss_is_caught(
    mutation: Mutation,
    sizes: Sizes,
    case: Case,
    told_by: set[str],
    pool: Pool,
    references: References,
) -> None:
    check_caught(mutation, sizes, case, told_by, pool, references)
