"""The mixture of experts that replaces the MLP of a layer: router, experts, shared expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.blueprint.dispatch import chosen_way
from parallel3d.experts.grouped import Activation, run_experts
from parallel3d.experts.route import TokenRoute, new_route
from parallel3d.experts.router import Router
from parallel3d.experts.rows import Rows
from parallel3d.models.checkpointing import recomputed
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext, output_std
from parallel3d.models.mlp import MLP, activate
from parallel3d.models.ops import weighed_backward, weighed_forward
from parallel3d.parameters.spec import ParameterSpec, ShardSpec


class Experts(nn.Module):
    """Holds the matrices of this rank's experts, concatenated.

    All ranks of an edp group hold the same experts. Experts have no biases.
    """

    def __init__(self, prefix: str, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.count = model.num_experts // ctx.ep.size
        self.activation = _activation(model)
        first, hidden, width = self.count * ctx.ep.index, model.hidden_size, model.expert_size
        inner = ("gate", "up") if model.is_gated else ("up",)
        up, down = [], []
        for number in range(self.count):
            name = f"{prefix}.{first + number}"
            for i, part in enumerate(inner):
                row = width * (number * len(inner) + i)
                full = (width, hidden)
                up.append(_whole(f"{name}.{part}.weight", full, row, model.init_std))
            full = (hidden, width)
            down.append(_whole(f"{name}.down.weight", full, number * hidden, output_std(model)))
        self.up = ctx.init.parameter(_spec(up))
        self.down = ctx.init.parameter(_spec(down))

    def forward(self, x: Tensor, weights: Tensor, rows: Rows) -> Tensor:
        """Returns each token's weighted sum over this rank's experts: (t, hidden) → (t, hidden)."""
        return run_experts(x, weights, self.up, self.down, rows, self.activation)


def _activation(model: ModelConfig) -> Activation:
    plain = partial(activate, model.activation)
    if not model.is_gated:
        return Activation(plain)

    def weighed(inner: Tensor, weights: Tensor) -> Tensor:
        return weighed_forward(inner, weights, model.activation)

    def backward(grad: Tensor, inner: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        return weighed_backward(grad, inner, weights, model.activation)

    return Activation(plain, weighed, backward)


def _whole(name: str, shape: tuple[int, int], row: int, std: float) -> ShardSpec:
    return ShardSpec(name, shape, (0, 0), shape, row, std)


def _spec(shards: list[ShardSpec]) -> ParameterSpec:
    rows = sum(shard.shape[0] for shard in shards)
    shape = (rows, shards[0].shape[1])
    return ParameterSpec(shape, tuple(shards), replicated=False, is_expert=True)


class MixtureOfExperts(nn.Module):
    """Sends each token to its chosen experts, and adds the result of the shared expert, if any.

    Under sequence parallelism each token is on exactly one rank, so the experts take this rank's
    tokens unchanged. The shared expert is an ordinary tensor-parallel MLP.
    """

    def __init__(self, layer: int, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        prefix = f"layers.{layer}.mlp"
        self.repeats = ctx.repeats
        self.tp = ctx.tp
        self.sp = ctx.sequence_parallel
        self.ep = ctx.ep
        self.overlap = ctx.overlap
        self.total = model.num_experts
        self.way = chosen_way(ctx.dispatch, self.total, model.experts_per_token, ctx.ep.size)
        self.router = Router(layer, model, ctx.init, ctx.routing)
        self.experts = Experts(f"{prefix}.experts", model, ctx)
        self.shared = self.shared_gate = None
        if model.shared_expert_size:
            inside, width = replace(ctx, repeats=ctx.repeats.inside_mlp), model.shared_expert_size
            self.shared = MLP(f"{prefix}.shared", width, model, inside, bias=False)
            if model.shared_expert_gate:
                shape = (1, model.hidden_size)
                name = f"{prefix}.shared_gate.weight"
                shard = ShardSpec(name, shape, (0, 0), shape, std=model.init_std)
                self.shared_gate = ctx.init.parameter(ParameterSpec(shape, (shard,), True))

    def forward(self, x: Tensor, norm: Callable[[Tensor], Tensor], inputs: LayerInputs) -> Tensor:
        """Returns the output of the experts for norm(x).

        x and the result are (b, s, hidden), or (b, s/tp, hidden) under sequence parallelism.
        `inputs.route` must be there (`new_route`).
        """
        if self.repeats.mlp_with_norm:
            return recomputed(lambda x: self.inner(norm(x), inputs), x)
        if self.repeats.mlp:
            return recomputed(self.inner, norm(x), inputs)
        return self.inner(norm(x), inputs)

    def inner(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        route, balance = inputs.route, inputs.balance
        assert route is not None  # a block with experts has made it
        if balance is not None and self.sp:
            balance = balance.at(self.tp.index, self.tp.size, x.shape[1])
        weights = self.router(x, route, balance)
        route.start(x.dtype)
        # With several ranks the device computes the shared expert while the host waits for counts.
        # A single rank does not wait, so the shared expert comes last: a recomputation that ends
        # with it does not repeat its last GEMM.
        shared = self.of_shared(x) if self.ep.size > 1 else None
        y = route.run(x.flatten(0, -2), weights, self.experts).view_as(x)
        if shared is None:
            shared = self.of_shared(x)
        return y if shared is None else y + shared

    def new_route(self) -> TokenRoute:
        """Returns a route for the tokens of one forward, on which nothing is decided yet."""
        return new_route(self.way, self.total, self.ep, self.overlap)

    def of_shared(self, x: Tensor) -> Tensor | None:
        """Returns the shared expert's result, or None if the model has no shared expert."""
        if self.shared is None:
            return None
        shared = self.shared(x, nn.Identity())
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(F.linear(x, self.shared_gate))
        return shared
