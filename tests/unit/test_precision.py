"""The dynamic loss scale, step by step."""

from __future__ import annotations

import pytest
import torch

from parallel3d.config import PrecisionConfig
from parallel3d.precision import LossScale, compute_dtype


def fp16(**changes: float) -> LossScale:
    keys = {
        "initial_loss_scale": 16.0,
        "loss_scale_window": 3,
        "loss_scale_hysteresis": 2,
        "min_loss_scale": 2.0,
    }
    return LossScale(PrecisionConfig(name="fp16", **(keys | changes)))


def scales(scale: LossScale, overflows: str) -> list[float]:
    """The scale after each step; "x" is an overflow, "." none."""
    seen = []
    for step in overflows:
        scale.update(overflow=step == "x")
        seen.append(scale.scale)
    return seen


def test_scale_grows_after_a_window_without_overflow() -> None:
    assert scales(fp16(), "......") == [16, 16, 32, 32, 32, 64]


def test_overflow_begins_the_window_anew() -> None:
    assert scales(fp16(), "..x...") == [16, 16, 16, 16, 16, 32]


def test_scale_backs_off_after_as_many_overflows_as_the_hysteresis() -> None:
    assert scales(fp16(), "xxx") == [16, 8, 8]
    assert scales(fp16(loss_scale_hysteresis=1), "xxxxx") == [8, 4, 2, 2, 2], (
        "never below the floor"
    )


def test_growth_forgives_earlier_overflows() -> None:
    assert scales(fp16(), "x...x") == [16, 16, 16, 32, 32]


def test_fixed_scale_and_other_types_never_change() -> None:
    fixed = fp16(loss_scale=8.0)
    assert scales(fixed, "xxx....") == [8] * 7
    for name in ("bf16", "fp32", "fp64"):
        assert scales(LossScale(PrecisionConfig(name=name)), "xx....") == [1] * 6


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp64", torch.float64), ("fp32", torch.float32), ("tf32", torch.float32),
     ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)  # fmt: skip
def test_compute_type(name: str, dtype: torch.dtype) -> None:
    assert compute_dtype(PrecisionConfig(name=name)) == dtype
