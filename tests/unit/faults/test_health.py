"""Tests spikes of the loss, and the sum by which replicas are compared."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from parallel3d.comm.process_groups import ProcessGroups
from parallel3d.device.precision import LossScale
from parallel3d.errors import TrainingFailure
from parallel3d.faults.health import Health, bit_sum
from parallel3d.models.keys import ModelConfig
from parallel3d.run_config import Config
from parallel3d.trainer import StepResult


def health(said: list[str], name: str = "fp32") -> Health:
    config = Config(model=ModelConfig(name="gpt_tiny"))
    config.recovery.drift_every = 0
    config.precision.name = name
    scale = LossScale(config.precision)
    trainer = SimpleNamespace(config=config, groups=ProcessGroups.single(), loss_scale=scale)
    return Health(trainer, checkpoints=None, say=said.append)


def result(step: int, loss: float | None, skipped: bool = False) -> StepResult:
    return StepResult(step, loss, 1.0, 1e-3, 64, skipped)


def test_spike_is_said_once_and_only_over_a_full_window() -> None:
    said: list[str] = []
    watched = health(said)
    watched.after_step(result(1, 90.0))  # there is no median yet
    for step in range(2, 60):
        watched.after_step(result(step, 2.0))
    for step in range(60, 65):
        watched.after_step(result(step, 6.5))
    assert said == [
        "step 60: loss 6.5000 is 3.2 times the median 2.0000 of the last 50 steps "
        "(recovery.spike_factor=3)"
    ]


@pytest.mark.parametrize(
    ("saved_step", "why"),
    [
        (-1, "there is no checkpoint to go back to"),
        (6, "recovery.max_restarts=0 allows no more rollbacks"),
    ],
)
def test_a_run_that_cannot_roll_back_ends_with_the_reason(saved_step: int, why: str) -> None:
    watched = health([])
    watched.trainer.parameters = {}
    watched.trainer.optimizer = SimpleNamespace(segments=[])
    watched.trainer.device = torch.device("cpu")
    watched.checkpoints = SimpleNamespace(saved_step=saved_step)
    recovery = watched.trainer.config.recovery
    recovery.after_skipped, recovery.max_skipped, recovery.max_restarts = "rollback", 0, 0
    with pytest.raises(TrainingFailure) as failed:
        watched.after_step(result(7, float("nan"), skipped=True))
    assert str(failed.value) == (
        "step 7: gradients were not finite for 1 step in a row; "
        f"no gradient is bad now: only the loss is not finite; {why}"
    )


def test_fp16_may_skip_while_it_finds_its_scale_but_not_for_a_loss_that_is_not_finite() -> None:
    watched = health([], "fp16")
    for step in range(1, 40):
        watched.after_step(result(step, 2.0, skipped=True))
    assert watched.skipped == 0
    watched.after_step(result(40, float("nan"), skipped=True))
    assert watched.skipped == 1


def test_a_step_without_labels_is_neither_a_bad_step_nor_breaks_a_row_of_them() -> None:
    watched = health([])
    watched.after_step(result(1, float("nan"), skipped=True))
    for step in range(2, 60):
        watched.after_step(result(step, None, skipped=True))
    assert watched.skipped == 1 and not watched.losses


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_single_bit_changes_the_sum(dtype: torch.dtype) -> None:
    tensor = torch.linspace(-3, 3, 24, dtype=dtype).view(4, 6)
    before = bit_sum(tensor)
    words = tensor.view(-1).view({8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize])
    bits = 8 * dtype.itemsize
    for bit in range(bits):
        flip = -(1 << bit) if bit == bits - 1 else 1 << bit
        words[7] ^= flip
        assert bit_sum(tensor) != before
        words[7] ^= flip
    assert bit_sum(tensor) == before
