"""The MLP of a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.models.checkpointing import checkpoint_up_to_linear
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext
from parallel3d.models.ops import geglu, swiglu
from parallel3d.parameters.declaration import Held, part_of
from parallel3d.parameters.state import state_of
from parallel3d.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


def activate(activation: str, x: Tensor, limit: float | None = None) -> Tensor:
    """Applies `model.activation`; swiglu and geglu map 2f features, gate and up, to f.

    `limit` is `model.swiglu_limit`.
    """
    if activation == "swiglu":
        return swiglu(x, limit)
    if activation == "geglu":
        return geglu(x)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class MLP(nn.Module):
    """Runs two GEMMs with a non-linearity between them; gate and up share the first GEMM.

    Args:
        held: its parameters (`declared.mlp`).
    """

    def __init__(self, held: Held, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.activation, self.limit = model.activation, model.swiglu_limit
        self.repeats = ctx.repeats
        self.chunks = ctx.mlp_chunks if ctx.repeats.mlp else 1
        self.up = ColumnParallelLinear.of(part_of(held, "up"), **ctx.linear_arguments)
        self.down = RowParallelLinear.of(part_of(held, "down"), **ctx.linear_arguments)

    def forward(
        self, x: Tensor, norm: Callable[[Tensor], Tensor], _: LayerInputs | None = None
    ) -> Tensor:
        """Returns the output for norm(x); nothing else about the tokens matters."""
        if self.repeats.mlp_with_norm:
            return self.in_chunks(lambda x: self.inner(norm(x)), x)
        if self.repeats.mlp:
            return self.in_chunks(self.inner, norm(x))
        x = checkpoint_up_to_linear(self.up, norm, x, again=self.repeats.norm)
        return checkpoint_up_to_linear(self.down, self.activate, x, again=self.repeats.activation)

    def in_chunks(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Returns down(function(x)), computed for one chunk of tokens at a time.

        The backward recomputes `function` of each chunk.
        """
        if self.chunks == 1:
            return checkpoint_up_to_linear(self.down, function, x, again=True)
        chunks = x.chunk(self.chunks, dim=1)
        for linear in (self.up, self.down):
            state_of(linear.weight).additions = len(chunks)
        run = partial(checkpoint_up_to_linear, self.down, function, again=True)
        return torch.cat([run(chunk) for chunk in chunks], dim=1)

    def inner(self, x: Tensor) -> Tensor:
        return self.activate(self.up(x))

    def activate(self, x: Tensor) -> Tensor:
        return activate(self.activation, x, self.limit)
