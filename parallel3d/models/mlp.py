"""The MLP of a block."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.config.schema import ModelConfig
from parallel3d.models.context import BuildContext
from parallel3d.models.layers import output_std
from parallel3d.models.ops import swiglu
from parallel3d.models.recompute import checkpoint_up_to_linear
from parallel3d.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class MLP(nn.Module):
    """Two GEMMs with a non-linearity; SwiGLU's gate and up share the first."""

    def __init__(self, layer: int, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.activation, self.recompute = model.activation, ctx.recompute
        prefix, ffn = f"layers.{layer}.mlp", model.ffn_size
        names = ("gate", "up") if self.activation == "swiglu" else ("up",)
        split = ctx.split | {"bias": model.bias}
        self.up = ColumnParallelLinear(
            prefix, dict.fromkeys(names, ffn), model.hidden_size, std=model.init_std, **split
        )
        self.down = RowParallelLinear(
            f"{prefix}.down", ffn, model.hidden_size, std=output_std(model), **split
        )

    def forward(self, x: Tensor, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """Of norm(x)."""
        if {"mlp", "norm"} <= self.recompute:
            return checkpoint_up_to_linear(self.down, lambda x: self.inner(norm(x)), x, again=True)
        if "mlp" in self.recompute:
            return checkpoint_up_to_linear(self.down, self.inner, norm(x), again=True)
        x = checkpoint_up_to_linear(self.up, norm, x, again="norm" in self.recompute)
        return checkpoint_up_to_linear(
            self.down, self.activate, x, again="activation" in self.recompute
        )

    def inner(self, x: Tensor) -> Tensor:
        return self.activate(self.up(x))

    def activate(self, x: Tensor) -> Tensor:
        if self.activation == "swiglu":
            return swiglu(x)
        if self.activation == "relu":
            return F.relu(x)
        return F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")
