"""Tests counts, losses and statistics of the balance, and updates of biases, on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parallel3d.experts.balance import Balance, BalanceLosses, BalanceOfRun, Tally
from parallel3d.experts.keys import ExpertsConfig
from tests.distributed.seams import TALLY, UPDATED_BIAS, Mutation, planted

CPU = torch.device("cpu")
NOTHING = torch.zeros(())


@dataclass
class Layer:
    """A router as the balance of a run sees it."""

    name: str
    bias: Tensor | None
    tally: Tally


def run_of(
    experts: int, chosen: int = 1, fixed: Collection[str] = (), **keys: float
) -> BalanceOfRun:
    """Returns the balance of a run whose layers 0 and 2 have experts; this rank has layer 2."""
    layer = Layer("layers.2.mlp.router", torch.zeros(experts), Tally(experts, CPU))
    settings, alone = ExpertsConfig(**keys), {"has_biases": True, "is_first": True}
    return BalanceOfRun(settings, {2: layer}, [0, 2], experts, chosen, (), **alone, fixed=fixed)


def chosen(*counts: int) -> BalanceLosses:
    """Returns the losses of a micro-batch; only the counts matter here."""
    return BalanceLosses(NOTHING, NOTHING, NOTHING, torch.tensor(counts), None)


def balance_of(used: Tensor | None, lengths: list[float], **more: Any) -> Balance:
    """Returns the balance of samples with these numbers of tokens before their padding."""
    numbers = torch.arange(len(lengths))
    return Balance(numbers, None, used, torch.tensor(lengths, dtype=torch.float64), **more)


def taken(run: BalanceOfRun) -> list[float]:
    return run.take(torch.zeros((), dtype=torch.float64)).tolist()


def test_counts_of_forty_thousand_tokens_differ_by_one() -> None:
    """bf16 numbers of this size are 256 apart, so that no bias would move."""
    run = run_of(4, bias_update_rate=0.25)
    layer = run.routers[2]
    layer.tally.add(chosen(40_000, 39_990, 40_000, 39_999))
    for _ in range(11):
        layer.tally.add(chosen(0, 1, 0, 0))
    figures = run.figures(taken(run), batch=1)
    assert figures.counts == {0: [0] * 4, 2: [40_000, 40_001, 40_000, 39_999]}
    run.update(figures)
    assert layer.bias is not None
    assert layer.bias.tolist() == [0.0, -0.25, 0.0, 0.25]
    assert run.figures(taken(run), batch=1).counts[2] == [0] * 4  # the next step starts at zero


@pytest.mark.parametrize(("rate", "fixed"), [(0.5, ["layers.2.mlp.router.bias"]), (0.0, [])])
def test_a_fixed_bias_keeps_its_bits(rate: float, fixed: list[str]) -> None:
    run = run_of(3, bias_update_rate=rate, fixed=fixed)
    bias = run.states["layers.2.mlp.router.bias"].fill_(-0.0)
    run.routers[2].tally.add(chosen(3, 4, 1))
    run.update(run.figures(taken(run), batch=1))
    assert bias.signbit().all() and not bias.any()


def test_a_bias_moves_by_the_sign_of_the_mean_minus_the_count() -> None:
    run = run_of(3, bias_update_rate=0.5)
    bias = run.states["layers.2.mlp.router.bias"]
    for counts, expected in (
        ((3, 4, 1), [-0.5, -0.5, 0.5]),  # the mean is not a whole number
        ((2, 2, 2), [-0.5, -0.5, 0.5]),
        ((0, 1, 1), [0.0, -1.0, 0.0]),
    ):
        run.routers[2].tally.add(chosen(*counts))
        run.update(run.figures(taken(run), batch=1))
        assert bias.tolist() == expected


@planted(TALLY)
def counted_in_bf16(sound: Any, tally: Tally, losses: BalanceLosses) -> None:
    """Counts are added in the model's type."""
    sound(tally, losses)
    tally.values = tally.values.bfloat16().double()


@planted(UPDATED_BIAS)
def compared_in_bf16(sound: Any, bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Counts are rounded before they are compared with their mean."""
    return sound(bias, counts.bfloat16(), rate)


@planted(UPDATED_BIAS)
def beside_a_whole_mean(sound: Any, bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The mean of the counts is rounded down."""
    return bias + rate * torch.sign(counts.sum() // counts.numel() - counts)


BUGS: list[tuple[Mutation, Callable[[], None]]] = [
    (counted_in_bf16, test_counts_of_forty_thousand_tokens_differ_by_one),
    (compared_in_bf16, test_counts_of_forty_thousand_tokens_differ_by_one),
    (beside_a_whole_mean, test_a_bias_moves_by_the_sign_of_the_mean_minus_the_count),
]


@pytest.mark.parametrize(("bug", "check"), BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_a_planted_bug_is_detected(bug: Mutation, check: Callable[[], None]) -> None:
    with bug(), pytest.raises(AssertionError):
        check()


def test_losses_and_entropy_are_the_formulas_without_padding() -> None:
    """Two samples; the second has two tokens and two of padding."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(2, 4, 3))
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    experts = np.argsort(-scores, axis=-1)[..., :2]
    used = torch.tensor([[True] * 4, [True, True, False, False]])
    balance = balance_of(used, [4.0, 2.0], aux_scale=torch.tensor(1.0))
    flat = [torch.from_numpy(a.reshape(8, -1).copy()) for a in (logits, scores, experts)]
    found = BalanceLosses.of(*flat, balance, None)
    aux = z = entropy = 0.0
    counts = np.zeros((2, 3))
    for b, length in enumerate((4, 2)):
        for t in range(length):
            z += math.log(np.exp(logits[b, t]).sum()) ** 2
            entropy -= sum(p * math.log(p) for p in scores[b, t])
            for e in experts[b, t]:
                counts[b, e] += 1
        f = counts[b] * 3 / (2 * length)
        aux += (f * scores[b, :length].mean(0)).sum()
    assert found.counts is not None and found.counts.tolist() == counts.tolist()
    assert found.chosen.tolist() == counts.sum(0).tolist()
    assert found.aux.item() == pytest.approx(aux, rel=1e-12)
    assert found.z.item() == pytest.approx(z, rel=1e-12)
    assert found.entropy.item() == pytest.approx(entropy, rel=1e-12)


def test_figures_are_means_over_sequences_and_over_tokens() -> None:
    run = run_of(2, chosen=2)
    sums = [torch.tensor(x) for x in (6.0, 8.0, 2.0)]
    run.routers[2].tally.add(BalanceLosses(*sums, torch.tensor([4, 4]), None))
    figures = run.figures(taken(run), batch=3)
    assert figures.aux == {0: 0.0, 2: 2.0}
    assert figures.z == {0: 0.0, 2: 2.0} and figures.entropy == {0: 0.0, 2: 0.5}  # four tokens


def test_both_losses_carry_the_scale_of_the_gradients() -> None:
    """Under fp16 they would be 65,536 times too small without it."""
    run = run_of(2, aux_loss=0.5, z_loss=0.25)
    plain = balance_of(None, [1.0])
    scaled = run.scaled(plain, 65536.0, 8, torch.tensor(32.0))
    assert scaled.aux_scale is not None and scaled.z_scale is not None
    assert scaled.aux_scale.item() == 0.5 * 65536 / 8
    assert scaled.z_scale.item() == 0.25 * 65536 / 32
    nothing = run.scaled(plain, 1.0, 8, torch.tensor(0.0))
    assert nothing.z_scale is not None and nothing.z_scale.item() == 0.25  # only padding
    off = run_of(2).scaled(plain, 1.0, 8, torch.tensor(32.0))
    assert off.aux_scale is None and off.z_scale is None


def test_biases_are_states_and_no_parameters() -> None:
    run = run_of(3)
    assert list(run.states) == ["layers.2.mlp.router.bias"]
    assert run.states["layers.2.mlp.router.bias"] is run.routers[2].bias
