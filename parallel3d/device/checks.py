"""Checks the settings of number formats."""

from __future__ import annotations

from parallel3d.config.fields import (
    check_at_most,
    check_conflicts,
)
from parallel3d.device.keys import NO_TF32, PrecisionConfig


def check_precision(precision: PrecisionConfig) -> None:
    """Raises UserError if the initial loss scale is below the minimum loss scale."""
    least, first = precision.min_loss_scale, precision.initial_loss_scale
    check_at_most("precision.min_loss_scale", least, "precision.initial_loss_scale", first)


def check_precision_of(device: str, precision: str) -> None:
    """Raises UserError if `device` ("cpu", "cuda" or "cuda:1") does not support `precision`."""
    values = {"device": device, "precision.name": precision}
    check_conflicts((NO_TF32,), values.__getitem__)
