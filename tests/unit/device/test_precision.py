"""Tests the dynamic loss scale, step by step."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from parallel3d.device import accelerator
from parallel3d.device.keys import PrecisionConfig
from parallel3d.device.precision import LossScale, compute_dtype, set_determinism


def fp16(**changes: float) -> LossScale:
    keys = {
        "initial_loss_scale": 16.0,
        "loss_scale_window": 3,
        "loss_scale_hysteresis": 2,
        "min_loss_scale": 2.0,
    }
    return LossScale(PrecisionConfig(name="fp16", **(keys | changes)))


def scales(scale: LossScale, overflows: str) -> list[float]:
    """Returns the scale after each step; "x" is an overflow, "." none."""
    seen = []
    for step in overflows:
        scale.update(overflow=step == "x")
        seen.append(scale.scale)
    return seen


def test_scale_grows_after_a_window_without_overflow() -> None:
    assert scales(fp16(), "......") == [16, 16, 32, 32, 32, 64]


def test_an_overflow_restarts_the_growth_window() -> None:
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


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


def test_determinism_is_set_on_accelerators_only(
    flags: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_determinism(torch.device("cpu"))
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)
    set_determinism(torch.device("cuda:0"))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_the_users_workspace_setting_is_kept(flags: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setattr(accelerator, "is_accelerator", lambda device: True)
    set_determinism(torch.device("cuda:0"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
