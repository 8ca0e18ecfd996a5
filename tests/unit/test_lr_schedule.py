"""The learning rate against hand-computed values."""

from __future__ import annotations

import math

import pytest

from parallel3d.config.schema import OptimConfig
from parallel3d.optim import learning_rate


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


def test_floor_holds_after_the_decay_steps() -> None:
    assert rates(6, lr_decay_style="linear", lr_decay_steps=3)[2:] == pytest.approx([0.1] * 4)
