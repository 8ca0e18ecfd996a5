"""The MLP of a block."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.config.schema import ModelConfig
from parallel3d.models.context import BuildContext
from parallel3d.models.layers import output_std
from parallel3d.models.ops import swiglu
from parallel3d.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """Two GEMMs with a non-linearity; SwiGLU's gate and up share the first."""

    def __init__(self, layer: int, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.activation = model.activation
        prefix, ffn = f"layers.{layer}.mlp", model.ffn_size
        names = ("gate", "up") if self.activation == "swiglu" else ("up",)
        split = ctx.split | {"bias": model.bias}
        self.up = ColumnParallelLinear(
            prefix, dict.fromkeys(names, ffn), model.hidden_size, std=model.init_std, **split
        )
        self.down = RowParallelLinear(
            f"{prefix}.down", ffn, model.hidden_size, std=output_std(model), **split
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.activation == "swiglu":
            x = swiglu(x)
        elif self.activation == "gelu":
            x = F.gelu(x)
        elif self.activation == "gelu_tanh":
            x = F.gelu(x, approximate="tanh")
        else:
            x = F.relu(x)
        return self.down(x)
