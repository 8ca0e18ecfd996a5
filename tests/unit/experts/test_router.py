"""Tests the router against the reference's, with ties, biases and groups; known bugs are
detected."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from parallel3d.experts.balance import Balance, BalanceOfRun
from parallel3d.experts.keys import ExpertsConfig
from parallel3d.experts.route import LocalRoute
from parallel3d.experts.router import (
    Router,
    RouterSettings,
    balanced_experts,
    margins_of,
    weights_of,
)
from parallel3d.models import declared
from parallel3d.models.keys import ModelConfig
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.state import state_of
from tests.distributed.seams import CHOICE_WEIGHTS, RANKED, SCORES, Mutation, planted
from tests.reference import mlp as reference

EXPERTS, TOKENS = 8, 40
F64 = torch.float64
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"router_normalize": False},
    "softmax-normalised": {},
    "sigmoid": {"router_score": "sigmoid", "router_scale": 2.5},
    "sigmoid-plain": {"router_score": "sigmoid", "router_normalize": False},
    "groups-of-softmax": {"router_groups": 4, "router_top_groups": 2},
    "groups-of-sigmoid": {
        "router_score": "sigmoid",
        "router_groups": 4,
        "router_top_groups": 2,
        "router_bias": True,
    },
}


def model(**keys: Any) -> ModelConfig:
    """Returns a model whose hidden size is its number of experts."""
    sizes = {"num_experts": EXPERTS, "experts_per_token": 3, "hidden_size": EXPERTS}
    return ModelConfig(**(sizes | {"num_layers": 2, "num_attention_heads": 2} | keys))


def router_drawn(
    layer: int, shape: ModelConfig, routing: str, dtype: torch.dtype = torch.float64
) -> Router:
    init = Initializer(3, dtype, torch.device("cpu"))
    return Router(layer, declared.router(shape), shape, init, routing)


def router_of(shape: ModelConfig, dtype: torch.dtype = torch.float64) -> Router:
    """Returns a router with the unit matrix, whose logits are the token itself."""
    router = router_drawn(0, shape, "model", dtype)
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS))
    return router


class Routed(NamedTuple):
    experts: Tensor
    weights: Tensor


def routed(router: Router, x: Tensor, balance: Balance | None) -> Routed:
    """Returns the chosen experts of new tokens, and their weights."""
    route = LocalRoute(EXPERTS)
    weights = router(x, route, balance)
    assert route.experts is not None
    return Routed(route.experts, weights)


def beside_the_reference(x: Tensor, bias: Tensor | None, **keys: Any) -> None:
    """Compares choices and weights of the tokens x (tokens, experts) with the reference's."""
    shape = model(**keys)
    ours, theirs = router_of(shape), reference.Router(shape).double()
    with torch.no_grad():
        theirs.weight.copy_(torch.eye(EXPERTS))
        if ours.bias is not None and bias is not None:
            ours.bias.copy_(bias)
            theirs.bias.copy_(bias)
    found, expected = routed(ours, x[None], None), theirs(x[None])
    assert torch.equal(found.experts, expected.chosen[0])
    torch.testing.assert_close(found.weights, expected.weights[0], rtol=1e-12, atol=1e-14)


def logits(seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("keys", ROUTERS.values(), ids=ROUTERS.keys())
def test_choices_and_weights_are_those_of_the_reference(keys: dict[str, Any]) -> None:
    beside_the_reference(logits(), 0.3 * logits(1)[0], **keys)


@pytest.mark.parametrize("keys", ROUTERS.values(), ids=ROUTERS.keys())
def test_ties_go_to_the_lower_index(keys: dict[str, Any]) -> None:
    """With whole numbers as logits, most tokens have equal scores at the border of their choice."""
    beside_the_reference(logits().round(), torch.zeros(EXPERTS), **keys)
    beside_the_reference(torch.zeros(1, EXPERTS).double(), torch.zeros(EXPERTS), **keys)


def test_a_bias_below_zero_does_not_let_a_token_out_of_its_groups() -> None:
    """Experts of other groups get zeros, as in older releases of transformers, and may win."""
    bias = torch.full((EXPERTS,), -2.0, dtype=torch.float64)
    beside_the_reference(logits(), bias + 0.3 * logits(1)[0], **ROUTERS["groups-of-sigmoid"])


@planted(RANKED)
def ties_to_the_higher_index(sound: Any, values: Tensor, count: int) -> Tensor:
    """The last of equal values wins."""
    return values.shape[-1] - 1 - sound(values.flip(-1), count)


@planted(RANKED)
def zero_outside_of_the_groups(sound: Any, values: Tensor, count: int) -> Tensor:
    """Experts of other groups have the value 0."""
    return sound(values.masked_fill(values == -torch.inf, 0.0), count)


@planted(SCORES)
def scores_of_bf16(sound: Any, given: Tensor, settings: RouterSettings) -> Tensor:
    """The router computes in bf16."""
    return sound(given.bfloat16().to(given.dtype), settings)


@planted(SCORES)
def softmax_twice(sound: Any, given: Tensor, settings: RouterSettings) -> Tensor:
    """The scores pass through the softmax twice."""
    return sound(sound(given, settings), settings)


@planted(CHOICE_WEIGHTS)
def weights_without_gradient(sound: Any, *given: Any) -> Tensor:
    """A gather without autograd cuts the router off."""
    return sound(*given).detach()


def balance_of(samples: int, length: int, scale: float) -> Balance:
    """Returns a balance whose auxiliary loss is scaled."""
    lengths = torch.full((samples,), float(length), dtype=torch.float64)
    numbers = torch.arange(samples)
    return Balance(numbers, None, None, lengths, torch.tensor(scale, dtype=torch.float64))


def aux_of(router: Router, x: Tensor) -> float:
    """Returns the auxiliary losses of x (b, s, experts), summed over its samples."""
    router.tally.take()
    routed(router, x, balance_of(*x.shape[:2], 1.0))
    return float(router.tally.take()[EXPERTS])


def test_the_auxiliary_loss_alone_gives_the_router_its_gradient() -> None:
    router, x = router_of(model()), logits().view(2, -1, EXPERTS)
    routing = routed(router, x, balance_of(*x.shape[:2], 0.7))
    (routing.weights * 0.0).sum().backward()
    found = router.weight.grad
    assert found is not None and found.abs().max() > 1e-3
    step = 1e-6 * torch.randn(EXPERTS, EXPERTS, generator=torch.Generator().manual_seed(4)).double()
    with torch.no_grad():
        values = []
        for sign in (1.0, -1.0):
            router.weight += sign * step
            values.append(aux_of(router, x))
            router.weight -= sign * step
    assert (found * step).sum() == pytest.approx(0.35 * (values[0] - values[1]), rel=1e-6)


def test_the_weights_alone_give_the_router_a_gradient() -> None:
    router, x = router_of(model()), logits()[None]
    weights = routed(router, x, None).weights
    assert weights.requires_grad
    weights[:, 0].sum().backward()
    assert router.weight.grad is not None and router.weight.grad.abs().max() > 1e-3


@pytest.mark.slow
def test_the_auxiliary_loss_is_that_of_transformers_by_experts_per_token() -> None:
    """Frequencies sum to the number of experts per token there, and to 1 here."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    router, x = router_of(model()), logits()[None]
    theirs = load_balancing_loss_func((x[0],), EXPERTS, top_k=3)
    assert 3 * aux_of(router, x) == pytest.approx(theirs.item(), rel=1e-6)


def closest(values: list[float], count: int) -> float:
    """Returns the difference between the lowest of the `count` best values and the best other."""
    ordered = sorted(values, reverse=True)
    return ordered[count - 1] - ordered[count] if count < len(values) else math.inf


@pytest.mark.parametrize("chosen", [3, 4])
def test_the_margin_is_the_closest_choice_of_experts_or_groups(chosen: int) -> None:
    """With 4 experts per token, both chosen groups are used whole, so no expert is left out."""
    shape = model(experts_per_token=chosen, **ROUTERS["groups-of-softmax"])
    scores = logits().softmax(-1)
    expected = []
    for row in scores.tolist():
        groups = [row[i : i + 2] for i in range(0, EXPERTS, 2)]
        best = sorted(map(max, groups), reverse=True)[:2]
        allowed = [value for group in groups if max(group) in best for value in group]
        expected.append(min(closest(allowed, chosen), closest([max(g) for g in groups], 2)))
    found = margins_of(scores, None, RouterSettings.of(shape))
    assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_a_token_that_uses_all_experts_has_no_margin() -> None:
    shape = model(experts_per_token=EXPERTS)
    found = margins_of(logits().softmax(-1), None, RouterSettings.of(shape))
    assert found.tolist() == [math.inf] * TOKENS


def test_a_router_of_bf16_scores_in_fp32() -> None:
    router = router_of(model(), torch.bfloat16)
    x = logits().bfloat16()
    routing = routed(router, x[None], None)
    assert routing.weights.dtype == torch.float32
    exact = routed(router_of(model()), x.double()[None], None)
    assert torch.equal(routing.experts, exact.experts)
    # Whole bf16 numbers as logits would hide a rounding, so the weights mix two of them.
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS) + 0.5 * torch.eye(EXPERTS).roll(1, 0))
    mixed = routed(router, x[None], None)
    expected = (x.double() @ router.weight.double().T).softmax(-1).gather(-1, mixed.experts)
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(mixed.weights.double(), expected, rtol=1e-6, atol=1e-7)


def test_a_router_of_bf16_has_gradients_of_fp32() -> None:
    """Neither the gradient of the logits nor its sum over tokens is rounded to bf16."""
    x, routers = logits().bfloat16(), [router_of(model(), t) for t in (torch.bfloat16, F64)]
    total = torch.zeros(EXPERTS, EXPERTS)
    state_of(routers[0].weight).main_grad = total
    found = []
    for router in routers:
        with torch.no_grad():
            router.weight += 0.5 * router.weight.roll(1, 0)
        tokens = x[None].to(router.weight.dtype).requires_grad_()
        weights = routed(router, tokens, None).weights
        given = torch.randn(weights.shape, generator=torch.Generator().manual_seed(9))
        weights.backward(given.to(weights.dtype))
        assert tokens.grad is not None
        found.append(tokens.grad)
    assert routers[1].weight.grad is not None
    torch.testing.assert_close(total.double(), routers[1].weight.grad, rtol=1e-5, atol=1e-6)
    large = found[1].abs() > 1e-4  # experts that are not chosen only have rounding as gradient
    assert (found[0] == found[1].bfloat16())[large].double().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_near_20_keeps_differences_of_a_hundredth(dtype: torch.dtype) -> None:
    """The biases of large models are far from zero and close together, such as 20 ± 0.01, so no
    conversion of the model may round them."""
    router = router_of(model(router_bias=True), torch.float32).to(dtype)
    assert router.weight.dtype == dtype
    assert router.bias is not None
    first = 20.0 + 0.01 * torch.tensor([0.0, 1, -1, 1, -1, 0, 0, 0])
    router.bias.copy_(first)
    settings = ExpertsConfig(bias_update_rate=0.001)
    alone = {"has_biases": True, "is_first": True}
    run = BalanceOfRun(settings, {0: router}, [0], EXPERTS, 3, (), **alone)
    x = torch.zeros(1, 1, EXPERTS, dtype=dtype)
    chosen = routed(router, x, balance_of(1, 1, 0.0)).experts
    assert chosen.tolist() == [[1, 3, 0]]
    run.update(run.figures(run.take(torch.zeros((), dtype=torch.float64)).tolist(), 1))
    moved = torch.where(torch.zeros(EXPERTS).index_fill(0, chosen[0], 1) > 0, -0.001, 0.001)
    torch.testing.assert_close(router.bias, first + moved, rtol=0, atol=4e-6)
    assert not torch.equal(first, first.to(dtype).float())  # a conversion would change them


def test_a_choice_that_is_given_is_not_made_again() -> None:
    router, x = router_of(model()), logits()[None]
    route = LocalRoute(EXPERTS)
    route.experts = torch.tensor([2, 1, 0]).expand(TOKENS, 3)
    weights = router(x, route, balance_of(1, TOKENS, 1.0))
    assert torch.equal(route.experts, torch.tensor([2, 1, 0]).expand(TOKENS, 3))
    torch.testing.assert_close(
        weights, weights_of(x[0].softmax(-1), route.experts, router.settings)
    )
    assert not router.tally.values.any()  # it was counted in the forward that chose


BUGS: list[tuple[Mutation, Callable[[], None]]] = [
    (
        ties_to_the_higher_index,
        lambda: test_ties_go_to_the_lower_index(ROUTERS["softmax"]),
    ),
    (
        zero_outside_of_the_groups,
        test_a_bias_below_zero_does_not_let_a_token_out_of_its_groups,
    ),
    (scores_of_bf16, test_a_router_of_bf16_scores_in_fp32),
    (softmax_twice, test_the_auxiliary_loss_is_that_of_transformers_by_experts_per_token),
    (weights_without_gradient, test_the_weights_alone_give_the_router_a_gradient),
]


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        pytest.param(*row, id=row[0].__name__, marks=[pytest.mark.slow] * (row[0] is softmax_twice))
        for row in BUGS
    ],
)
def test_a_planted_bug_is_detected(bug: Mutation, check: Callable[[], None]) -> None:
    with bug(), pytest.raises(AssertionError):
        check()


def test_balanced_choices_are_equally_many_and_the_same_for_any_split_of_a_sequence() -> None:
    shape = model(seq_length=32, experts_per_token=2)
    router = router_drawn(1, shape, "balanced")
    x = torch.rand(2, 32, EXPERTS, dtype=F64)
    samples, lengths = torch.arange(2), torch.full((2,), 32, dtype=F64)
    whole = routed(router, x, Balance(samples, None, None, lengths)).experts.view(2, 32, 2)
    assert torch.equal(whole[0], whole[1])
    assert whole[0].flatten().bincount(minlength=EXPERTS).tolist() == [8] * EXPERTS
    assert all(len(set(chosen)) == 2 for chosen in whole[0].tolist())
    held = torch.tensor([3, 4, 30]).expand(2, -1)
    part = routed(router, x[:, held[0]], Balance(samples, held, None, lengths)).experts
    assert torch.equal(part.view(2, 3, 2), whole[:, held[0]])
    other = router_drawn(0, shape, "balanced")
    assert router.balanced is not None and other.balanced is not None
    assert not torch.equal(router.balanced, other.balanced)


@pytest.mark.parametrize("seed", [0, 2**51, 2**53 + 1, 2**63 - 1])
def test_balanced_choices_take_every_seed_that_the_key_allows(seed: int) -> None:
    found = balanced_experts(seed, 5, tokens=12, experts=8, chosen=2)
    assert torch.bincount(found.flatten()).tolist() == [3] * 8
    assert not torch.equal(found, balanced_experts(seed ^ 1, 5, tokens=12, experts=8, chosen=2))
