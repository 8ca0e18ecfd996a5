"""The mixture of experts that replaces the MLP of a layer: router, experts, shared expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel3d.blueprint.dispatch import chosen_way
from parallel3d.experts.grouped import Activation, add_biases, run_experts
from parallel3d.experts.route import TokenRoute, new_route
from parallel3d.experts.router import Router
from parallel3d.experts.rows import Rows
from parallel3d.models.checkpointing import recomputed
from parallel3d.models.keys import ModelConfig
from parallel3d.models.layer_inputs import LayerInputs
from parallel3d.models.layers import BuildContext
from parallel3d.models.mlp import MLP, activate
from parallel3d.models.ops import weighed_backward, weighed_forward
from parallel3d.parameters.declaration import Held, part_of


class Experts(nn.Module):
    """Holds the matrices and the biases of this rank's experts, concatenated.

    All ranks of an edp group hold the same experts.
    """

    def __init__(self, held: Held, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.activation = _activation(model)

        def bias(name: str) -> nn.Parameter | None:
            return ctx.parameter(held[name]) if name in held else None

        self.up, self.up_bias = ctx.parameter(held["up"]), bias("up_bias")
        self.down, self.down_bias = ctx.parameter(held["down"]), bias("down_bias")

    def forward(self, x: Tensor, weights: Tensor, rows: Rows) -> Tensor:
        """Returns each token's weighted sum over this rank's experts: (t, hidden) → (t, hidden)."""
        matrices = self.up, self.down
        y = run_experts(x, weights, *matrices, rows, self.activation, self.up_bias)
        return y if self.down_bias is None else add_biases(y, weights, self.down_bias, rows)


def _activation(model: ModelConfig) -> Activation:
    name, limit = model.activation, model.swiglu_limit
    plain = partial(activate, name, limit=limit)
    if not model.is_gated:
        return Activation(plain)

    def weighed(inner: Tensor, weights: Tensor) -> Tensor:
        return weighed_forward(inner, weights, name, limit)

    def backward(grad: Tensor, inner: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        return weighed_backward(grad, inner, weights, name, limit)

    return Activation(plain, weighed, backward)


class MixtureOfExperts(nn.Module):
    """Sends each token to its chosen experts, and adds the result of the shared expert, if any.

    Under sequence parallelism each token is on exactly one rank, so the experts take this rank's
    tokens unchanged. The shared expert is an ordinary tensor-parallel MLP.
    """

    def __init__(self, layer: int, held: Held, model: ModelConfig, ctx: BuildContext) -> None:
        super().__init__()
        self.repeats = ctx.repeats
        self.tp = ctx.tp
        self.sp = ctx.sequence_parallel
        self.ep = ctx.ep
        self.overlap = ctx.overlap
        self.load = ctx.load
        self.total = model.num_experts
        self.way = chosen_way(ctx.dispatch, self.total, model.experts_per_token, ctx.ep.size)
        self.router = Router(layer, part_of(held, "router"), model, ctx.init, ctx.routing)
        self.experts = Experts(part_of(held, "experts"), model, ctx)
        self.shared = self.shared_gate = None
        if shared := part_of(held, "shared"):
            self.shared = MLP(shared, model, replace(ctx, repeats=ctx.repeats.inside_mlp))
            if "shared_gate" in held:
                self.shared_gate = ctx.parameter(held["shared_gate"])

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
        return new_route(self.way, self.total, self.ep, self.overlap, self.load)

    def of_shared(self, x: Tensor) -> Tensor | None:
        """Returns the shared expert's result, or None if the model has no shared expert."""
        if self.shared is None:
            return None
        shared = self.shared(x, nn.Identity())
        if self.shared_gate is not None:
            shared = shared * torch.sigmoid(F.linear(x, self.shared_gate))
        return shared
