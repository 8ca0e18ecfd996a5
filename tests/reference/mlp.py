"""A layer's MLP, or several of them behind a router (a mixture of experts).

The experts of each token are sorted in Python, one expert after the other takes its tokens, and
the sum over a token's experts runs in the order in which they were chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from tests.reference.model import ModelShape


def gelu_tanh(x: Tensor) -> Tensor:
    """The approximation of GELU by a tanh (Hendrycks and Gimpel 2016)."""
    return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class MLP(nn.Module):
    """Computes down(gelu(up(x))), down(relu(up(x))), or down(silu(gate(x)) · up(x)), or that with
    gelu.

    If `width` or `bias` is None, it is the model's.
    """

    def __init__(
        self, shape: ModelShape, width: int | None = None, bias: bool | None = None
    ) -> None:
        super().__init__()
        width = width or shape.ffn_hidden_size or 4 * shape.hidden_size
        bias = shape.bias if bias is None else bias
        self.activation = shape.activation
        self.limit = getattr(shape, "swiglu_limit", None)
        if shape.activation in ("swiglu", "geglu"):
            self.gate = nn.Linear(shape.hidden_size, width, bias=bias)
        self.up = nn.Linear(shape.hidden_size, width, bias=bias)
        self.down = nn.Linear(width, shape.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        if self.activation == "swiglu":
            gate = self.gate(x)
            if self.limit is not None:  # gpt-oss, arXiv 2508.10925
                gate, up = gate.clamp_max(self.limit), up.clamp(-self.limit, self.limit)
                return self.down((up + 1) * (gate * (1.702 * gate).sigmoid()))
            return self.down(gate * gate.sigmoid() * up)
        if self.activation == "geglu":
            return self.down(gelu_tanh(self.gate(x)) * up)
        if self.activation == "relu":
            return self.down(up.clamp_min(0))
        if self.activation == "gelu_tanh":
            return self.down(gelu_tanh(up))
        assert self.activation == "gelu", self.activation
        return self.down(up * 0.5 * (1 + torch.erf(up / math.sqrt(2))))


class Routing(NamedTuple):
    """The decisions of one layer's router for a batch."""

    logits: Tensor  # (batch, sequence, experts)
    scores: Tensor  # (batch, sequence, experts), softmax or sigmoid of the logits, without the bias
    chosen: Tensor  # int64 (batch, sequence, k), the first choice first
    weights: Tensor  # (batch, sequence, k): factors of the chosen experts' outputs
    # the smallest gap between the last value that was chosen and the first that was not
    margin: float


def best(values: Sequence[float], count: int) -> tuple[list[int], float]:
    """Returns the places of the `count` largest values, the largest first; of equal values, the
    lower place comes first.

    Also returns the gap between the last of them and the next one, or inf if there is none.
    """
    order = sorted(range(len(values)), key=lambda place: (-values[place], place))
    taken, left = order[:count], order[count:]
    return taken, values[taken[-1]] - values[left[0]] if left else math.inf


class Router(nn.Module):
    """Scores experts by softmax(W x) or sigmoid(W x), and chooses k of them; gpt-oss adds a bias,
    which is trained, to W x.

    The bias b of the choice (DeepSeek-V3, arXiv 2412.19437) has no gradient and no part in the
    weights. With groups, only experts of the best groups can be chosen: a group is rated by the sum
    of its two largest s + b with sigmoid (DeepSeek-V3), by its largest s with softmax (V2).
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.zeros(shape.num_experts, shape.hidden_size))
        self.group_size = shape.num_experts // shape.router_groups
        assert self.group_size * shape.router_groups == shape.num_experts
        assert shape.experts_per_token <= self.group_size * shape.router_top_groups
        if getattr(shape, "router_logit_bias", False):
            self.logit_bias = nn.Parameter(torch.zeros(shape.num_experts))
        if shape.router_bias:
            self.register_buffer("bias", torch.zeros(shape.num_experts))

    def forward(self, x: Tensor) -> Routing:
        """Scores the experts for `x` (batch, sequence, hidden)."""
        logits = x @ self.weight.T
        if hasattr(self, "logit_bias"):
            logits = logits + self.logit_bias
        softmax = self.shape.router_score == "softmax"
        assert softmax or self.shape.router_score == "sigmoid", self.shape.router_score
        scores = logits.softmax(dim=-1) if softmax else logits.sigmoid()
        chosen, margin = self.choice(scores.detach())
        weights = scores.gather(-1, chosen)
        if self.shape.router_normalize:
            total = weights.sum(dim=-1, keepdim=True)
            weights = weights / (total if softmax else total + 1e-20)
        return Routing(logits, scores, chosen, weights * self.shape.router_scale, margin)

    def choice(self, scores: Tensor) -> tuple[Tensor, float]:
        """Returns the chosen experts (batch, sequence, k) by scores (batch, sequence, experts), and
        the margin.

        The margin is over all tokens, and covers the choices of groups and of experts.
        """
        biased = scores + self.bias if self.shape.router_bias else scores
        if self.shape.router_score == "softmax":
            of_groups = scores.unflatten(-1, (-1, self.group_size)).amax(dim=-1)
        else:
            in_groups = biased.unflatten(-1, (-1, self.group_size))
            two = in_groups.sort(dim=-1, descending=True).values[..., :2]
            of_groups = two.sum(dim=-1)
        chosen, margin = [], math.inf
        for values, groups in zip(
            biased.flatten(0, 1).tolist(), of_groups.flatten(0, 1).tolist(), strict=True
        ):
            kept, gap = best(groups, self.shape.router_top_groups)
            allowed = [
                value if expert // self.group_size in kept else -math.inf
                for expert, value in enumerate(values)
            ]
            taken, next_gap = best(allowed, self.shape.experts_per_token)
            chosen.append(taken)
            margin = min(margin, gap, next_gap)
        return torch.tensor(chosen).view(*scores.shape[:2], -1), margin


class Experts(nn.Module):
    """Σ weight · expert(x) over the chosen experts, plus the shared expert that each token has."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.router = Router(shape)
        width = shape.expert_ffn_size
        self.experts = nn.ModuleList(
            MLP(shape, width, bias=getattr(shape, "expert_bias", False))
            for _ in range(shape.num_experts)
        )
        if shape.shared_expert_size:
            self.shared = MLP(shape, shape.shared_expert_size, bias=False)
            if shape.shared_expert_gate:
                self.shared_gate = nn.Linear(shape.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """Returns the sum for `x` (batch, sequence, hidden), in its shape, and the routing."""
        routing = self.router(x)
        tokens, chosen = x.flatten(0, 1), routing.chosen.flatten(0, 1)
        answers = tokens.new_zeros(*chosen.shape, x.shape[-1])
        for number, expert in enumerate(self.experts):
            # An expert without tokens gets an empty batch, so that its gradient is zero and it
            # decays.
            token, slot = torch.where(chosen == number)
            answers = answers.index_put((token, slot), expert(tokens[token]))
        weights = routing.weights.flatten(0, 1)
        total = torch.zeros_like(tokens)
        for slot in range(chosen.shape[1]):
            total = total + weights[:, slot, None] * answers[:, slot]
        total = total.view_as(x)
        if hasattr(self, "shared"):
            shared = self.shared(x)
            if hasattr(self, "shared_gate"):
                shared = self.shared_gate(x).sigmoid() * shared
            total = total + shared
        return total, routing


class Balance(NamedTuple):
    """The routing of a global batch, without its padding; losses are summed over the layers."""

    # by layer, int64 (experts,): the number of tokens that chose each expert
    counts: dict[int, Tensor]
    aux: Tensor  # mean over the sequences of Σ f P (DeepSeek-V3, equations 17 to 20, without α)
    z: Tensor  # mean over the tokens of logsumexp(logits)² (ST-MoE, arXiv 2202.08906)


def balance(routed: Mapping[int, Routing], used: Sequence[int | None]) -> Balance:
    """Computes the addends of the loss from the routings by layer.

    `used` is the number of tokens of each sequence before its padding (None: all). A sequence of
    padding alone counts as one without auxiliary loss.
    """
    counts, aux, z = {}, torch.zeros(()), torch.zeros(())
    for layer, routing in routed.items():
        experts, k = routing.logits.shape[-1], routing.chosen.shape[-1]
        counts[layer] = torch.zeros(experts, dtype=torch.int64)
        of_sequences, of_tokens = [], []
        for i, length in enumerate(used):
            scores, logits = routing.scores[i, :length], routing.logits[i, :length]
            chose = torch.bincount(routing.chosen[i, :length].flatten(), minlength=experts)
            counts[layer] += chose
            of_tokens.append(logits.logsumexp(dim=-1) ** 2)
            if len(scores) == 0:
                of_sequences.append(scores.sum())
                continue
            frequency = chose.to(scores.dtype) * experts / (k * len(scores))
            probability = (scores / scores.sum(dim=-1, keepdim=True)).mean(dim=0)
            of_sequences.append((frequency * probability).sum())
        aux = aux + torch.stack(of_sequences).mean()
        squares = torch.cat(of_tokens)
        z = z + squares.sum() / max(1, len(squares))
    return Balance(counts, aux, z)
