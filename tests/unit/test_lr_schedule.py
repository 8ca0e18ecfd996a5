"""Compares the learning rate with values computed by hand."""

from __future__ import annotations

import math

import pytest

from parallel3d.optim.keys import OptimConfig
from parallel3d.optim.optimizer import learning_rate


def rates(steps: int, **keys: object) -> list[float]:
    optim = OptimConfig(lr=1.0, min_lr=0.1, **keys)
    return [learning_rate(optim, steps, step) for step in range(1, steps + 1)]


def test_constant_keeps_the_peak_after_the_warmup() -> None:
    assert rates(5, lr_decay_style="constant", lr_warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_linear_reaches_the_floor_at_the_last_decay_step() -> None:
    expected = [1.0, 0.775, 0.55, 0.325, 0.1]
    assert rates(5, lr_decay_style="linear", lr_warmup_steps=1) == pytest.approx(expected)


def test_cosine_halves_between_peak_and_floor() -> None:
    got = rates(8, lr_decay_style="cosine")
    assert got[3] == pytest.approx(0.55)
    assert got[1] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert got[-1] == pytest.approx(0.1)


def test_wsd_is_stable_then_decays_linearly() -> None:
    got = rates(10, lr_decay_style="wsd", wsd_decay_fraction=0.4, lr_warmup_fraction=0.2)
    expected = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1]
    assert got == pytest.approx(expected)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("cosine", [0.1 + 0.9 * math.cos(math.pi / 8 * n) ** 2 for n in range(1, 5)]),
        ("minus_sqrt", [1.0 - 0.9 * 0.5, 1.0 - 0.9 * 0.5**0.5, 1.0 - 0.9 * 0.75**0.5, 0.1]),
        ("exponential", [0.1 + 0.9 * (2 ** (1 - n / 4) - 1) for n in range(1, 5)]),
    ],
)
def test_wsd_decays_in_megatrons_shapes_over_a_number_of_steps(
    style: str, expected: list[float]
) -> None:
    got = rates(8, lr_decay_style="wsd", wsd_decay_style=style, wsd_decay_steps=4)
    assert got == pytest.approx([1.0, 1.0, 1.0, 1.0, *expected])


def test_inverse_square_root_starts_at_the_end_of_the_warmup_and_keeps_the_floor() -> None:
    got = rates(800, lr_decay_style="inverse-square-root", lr_warmup_steps=4)
    assert got[3:5] == [1.0, pytest.approx(2 / math.sqrt(5))]
    assert got[15] == pytest.approx(0.5)
    assert got[-1] == 0.1
    assert rates(9, lr_decay_style="inverse-square-root")[8] == pytest.approx(1 / 3)


def test_floor_holds_after_the_decay_steps() -> None:
    assert rates(6, lr_decay_style="linear", lr_decay_steps=3)[2:] == pytest.approx([0.1] * 4)
