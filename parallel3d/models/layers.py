"""Norms and rotary positions: the parts of a block that tensor parallelism does not split."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.config.schema import ModelConfig
from parallel3d.models.ops import rms_norm
from parallel3d.parameters.pieces import Initializer, ParameterSpec, Piece


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the hidden dimension; its parameters are replicated over tp."""

    def __init__(self, name: str, model: ModelConfig, init: Initializer) -> None:
        super().__init__()
        self.eps, self.size = model.norm_eps, (model.hidden_size,)

        def vector(part: str, fill: float) -> nn.Parameter:
            piece = Piece(f"{name}.{part}", self.size, (0,), self.size, fill=fill)
            return init.parameter(ParameterSpec(self.size, (piece,), replicated=True))

        self.weight = vector("weight", 1.0)
        self.bias = vector("bias", 0.0) if model.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return F.layer_norm(x, self.size, self.weight, self.bias, self.eps)


def rotary_tables(
    model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of position / base^(2d/r): (seq_length, 1, r/2) each, fp32 or better."""
    rotated = int(model.head_dim * model.rotary_percent) // 2 * 2
    wide = torch.float64  # angles of late positions lose their digits below this
    exponent = torch.arange(0, rotated, 2, dtype=wide) / rotated
    angle = torch.outer(torch.arange(model.seq_length, dtype=wide), model.rotary_base**-exponent)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    return tuple(t.unsqueeze(1).to(device, kind) for t in (angle.cos(), angle.sin()))
