"""Number formats and determinism of a run, and the loss scale of fp16."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parallel3d.device import accelerator
from parallel3d.device.keys import PrecisionConfig

COMPUTE = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def compute_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Returns the dtype of parameters and activations."""
    return COMPUTE[precision.name]


def master_dtype(precision: PrecisionConfig) -> torch.dtype:
    """Returns the dtype of master weights and checkpoints, fp32 or fp64."""
    return torch.promote_types(compute_dtype(precision), torch.float32)


def set_matmul_precision(precision: PrecisionConfig) -> None:
    """Sets whether fp32 GEMMs of this process may use tf32 on tensor cores."""
    torch.set_float32_matmul_precision("high" if precision.name == "tf32" else "highest")


def set_numerics(precision: PrecisionConfig, device: torch.device, deterministic: bool) -> None:
    """Sets this process's matmul precision, and makes its kernels deterministic if requested."""
    set_matmul_precision(precision)
    if deterministic:
        set_determinism(device)


def set_determinism(device: torch.device) -> None:
    """Makes this process compute the same bits whenever it gets the same inputs.

    A CPU's kernels do so anyway. On a GPU, PyTorch then uses slower kernels, which add in a fixed
    order; a later call that has no such kernel raises RuntimeError. cuBLAS needs a fixed workspace,
    which an environment variable sets before the first matmul.
    """
    if not accelerator.is_accelerator(device):
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling memory is not needed, as no code here reads uninitialised memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@dataclass
class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018 §3.2), with Megatron-LM's hysteresis.

    The scale is reduced at the `precision.loss_scale_hysteresis`-th overflow since its last change,
    and grows after `precision.loss_scale_window` steps in a row without an overflow. In dtypes
    other than fp16 it stays 1.

    Attributes:
        config: the section `precision` of the configuration.
        scale: the factor by which the loss is multiplied.
        good_steps: the number of steps since the last overflow or growth.
        overflows: the number of overflows since the scale last changed.
    """

    config: PrecisionConfig
    scale: float = 1.0
    good_steps: int = 0
    overflows: int = 0

    def __post_init__(self) -> None:
        if self.config.name == "fp16":
            self.scale = self.config.loss_scale or self.config.initial_loss_scale

    @property
    def is_dynamic(self) -> bool:
        return self.config.name == "fp16" and self.config.loss_scale is None

    def update(self, overflow: bool) -> None:
        """Adapts the scale after a step; `overflow`: whether its gradients were not finite."""
        if not self.is_dynamic:
            return
        config = self.config
        if overflow:
            self.good_steps = 0
            self.overflows += 1
            if self.overflows >= config.loss_scale_hysteresis:
                self.scale = max(self.scale * config.loss_scale_backoff, config.min_loss_scale)
                self.overflows = 0
            return
        self.good_steps += 1
        if self.good_steps >= config.loss_scale_window:
            self.scale *= config.loss_scale_growth
            self.good_steps = self.overflows = 0

    def progress(self) -> dict[str, float]:
        return {
            "loss_scale": self.scale,
            "good_steps": self.good_steps,
            "overflows": self.overflows,
        }

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Restores the state that `progress` returned, unless the configuration fixes the scale."""
        if self.is_dynamic:
            self.scale = float(progress["loss_scale"])
            self.good_steps = int(progress["good_steps"])
            self.overflows = int(progress["overflows"])

    def unscaled(self, norm: float, divisor: float = 1.0) -> float:
        """Returns the norm of the gradients as it would be without the loss scale.

        `divisor` divides the gradients too. A norm that is not finite is returned unchanged.
        """
        return norm / (self.scale * divisor) if math.isfinite(norm) else norm
