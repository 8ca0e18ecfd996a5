"""The router, which scores the experts for each token, chooses among them and weights them.

One implementation serves all model families, which differ in their `RouterSettings`. Scores are
fp32, or fp64 in an fp64 model. The choice is made once per micro-batch and kept in its route,
because a recomputed forward that chose again could choose other experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.device.matmul import matmul
from parallel3d.device.wide import wide_linear
from parallel3d.experts.balance import Balance, BalanceLosses, Tally
from parallel3d.experts.route import TokenRoute
from parallel3d.models.keys import ModelConfig
from parallel3d.parameters.declaration import Held
from parallel3d.parameters.gradients import add_gradient
from parallel3d.parameters.initializer import Initializer
from parallel3d.parameters.spec import ParameterSpec
from parallel3d.parameters.state import state_of


@dataclass(frozen=True)
class RouterSettings:
    """The settings in which routers differ; `experts.keys.ExpertKeys` explains them."""

    score: str
    experts: int
    chosen: int
    normalize: bool
    scale: float
    groups: int
    top_groups: int

    @classmethod
    def of(cls, model: ModelConfig) -> RouterSettings:
        return cls(
            score=model.router_score,
            experts=model.num_experts,
            chosen=model.experts_per_token,
            normalize=model.router_normalize,
            scale=model.router_scale,
            groups=model.router_groups,
            top_groups=model.router_top_groups,
        )


def scores_of(logits: Tensor, settings: RouterSettings) -> Tensor:
    """Returns the scores of all experts, given the logits: (n, experts) → (n, experts)."""
    return logits.sigmoid() if settings.score == "sigmoid" else logits.softmax(-1)


def ranked(values: Tensor, count: int) -> Tensor:
    """Returns the indices of the `count` largest values of each row, the largest first.

    Among equal values, the first comes first.
    """
    places = values.sort(dim=-1, descending=True, stable=True).indices
    return places[..., :count].contiguous()  # a view would keep all indices in memory


def choose(scores: Tensor, bias: Tensor | None, settings: RouterSettings) -> Tensor:
    """Returns the experts of each token, best first: (n, experts) → (n, k) int64.

    `bias` is added to the scores for the choice only; None: nothing is added. With groups, experts
    outside a token's best groups are not chosen (DeepSeek-V3 report, §2.1.2).
    """
    values, _ = _values(scores, bias, settings)
    return ranked(values, settings.chosen)


def margins_of(scores: Tensor, bias: Tensor | None, settings: RouterSettings) -> Tensor:
    """Returns how close each token's choice was: (n, experts) → (n,).

    The result is the difference between the lowest value that was chosen and the highest that was
    not, or the same difference between groups of experts if that is smaller.
    """
    values, of_groups = _values(scores, bias, settings)
    gaps = [_gap(values, settings.chosen)]
    if of_groups is not None:
        gaps.append(_gap(of_groups, settings.top_groups))
    return torch.stack(gaps).amin(0)


def _gap(values: Tensor, count: int) -> Tensor:
    if count == values.shape[-1]:
        return torch.full_like(values[..., 0], torch.inf)
    best = values.sort(dim=-1, descending=True).values
    return best[..., count - 1] - best[..., count]


def _values(
    scores: Tensor, bias: Tensor | None, settings: RouterSettings
) -> tuple[Tensor, Tensor | None]:
    """Returns the values by which experts are chosen, and those by which groups are chosen.

    The latter are None if a token may use all groups.
    """
    values = scores.detach()
    if bias is not None:
        values = values + bias
    if settings.top_groups < settings.groups:
        grouped = values.unflatten(-1, (settings.groups, -1))
        if settings.score == "sigmoid":
            of_groups = grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1)
        else:  # as in DeepSeek-V2, whose router has no bias
            of_groups = scores.detach().unflatten(-1, (settings.groups, -1)).amax(-1)
        kept = torch.zeros_like(of_groups, dtype=torch.bool)
        kept.scatter_(-1, ranked(of_groups, settings.top_groups), True)
        return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2), of_groups
    return values, None


def weights_of(scores: Tensor, experts: Tensor, settings: RouterSettings) -> Tensor:
    """Returns the weights of the chosen experts: (n, experts), (n, k) → (n, k)."""
    weights = scores.gather(-1, experts)
    if settings.normalize:
        total = weights.sum(-1, keepdim=True)
        # transformers and DeepSeek-V3 add 1e-20 too; a sum of softmax scores is never zero.
        weights = weights / (total + 1e-20 if settings.score == "sigmoid" else total)
    return weights * settings.scale


class Router(nn.Module):
    """Scores the experts for every token and chooses among them; replicated over tp.

    Args:
        held: its parameters and its bias (`declared.router`).
        routing: the key `moe.routing`: `model` or `balanced`.

    Attributes:
        logit_bias: (experts,), added to the logits; None without `model.router_logit_bias`.
        bias: (experts,), fp32 or fp64, added to the scores for the choice; None without
            `model.router_bias`. It is not a parameter: the optimizer, gradient clipping and weight
            averaging ignore it.
    """

    bias: Tensor | None

    def __init__(
        self,
        layer: int,
        held: Held,
        model: ModelConfig,
        init: Initializer,
        routing: str = "model",
    ) -> None:
        super().__init__()
        self.layer = layer
        (weight,) = held["weight"]
        self.name = weight.name.removesuffix(".weight")
        self.settings = RouterSettings.of(model)
        self.weight = init.parameter(ParameterSpec.of(held["weight"]))
        self.logit_bias: nn.Parameter | None = None
        if "logit_bias" in held:
            self.logit_bias = init.parameter(ParameterSpec.of(held["logit_bias"]))
        bias = None
        if "bias" in held:
            bias = torch.zeros(held["bias"][0].shape, dtype=init.dtype, device=init.device)
        # The bias is not a buffer, because modules convert buffers to bf16 with their parameters,
        # which would erase the small differences that balance the experts.
        self.bias = bias
        self.tally = Tally(model.num_experts, init.device)
        self.balanced: Tensor | None = None
        if routing == "balanced":
            sizes = model.seq_length, model.num_experts, model.experts_per_token
            self.balanced = balanced_experts(init.seed, layer, *sizes).to(init.device)

    def forward(self, x: Tensor, route: TokenRoute, balance: Balance | None) -> Tensor:
        """Chooses experts for the n = b · s tokens in x, (b, s, hidden).

        Returns the weights of the chosen experts, (n, k), in fp32 or fp64.

        Args:
            route: the route of these tokens, which gets the chosen experts. If an earlier forward
                has chosen them, they are not chosen again.
            balance: the data for the micro-batch's balancing losses; None: there are no losses, and
                tokens are not counted.
        """
        logits = _Logits.apply(x, self.weight).flatten(0, -2)
        if self.logit_bias is not None:
            logits = logits + self.logit_bias.to(logits.dtype)
        scores = scores_of(logits, self.settings)
        is_first = route.experts is None
        experts = self._chosen(x, scores, balance) if route.experts is None else route.experts
        route.experts = experts
        weights = weights_of(scores, experts, self.settings)
        if balance is not None:
            losses = BalanceLosses.of(logits, scores, experts, balance, route.counts)
            route.counts = losses.counts
            if is_first:
                self.tally.add(losses)
            weights = losses.through(weights, balance)
        return weights

    def _chosen(self, x: Tensor, scores: Tensor, balance: Balance | None) -> Tensor:
        """Returns the experts of each token, best first, (n, k)."""
        if self.balanced is None or balance is None:
            experts = choose(scores, self.bias, self.settings)
        else:
            experts = self._balanced(self.balanced, balance, *x.shape[:-1])
        if balance is None or balance.watch is None:
            return experts
        margins = margins_of(scores, self.bias, self.settings)
        return balance.watch.chosen(self.layer, balance, experts, margins)

    def _balanced(self, table: Tensor, balance: Balance, samples: int, tokens: int) -> Tensor:
        """Returns the experts that `moe.routing=balanced` gives the tokens of a micro-batch."""
        if balance.positions is None:
            return table[:tokens].repeat(samples, 1)
        return table[balance.positions.flatten() % len(table)]


def balanced_experts(seed: int, layer: int, tokens: int, experts: int, chosen: int) -> Tensor:
    """Returns experts for each position of a sequence, with every expert used equally often.

    The result, (tokens, chosen) int64, is the same for all sequences and layouts. One random
    permutation of all experts is divided among experts/chosen consecutive positions.
    """
    # The generator takes 64 bits, which are more than enough for a table that only spreads tokens.
    chance = torch.Generator().manual_seed((4096 * seed + layer) % 2**64)
    each = experts // chosen
    orders = torch.rand(-(-tokens // each), experts, generator=chance).argsort(-1)
    return orders[:, : each * chosen].reshape(-1, chosen)[:tokens].contiguous()


class _Logits(torch.autograd.Function):
    """Computes x·Wᵀ in fp32, in which products of bf16 numbers are exact, or in fp64.

    In the backward, incoming gradients are fp32. As no GEMM multiplies fp32 by bf16, the other
    operands are copied to fp32 on every device.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(*([x] if weight.requires_grad else []))
        ctx.dtype = x.dtype
        return wide_linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        weight = ctx.weight
        grad_x = matmul(grad, weight.to(grad.dtype)).to(ctx.dtype)
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        (x,) = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_weight = matmul(rows.t(), x.flatten(0, -2).to(grad.dtype))
        if state_of(weight).main_grad is None:
            return grad_x, grad_weight.to(weight.dtype)
        add_gradient(weight, grad_weight)
        return grad_x, None
