"""Norms and rotary positions: the parts of a block that tensor parallelism does not split."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.config.schema import ModelConfig
from parallel3d.device.accelerator import is_on_accelerator
from parallel3d.models.ops import add_rms_norm, rms_norm
from parallel3d.parameters.pieces import Initializer, ParameterSpec, ShardSpec


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the hidden dimension; its parameters are replicated over tp."""

    def __init__(self, name: str, model: ModelConfig, init: Initializer) -> None:
        super().__init__()
        self.eps, self.size = model.norm_eps, (model.hidden_size,)

        def vector(part: str, fill: float) -> nn.Parameter:
            piece = ShardSpec(f"{name}.{part}", self.size, (0,), self.size, fill=fill)
            return init.parameter(ParameterSpec(self.size, (piece,), replicated=True))

        self.weight = vector("weight", 1.0)
        self.bias = vector("bias", 0.0) if model.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)

    def is_fused_with_sum(self, x: Tensor) -> bool:
        """Whether `add` is one kernel, forward and backward.

        A compiler fuses them itself, and a CPU's losses stay what they are.
        """
        return self.bias is None and is_on_accelerator(x) and not torch.compiler.is_compiling()

    def add(self, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + y (x where y is None), and the norm of it."""
        return add_rms_norm(x, y, self.weight, self.eps)


def rotary_tables(
    model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of position · frequency: (seq_length, 1, r/2) each, fp32 or better.

    The frequency of pair d is base^(-2d/r), scaled where the model says so.
    """
    rotated = int(model.head_size * model.rotary_percent) // 2 * 2
    wide = torch.float64  # angles of late positions lose their digits below this
    exponent = torch.arange(0, rotated, 2, dtype=wide) / rotated
    frequency = _scaled(model.rotary_base**-exponent, model)
    angle = torch.outer(torch.arange(model.seq_length, dtype=wide), frequency)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    return tuple(t.unsqueeze(1).to(device, kind) for t in (angle.cos(), angle.sin()))


def _scaled(frequency: Tensor, model: ModelConfig) -> Tensor:
    """Frequencies for longer sequences (Llama 3.1's models/llama3/reference_impl, `apply_scaling`).

    A pair that turns less than `rope_low_freq_factor` times in `rope_original_length` tokens turns
    `rope_scaling_factor` times slower, one that turns more than `rope_high_freq_factor` times
    stays, and between the two it goes linearly with the number of turns.
    """
    if model.rope_scaling_factor == 1:
        return frequency
    turns = frequency * model.rope_original_length / (2 * math.pi)
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / model.rope_scaling_factor)


def output_std(model: ModelConfig) -> float:
    """Init of the layers that write into the residual stream (Radford et al. 2019 §2.3)."""
    return model.init_std / math.sqrt(2 * model.num_layers)
